"""Small tables and questions about them: one value, how many, which ones, the largest, the smallest, the sum.

The same questions are asked of a tool's result and of data that stands in the prompt (`leyden.synthetic.reading`).
"""

from dataclasses import dataclass
from typing import Any

from leyden.synthetic import values
from leyden.synthetic.arithmetic import total
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
        """CSV, a Markdown table, or one line per row."""
        names = list(self.rows[0])
        cells = [[str(row[name]) for name in names] for row in self.rows]
        style = draw.below(3)
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
    text = draw.text("records.value", column=column, noun=records.noun, key=row[records.key])
    return Question(text, f"{row[records.key]} has {column} {row[column]}", str(row[column]), True)


def _key(draw: Draw, records: Records) -> Question:
    row = draw.pick(records.rows)
    text = draw.text("records.key", key=records.key, noun=records.noun, column=records.word, value=row[records.word])
    return Question(text, f"{records.word} {row[records.word]} is in {row[records.key]}", row[records.key], True)


def _count(draw: Draw, records: Records) -> Question:
    status, marks = _marks(draw, records)
    hits = [row for row in records.rows if row["status"] == status]
    text = draw.text("records.count", nouns=plural(records.noun), status=status)
    return Question(text, f"{marks}\n{len(hits)} with status {status}", str(len(hits)), False)


def _which(draw: Draw, records: Records) -> Question:
    status, marks = _marks(draw, records)
    keys = ", ".join(row[records.key] for row in records.rows if row["status"] == status)
    text = draw.text("records.which", key=records.key, nouns=plural(records.noun), status=status)
    return Question(text, f"{marks}\n{keys}", keys, False)


def _extreme(draw: Draw, records: Records) -> Question:
    largest = draw.chance(0.5)
    best, steps = records.rows[0], []
    for row in records.rows[1:]:
        first, second = best[records.number], row[records.number]
        best = row if (second > first) == largest else best
        steps.append(f"{first} or {second}: {best[records.number]}")
    text = draw.text(
        f"records.{'largest' if largest else 'smallest'}", key=records.key, noun=records.noun, number=records.number
    )
    return Question(
        text, f"{', '.join(steps)}\n{best[records.number]} is {best[records.key]}", best[records.key], False
    )


def _sum(draw: Draw, records: Records) -> Question:
    numbers = [row[records.number] for row in records.rows]
    working, result = total(numbers)
    text = draw.text("records.sum", nouns=plural(records.noun), number=records.number)
    return Question(text, f"{' + '.join(map(str, numbers))}\n{working}", str(result), False)


def _marks(draw: Draw, records: Records) -> tuple[str, str]:
    """A status that occurs, and every row with a yes (numbered) or no: "T12 open yes 1, T15 done no"."""
    status, hits, marks = draw.pick(records.rows)["status"], 0, []
    for row in records.rows:
        hit = row["status"] == status
        hits += hit
        marks.append(f"{row[records.key]} {row['status']} {f'yes {hits}' if hit else 'no'}")
    return status, ", ".join(marks)


_NUMBERS = ("price", "amount", "hours", "quantity", "score", "weight", "visits", "errors")
_EASY = (_value, _key)
_ALL = (_value, _key, _count, _which, _extreme, _sum)
