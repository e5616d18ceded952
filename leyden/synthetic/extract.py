"""Facts of a short text as JSON: chosen keys in the order asked for, null for what is not there; and lists of items."""

import re
from typing import Any

from leyden.synthetic import values
from leyden.synthetic.conversation import Conversation, Example
from leyden.synthetic.draw import Draw, table
from leyden.synthetic.toolbox import shown

NOT_GIVEN = ("website", "discount", "nickname", "fax", "currency", "country", "notes", "manager")


def fields(draw: Draw, thinking: bool) -> Example:
    """Two to five facts of a text, sometimes one that it does not give."""
    entry = draw.pick(table("documents")["document"])
    text = draw.pick(entry[draw.split])
    draw.templates.append(f"document/{draw.split}/{entry[draw.split].index(text)}")
    facts = {name: _value(draw, kind) for name, kind in entry["fields"].items()}
    while "origin" in facts and facts["origin"].json == facts["destination"].json:
        facts["destination"] = _value(draw, "city")
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
