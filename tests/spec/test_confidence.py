"""What is learned about drafts from what became of them."""

import numpy as np
import pytest
import torch

from leyden import ops
from leyden.model.context import Context
from leyden.spec.confidence import Confidence
from leyden.spec.drafter import Heads, Seen
from tests import batches
from tests.train.examples import CONFIG

SLOTS = 5


def test_certainty_is_the_log_odds_of_the_most_likely_token():
    logits = torch.randn(6, 7)
    most = logits.double().softmax(-1).amax(-1)
    torch.testing.assert_close(ops.certainty(logits), (most / (1 - most)).log().float(), atol=1e-5, rtol=1e-5)
    sure = torch.tensor([[30.0, 0.0], [1e4, 0.0], [0.0, float("-inf")]])  # where 1 - p has no digits left
    assert ops.certainty(sure).tolist() == [30.0, 40.0, 40.0]


def heads(slots: list[int], position: int) -> Heads:
    n = len(slots)
    zeros = torch.zeros(n, dtype=torch.int64)
    positions, starts = torch.full((n,), position, dtype=torch.int32), torch.arange(n + 1, dtype=torch.int32)
    return Heads(torch.tensor(slots), zeros, positions, zeros, torch.zeros(n, 1), starts)


def logits_of(scores: torch.Tensor) -> list[torch.Tensor]:
    """fp32 [R, 2] with the certainty of each place; below 0 it is the other token that is likelier."""
    return list(torch.stack([scores, torch.zeros_like(scores)], -1).unbind(1))


def seen(rows: list[tuple[int, int, list[bool]]]) -> Seen:
    """(slot, position of the anchor, which drafts are right as far as is known) of every row."""
    cache = batches.pool(CONFIG, SLOTS)
    tokens, following = [], []
    for _, _, right in rows:
        drafts = list(range(1, len(right) + 1))
        tokens += [0, *drafts]
        following += [d if good else 63 for d, good in zip(drafts, right, strict=True)] + [62]
    narrow = batches.rows(cache, [(slot, past, 1 + len(right)) for slot, past, right in rows])
    positions = [torch.arange(past, past + 1 + len(right), dtype=torch.int32) for _, past, right in rows]
    ctx = Context(narrow, batches.rows(cache, []), torch.cat(positions), cache)
    return Seen(torch.tensor(tokens), torch.tensor(following), torch.empty(0), [], ctx)


@pytest.mark.parametrize("truth", [(1.0, 0.5, -1.0), (0.3, -0.4, 0.8)])
def test_a_logistic_law_is_found(truth: tuple[float, float, float]):
    random = np.random.default_rng(0)
    learned, (slope, *bias) = Confidence(SLOTS, 2, torch.device("cpu")), truth
    assert learned.estimate(heads([1], 0), logits_of(torch.tensor([[2.0, 4.0]])))[0].tolist() == pytest.approx(
        [0.8, 1.8]
    )
    slots = [1, 2, 3, 4]
    for step in range(400):
        scores = torch.from_numpy(random.uniform(0, 4, (4, 2))).float()
        learned.estimate(heads(slots, step), logits_of(scores))
        chance = 1 / (1 + np.exp(-(slope * scores.numpy() + bias)))
        right = random.random((4, 2)) < chance
        learned.learn(seen([(slot, step, row.tolist()) for slot, row in zip(slots, right, strict=True)]))
        learned.settle()
    assert learned.weights.tolist() == pytest.approx(list(truth), abs=0.25)


def test_only_drafts_of_ours_whose_fate_is_known_count():
    """Behind a wrong draft nothing is known, and a sequence that is new in a slot has no drafts."""
    learned = Confidence(SLOTS, 3, torch.device("cpu"))
    learned.estimate(heads([1, 2, 3], 10), logits_of(torch.ones(3, 3)))
    learned.learn(seen([(1, 10, [True, False, True]), (2, 0, [True, True, True]), (3, 10, []), (4, 10, [True])]))
    _, kept, known = learned._memory[:, :4]
    assert known.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert kept[0, :2].tolist() == [1, 0]
    learned.learn(seen([(1, 10, [True])]))  # the same drafts do not count twice
    assert not learned._memory[2, 4].any()


def test_garbage_is_not_learned_from():
    learned = Confidence(SLOTS, 2, torch.device("cpu"))
    for step in range(40):
        learned.estimate(heads([1], step), [torch.full((1, 3), float("nan"))] * 2)
        learned.learn(seen([(1, step, [True, True])]))
        learned.settle()
    assert learned.weights.tolist() == [0.5, -0.2, -0.2]
