"""Facts of a short text as JSON: chosen keys in the order asked for, null for what is not there; and lists of items."""

import re
from typing import Any

from leyden.synthetic import values
from leyden.synthetic.conversation import Conversation, Example
from leyden.synthetic.draw import Draw, table
from leyden.synthetic.toolbox import shown

NOT_GIVEN = ("website", "discount", "nickname", "fax", "currency", "country", "notes", "manager")


# Kinds of values for made-up fields, and sentences that give no fact.
_KINDS = (
    "person",
    "city",
    "code",
    "int:2:90",
    "int:100:9000",
    "email",
    "price",
    "company",
    "product",
    "bare_title",
    "date",
)
_IDLE = (
    *("thank you", "more on this next week", "see you soon", "this is all we know", "have a nice day", "all is well"),
    *("please do not forget it", "we keep our fingers crossed", "no further news", "best wishes", "it was a long day"),
)


def fields(draw: Draw, thinking: bool) -> Example:
    """Two to five facts of a text, sometimes one that it does not give."""
    entry = draw.pick(table("documents")["document"])
    text = draw.pick(entry[draw.split])
    kinds = _form(draw) if draw.split == "train" and draw.chance(0.25) else entry["fields"]
    facts = {name: _value(draw, kind) for name, kind in kinds.items()}
    while "origin" in facts and facts["origin"].json == facts["destination"].json:
        facts["destination"] = _value(draw, "city")
    if kinds is not entry["fields"]:
        filled = _composed(draw, {}, facts)
    elif draw.split == "train" and draw.chance(0.5):
        filled = _composed(draw, entry["said"], facts)
    else:
        draw.templates.append(f"document/{draw.split}/{entry[draw.split].index(text)}")
        filled = re.sub(r"\{(\w+)\}", lambda slot: facts[slot[1]].said, text)
    keys = draw.sample(list(facts), draw.between(2, 5))
    absent = draw.pick(NOT_GIVEN) if draw.chance(0.3) else ""
    if absent:
        keys.insert(draw.below(len(keys) + 1), absent)
    expected = {key: None if key == absent else facts[key].json for key in keys}
    dated = any(isinstance(fact.json, str) and fact.working for key, fact in facts.items() if key in keys)
    rules = [draw.text("extract.dates")] if dated else []
    rules += [draw.text("extract.null")] if absent or draw.chance(0.2) else []
    working = []
    for key in keys:
        fact = facts.get(key)
        working += [fact.working] if fact and fact.working else []
        working.append(f"{key}: {shown(fact.json) if fact else 'not given'}")
    # digits that have to stay a string cannot be told from a number without its type
    typed = draw.chance(0.4) or any(isinstance(value, str) and value.isdigit() for value in expected.values())
    named = [f"{key} ({_type(expected[key])})" if typed and key != absent else key for key in keys]
    return _extracted(draw, thinking, "extract.keys", filled, rules, expected, working, keys=", ".join(named))


def _form(draw: Draw) -> dict[str, str]:
    """Fields that nobody has seen: made-up names, some of two words, for values of any kind."""
    names = dict.fromkeys("_".join(draw.invent() for _ in range(draw.pick((1, 1, 2)))) for _ in range(5))
    return {name: draw.pick(_KINDS) for name in draw.sample(list(names), draw.between(2, 5)) if name != "origin"}


def _composed(draw: Draw, said: dict[str, list[str]], facts: dict[str, values.Value]) -> str:
    """The facts in any order, each as it is said or with its name before it, as sentences, a row or lines."""
    labels = {name: name if draw.chance(0.3) else name.replace("_", " ") for name in facts}
    sign = draw.pick((": ", ": ", " = ", "=", " - ", " is ", " "))
    labelled = not said or draw.chance(0.35)
    pieces = []
    for name in draw.shuffled(list(facts)):
        if labelled or draw.chance(0.15):
            pieces.append(f"{labels[name]}{sign}{facts[name].said}")
        else:
            pieces.append(draw.pick(said[name]).replace("{x}", facts[name].said))
    if draw.chance(0.25):
        pieces.insert(draw.below(len(pieces) + 1), draw.pick(_IDLE))
    joint = draw.pick((", ", "; ", ". ", "\n", "\n", " | ", " / ", "\n- "))
    if joint == ". " or draw.chance(0.2):
        pieces = [piece if piece in {fact.said for fact in facts.values()} else _capital(piece) for piece in pieces]
    return joint.join(pieces) + ("." if joint in (", ", ". ") and draw.chance(0.7) else "")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:] if text[0].isalpha() and text.split()[0].islower() else text


def items(draw: Draw, thinking: bool) -> Example:
    """An order of several lines as a list of objects."""
    products, key = draw.words("product", draw.between(2, 4)), draw.pick(("item", "product", "name"))
    amount = draw.pick(("quantity", "count", "pieces"))
    numbers = [draw.between(1, 30) for _ in products]
    pattern = draw.pick(("{n} x {p}", "{p}: {n}", "{n} {p}", "{p} ({n})"))
    joint = draw.pick((", ", "; ", "\n"))
    text = joint.join(pattern.replace("{n}", str(n)).replace("{p}", p) for n, p in zip(numbers, products, strict=True))
    expected = [{key: p, amount: n} for n, p in zip(numbers, products, strict=True)]
    working = [f"{p} {n}" for n, p in zip(numbers, products, strict=True)]
    return _extracted(draw, thinking, "extract.items", text, [], expected, working, key=key, amount=amount)


def emails(draw: Draw, thinking: bool) -> Example:
    """All email addresses of a text, or all names, as a list of strings."""
    people = [values.person(draw) for _ in range(draw.between(2, 4))]
    addresses = [values.email(draw, person) for person in people]
    text = "\n".join(
        draw.text("extract.line", person=p, email=e, city=draw.word("city"))
        for p, e in zip(people, addresses, strict=True)
    )
    wanted, found = draw.pick((("extract.emails", addresses), ("extract.names", people)))
    return _extracted(draw, thinking, wanted, text, [], found, found)


def _type(value: Any) -> str:
    return {str: "string", int: "integer", float: "number"}[type(value)]


def _value(draw: Draw, kind: str) -> values.Value:
    """Kinds of documents.toml: those of values, and some that stand there without quotes."""
    match kind:
        case "bare_title":
            text = values.title(draw)
        case "street_line":
            text = f"{draw.between(1, 199)} {draw.word('street')} Street"
        case "zip":
            text = str(draw.between(10000, 99999))
        case _:
            return values.sample(draw, kind)
    return values.Value(text, text)


def _extracted(
    draw: Draw,
    thinking: bool,
    phrase: str,
    text: str,
    rules: list[str],
    expected: Any,
    working: list[str],
    **slots: str,
) -> Example:
    conversation = Conversation(draw, thinking)
    only = draw.text("extract.only") if draw.chance(0.5) else ""
    if only and draw.chance(0.5):
        conversation.system(only)
        only = ""
    else:
        conversation.system()
    task = " ".join([draw.text(phrase, **slots), *rules, *([only] if only else [])])
    conversation.user(draw.text("extract.layout", task=task, text=text))
    conversation.answer(values.json_text(expected), "\n".join(working))
    return conversation.example("json", expected)
