"""Practice for training alone: words that nobody has seen, copied exactly, and sums of single digits by heart.

What is hard in the other families is learnt here by itself: a copy of many pieces, found by place or by key, and the
small facts that every written sum is made of. The held-out split has none of it, as it asks for nothing new.
"""

from leyden.synthetic import values
from leyden.synthetic.arithmetic import choose
from leyden.synthetic.conversation import Example, question
from leyden.synthetic.draw import Draw, table
from leyden.synthetic.toolbox import CASINGS, spelled

_POOLS = (
    *("noun", "product", "city", "code_word", "topic", "field_text", "field_number", "symbol", "stem", "last_name"),
    *("company", "adjective", "dir", "tag", "column", "status", "error_text", "mail_domain"),
)
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")


def echo(draw: Draw, thinking: bool) -> Example:
    """One value, as it is."""
    value = _some_value(draw)
    return question(draw, thinking, _text(draw, "echo", value=value), value, value)


def at_place(draw: Draw, thinking: bool) -> Example:
    """The k-th of a list."""
    items = list(dict.fromkeys(_some_value(draw) for _ in range(draw.between(3, 7))))
    k = draw.below(len(items))
    place = draw.pick((_ORDINALS[k], f"number {k + 1}")) if k + 1 < len(items) or draw.chance(0.5) else "last"
    text = _text(draw, "place", items=draw.pick((", ", "; ", "\n")).join(items), place=place)
    working = "\n".join(f"{i} {item}" for i, item in enumerate(items[: k + 1], 1))
    return question(draw, thinking, text, items[k], working)


def by_key(draw: Draw, thinking: bool) -> Example:
    """The value that stands with a key, or the key that stands with a value."""
    keys = list(dict.fromkeys(_key(draw) for _ in range(draw.between(3, 8))))
    pairs = {key: _some_value(draw) for key in keys}
    key = draw.pick(keys)
    mark = draw.pick((": ", " = ", " -> ", " is "))
    slots = {"pairs": draw.pick(("\n", "; ")).join(f"{k}{mark}{v}" for k, v in pairs.items())}
    if draw.chance(0.4) and len(set(pairs.values())) == len(pairs):
        tried = [f"{k} {v} {'yes' if k == key else 'no'}" for k, v in pairs.items()][: keys.index(key) + 1]
        return question(draw, thinking, _text(draw, "key", value=pairs[key], **slots), key, "\n".join(tried))
    return question(draw, thinking, _text(draw, "value", key=key, **slots), pairs[key], f"{key}{mark}{pairs[key]}")


def keys(draw: Draw, thinking: bool) -> Example:
    """A JSON object with one key renamed, or with some of its keys alone."""
    names = list(dict.fromkeys(_key(draw) for _ in range(draw.between(3, 6))))
    facts = {name: draw.pick((_some_value(draw), draw.between(1, 999))) for name in names[1:]}
    old = draw.pick(list(facts))
    slots = {"json": values.json_text(facts)}
    if draw.chance(0.5):
        result = {names[0] if name == old else name: value for name, value in facts.items()}
        text, working = _text(draw, "rename", old=old, new=names[0], **slots), f"{old} becomes {names[0]}"
    else:
        kept = [name for name in facts if name == old or draw.chance(0.4)]
        result = {name: facts[name] for name in kept}
        text, working = _text(draw, "keep", keys=values.listed(kept), **slots), f"keep {', '.join(kept)}"
    return question(draw, thinking, text, result, working, kind="json")


def respell(draw: Draw, thinking: bool) -> Example:
    """Words as a name of code, and names of code as words."""
    words = " ".join(draw.word(draw.pick(("noun", "field_text", "adjective"))) for _ in range(draw.between(1, 2)))
    casing = draw.pick(list(CASINGS))
    name = spelled(words, casing)
    if draw.chance(0.6):
        return question(draw, thinking, _text(draw, f"to_{casing}", words=words), name, words)
    return question(draw, thinking, _text(draw, "to_words", name=name), words, words)


def digits(draw: Draw, thinking: bool) -> Example:
    """Small facts: sums, differences, products, divisions with a rest and signs, as the written sums use them."""
    facts = [_fact(draw) for _ in range(draw.pick((1, 2, 4, 6, 8, 10, 12)))]
    text = _text(draw, "digits", sums=", ".join(left for left, _ in facts))
    answer = ", ".join(right for _, right in facts)
    return question(draw, thinking, text, answer, ", ".join(f"{left}={right}" for left, right in facts))


def larger(draw: Draw, thinking: bool) -> Example:
    """Pairs of numbers, often alike, and the larger or the smaller one of each."""
    largest, top = draw.chance(0.5), draw.pick((10, 20, 99, 99, 500, 2000))
    steps = []
    for _ in range(draw.between(1, 6)):
        a, b = draw.sample(range(1, top), 2)
        near = max(1, a + draw.between(-9, 9))
        steps.append(choose(a, b if near == a or draw.chance(0.7) else near, largest))
    pairs = ", ".join(step.split(":")[0] for step, _ in steps)
    text = _text(draw, "larger" if largest else "smaller", pairs=pairs)
    working = f"{'largest' if largest else 'smallest'}\n{', '.join(step for step, _ in steps)}"
    return question(draw, thinking, text, ", ".join(str(best) for _, best in steps), working)


def _fact(draw: Draw) -> tuple[str, str]:
    a, b = draw.below(10), draw.below(10)
    match draw.pick("++--xxx///"):
        case "+":
            carry = draw.pick((0, 0, 1))
            return f"{a}+{b}{'+1' if carry else ''}", str(a + b + carry)
        case "-":
            return f"{a + b}-{b}", str(a)
        case "x":
            carry = draw.pick((0, 0, draw.below(9)))
            return f"{a}x{b}{f'+{carry}' if carry else ''}", str(a * b + carry)
        case _:
            b = draw.between(2, 9)
            n = draw.below(10 * b)
            return f"{n}/{b}", f"{n // b} r {n % b}"


def _some_value(draw: Draw) -> str:
    match draw.pick("wwwiepft"):
        case "i":
            return values.identifier(draw, draw.word("noun"))
        case "e":
            return values.email(draw)
        case "p":
            return values.person(draw)
        case "f":
            return values.path(draw)
        case "t":
            return values.title(draw)
        case _:
            return draw.word(draw.pick(_POOLS))


def _key(draw: Draw) -> str:
    words = draw.word(draw.pick(("field_text", "field_number", "column", "symbol", "noun")))
    return words if draw.chance(0.3) else spelled(words, draw.pick(("snake", "snake", "camel", "kebab")))


def _text(draw: Draw, phrase: str, /, **slots: str) -> str:
    choices = table("copying")[phrase]
    i = draw.below(len(choices))
    draw.templates.append(f"copying.{phrase}/train/{i}")
    return draw.fill(choices[i], **slots)
