"""Tools, requests for them, and boxes of several tools to choose from.

A tool is one of the list in tools.toml or an action crossed with a noun (get_ticket, share_invoice, ...); in training
more than half are new ones instead: any verb with any noun, with parameters of any names, so that nothing but reading
the schema helps. A box holds the tools a request needs and distractors: same noun and other action, same action and
other noun, or anything.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from typing import Any

from leyden.synthetic import calendar, values
from leyden.synthetic.draw import Draw, Split, heldout_words, table

# Actions that cannot be taken for one outside this list, those whose absence leaves no way to do what they do, and the
# tools of the list with which nearly everything can be done.
HARMLESS = ("read", "copy", "export", "tag", "price", "locate", "validate")
IRREPLACEABLE = ("create", "remove", "rename", "archive", "move", "lock", "approve", "merge", "extend", "refresh")
ALL_PURPOSE = ("run_command",)
# Share of new tools among those that training draws.
NEW = 0.5


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
    verb: str = ""  # of a new tool
    questions: tuple[str, ...] = ()  # what it answers, as `ask`

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
    casing: str = "snake"  # how names are written, one of CASINGS
    described: bool = True  # parameters have descriptions
    defaults: bool = False  # optional parameters name their default; it is never written into a call


def some_setting(draw: Draw, thinking: bool) -> Setting:
    today = calendar.some_date(draw) if thinking and draw.chance(0.3) else None
    casing = "camel" if draw.chance(0.2) else "snake"
    if draw.unseen(0.25):
        casing = draw.pick(list(CASINGS))
    return Setting(thinking, today, casing, draw.chance(0.6), draw.chance(0.15))


def some_tool(draw: Draw, setting: Setting) -> Tool:
    """An action on a noun (four times of five) or one of the list; in training mostly a new one."""
    if draw.unseen(NEW):
        return new_tool(draw, setting)
    return made_tool(draw, setting) if draw.chance(0.8) else listed_tool(draw, setting)


def listed_tool(draw: Draw, setting: Setting, returning: bool = False) -> Tool:
    """A tool of the list, in training mostly a new one; with `returning` one that says what its result holds."""
    if draw.unseen(NEW):
        return new_tool(draw, setting, returning=returning)
    return _build(draw, setting, draw.pick(_listed(draw.split, returning)))


def made_tool(draw: Draw, setting: Setting, noun: str = "", id: str = "", groups: Sequence[str] = ()) -> Tool:
    """An action crossed with a noun, with up to two more optional parameters. `id` or `groups` narrow the choice."""
    entries = [
        entry
        for entry in table("tools")["action"]
        if (not id or entry["name"] == id) and (not groups or entry["group"] in groups)
    ]
    return _build(draw, setting, draw.pick(entries), noun or draw.word("noun"))


def new_tool(draw: Draw, setting: Setting, noun: str = "", verb: str = "", returning: bool = False) -> Tool:
    """A tool that exists nowhere else, for training. Its name or its description and the request share their words;
    parameters are asked for by name, but for the first required one, which may stand next to the noun."""
    texts = table("tools")["new"]
    verb = verb or (draw.invent() if draw.unseen(draw.invented / 2) else draw.pick(_words_of_list("verbs")))
    noun = noun or draw.word("noun")
    words = {"verb": verb, "noun": noun, "nouns": plural(noun)}
    name = draw.pick(texts["names"]).format(**words, word=draw.word("code_word"))
    about = draw.pick(texts["about"]).format(**words)
    if draw.chance(0.08):
        name = f"{draw.invent()} {draw.between(1, 9)}"  # only the description tells
        about = draw.pick(texts["about"][:4]).format(**words)
    required = draw.pick((1, 1, 1, 2, 2, 3) if returning else (0, 1, 1, 1, 2, 2, 3))
    params: list[Param] = []
    placed = ""
    for i in range(required):
        bare = i == 0 and draw.chance(0.65)
        param, say = _new_param(draw, setting, f"p{i}", noun, texts["plain" if returning else "kinds"], bare)
        if any(param.name == other.name for other in params):
            continue
        apart = " " if not placed or say.startswith("and ") else draw.pick((" ", ", ", " and "))
        placed += (" " if apart == " and " and params[-1].kind.startswith(("list", "numbers")) else apart) + say
        params.append(param)
    ask = draw.pick(texts["asks"]).format(**words) + placed
    if len(params) == 1 and draw.chance(0.3):  # "send to Rome the parcel"
        ask = draw.pick(texts["asks_after"]).format(**words, placed=placed.strip().removeprefix("and "))
    for i in range(draw.pick((0, 0, 1, 1, 2, 3))):
        param, say = _new_param(draw, setting, f"o{i}", noun, texts["kinds"], optional=True)
        if not any(param.name == other.name for other in params):
            params.append(param)
    fields = {spelled(draw.word("field_number"), "snake"): "int:1:99" for _ in range(draw.between(1, 3))}
    return Tool(
        id="new",
        name=spelled(name, setting.casing),
        about=with_articles(f"{about[0].upper()}{about[1:]}"),
        group=f"{verb} {noun}",
        noun=noun,
        params=tuple(params if returning else draw.shuffled(params)),
        ask=(ask,),
        returns=tuple(fields.items()) if returning else (),
        verb=verb,
        questions=(draw.pick(texts["questions"]).format(**words) + placed,) if verb in texts["looking"] else (),
    )


def _new_param(
    draw: Draw,
    setting: Setting,
    slot: str,
    noun: str,
    kinds: Sequence[str],
    bare: bool = False,
    optional: bool = False,
) -> tuple[Param, str]:
    """A parameter with a name of one to three words, and how a request says its value, {slot} included; `bare` leaves
    the name away. `kinds` are those of texts."""
    texts = table("tools")["new"]
    sort = draw.pick(("text", "text", "text", "number", "flag") if optional else ("text", "text", "text", "number"))
    words = draw.word(f"field_{sort}")
    kind = {
        "text": draw.pick(kinds),
        "number": draw.pick(("int:1:12", "int:2:99", "int:10:999", "int:1:9999", "price")),
        "flag": "flag",
    }[sort]
    if kind == "enum":
        kind = f"enum:{':'.join(draw.words(draw.pick(('status', 'tag', 'color', 'field_text')), draw.between(2, 5)))}"
    elif kind == "counts":
        kind = f"counts:{':'.join(spelled(key, 'snake') for key in draw.words('field_number', draw.between(2, 3)))}"
    elif kind == "id" and draw.chance(0.7):
        words = f"{noun} id"
    if sort != "flag" and not words.endswith(" id") and draw.chance(0.15):
        words = f"{draw.pick(texts['prefixes'])} {words}"
    about = draw.pick(texts[f"about_{sort}"]).format(w=words, noun=noun)
    about = f"{about[0].upper()}{about[1:]}"
    name = spelled(words, setting.casing)
    if sort == "flag":
        yes, no = (draw.pick(texts[key]).format(w=words) for key in ("yes", "no"))
        return Param(slot, name, kind, about, (), (yes,), (no,)), ""
    if bare:
        said = draw.pick(texts["bare_id" if kind == "id" else "bare"])
        return Param(slot, name, kind, about), said.replace("{}", f"{{{slot}}}")
    said = draw.pick(texts["say"] + (texts["say_number"] if sort == "number" else [])).replace("{w}", words)
    if optional:
        return Param(slot, name, kind, about, (said,)), ""
    return Param(slot, name, kind, about), said.replace("{}", f"{{{slot}}}")


def box(draw: Draw, setting: Setting, wanted: Sequence[Tool], size: int) -> list[Tool]:
    """`wanted` and distractors, shuffled: `size` tools, or `wanted` alone if that is more."""
    tools = list(wanted)
    for _ in range(3 * size):
        if len(tools) >= size:
            break
        target = draw.pick(wanted)
        if target.noun and draw.chance(0.4):
            other = _with_noun(draw, setting, target.noun)
        elif target.noun and draw.chance(0.3):
            other = _with_verb(draw, setting, target)
        else:
            other = some_tool(draw, setting)
        if not any(_alike(other, tool) for tool in tools):
            tools.append(other)
    return draw.shuffled(tools)


def box_without(draw: Draw, setting: Setting, absent: Tool, size: int) -> list[Tool]:
    """`size` tools of which none can do what `absent` does."""
    tools: list[Tool] = []
    while len(tools) < size:
        if absent.noun and draw.chance(0.4):
            other = _with_noun(draw, setting, absent.noun, HARMLESS)
        elif absent.verb and draw.chance(0.3):
            other = _with_verb(draw, setting, absent)
        else:
            other = some_tool(draw, setting)
        if other.id in ALL_PURPOSE or other.group == absent.group:
            continue
        if not any(_alike(other, tool) for tool in (*tools, absent)):
            tools.append(other)
    return tools


def _with_noun(draw: Draw, setting: Setting, noun: str, groups: Sequence[str] = ()) -> Tool:
    if draw.unseen(0.3):
        return new_tool(draw, setting, noun=noun)
    return made_tool(draw, setting, noun=noun, groups=groups)


def _with_verb(draw: Draw, setting: Setting, target: Tool) -> Tool:
    """A tool that does the same as `target` to something else; nouns of two words often share one."""
    if not target.verb:
        return made_tool(draw, setting, id=target.id)
    first, *rest = target.noun.split()
    noun = draw.word("noun").split()[-1]
    if rest and draw.chance(0.6):
        noun = draw.pick((f"{first} {noun}", f"{noun} {rest[-1]}"))
    return new_tool(draw, setting, noun="" if noun in heldout_words() else noun, verb=target.verb)


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
            value = values.Value(value.json, tails[-1])
        elif param.optional:
            tails.append(draw.pick(param.say).replace("{}", value.said))
        else:
            slots[param.slot] = value.said
        working += _steps(param.name, value)
    template = draw.pick(tool.ask)
    if draw.unseen(0.5):
        thing = draw.pick(table("tools")["new"]["things"]).replace("{noun}", tool.noun)
        template = re.sub(rf"((the|this) )?\b{re.escape(tool.noun)} \{{id\}}", thing, template, count=1)
    ask = draw.fill(template, **slots)
    if draw.split == "train":
        tails = draw.shuffled(tails)
    return Call(tool, arguments, _joined(draw, ask, tails), "\n".join(working))


def explicit_call(draw: Draw, tool: Tool, setting: Setting, left_out: Sequence[str] = ()) -> Call:
    """A request that spells out the tool and its parameters by name; parameters named in `left_out` are not given, and
    the working says so."""
    arguments, said, working = {}, [], [f"tool: {tool.name}"]
    for param in tool.params:
        if param.name in left_out:
            working.append(f"{param.name}: not given")
            continue
        if param.optional and draw.chance(0.5):
            continue
        value = _argument(draw, param, tool, replace(setting, thinking=False))
        arguments[param.name] = value.json
        said.append(f"{param.name} {value.said}")
        working += _steps(param.name, value)
    if draw.split == "train":
        said = draw.shuffled(said)
    return Call(
        tool,
        arguments,
        draw.text("tools.explicit", tool=tool.name) + (f" with {values.listed(said)}" if said else ""),
        "\n".join(working),
    )


def _steps(name: str, value: values.Value) -> list[str]:
    """The working of one argument: how the value follows from what is said, where it is no copy, and the value."""
    written = shown(value.json)
    reworded = isinstance(value.json, bool | int) and not re.match(r"[\d`]|true$|false$", value.said)
    line = f"{name}: {value.said} -> {written}" if reworded and not value.working else f"{name}: {written}"
    return [value.working, line] if value.working else [line]


def answering_tool(draw: Draw, setting: Setting) -> Tool:
    """A tool that a question can be answered with, for training."""
    while True:
        match draw.below(3):
            case 0:
                tool = new_tool(draw, setting, verb=draw.pick(table("tools")["new"]["looking"]))
            case 1:
                tool = made_tool(draw, setting)
            case _:
                tool = _build(draw, setting, draw.pick(_listed(draw.split, returning=False)))
        if tool.questions:
            return tool


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
        same = (a.id, a.verb) == (b.id, b.verb)  # names alone can differ by a word that says nothing
        return a.name == b.name or (same and a.noun == b.noun)
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
        return spelled(written(text), setting.casing)

    def param(fields: dict[str, Any]) -> Param:
        kind = f"enum:{':'.join(draw.words('status', 4))}" if fields["kind"] == "status" else fields["kind"]
        say, yes, no = (
            tuple(written(t) for t in (heldout and fields.get(other)) or fields.get(key, ()))
            for key, other in (("say", "heldout"), ("yes", "heldout_yes"), ("no", "heldout_no"))
        )
        slot, about = fields["name"].removeprefix("{noun}_"), with_articles(written(fields["about"]))
        return Param(slot, name(longer(fields["name"], 0.15)), kind, about, say, yes, no)

    def longer(text: str, p: float) -> str:
        """In training names get one more word now and then, so that none is known by heart."""
        if not draw.unseen(p):
            return text
        word = draw.word(draw.pick(("code_word", "tag", "field_text")))
        return draw.pick((f"{word} {text}", f"{text} {word}"))

    params = [param(fields) for fields in entry["params"]]
    if noun and params:
        taken = {param.name for param in params}
        extra = _extra(draw, draw.pick((0, 0, 0, 1, 1, 2) if heldout else (0, 0, 1, 1, 2, 3)))
        params += [_extra_param(words, name(words), kind, heldout) for words, kind in extra if name(words) not in taken]
    return Tool(
        id=entry["name"],
        name=name(longer(entry["name"], 0.2)),
        about=with_articles(written(draw.pick(entry["about"]))) if noun else entry["about"],
        group=entry.get("group", entry["name"]),
        noun=noun,
        params=tuple(params),
        ask=tuple(written(t) for t in (noun and heldout and entry["heldout"]) or entry["ask"]),
        returns=tuple(entry.get("returns", {}).items()),
        questions=tuple(written(t) for t in entry.get("questions", ())),
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
    texts = table("tools")["new"]
    if kind == "flag":
        yes = ["setting {w} to true"] if heldout else texts["yes"]
        no = ["setting {w} to false"] if heldout else texts["no"]
        yes, no = (tuple(text.replace("{w}", words) for text in choices) for choices in (yes, no))
        return Param(name, name, kind, f"Whether it is {words}.", (), yes, no)
    say = ["setting {w} to {}"] if heldout else texts["say"] + (texts["say_number"] if kind.startswith("int") else [])
    return Param(name, name, kind, f"The {words}.", tuple(text.replace("{w}", words) for text in say))


@cache
def _words_of_list(key: str) -> tuple[str, ...]:
    """The words of new.`key` in tools.toml."""
    return tuple(re.split(r",\s+", table("tools")["new"][key]))


def spelled(words: str, casing: str) -> str:
    """Words (separated by blanks or underscores) as one name: "purchase order" -> "purchase_order"."""
    return CASINGS[casing](re.split(r"[ _]", words))


CASINGS: dict[str, Callable[[list[str]], str]] = {
    "snake": "_".join,
    "camel": lambda parts: parts[0] + "".join(part.capitalize() for part in parts[1:]),
    "pascal": lambda parts: "".join(part.capitalize() for part in parts),
    "kebab": "-".join,
    "upper": lambda parts: "_".join(parts).upper(),
}


def with_articles(text: str) -> str:
    """ "a invoice" -> "an invoice"."""
    return re.sub(r"\b([Aa]) (?=[aeio]|up|un)", r"\1n ", text)


def plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh", "z")) else f"{noun}s"
