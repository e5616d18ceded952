"""The flags of the command line: what a flag is, how its value is read, and the table of `leyden serve` (flags.json).

A row of the table has these keys, the last ones only where they say something:

    names       "--long-name", then short ones ("-q"); the one without dashes is the positional argument
    dest        name of the value, the same as in EngineConfig and ServerConfig
    type        switch, int, size (8k, 8K), length (size or auto), float, text, json, object, object or text, pairs, ids
    many        "+" one or more values, "append" one value each time, "?" the value may be missing
    optional    the words None and "" mean: not set
    choices     accepted values;  fold: "lower" or "upper" if case does not matter
    keys        of an object: the keys it may have, each with its choices or null
    group, help, common (shown on the first page of --help)
    treatment   effect; no-effect (accepted, one log line with the reason); refuse (an error with the reason)
    reason      why; with effect: why values that are not in `accepts` have none. "not yet: ..." is work to come
    always      with effect: what the flag asks for is always done
    accepts     values other than the default that the treatment does not concern: honoured, or harmless
    cpu         why the flag has no effect on a CPU
    since       0.33: known to newer vLLM only, older: to older vLLM only, leyden: to leyden only

Refuses a value it cannot read with a ConfigError that names the flag, the value and what is accepted.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import Any

from leyden.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One row of the table; the fields are explained at the top of this file."""

    names: tuple[str, ...]
    dest: str
    type: str
    group: str
    help: str
    treatment: str = "effect"
    many: str = ""
    optional: bool = False
    default: Any = None
    choices: tuple[Any, ...] = ()
    fold: str = ""
    keys: dict[str, list[Any] | None] = field(default_factory=dict)
    common: bool = False
    always: bool = False
    accepts: tuple[Any, ...] = ()
    reason: str = ""
    cpu: str = ""
    since: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def positional(self) -> bool:
        return not self.name.startswith("-")

    def negations(self) -> list[str]:
        """Spellings that switch the flag off, the usual one first: --no-x, and --disable-x for --enable-x."""
        if self.type != "switch":
            return []
        word = self.name.removeprefix("--")
        for this, other in (("enable-", "disable-"), ("disable-", "enable-")):
            if word.startswith(this):
                return [f"--no-{word}", f"--{other}{word.removeprefix(this)}"]
        return [f"--no-{word}"]

    def read(self, text: str) -> Any:
        """The value that one word of the command line stands for."""
        if self.optional and text in ("", "None"):
            return None
        try:
            value = READERS[self.type](text)
        except ValueError as error:
            raise ConfigError(f"{self.name}: expected {error}, got {text!r}") from None
        if self.fold:
            value = value.replace("-", "_").lower() if self.fold == "lower" else value.upper()
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.name}: expected one of {listed(self.choices)}, got {text!r}")
        return value

    def check_keys(self, value: Any) -> None:
        """Whether an object has known keys only, with known values."""
        if not self.keys or not isinstance(value, dict):
            return
        for key, item in value.items():
            if key not in self.keys:
                raise ConfigError(f"{self.name}: unknown key {key!r}, expected one of {listed(self.keys)}")
            choices = self.keys[key]
            if choices and item not in choices:
                raise ConfigError(f"{self.name}: {key} must be one of {listed(choices)}, got {item!r}")


def shown(flag: Flag, value: Any) -> str:
    """A flag and its value as one would type them."""
    if flag.type == "switch":
        return flag.name if value else flag.negations()[0]
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{flag.name} {text if len(text) <= 60 else text[:57] + '...'}"


def because(what: str, reason: str) -> str:
    """`what` and why; reasons that begin with "not yet" are about work to come."""
    return f"{what} yet: {reason.removeprefix('not yet: ')}" if reason.startswith("not yet: ") else f"{what}: {reason}"


def listed(words: Any) -> str:
    """Words for a message: `a, b, c`, the empty one in quotes."""
    return ", ".join(str(word) or '""' for word in words)


SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """A whole number, maybe with a suffix: k m g t count in thousands, K M G T in 1024s (1.5k = 1500, 8K = 8192)."""
    match = re.fullmatch(r"(-?\d+)(\.\d+)?([kmgtKMGT]?)", text.strip())
    if not match or (match[2] and not match[3]):
        raise ValueError("an integer such as 4096, 4k (4000) or 4K (4096)")
    if match[2] and match[3].isupper():
        raise ValueError(f"a whole number before {match[3]} (or {match[1]}{match[2]}{match[3].lower()})")
    return int(Decimal(match[1] + (match[2] or "")) * SUFFIXES.get(match[3], 1))


def _length(text: str) -> int:
    if text.strip().lower() in ("auto", "-1"):
        return -1
    try:
        return size(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def _number(read: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    def reader(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise ValueError(what) from None

    return reader


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"JSON ({error})") from None


def _object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise ValueError("a JSON object")
    return value


def _object_or_text(text: str) -> Any:
    return _object(text) if text.lstrip().startswith("{") else text


def _pair(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        return _object(text)
    name, equals, path = text.partition("=")
    if not equals:
        raise ValueError("NAME=PATH or a JSON object")
    return {"name": name, "path": path, "is_3d_lora_weight": False}


def _ids(text: str) -> list[int | str]:
    return [int(word) if word.strip().isdigit() else word.strip() for word in text.split(",")]


READERS: dict[str, Callable[[str], Any]] = {
    "int": _number(int, "an integer"),
    "size": size,
    "length": _length,
    "float": _number(float, "a number"),
    "text": str,
    "json": _json,
    "object": _object,
    "object or text": _object_or_text,
    "pairs": _pair,
    "ids": _ids,
}


@dataclass(frozen=True)
class Group:
    """A chapter of --help; `also` holds the names that vLLM has for it."""

    name: str
    about: str
    also: tuple[str, ...]


@cache
def table() -> tuple[tuple[Group, ...], tuple[Flag, ...]]:
    """Groups and flags of `leyden serve`, in the order in which --help shows them."""
    data = json.loads((files("leyden.config") / "flags.json").read_text(encoding="utf-8"))
    groups = tuple(Group(name, row["about"], tuple(row["also"])) for name, row in data["groups"].items())
    return groups, tuple(Flag(**{key: _frozen(key, item) for key, item in row.items()}) for row in data["flags"])


def _frozen(key: str, item: Any) -> Any:
    return tuple(item) if key in ("names", "choices", "accepts") else item
