"""Tools, requests for them, and boxes of several tools to choose from.

A tool is either one of the list in tools.toml or an action crossed with a noun (get_ticket, share_invoice, ...), which
gives some thousand different ones. A box holds the tools a request needs and distractors: same noun and other action,
same action and other noun, or anything.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from typing import Any

from leyden.synthetic import calendar, values
from leyden.synthetic.draw import Draw, Split, table

# Actions that cannot be taken for one outside this list, those whose absence leaves no way to do what they do, and the
# tools of the list with which nearly everything can be done.
HARMLESS = ("read", "copy", "export", "tag", "price", "locate", "validate")
IRREPLACEABLE = ("create", "remove", "rename", "archive", "move", "lock", "approve", "merge", "extend", "refresh")
ALL_PURPOSE = ("run_command",)


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. `slot` is its place in a request; optional ones bring their words instead: `say` with {} for the
    value, `yes` and `no` for booleans."""

    slot: str
    name: str
    kind: str
    about: str
    say: tuple[str, ...] = ()
    yes: tuple[str, ...] = ()
    no: tuple[str, ...] = ()

    @property
    def optional(self) -> bool:
        return bool(self.say or self.yes)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. `ask`: imperatives with a {slot} per required parameter; `returns`: (field, kind) of its result."""

    id: str  # its name in tools.toml
    name: str
    about: str
    group: str
    noun: str
    params: tuple[Param, ...]
    ask: tuple[str, ...]
    returns: tuple[tuple[str, str], ...] = ()

    def schema(self, described: bool, defaults: bool) -> dict[str, Any]:
        """The tool as the OpenAI API takes it, with or without descriptions and defaults of its parameters."""
        properties = {}
        for param in self.params:
            properties[param.name] = values.schema(param.kind)
            if described:
                properties[param.name]["description"] = param.about
            if defaults and param.optional and (default := values.default(param.kind)) is not None:
                properties[param.name]["default"] = default
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if required := [param.name for param in self.params if not param.optional]:
            parameters["required"] = required
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }


@dataclass(frozen=True, slots=True)
class Call:
    """A tool with arguments: `ask` is the imperative that asks for it, `working` the reasoning that fills it."""

    tool: Tool
    arguments: dict[str, Any]
    ask: str
    working: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What all tools of one example share."""

    thinking: bool
    today: date | None = None  # requests may speak of days from here
    camel: bool = False  # names in camelCase
    described: bool = True  # parameters have descriptions
    defaults: bool = False  # optional parameters name their default; it is never written into a call


def some_setting(draw: Draw, thinking: bool) -> Setting:
    today = calendar.some_date(draw) if thinking and draw.chance(0.3) else None
    return Setting(thinking, today, draw.chance(0.2), draw.chance(0.6), draw.chance(0.15))


def some_tool(draw: Draw, setting: Setting) -> Tool:
    """An action on a noun (four times of five) or one of the list."""
    return made_tool(draw, setting) if draw.chance(0.8) else listed_tool(draw, setting)


def listed_tool(draw: Draw, setting: Setting, returning: bool = False) -> Tool:
    """A tool of the list; with `returning` one that says what its result holds."""
    return _build(draw, setting, draw.pick(_listed(draw.split, returning)))


def made_tool(draw: Draw, setting: Setting, noun: str = "", id: str = "", groups: Sequence[str] = ()) -> Tool:
    """An action crossed with a noun, with up to two more optional parameters. `id` or `groups` narrow the choice."""
    entries = [
        entry
        for entry in table("tools")["action"]
        if (not id or entry["name"] == id) and (not groups or entry["group"] in groups)
    ]
    return _build(draw, setting, draw.pick(entries), noun or draw.word("noun"))


def box(draw: Draw, setting: Setting, wanted: Sequence[Tool], size: int) -> list[Tool]:
    """`wanted` and distractors, shuffled: `size` tools, or `wanted` alone if that is more."""
    tools = list(wanted)
    for _ in range(3 * size):
        if len(tools) >= size:
            break
        target = draw.pick(wanted)
        if target.noun and draw.chance(0.4):
            other = made_tool(draw, setting, noun=target.noun)
        elif target.noun and draw.chance(0.3):
            other = made_tool(draw, setting, id=target.id)
        else:
            other = some_tool(draw, setting)
        if not any(_alike(other, tool) for tool in tools):
            tools.append(other)
    return draw.shuffled(tools)


def box_without(draw: Draw, setting: Setting, absent: Tool, size: int) -> list[Tool]:
    """`size` tools of which none can do what `absent` does."""
    tools: list[Tool] = []
    while len(tools) < size:
        near = absent.noun and draw.chance(0.4)
        other = made_tool(draw, setting, noun=absent.noun, groups=HARMLESS) if near else some_tool(draw, setting)
        if other.id in ALL_PURPOSE or other.group == absent.group:
            continue
        if not any(_alike(other, tool) for tool in (*tools, absent)):
            tools.append(other)
    return tools


def call(draw: Draw, tool: Tool, setting: Setting, optional: float = 0.5) -> Call:
    """A request for `tool`; each optional parameter is stated with probability `optional`."""
    arguments, slots, tails, working = {}, {}, [], [f"tool: {tool.name}"]
    for param in tool.params:
        if param.optional and not draw.chance(optional):
            continue
        value = _argument(draw, param, tool, setting)
        arguments[param.name] = value.json
        if param.kind == "flag":
            tails.append(draw.pick(param.yes if value.json else param.no))
        elif param.optional:
            tails.append(draw.pick(param.say).replace("{}", value.said))
        else:
            slots[param.slot] = value.said
        working += [value.working] if value.working else []
        working.append(f"{param.name}: {shown(value.json)}")
    return Call(tool, arguments, _joined(draw, draw.fill(draw.pick(tool.ask), **slots), tails), "\n".join(working))


def explicit_call(draw: Draw, tool: Tool, setting: Setting, left_out: Sequence[str] = ()) -> Call:
    """A request that spells out the tool and its parameters by name; parameters named in `left_out` are not given."""
    arguments, said, working = {}, [], [f"tool: {tool.name}"]
    for param in tool.params:
        if param.name in left_out or (param.optional and draw.chance(0.5)):
            continue
        value = _argument(draw, param, tool, replace(setting, thinking=False))
        arguments[param.name] = value.json
        said.append(f"{param.name} {value.said}")
        working += [value.working] if value.working else []
        working.append(f"{param.name}: {shown(value.json)}")
    return Call(
        tool,
        arguments,
        draw.text("tools.explicit", tool=tool.name) + (f" with {values.listed(said)}" if said else ""),
        "\n".join(working),
    )


def file_tool(draw: Draw, setting: Setting) -> Tool:
    """A tool that prints a file, with the path alone as parameter; both splits have one of their own."""
    return _build(draw, setting, table("tools")["file"][draw.split])


def arguments_working(made: Call) -> str:
    """The reasoning of a call whose arguments are copied."""
    return "\n".join(
        [f"tool: {made.tool.name}", *(f"{name}: {shown(value)}" for name, value in made.arguments.items())]
    )


def shown(value: Any) -> str:
    """A value as the reasoning writes it: JSON, but strings without quotes."""
    return value if isinstance(value, str) else values.json_text(value)


def _argument(draw: Draw, param: Param, tool: Tool, setting: Setting) -> values.Value:
    if param.kind == "flag":
        on = not param.no or draw.chance(0.6)
        return values.Value(on, str(on).lower())
    return values.sample(draw, param.kind, setting.thinking, setting.today, tool.noun)


def _joined(draw: Draw, ask: str, tails: list[str]) -> str:
    for i, tail in enumerate(tails):
        ask += f"{' ' if i == 0 or tail.startswith(('and ', 'but ')) else draw.pick((', ', ' and '))}{tail}"
    ask = ask.replace(" on tomorrow", " tomorrow").replace(" on the day", " the day")
    return with_articles(ask)


def _alike(a: Tool, b: Tool) -> bool:
    """Whether a request for one could be met by the other."""
    if bool(a.noun) == bool(b.noun):
        return a.name == b.name
    made, listed = (a, b) if a.noun else (b, a)
    return made.noun in f"{listed.name} {listed.about}".lower()


@cache
def _listed(split: Split, returning: bool) -> tuple[dict[str, Any], ...]:
    return tuple(
        entry
        for entry in table("tools")["tool"]
        if entry.get("heldout", False) == (split == "heldout") and (not returning or "returns" in entry)
    )


def _build(draw: Draw, setting: Setting, entry: dict[str, Any], noun: str = "") -> Tool:
    heldout = draw.split == "heldout"

    def written(text: str) -> str:
        return text.replace("{noun}", noun).replace("{nouns}", plural(noun)) if noun else text

    def name(text: str) -> str:
        snake = written(text).replace(" ", "_")
        head, *rest = snake.split("_")
        return head + "".join(word.capitalize() for word in rest) if setting.camel else snake

    def param(fields: dict[str, Any]) -> Param:
        kind = f"enum:{':'.join(draw.words('status', 4))}" if fields["kind"] == "status" else fields["kind"]
        say, yes, no = (
            tuple(written(t) for t in (heldout and fields.get(other)) or fields.get(key, ()))
            for key, other in (("say", "heldout"), ("yes", "heldout_yes"), ("no", "heldout_no"))
        )
        slot, about = fields["name"].removeprefix("{noun}_"), with_articles(written(fields["about"]))
        return Param(slot, name(fields["name"]), kind, about, say, yes, no)

    params = [param(fields) for fields in entry["params"]]
    if noun and params:
        taken = {param.name for param in params}
        extra = _extra(draw, draw.pick((0, 0, 0, 1, 1, 2)))
        params += [_extra_param(words, name(words), kind, heldout) for words, kind in extra if name(words) not in taken]
    return Tool(
        id=entry["name"],
        name=name(entry["name"]),
        about=with_articles(written(draw.pick(entry["about"]))) if noun else entry["about"],
        group=entry.get("group", entry["name"]),
        noun=noun,
        params=tuple(params),
        ask=tuple(written(t) for t in (noun and heldout and entry["heldout"]) or entry["ask"]),
        returns=tuple(entry.get("returns", {}).items()),
    )


def _extra(draw: Draw, n: int) -> list[tuple[str, str]]:
    """`n` parameters any tool could have, as (words, kind)."""
    found = {}
    for _ in range(n):
        sort = draw.pick(("text", "text", "number", "flag"))
        words = draw.word(f"field_{sort}")
        if sort == "text":
            found[words] = draw.pick(("product", "city", "tag", "color", "code_word", "first_name"))
        else:
            found[words] = "flag" if sort == "flag" else f"int:{draw.pick((1, 2, 5))}:{draw.pick((20, 60, 400))}"
    return list(found.items())


def _extra_param(words: str, name: str, kind: str, heldout: bool) -> Param:
    if kind == "flag":
        yes = ("setting {} to true",) if heldout else ("with {} on", "with {} set to true", "and set {} to true")
        no = ("setting {} to false",) if heldout else ("with {} off", "with {} set to false", "and set {} to false")
        about = f"Whether it is {words}."
        return Param(
            name, name, kind, about, (), tuple(t.format(words) for t in yes), tuple(t.format(words) for t in no)
        )
    say = (
        ("setting {} to {{}}",)
        if heldout
        else ("with {} {{}}", "with the {} {{}}", "and {} {{}}", "and set {} to {{}}")
    )
    return Param(name, name, kind, f"The {words}.", tuple(t.format(words) for t in say))


def with_articles(text: str) -> str:
    """ "a invoice" -> "an invoice"."""
    return re.sub(r"\b([Aa]) (?=[aeio]|up|un)", r"\1n ", text)


def plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh", "z")) else f"{noun}s"
