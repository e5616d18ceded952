"""Answers that repeat themselves: the rule, and where the scheduler ends them."""

import random

import pytest

from leyden.engine.repetition import repeats
from leyden.errors import RequestError
from leyden.types import Repetition, Request, SamplingParams
from tests.engine.conftest import engine, run


def slow(tokens: list[int], rule: Repetition) -> bool:
    """A pattern, so many times, in plain words."""
    sizes = range(max(rule.min_pattern_size, 1), rule.max_pattern_size + 1)
    return any(
        len(tokens) >= size * rule.min_count and tokens[-size * rule.min_count :] == tokens[-size:] * rule.min_count
        for size in sizes
    )


@pytest.mark.parametrize("seed", range(10))
def test_repeats_is_the_rule(seed: int):
    draw = random.Random(seed)
    seen = set()
    for _ in range(300):
        rule = Repetition(
            min_pattern_size=(least := draw.randint(0, 3)),
            max_pattern_size=draw.randint(max(least, 1), 5),
            min_count=draw.randint(2, 4),
        )
        pattern = [draw.randrange(3) for _ in range(draw.randint(1, 6))]
        answer = [draw.randrange(3) for _ in range(draw.randint(0, 5))] + pattern * draw.randint(1, 4)
        seen.add(slow(answer, rule))
        assert repeats([1, 1, 1, 1, *answer], 4, rule) == slow(answer, rule)
    assert seen == {True, False}


def test_no_rule_and_a_rule_that_is_off_find_nothing():
    assert not repeats([1] * 10, 0, None)
    assert not repeats([1] * 10, 0, Repetition(min_count=3))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_an_answer_ends_with_the_pattern_but_not_before_min_tokens(model, overlap: bool):
    made = engine(model, overlap=overlap)
    rule = Repetition(max_pattern_size=3, min_count=4)
    for least, ends in ((0, 4), (9, 9)):
        params = SamplingParams(allowed_token_ids=[7], max_tokens=50, min_tokens=least, repetition_detection=rule)
        deltas = run(made, [(0, Request(id="r", prompt=[7, 7, 7], params=params))])["r"]
        assert sum(len(delta.token_ids) for delta in deltas) == ends
        assert deltas[-1].finish_reason == "repetition"
    assert made.stats().finished["repetition"] == 2


@pytest.mark.parametrize("rule", [(0, 3, 2), (4, 5, 2), (-1, 0, 2), (3, 1, 1), (2000, 1, 2)])
def test_a_rule_that_makes_no_sense_is_refused(rule: tuple[int, int, int]):
    longest, shortest, count = rule
    with pytest.raises(RequestError) as error:
        Repetition(max_pattern_size=longest, min_pattern_size=shortest, min_count=count)
    assert error.value.param == "repetition_detection"
