"""Synthetic agent work: conversations of the kind an agent farms out, with answers that can be checked.

    generate(seed, n, split)   examples, the same for the same arguments, each from (seed, split, index) alone
    check(example, message)    whether a model's answer is right
    FAMILIES                   what there is, with weights and the share of examples with thinking

Two splits, "train" and "heldout", share no template and no open-class vocabulary (docs/pocket_data.md). This is
training and test material for a small model, not a picture of the world: only the facts about leyden are meant.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from leyden.errors import ConfigError
from leyden.synthetic import about, calls, classify, copying, days, dialogue, extract, quantities, reading, rewrite
from leyden.synthetic.check import check
from leyden.synthetic.conversation import Example
from leyden.synthetic.draw import SPLITS, Draw, Split

__all__ = ["FAMILIES", "SPLITS", "Example", "Family", "Split", "check", "example", "generate"]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of task: `sample` makes an example, `weight` is its share, `thinking` the part of it with reasoning.

    `thinking` 1.0 marks tasks that a small model cannot answer without working them out; `practice` those that only
    training has. `taught` is (weight, thinking) in training where it differs: what is hard is drawn more often there.
    """

    sample: Callable[[Draw, bool], Example]
    weight: float
    thinking: float = 0.6
    practice: bool = False
    taught: tuple[float, float] | None = None

    def share(self, split: Split) -> tuple[float, float]:
        """(weight, thinking) in `split`."""
        return self.taught if self.taught and split == "train" else (self.weight, self.thinking)


FAMILIES: dict[str, Family] = {
    "call": Family(calls.single, 16, taught=(24, 0.5)),
    "parallel": Family(calls.parallel, 7, taught=(18, 0.5)),
    "none_fits": Family(calls.none_fits, 4, taught=(4.5, 0.65)),
    "missing": Family(calls.missing, 3, 0.8, taught=(3.5, 0.75)),
    "lookup": Family(reading.lookup, 4, taught=(5, 0.5)),
    "compare": Family(reading.compare, 2, taught=(5, 0.55)),
    "rows": Family(reading.rows, 4, 0.75, taught=(6, 0.6)),
    "prompt_rows": Family(reading.prompt_rows, 4, 0.75, taught=(8, 0.6)),
    "text_file": Family(reading.text_file, 2),
    "failure": Family(reading.failure, 2),
    "retry": Family(reading.retry, 2),
    "chain": Family(reading.chain, 4, taught=(4.5, 0.55)),
    "extract": Family(extract.fields, 6, taught=(10, 0.5)),
    "extract_items": Family(extract.items, 2, taught=(3, 0.5)),
    "extract_list": Family(extract.emails, 1, taught=(4, 0.5)),
    "convert": Family(quantities.convert, 2, 0.8, taught=(4, 0.7)),
    "ratio": Family(quantities.ratio, 2, 0.85, taught=(5, 0.65)),
    "machine": Family(quantities.machine, 1, 0.85, taught=(3, 0.65)),
    "stock": Family(quantities.stock, 2, 0.85, taught=(5, 0.65)),
    "share": Family(quantities.share, 2, 0.85, taught=(5, 0.65)),
    "price": Family(quantities.price, 2, 0.9, taught=(4, 0.8)),
    "summed": Family(quantities.summed, 1.5, 0.85, taught=(5, 0.65)),
    "longer": Family(quantities.longer, 1, 1.0, taught=(2.5, 1.0)),
    "shift": Family(days.shift, 2.5, 0.85, taught=(5, 0.7)),
    "distance": Family(days.distance, 1.5, 0.85, taught=(4, 0.65)),
    "weekday": Family(days.weekday, 1.5, 0.8, taught=(4, 0.65)),
    "clock_end": Family(days.clock_end, 1.5, 0.85, taught=(4, 0.75)),
    "clock_length": Family(days.clock_length, 1.5, 0.85, taught=(4.5, 0.75)),
    "date_format": Family(days.rewrite, 1, taught=(3, 0.5)),
    "in_weeks": Family(days.in_weeks, 0.5, 0.8, taught=(2.5, 0.65)),
    "labels": Family(classify.labels, 2, taught=(5, 0.5)),
    "sentiment": Family(classify.sentiment, 1.5),
    "limit": Family(classify.limit, 1.5, taught=(3, 0.5)),
    "member": Family(classify.member, 1, taught=(3, 0.5)),
    "route": Family(classify.route, 1, taught=(3, 0.5)),
    "sort_numbers": Family(rewrite.sort_numbers, 1, 0.8, taught=(3, 0.65)),
    "sort_words": Family(rewrite.sort_words, 1, 0.8, taught=(3, 0.65)),
    "shape": Family(rewrite.shape, 2, 0.5, taught=(5, 0.5)),
    "change": Family(rewrite.change, 2, 0.5, taught=(6, 0.5)),
    "pick": Family(rewrite.pick, 1.5, taught=(5, 0.5)),
    "rename": Family(rewrite.rename, 1, 0.5, taught=(2, 0.5)),
    "fill_in": Family(rewrite.fill_in, 1.5, taught=(4, 0.5)),
    "to_json": Family(rewrite.to_json, 1, taught=(2, 0.5)),
    "recall": Family(dialogue.recall, 1.5, taught=(2, 0.5)),
    "again": Family(dialogue.again, 2),
    "corrected": Family(dialogue.corrected, 2),
    "kept_list": Family(dialogue.kept_list, 1.5, taught=(4, 0.5)),
    "carried": Family(dialogue.carried, 1, 0.85, taught=(3, 0.65)),
    "leyden": Family(about.leyden, 3, 0.5, taught=(9, 0.5)),
    "chat": Family(about.chat, 3, 0.5, taught=(6, 0.5)),
    "echo": Family(copying.echo, 2.5, 0.3, practice=True),
    "at_place": Family(copying.at_place, 3, 0.5, practice=True),
    "by_key": Family(copying.by_key, 4, 0.4, practice=True),
    "keys": Family(copying.keys, 2.5, 0.4, practice=True),
    "respell": Family(copying.respell, 2, 0.4, practice=True),
    "digits": Family(copying.digits, 12, 0.2, practice=True),
    "larger": Family(copying.larger, 5, 0.5, practice=True),
}


def example(seed: int, index: int, split: Split = "train", families: Sequence[str] | None = None) -> Example:
    """Example `index` of the endless sequence that `seed`, `split` and `families` (None: all of the split) name."""
    names, bounds = _weights(None if families is None else tuple(families), split)
    draw = Draw(seed, index, split)
    point = draw.unit() * bounds[-1]
    name = names[bisect_right(bounds, point)]
    family = FAMILIES[name]
    made = family.sample(draw, draw.chance(family.share(split)[1]))
    made["family"] = name
    return made


def generate(
    seed: int, n: int, split: Split = "train", families: Sequence[str] | None = None, start: int = 0
) -> Iterator[Example]:
    """Examples `start` to `start + n - 1`; several processes can share the work by index."""
    for index in range(start, start + n):
        yield example(seed, index, split, families)


@cache
def _weights(families: tuple[str, ...] | None, split: Split) -> tuple[list[str], list[float]]:
    known = [name for name, family in FAMILIES.items() if split == "train" or not family.practice]
    names = list(known if families is None else families)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown family {unknown[0]!r}; there are: {', '.join(known)}")
    return names, list(accumulate(FAMILIES[name].share(split)[0] for name in names))
