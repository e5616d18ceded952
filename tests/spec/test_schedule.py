"""Confidence-scheduled lengths against the paper's vectors, and the number of drafts in simulated engines."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from math import log2
from operator import mul
from pathlib import Path

import pytest

from leyden.spec.schedule import Schedule, Speed, admit, budget

VECTORS = json.loads((Path(__file__).parent.parent / "data/spec/rejection_and_schedule.json").read_text())["scheduler"]
SPS = {int(tokens): speed for tokens, speed in VECTORS["sps"].items()}


def allot(confidence: Sequence[Sequence[float]], speed: Speed) -> list[int]:
    """The paper's algorithm as it stands there: drafts are added, the likeliest first, as long as more tokens a second
    are to be expected. Whether one is tried then never depends on those behind it, which rejection sampling needs to
    stay exact. (Ours does not: it draws the same tokens whatever is tried, so budget() looks ahead.)"""
    lengths, kept = [0] * len(confidence), float(len(confidence))
    best = kept * speed(len(confidence))
    survivals = [list(accumulate(chances, mul)) for chances in confidence]
    drafts = sorted((-s, place, row) for row, chances in enumerate(survivals) for place, s in enumerate(chances))
    for tokens, (survival, _, row) in enumerate(drafts, start=len(confidence) + 1):
        kept -= survival
        if kept * speed(tokens) <= best:
            break
        best = kept * speed(tokens)
        lengths[row] += 1
    return lengths


@pytest.mark.parametrize("case", VECTORS["multi"])
def test_vectors_of_several_sequences(case: dict):
    assert case["sps_formula"] == "1/(1+0.08*B)"
    speed: Speed = lambda tokens: 1 / (1 + 0.08 * tokens)  # noqa: E731
    assert allot(case["confidence"], speed) == case["lengths"]
    assert admit(case["confidence"], budget(case["confidence"], speed)) == case["lengths"]


@pytest.mark.parametrize("case", VECTORS["cases"])
def test_pitfall_35_the_counter_example_of_the_paper(case: dict):
    confidence = [[VECTORS["c1"], case["c2"]]]
    assert allot(confidence, SPS.__getitem__) == [case["with_break"]]
    assert admit(confidence, budget(confidence, SPS.__getitem__)) == [case["without_break"]]


def emitted(length: Callable[[float], int]) -> list[float]:
    """Distribution of the first token, by rejection sampling, if `length` is asked once the drafts are known."""
    out, (p, q) = [0.0, 0.0], (VECTORS["p_target"], VECTORS["p_draft"])
    residual = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    for draft, chance in enumerate(q):
        if length(0.9 if draft == 0 else 0.0) == 0:
            out = [o + chance * a for o, a in zip(out, p, strict=True)]
            continue
        kept = min(1, p[draft] / q[draft])
        out[draft] += chance * kept
        out = [o + chance * (1 - kept) * r / sum(residual) for o, r in zip(out, residual, strict=True)]
    return out


def test_the_lengths_of_the_counter_example_leave_rejection_sampling_exact():
    assert emitted(lambda c2: allot([[VECTORS["c1"], c2]], SPS.__getitem__)[0]) == pytest.approx(
        VECTORS["output_with_break"]
    )

    def looks_ahead(c2: float) -> int:
        return budget([[VECTORS["c1"], c2]], SPS.__getitem__)

    biased = VECTORS["output_without_break_when_c2_is_0p9_for_token0_else_0"]
    assert emitted(looks_ahead) == pytest.approx(biased)


def test_a_length_does_not_depend_on_what_is_behind_it():
    draw = random.Random(0)
    for _ in range(500):
        confidence = [[draw.random() for _ in range(4)] for _ in range(draw.randint(1, 4))]
        slope = draw.uniform(0, 0.4)
        speed = [1 / (1 + slope * tokens) for tokens in range(21)].__getitem__
        lengths = allot(confidence, speed)
        row = draw.randrange(len(confidence))
        confidence[row][lengths[row] + 1 :] = [draw.random() for _ in confidence[row][lengths[row] + 1 :]]
        assert allot(confidence, speed) == lengths


def test_the_budget_is_the_best_of_all_choices():
    draw = random.Random(1)
    for _ in range(50):
        confidence = [[draw.random() for _ in range(3)] for _ in range(3)]
        table = [draw.random() for _ in range(13)]
        survival = [[0.0, *accumulate(accumulate(row, mul))] for row in confidence]
        rates = {
            lengths: (3 + sum(s[n] for s, n in zip(survival, lengths, strict=True))) * table[3 + sum(lengths)]
            for lengths in product(range(4), repeat=3)
        }
        found = tuple(admit(confidence, budget(confidence, table.__getitem__)))
        assert rates[found] == pytest.approx(max(rates.values()))


def test_of_equals_the_earlier_place_comes_first():
    assert admit([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], 3) == [2, 1]
    assert admit([[0.0, 0.0], [0.0, 0.0]], 3) == [2, 1] and admit([[0.5]], 7) == [1]


class Engine:
    """Seconds of a step: something for the weights, the rows and the tokens; drafting costs, too."""

    def __init__(self, chance: float, weights: float, row: float, token: float, draft: float, seed: int = 0):
        self.chance, self.costs, self.random = chance, (weights, row, token, draft), random.Random(seed)

    def seconds(self, rows: int, drafts: int, made: int) -> float:
        weights, row, token, draft = self.costs
        return weights + rows * row + rows * (1 + drafts) * token + (made > 0) * draft + made * rows * token / 20

    def kept(self, drafts: int) -> int:
        return next((i for i in range(drafts) if self.random.random() >= self.chance), drafts)

    def rate(self, rows: int, drafts: int) -> float:
        """Tokens per second of a sequence with always so many drafts."""
        return sum(self.chance**i for i in range(drafts + 1)) / self.seconds(rows, drafts, drafts)

    def run(self, schedule: Schedule, rows: int, steps: int) -> float:
        tokens, seconds, tried = 0, 0.0, 0
        for _ in range(steps):
            _, made = schedule.choose(rows)
            kept = [self.kept(tried) for _ in range(rows)]
            took = self.seconds(rows, tried, made) * self.random.uniform(0.95, 1.05)
            schedule.told(0, [tried] * rows, (0, made), took, kept)
            tokens, seconds, tried = tokens + sum(kept) + rows, seconds + took, made
        return tokens / seconds / rows


ENGINES = {
    "memory bound": (0.7, 10.0, 0.01, 0.02, 0.5),
    "compute bound": (0.7, 0.1, 0.1, 1.0, 0.5),
    "in between": (0.6, 4.0, 0.05, 0.2, 0.5),
    "bad drafts": (0.05, 10.0, 0.1, 0.3, 0.5),
    "dear drafter": (0.6, 10.0, 0.1, 0.1, 9.0),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_never_much_slower_than_no_drafts_nor_than_the_best_number(name: str, rows: int):
    engine = Engine(*ENGINES[name])
    rates = [engine.rate(rows, n) for n in range(8)]
    found = engine.run(Schedule([7]), rows, 6000 // rows + 1000)
    assert found > 0.97 * rates[0] and found > 0.95 * max(rates)


def test_the_number_follows_the_load():
    engine, schedule = Engine(*ENGINES["in between"]), Schedule([7])
    chosen = {}
    for rows in (1, 8, 64, 1):
        engine.run(schedule, rows, 400)
        chosen.setdefault(rows, []).append(schedule._best(round(4 * (rows.bit_length() - 1)))[1])
    assert chosen[1][0] > chosen[8][0] > chosen[64][0] == 0 and abs(chosen[1][1] - chosen[1][0]) <= 1
    for rows in (1, 8, 64):
        best = max(range(8), key=lambda n: engine.rate(rows, n))
        assert engine.rate(rows, chosen[rows][0]) > 0.97 * engine.rate(rows, best)


def test_drafts_that_become_better_are_noticed():
    engine, schedule = Engine(*ENGINES["bad drafts"]), Schedule([7])
    engine.run(schedule, 1, 1000)
    engine.chance = 0.9
    assert engine.run(schedule, 1, 30_000) > 0.9 * max(engine.rate(1, n) for n in range(8))


def test_fixed_ranges():
    schedule = Schedule([5], [(1, 4, 5), (5, 16, 2), (17, 100, 0)])
    assert [schedule.choose(n) for n in (1, 4, 5, 16, 17, 101)] == [(0, n) for n in (5, 5, 2, 2, 0, 5)]


def test_one_slow_step_does_not_count_for_more_than_two():
    schedule = Schedule([1])
    for seconds in (1.0, 1.0, 1.0, 500.0):
        schedule.told(0, [1], (0, 1), seconds, [1])
    assert schedule.cost(0, 0, 1) == pytest.approx(1 + 1 / 4)


def test_of_two_drafters_each_has_its_load():
    """A dear one that is mostly right while there are few sequences, a cheap one when there are more, then none."""
    engines = [Engine(0.85, 10.0, 0.0, 0.05, 3.0, seed=1), Engine(0.6, 10.0, 0.0, 0.05, 0.2, seed=2)]

    def seconds(which: int, rows: int, n: int, made: int) -> float:
        extra = 0.4 * rows * n if which == 0 else 0.15 * rows * n
        return engines[which].seconds(rows, n, made) + extra * (1 if n else 0)

    def rate(which: int, rows: int, n: int) -> float:
        return sum(engines[which].chance ** i for i in range(n + 1)) / seconds(which, rows, n, n)

    schedule, chosen = Schedule([5, 3]), {}
    for rows in (1, 8, 200):
        tried, by = 0, 0
        for _ in range(1500):
            which, made = schedule.choose(rows)
            kept = [engines[by].kept(tried) for _ in range(rows)]
            schedule.told(by, [tried] * rows, (which, made), seconds(which, rows, tried, made), kept)
            tried, by = made, which
        chosen[rows] = schedule._best(round(4 * log2(rows)))
        every = [(w, n) for w, width in enumerate((5, 3)) for n in range(width + 1)]
        best = max(rate(w, rows, n) for w, n in every)
        assert rate(chosen[rows][0], rows, chosen[rows][1]) > 0.95 * best
    assert chosen[1][0] == 0 and chosen[1][1] and chosen[8][0] == 1 and chosen[8][1] and chosen[200] == (0, 0)


def test_unlikely_drafts_are_not_tried_once_it_is_known_what_steps_take():
    schedule = Schedule([4])
    confidence = [[0.9, 0.9, 0.05, 0.9], [0.02, 0.9, 0.9, 0.9]]
    assert schedule.lengths(0, confidence) == [4, 4]
    for n in (0, 4):
        for _ in range(4):
            schedule.told(0, [n, n], (0, n), 1.0 + 0.1 * 2 * n, [0, 0])
    assert schedule.lengths(0, confidence) == [2, 0]
    assert schedule.lengths(0, [[1.0] * 4, [1.0] * 4]) == [4, 4] and schedule.lengths(0, []) == []
