"""Reads a command line as `vllm serve` does: the words after the command become values by name of destination.

    --max_num_seqs 8, --max-num-seqs=8, --gpu-mem 0.5     - and _ are equal, a unique beginning is enough
    -tp 2, -O3, -q=fp8                                    short names
    --enable-x, --no-enable-x, --disable-x                switches take no value
    --json-flag '{"a": 1}'                                JSON, or single keys of it:
    --json-flag.a.b 8k, --json-flag.list+ x,y             JSON, else a size, else text; + appends texts
    --config file.yaml                                    flags from a file; those of the command line win

The last one of a repeated flag counts. Keys given one by one replace a whole JSON value of the same flag. Refuses
unknown flags, ambiguous beginnings and malformed values with a ConfigError that names the word at fault.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from leyden.config.flags import Flag, size
from leyden.errors import ConfigError

NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?|-\.\d+")


@dataclass(frozen=True)
class Arguments:
    """What was given, by dest. `notices` are things worth a warning: repeated flags, replaced values."""

    values: dict[str, Any]
    notices: list[str]


def parse(argv: Sequence[str], flags: Iterable[Flag]) -> Arguments:
    """The values of `argv`, flags that were not given left out."""
    reader = _Reader(tuple(flags))
    words, file = _split_config(list(argv))
    if file is not None:
        reader.read_file(file)
    reader.read(words)
    return reader.finish()


class _Reader:
    def __init__(self, flags: tuple[Flag, ...]):
        self.by_dest = {flag.dest: flag for flag in flags}
        self.positional = next((flag for flag in flags if flag.positional), None)
        # spelling -> (flag, what it sets a switch to); abbreviations are looked up in the usual spellings first
        self.usual: dict[str, tuple[Flag, bool]] = {}
        self.unusual: dict[str, tuple[Flag, bool]] = {}
        for flag in flags:
            if flag.positional:
                continue
            off = flag.negations()
            spellings = self.unusual if flag.since else self.usual
            spellings |= {name: (flag, True) for name in flag.names} | {name: (flag, False) for name in off[:1]}
            self.unusual |= {name: (flag, False) for name in off[1:]}
        self.spellings = self.unusual | self.usual
        self.values: dict[str, Any] = {}
        self.keys: dict[str, dict[str, Any]] = {}  # dest -> object made of dotted keys
        self.seen: set[str] = set()
        self.notices: list[str] = []

    def find(self, name: str) -> tuple[Flag, bool]:
        if name in self.spellings:
            return self.spellings[name]
        for spellings in (self.usual, self.unusual):
            found = [spelling for spelling in spellings if spelling.startswith(name)]
            if len(found) == 1 and len(name) > 2:
                return spellings[found[0]]
            if found and len(name) > 2:
                raise ConfigError(f"{name} is ambiguous, it could be {', '.join(sorted(found))}")
        close = get_close_matches(name, self.spellings, n=1, cutoff=0.75)
        raise ConfigError(f"unrecognised argument {name}" + (f", did you mean {close[0]}?" if close else ""))

    def read(self, words: Iterable[str]) -> None:
        self.seen.clear()
        ahead = deque(words)
        while ahead:
            word = ahead.popleft()
            if word == "--":
                while ahead:
                    self.take_positional(ahead.popleft())
            elif _is_flag(word):
                self.read_flag(word, ahead)
            else:
                self.take_positional(word)

    def read_flag(self, word: str, ahead: deque[str]) -> None:
        """One flag; its values are taken from `ahead`."""
        name, equals, inline = normal(word).partition("=")
        if name not in self.spellings and name[:2] in self.spellings and name[2:3] != ".":  # -O3
            name, equals, inline = name[:2], "=", word[2:]
        name, dot, path = name.partition(".")
        flag, on = self.find(name)
        if flag.type == "switch":
            if equals or dot:
                raise ConfigError(f"{name} takes no value, got {word}")
            self.take(flag, on)
            return
        texts = [inline] if equals else []
        several = flag.many == "+" and not dot
        while ahead and not _is_flag(ahead[0]) and not equals and (several or not texts):
            texts.append(ahead.popleft())
        if not texts and flag.many != "?":
            raise ConfigError(f"{name}{dot}{path}: a value is expected")
        if dot:
            self.take_key(flag, path, texts[0])
        elif several:
            self.take(flag, [flag.read(text) for text in texts])
        else:
            self.take(flag, flag.read(texts[0]) if texts else True)

    def take_positional(self, word: str) -> None:
        if self.positional is None or self.positional.dest in self.values:
            raise ConfigError(f"unrecognised argument {word}")
        self.values[self.positional.dest] = self.positional.read(word)

    def take(self, flag: Flag, value: Any) -> None:
        if flag.many == "append":
            value = [*self.values.get(flag.dest, []), value]
        elif flag.dest in self.seen and self.values[flag.dest] != value:
            self.notices.append(f"{flag.name} was given more than once, the last one counts: {value}")
        self.seen.add(flag.dest)
        self.values[flag.dest] = value

    def take_key(self, flag: Flag, path: str, text: str) -> None:
        if flag.type not in ("json", "object", "object or text"):
            raise ConfigError(f"{flag.name} has no keys, got {flag.name}.{path}")
        append = path.endswith("+")
        value: Any = text.split(",") if append else _json_or_size_or_text(text)
        *outer, last = path.removesuffix("+").split(".")
        place = self.keys.setdefault(flag.dest, {})
        for key in outer:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{flag.name}.{path}: {key} already has the value {place!r}, which has no keys")
        old = place.get(last)
        if append and isinstance(old, list):
            value = old + value
        elif isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value)
        elif last in place and old != value:
            self.notices.append(f"{flag.name}.{path} was given more than once, the last one counts: {value}")
        place[last] = value

    def read_file(self, path: str) -> None:
        try:
            for key, value in _load(path).items():
                self.read(self.words(f"--{key}", value))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def words(self, name: str, value: Any) -> list[str]:
        """One entry of a config file as words of a command line."""
        flag, on = self.find(normal(name).split(".")[0])
        if isinstance(value, bool) and "." not in name and flag.type == "switch":
            return [(flag.names if on == value else flag.negations())[0]]
        if isinstance(value, list) and flag.many == "+":
            return [name, *map(_text, value)] if value else []
        if isinstance(value, list) and flag.many == "append":
            return [f"{name}={_text(item)}" for item in value]
        return [f"{name}={'None' if value is None and '.' not in name else _text(value)}"]

    def finish(self) -> Arguments:
        for dest, tree in self.keys.items():
            flag = self.by_dest[dest]
            if dest in self.values:
                self.notices.append(f"{flag.name} was given whole and by keys; the keys replace it: {json.dumps(tree)}")
            self.values[dest] = tree
        for dest, value in self.values.items():
            self.by_dest[dest].check_keys(value)
        return Arguments(self.values, self.notices)


def _is_flag(word: str) -> bool:
    """Whether a word is a flag rather than a value: -1 and "-a b" are values."""
    name = word.split("=", 1)[0]
    return word.startswith("-") and word != "-" and " " not in name and not NEGATIVE_NUMBER.fullmatch(word)


def normal(word: str) -> str:
    """_ becomes - in the name of a flag; keys behind a dot and values stay as they are."""
    end = min((word.find(mark) for mark in ".=" if mark in word), default=len(word))
    return word[:end].replace("_", "-") + word[end:] if word.startswith("--") else word


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json_or_size_or_text(text: str) -> Any:
    for read in (json.loads, size):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(old[key], new[key]) for key in old.keys() & new.keys() if _objects(old[key], new[key])}
    return old | new | both


def _objects(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _split_config(words: list[str]) -> tuple[list[str], str | None]:
    """The words without --config, and the file it names."""
    found: list[str] = []
    rest: list[str] = []
    ahead = iter(words)
    for word in ahead:
        if word == "--":
            rest += [word, *ahead]
        elif word == "--config":
            found.append(next(ahead, "-"))
        elif word.startswith("--config="):
            found.append(word.removeprefix("--config="))
        else:
            rest.append(word)
    if len(found) > 1:
        raise ConfigError(f"--config: expected one file, got {', '.join(found)}")
    if found and found[0].startswith("-"):
        raise ConfigError("--config: a file name is expected")
    return rest, found[0] if found else None


def _load(path: str) -> dict[str, Any]:
    import yaml

    if Path(path).suffix not in (".yaml", ".yml"):
        raise ConfigError("expected a .yaml or .yml file")
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"not YAML{place}: {error.problem}") from None
    if not isinstance(data, dict | None):
        raise ConfigError(f"expected flags and values, got {type(data).__name__}")
    return data or {}
