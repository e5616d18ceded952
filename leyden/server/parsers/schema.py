"""Text of an argument to the JSON value that a tool's schema asks for.

The chat format writes values as bare text, so `5` may be a number or a string: only the schema knows. Text that cannot
be read as any allowed type stays a string; nothing here raises, and nothing is ever evaluated.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

DROP = object()  # an empty value of a type that has no empty form: leave the argument out

_ALIASES = {"int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array", "str": "string"}
_KINDS: list[tuple[type, str]] = [
    (type(None), "null"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
]
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_INTEGER = re.compile(r"[+-]?\d{1,4000}")  # Python reads up to 4,300 digits
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_DEEPEST = 64
_LONGEST_LITERAL = 1 << 16  # characters; Python's parser takes about a microsecond and a kilobyte for each


class Parameters:
    """The parameters of one tool: a JSON schema of type object, in which references are looked up."""

    def __init__(self, schema: Any):
        self._root: Schema = schema if isinstance(schema, Mapping) else {}
        properties = self._root.get("properties")
        self.properties: Schema = properties if isinstance(properties, Mapping) else {}

    def is_text(self, name: str) -> bool:
        """Whether the value of this parameter is a string whatever it looks like."""
        return self._types(self._schema_of(name)) <= {"string"}

    def value(self, name: str, text: str) -> Any:
        """The value of a parameter, or DROP. A parameter that the schema does not know is a string."""
        return self._read(text, self._schema_of(name), 0)

    def _schema_of(self, name: str) -> Any:
        return self.properties.get(name, self._root.get("additionalProperties"))

    def _read(self, text: str, schema: Any, depth: int) -> Any:
        types = self._types(schema)
        if types <= {"string"}:
            return text
        word = text.strip()
        if not word:
            return None if "null" in types else text if "string" in types else DROP
        if word.lower() in ("null", "none") and ("null" in types or "string" not in types):
            return None
        if types & {"integer", "number"}:
            number = _number(word)
            # 5.5 where only "integer" is allowed stays a number: the tool can say best what is wrong with it
            if isinstance(number, int) or number is not None and ("number" in types or "string" not in types):
                return number
        if "boolean" in types and word.lower() in _BOOLEANS:
            return _BOOLEANS[word.lower()]
        if types & {"object", "array"}:
            value = _json(word)
            if isinstance(value, str):  # encoded twice
                value = _json(value)
            if isinstance(value, dict) and "object" in types or isinstance(value, list) and "array" in types:
                return self._repaired(value, schema, depth)
        return text

    def _repaired(self, value: Any, schema: Any, depth: int) -> Any:
        """Strings inside an object or array that stand for another type, read as that type."""
        if depth > _DEEPEST:
            return value
        if isinstance(value, dict):
            inner = self._first(schema, "properties") or {}
            return {key: self._repaired(item, inner.get(key), depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            inner = self._first(schema, "items")
            return [self._repaired(item, inner, depth + 1) for item in value]
        if isinstance(value, str) and "string" not in self._types(schema):
            read = self._read(value, schema, depth + 1)
            return value if read is DROP else read
        return value

    def _types(self, schema: Any) -> set[str]:
        """Names of the allowed types; empty if the schema does not say."""
        types: set[str] = set()
        for part in self._parts(schema):
            if named := part.get("type"):
                names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
                types |= {_ALIASES.get(name, name) for name in names if isinstance(name, str)}
                continue
            members = part["enum"] if isinstance(part.get("enum"), list) else []
            members = members + [part["const"]] if "const" in part else members
            types |= {name for member in members for kind, name in _KINDS if type(member) is kind}
            types |= {"object"} if "properties" in part else set()
            types |= {"array"} if "items" in part or "prefixItems" in part else set()
        return types

    def _first(self, schema: Any, key: str) -> Any:
        found = (part[key] for part in self._parts(schema) if isinstance(part.get(key), Mapping))
        return next(found, None)

    def _parts(self, schema: Any) -> Iterator[Schema]:
        """The schema and all that it is put together from: anyOf, oneOf, allOf and references, each once."""
        todo, seen = [schema], set()
        while todo:
            part = todo.pop()
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            for key in ("anyOf", "oneOf", "allOf"):
                todo += part[key] if isinstance(part.get(key), list) else []
            if isinstance(reference := part.get("$ref"), str):
                todo.append(self._resolve(reference))

    def _resolve(self, reference: str) -> Any:
        """What "#/$defs/Name" points to; None for anything but a place in this schema."""
        place: Any = self._root if reference.startswith("#") else None
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            place = place.get(step) if isinstance(place, Mapping) else None
        return place


def dumps(value: Any) -> str:
    """JSON as the chat template writes it; half a surrogate pair, which no UTF-8 can carry, is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _number(word: str) -> int | float | None:
    if _INTEGER.fullmatch(word):
        return int(word)
    if not _NUMBER.fullmatch(word) or not math.isfinite(number := float(word)):
        return None
    return int(number) if number.is_integer() else number


def _json(text: str) -> Any:
    """The value of a JSON text, or of the same written as Python does (True, None, 'a'); None if it is neither."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _literal(text)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # a set or bytes; infinity
        return None
    return list(value) if isinstance(value, tuple) else value


def _literal(text: str) -> Any:
    if len(text) > _LONGEST_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in strings
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
