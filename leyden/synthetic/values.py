"""Typed values: what a tool argument or a JSON field holds, how a person says it, and how one gets from there to here.

A kind is a word of tools.toml and documents.toml: the name of a pool, or one of KINDS, or "int:LOW:HIGH",
"enum:A:B:...", "list:POOL", "counts:KEY:KEY:..." (an object of numbers).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leyden.synthetic import calendar
from leyden.synthetic.arithmetic import cents, times
from leyden.synthetic.draw import Draw

NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


@dataclass(frozen=True, slots=True)
class Value:
    """`json` is the exact value, `said` its wording in a request, `working` the way between them ("" for a copy)."""

    json: Any
    said: str
    working: str = ""


def sample(draw: Draw, kind: str, thinking: bool = False, today: Any = None, hint: str = "") -> Value:
    """A value of `kind`. With `thinking` some are said in a way that needs a step of arithmetic; a relative day ("in 3
    days") needs `today`. `hint` is the noun an id belongs to."""
    name, *args = kind.split(":")
    if name == "int":
        return integer(draw, int(args[0]), int(args[1]))
    if name == "enum":
        return _same(draw.pick(args))
    if name == "list":
        items = draw.words(args[0], draw.between(2, 4))
        return Value(items, listed(items))
    if name == "counts":
        counts = {key: draw.between(1, 99) for key in args}
        return Value(counts, draw.pick((", ", " and ")).join(f"{key} {count}" for key, count in counts.items()))
    if name == "id":
        return _same(identifier(draw, hint))
    if name in ("minutes", "seconds", "days"):
        return _duration(draw, name, thinking)
    if name == "date":
        return _date(draw, thinking, today)
    if name in KINDS:
        return KINDS[name](draw)
    return _same(draw.word(name))


def schema(kind: str) -> dict[str, Any]:
    """The JSON schema of `kind`, a new object."""
    name, *args = kind.split(":")
    if name == "enum":
        return {"type": "string", "enum": args}
    if name == "list":
        return {"type": "array", "items": {"type": "string"}}
    if name in _OBJECTS or name == "counts":
        keys, item = _OBJECTS.get(name, (args, "integer"))
        return {"type": "object", "properties": {key: {"type": item} for key in keys}, "required": list(keys)}
    return dict(_SCHEMAS.get(name, {"type": "string"}))


def default(kind: str) -> Any:
    """What an optional parameter of `kind` is if it is not given; None for kinds without a natural default."""
    name, *args = kind.split(":")
    return {"flag": False, "enum": args[0] if args else None, "int": int(args[0]) if name == "int" else None}.get(name)


def integer(draw: Draw, low: int, high: int) -> Value:
    number = draw.between(low, high)
    in_words = number < len(NUMBER_WORDS) and draw.chance(0.25)
    return Value(number, NUMBER_WORDS[number] if in_words else str(number))


def identifier(draw: Draw, noun: str = "") -> str:
    """An id: letters of the noun and a number, a number alone, or hexadecimal digits."""
    letters = (noun or draw.pick(("order", "item", "ref"))).replace(" ", "")
    digits = draw.between(100, 10 ** draw.between(3, 5) - 1)
    style = draw.below(4)
    if style == 0:
        return f"{letters[:3].upper()}-{digits}"
    if style == 1:
        return f"{letters[0].upper()}{digits}"
    if style == 2:
        return f"{letters[:4]}_{''.join(draw.pick('0123456789abcdef') for _ in range(draw.between(4, 6)))}"
    return str(digits)


def person(draw: Draw) -> str:
    return f"{draw.word('first_name')} {draw.word('last_name')}"


def email(draw: Draw, name: str = "") -> str:
    first, last = (name or person(draw)).lower().split()
    local = draw.pick((f"{first}.{last}", first, f"{first[0]}.{last}", f"{last}{draw.between(1, 99)}"))
    return f"{local}@{draw.word('mail_domain')}"


def path(draw: Draw, ext: str = "") -> str:
    folders = "/".join(draw.words("dir", draw.between(0, 2)) + [""])
    return f"{folders}{draw.word('stem')}.{ext or draw.word('ext')}"


def folder(draw: Draw) -> str:
    return "/".join(draw.words("dir", draw.between(1, 2)))


def title(draw: Draw) -> str:
    """Two or three words of a heading: "final budget review"."""
    first, second = draw.words("topic", 2)
    return f"{draw.word('adjective')} {first}" + (f" {second}" if draw.chance(0.4) else "")


def price(draw: Draw) -> Value:
    if draw.chance(0.4):
        return _same(draw.between(2, 900))
    text = cents(draw.between(101, 29999))
    amount = float(text)
    return Value(int(amount) if amount.is_integer() else amount, text)


def company(draw: Draw) -> str:
    name = draw.word("company")
    return f"{name} {draw.word('company_form')}" if draw.chance(0.6) else name


def json_text(value: Any) -> str:
    """JSON as the chat template prints it: ", " and ": ", characters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=False)


def listed(items: list[str]) -> str:
    """ "a, b and c"."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]


def _same(value: Any) -> Value:
    return Value(value, str(value))


def _quoted(draw: Draw) -> Value:
    text, mark = title(draw), draw.pick("\"'")
    return Value(text, f"{mark}{text}{mark}")


def _date(draw: Draw, thinking: bool, today: Any) -> Value:
    if thinking and today and draw.chance(0.6):
        days = draw.pick((1, 2, 3, 4, 5, 6, 7, 10, 14, 21))
        working, day = calendar.later(today, days)
        word = {1: "tomorrow", 2: "the day after tomorrow"}.get(days, f"the day {days} days from now")
        return Value(str(day), word, f"{word} is {today} plus {days}. {working}")
    day = calendar.some_date(draw)
    if draw.chance(0.6):
        return _same(str(day))
    said = calendar.long_form(draw, day)
    return Value(str(day), said, calendar.iso_working(said, day))


def _duration(draw: Draw, unit: str, thinking: bool) -> Value:
    larger, factor = {"seconds": ("minutes", 60), "minutes": ("hours", 60), "days": ("weeks", 7)}[unit]
    if not thinking or draw.chance(0.4):
        number = draw.between(2, 90)
        return Value(number, f"{number} {unit}")
    number = draw.between(2, 12)
    working, result = times(number, factor)
    return Value(result, f"{number} {larger}", f"{number} {larger} in {unit}. {working}")


def _time(draw: Draw) -> Value:
    minutes = draw.between(6, 22) * 60 + draw.pick((0, 0, 5, 10, 15, 20, 30, 30, 40, 45, 50))
    if draw.chance(0.7):
        return _same(calendar.clock(minutes))
    said = calendar.half_day_clock(minutes)
    return Value(calendar.clock(minutes), said, calendar.clock_working(minutes))


def _numbers(draw: Draw) -> Value:
    numbers = [draw.between(1, 99) for _ in range(draw.between(3, 5))]
    return Value(numbers, listed([str(n) for n in numbers]))


def _point(draw: Draw) -> Value:
    lat, lon = (round(draw.between(-8999, 8999) / 100, 2) for _ in range(2))
    return Value({"lat": lat, "lon": lon}, f"{lat}, {lon}")


def _range(draw: Draw) -> Value:
    low = draw.between(1, 90)
    high = low + draw.between(5, 200)
    return Value({"min": low, "max": high}, draw.pick((f"from {low} to {high}", f"between {low} and {high}")))


def _size(draw: Draw) -> Value:
    width, height = (draw.between(2, 40) * 40 for _ in range(2))
    return Value({"width": width, "height": height}, f"{width}x{height}")


def _address(draw: Draw) -> Value:
    street, city = f"{draw.between(1, 199)} {draw.word('street')} Street", draw.word("city")
    return Value({"street": street, "city": city}, f"{street}, {city}")


def _command(draw: Draw) -> Value:
    text = f"{draw.word('verb_command')} {path(draw)}"
    return Value(text, f"`{text}`")


KINDS: dict[str, Callable[[Draw], Value]] = {
    "person": lambda draw: _same(person(draw)),
    "email": lambda draw: _same(email(draw)),
    "path": lambda draw: _same(path(draw)),
    "image": lambda draw: _same(path(draw, draw.pick(("png", "jpg")))),
    "dir": lambda draw: _same(folder(draw)),
    "company": lambda draw: _same(company(draw)),
    "code": lambda draw: _same(identifier(draw)),
    "phone": lambda draw: _same(f"+{draw.between(1, 99)} {draw.between(100, 999)} {draw.between(1000, 9999)}"),
    "url": lambda draw: _same(f"https://{draw.word('mail_domain')}/{draw.word('stem')}"),
    "title": _quoted,
    "price": price,
    "time": _time,
    "numbers": _numbers,
    "point": _point,
    "range": _range,
    "size": _size,
    "address": _address,
    "command": _command,
}
_OBJECTS = {
    "point": (("lat", "lon"), "number"),
    "range": (("min", "max"), "integer"),
    "size": (("width", "height"), "integer"),
    "address": (("street", "city"), "string"),
}
_SCHEMAS: dict[str, dict[str, Any]] = {
    **{name: {"type": "integer"} for name in ("int", "minutes", "seconds", "days")},
    "price": {"type": "number"},
    "flag": {"type": "boolean"},
    "numbers": {"type": "array", "items": {"type": "number"}},
}
