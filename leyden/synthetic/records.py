"""Small tables and questions about them: one value, how many, which ones, the largest, the smallest, the sum.

The same questions are asked of a tool's result and of data that stands in the prompt (`leyden.synthetic.reading`).
"""

from dataclasses import dataclass
from typing import Any

from leyden.synthetic import values
from leyden.synthetic.arithmetic import choose, total
from leyden.synthetic.draw import Draw
from leyden.synthetic.toolbox import plural


@dataclass(frozen=True, slots=True)
class Records:
    """Rows of one kind of thing, with columns for the key, some words, a status and a whole number."""

    noun: str
    key: str
    word: str
    number: str
    rows: tuple[dict[str, Any], ...]

    def as_json(self, draw: Draw) -> str:
        rows = list(self.rows)
        return values.json_text({plural(self.noun).replace(" ", "_"): rows} if draw.chance(0.5) else rows)

    def as_text(self, draw: Draw) -> str:
        """CSV, a Markdown table, or one line per row; in training also with other separators and in columns."""
        names = list(self.rows[0])
        cells = [[str(row[name]) for name in names] for row in self.rows]
        style = draw.below(3 if draw.split == "heldout" else 6)
        if style == 3:
            sign = draw.pick((";", " | ", "\t", ", ", " ; ", " / "))
            return "\n".join(sign.join(line) for line in [names, *cells])
        if style == 4:
            widths = [max(map(len, column)) + 2 for column in zip(names, *cells, strict=True)]
            return "\n".join("".join(map(str.ljust, line, widths)).rstrip() for line in [names, *cells])
        if style == 5:
            joint, sign = draw.pick(((" ", "="), ("; ", "="), (", ", " "), (" | ", ": "), ("; ", ": ")))
            return "\n".join(joint.join(map(sign.join, zip(names, line, strict=True))) for line in cells)
        if style == 0:
            return "\n".join(",".join(line) for line in [names, *cells])
        if style == 1:
            return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *cells])
        return "\n".join("- " + ", ".join(f"{n}: {c}" for n, c in zip(names, line, strict=True)) for line in cells)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about records, the reasoning that leads to the answer, and the answer."""

    text: str
    working: str
    answer: str
    easy: bool  # one look is enough: can be answered without reasoning


def some_records(draw: Draw, noun: str = "", count: int = 0) -> Records:
    """Three to seven rows with different keys, names and numbers."""
    noun = noun or draw.word("noun")
    count = count or draw.between(3, 7)
    key = draw.pick(("id", f"{noun.replace(' ', '_')}_id", "code"))
    word_column, words = draw.pick(
        (("owner", "first_name"), ("city", "city"), ("name", "code_word"), ("product", "product"))
    )
    number = draw.pick(_NUMBERS)
    statuses = draw.words("status", 3)
    keys = [f"{noun[0].upper()}{n}" for n in draw.sample(range(10, 99), count)]
    names, numbers = draw.words(words, count), draw.sample(range(2, draw.pick((20, 99, 400))), count)
    order = draw.shuffled((word_column, "status", number))
    rows = []
    for i in range(count):
        row = {word_column: names[i], "status": draw.pick(statuses), number: numbers[i]}
        rows.append({key: keys[i]} | {name: row[name] for name in order})
    return Records(noun, key, word_column, number, tuple(rows))


def ask(draw: Draw, records: Records, easy: bool = False) -> Question:
    """A question with one answer; with `easy` only one that needs no reasoning."""
    kinds = _EASY if easy else _ALL if len(records.rows) < 5 else _ALL[:-1]  # long sums make long reasoning
    return draw.pick(kinds)(draw, records)


def _value(draw: Draw, records: Records) -> Question:
    row = draw.pick(records.rows)
    column = draw.pick((records.word, "status", records.number))
    text = _asked(draw, records, "value", column=column, key=row[records.key])
    cells = ", ".join(f"{name}: {cell}" for name, cell in row.items())
    return Question(text, f"{column} of {row[records.key]}\n{cells}", str(row[column]), True)


def _key(draw: Draw, records: Records) -> Question:
    row = draw.pick(records.rows)
    text = _asked(draw, records, "key", key=records.key, column=records.word, value=row[records.word])
    marks = ", ".join(_marks(records, records.word, row[records.word], stop=True))
    return Question(text, f"{records.key} with {row[records.word]}\n{marks}", row[records.key], True)


def _count(draw: Draw, records: Records) -> Question:
    status, hits, lines = draw.pick(records.rows)["status"], 0, []
    for mark in _marks(records, "status", status):
        hits += mark.endswith("yes")
        lines.append(f"{mark}: {hits}")
    text = _asked(draw, records, "count", status=status)
    return Question(text, "\n".join([f"count {status}", *lines]), str(hits), False)


def _which(draw: Draw, records: Records) -> Question:
    status, keys, lines = draw.pick(records.rows)["status"], "", []
    for mark in _marks(records, "status", status):
        if mark.endswith("yes"):
            key = mark.split()[0]
            keys = f"{keys}, {key}" if keys else key
        lines.append(f"{mark}: {keys or 'none'}")
    text = _asked(draw, records, "which", key=records.key, status=status)
    return Question(text, "\n".join([f"each {records.key} with {status}", *lines]), keys, False)


def _extreme(draw: Draw, records: Records) -> Question:
    largest = draw.chance(0.5)
    kind = "largest" if largest else "smallest"
    best = records.rows[0]
    lines = [f"{kind} {records.number}", f"{best[records.key]} {best[records.number]}"]
    for row in records.rows[1:]:
        step, number = choose(best[records.number], row[records.number], largest)
        best = row if number == row[records.number] else best
        lines.append(f"{row[records.key]} {row[records.number]}, {step}, {best[records.key]}")
    text = _asked(draw, records, kind, key=records.key, number=records.number)
    return Question(text, "\n".join(lines), best[records.key], False)


def _sum(draw: Draw, records: Records) -> Question:
    numbers = [row[records.number] for row in records.rows]
    working, result = total(numbers)
    text = _asked(draw, records, "sum", number=records.number)
    working = f"sum of {records.number}\n{' + '.join(map(str, numbers))}\n{working}"
    return Question(text, working, str(result), False)


def _asked(draw: Draw, records: Records, kind: str, **slots: str) -> str:
    return draw.text(f"records.{kind}", noun=records.noun, nouns=plural(records.noun), **slots)


def _marks(records: Records, column: str, wanted: str, stop: bool = False) -> list[str]:
    """Key and one column of the rows in order, each with a yes or no ("T12 open no"); `stop`: up to the first yes."""
    marks = []
    for row in records.rows:
        hit = row[column] == wanted
        marks.append(f"{row[records.key]} {row[column]} {'yes' if hit else 'no'}")
        if stop and hit:
            break
    return marks


_NUMBERS = ("price", "amount", "hours", "quantity", "score", "weight", "visits", "errors")
_EASY = (_value, _key)
_ALL = (_value, _key, _count, _which, _extreme, _sum)
