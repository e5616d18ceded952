"""Following a format: order, join, number, pick, replace, drop, count, rename and fill in, exactly as asked."""

from collections.abc import Callable

from leyden.synthetic import values
from leyden.synthetic.arithmetic import choose
from leyden.synthetic.conversation import Example, question
from leyden.synthetic.draw import Draw

_POOLS = ("city", "product", "food", "first_name", "tag", "color", "code_word")


def sort_numbers(draw: Draw, thinking: bool) -> Example:
    """Numbers in rising or falling order; the reasoning looks for the smallest (or largest) of what is left."""
    top = draw.pick((20, 99, 99, 500))
    numbers = draw.sample(range(1, top), draw.between(3, 5) if thinking else 3)
    falling = draw.chance(0.4)
    order = sorted(numbers, reverse=falling)
    left, steps = list(numbers), ["the largest first" if falling else "the smallest first"]
    for number in order[:-1]:
        best, tried = left[0], []
        for other in left[1:]:
            step, best = choose(best, other, falling)
            tried.append(step)
        steps.append(f"{', '.join(map(str, left))}. {', '.join(tried)}")
        left.remove(number)
    name = "rewrite.falling" if falling else "rewrite.rising"
    text = draw.text(name, numbers=", ".join(map(str, numbers)))
    return question(draw, thinking, text, ", ".join(map(str, order)), "\n".join([*steps, str(left[0])]))


def sort_words(draw: Draw, thinking: bool) -> Example:
    """Words in alphabetical order; their first letters differ."""
    pool = draw.pick(_POOLS)
    words: dict[str, str] = {}
    for word in draw.words(pool, 12):
        words.setdefault(word[0].lower(), word)
    chosen = dict(draw.sample(list(words.items()), draw.between(3, 4)))
    order = [chosen[letter] for letter in sorted(chosen)]
    letters = ", ".join(f"{letter} {word}" for letter, word in chosen.items())
    found = ", ".join(f"{letter} {chosen[letter]}" for letter in sorted(chosen))
    text = draw.text("rewrite.alphabet", items=", ".join(chosen.values()))
    return question(draw, thinking, text, ", ".join(order), f"{letters}\n{' '.join(sorted(chosen))}\n{found}")


def shape(draw: Draw, thinking: bool) -> Example:
    """A list in another form: bullets, numbers, JSON, another separator, quotes, backwards, or two of these."""
    items = draw.words(draw.pick(_POOLS), draw.between(3, 5))
    style = draw.pick(list(_SHAPES))
    turned = style != "backwards" and draw.chance(0.2)
    result = _SHAPES[style](items[::-1] if turned else items)
    text = draw.text(f"rewrite.{style}", items=", ".join(items), pipe=" | ")
    if turned:
        text += " " + draw.text("rewrite.backwards_too")
    working = f"{style}, keep the order"
    if turned or style == "backwards":
        numbered = [f"{i} {item}" for i, item in enumerate(items, 1)]
        working = f"{style}, backwards\n{', '.join(numbered)}\n{', '.join(numbered[::-1])}"
    return question(draw, thinking, text, result, working)


def change(draw: Draw, thinking: bool) -> Example:
    """A list with one item replaced, dropped, added or moved, or doubles taken out."""
    pool = draw.pick(_POOLS)
    *items, new = draw.words(pool, draw.between(4, 6))
    old = draw.pick(items)
    i = items.index(old)
    kind = draw.pick(("replace", "drop", "append", "front", "doubles"))
    slots = {"items": ", ".join(items), "old": old, "new": new}
    match kind:
        case "replace":
            result = items[:i] + [new] + items[i + 1 :]
            working = f"replace {old} with {new}\n{', '.join([*items[:i], f'{old} becomes {new}', *items[i + 1 :]])}"
        case "drop":
            result, working = items[:i] + items[i + 1 :], without(items, old)
        case "append":
            result, working = [*items, new], f"{new} at the end"
        case "front":
            result, working = [new, *items], f"{new} at the front"
        case _:
            again = draw.between(i + 1, len(items))
            slots["items"] = ", ".join(items[:again] + [old] + items[again:])
            listed = items[:again] + [old] + items[again:]
            lines = [
                f"{item}{' again' if j == again else ''}: {', '.join(dict.fromkeys(listed[: j + 1]))}"
                for j, item in enumerate(listed)
            ]
            result, working = items, "\n".join(["no doubles", *lines])
    return question(draw, thinking, draw.text(f"rewrite.{kind}", **slots), ", ".join(result), working)


def without(items: list[str], gone: str) -> str:
    """The working of a list that loses an item: after each item what there is so far, so that the last line is it."""
    lines, kept = [f"without {gone}"], ""
    for item in items:
        if item != gone:
            kept = f"{kept}, {item}" if kept else item
        lines.append(f"{item}{' out' if item == gone else ''}: {kept or 'none'}")
    return "\n".join(lines)


def pick(draw: Draw, thinking: bool) -> Example:
    """The item at a place, the first or last few, or how many there are."""
    items = draw.words(draw.pick(_POOLS), draw.between(4, 7))
    slots = {"items": ", ".join(items)}
    kind = draw.pick(("place", "first", "last", "how_many"))
    numbered = [f"{i} {item}" for i, item in enumerate(items, 1)]
    i, working = draw.between(2, 3), ""
    match kind:
        case "place":
            i = draw.between(1, len(items))
            result = items[i - 1]
            slots["place"] = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")[i - 1]
            working = f"number {i}\n{', '.join(numbered[:i])}"
        case "first":
            result, slots["n"] = ", ".join(items[:i]), values.NUMBER_WORDS[i]
            working = f"the first {i}\n{', '.join(numbered[:i])}"
        case "last":
            result, slots["n"] = ", ".join(items[-i:]), values.NUMBER_WORDS[i]
            rest = f"{len(items)} - {i} = {len(items) - i}"
            working = f"the last {i}\n{', '.join(numbered)}\n{rest}\n{', '.join(numbered[-i:])}"
        case _:
            result, working = str(len(items)), f"how many\n{', '.join(numbered)}"
    return question(draw, thinking, draw.text(f"rewrite.{kind}", **slots), result, working)


def rename(draw: Draw, thinking: bool) -> Example:
    """A title as a name for code or files."""
    title = values.title(draw)
    style = draw.pick(("snake", "kebab", "dotted", "path"))
    joint = {"snake": "_", "kebab": "-", "dotted": ".", "path": "/"}[style]
    return question(
        draw,
        thinking,
        draw.text(f"rewrite.{style}", title=title),
        title.replace(" ", joint),
        f"{style}: join with {joint}",
    )


def fill_in(draw: Draw, thinking: bool) -> Example:
    """A pattern with {names} filled in with values."""
    person, city, day = draw.word("first_name"), draw.word("city"), draw.pick(("Monday", "Tuesday", "Friday", "Sunday"))
    facts = {
        "name": person,
        "city": city,
        "day": day,
        "code": values.identifier(draw),
        "count": str(draw.between(2, 40)),
    }
    train = draw.split == "train"
    forms, joints = (_PIECES, _JOINTS) if train else (_PIECES[:5], _JOINTS[:5])
    if train:
        words = [draw.word(draw.pick(("code_word", "product", "last_name", "tag"))) for _ in range(4)]
        facts |= zip([name for name in draw.words("column", 4) if name.isalpha()], words, strict=False)
    used = draw.sample(list(facts), draw.between(2, 4))
    pieces = [draw.pick(forms).replace("<k>", f"<{key}>").replace("k=", f"{key}=").replace("{k}", key) for key in used]
    pattern = draw.pick(joints).join(pieces)
    result = pattern
    for key in used:
        result = result.replace(f"<{key}>", facts[key])
    given = ", ".join(f"{key} {facts[key]}" for key in draw.shuffled(used))
    text = draw.text("rewrite.fill_in", pattern=pattern, given=given)
    return question(draw, thinking, text, result, "\n".join(f"{key}: {facts[key]}" for key in used))


def to_json(draw: Draw, thinking: bool) -> Example:
    """key = value lines as a JSON object of strings, or one column of a table as a JSON list."""
    keys = draw.words("column", draw.between(2, 4))
    facts = {key: draw.pick((draw.word("code_word"), draw.word("first_name"), draw.word("city"))) for key in keys}
    sign = draw.pick((" = ", ": ", "=", " -> "))
    lines = draw.pick(("\n", "; ", "\n")).join(f"{key}{sign}{value}" for key, value in facts.items())
    working = "\n".join(f"{key}: {value}" for key, value in facts.items())
    return question(draw, thinking, draw.text("rewrite.to_json", lines=lines), facts, working, "json")


# How a value stands in a pattern, and what is between two of them; held-out patterns use the first five.
_PIECES = (
    *("{k}: <k>", "<k>", "[<k>]", "k=<k>", "#<k>"),
    *("(<k>)", "<k>!", "@<k>", "{k} <k>", "+<k>", "'<k>'", "{k}/<k>", "*<k>*"),
)
_JOINTS = (" | ", "; ", " / ", ", ", " - ", " ", " + ", " & ", " > ", " and ", " :: ", " * ", "\n")

_SHAPES: dict[str, Callable[[list[str]], str]] = {
    "bullets": lambda items: "\n".join(f"- {item}" for item in items),
    "numbered": lambda items: "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1)),
    "array": values.json_text,
    "semicolons": "; ".join,
    "slashes": " / ".join,
    "pipes": " | ".join,
    "lines": "\n".join,
    "arrows": " -> ".join,
    "quoted": lambda items: ", ".join(f'"{item}"' for item in items),
    "backwards": lambda items: ", ".join(items[::-1]),
}
