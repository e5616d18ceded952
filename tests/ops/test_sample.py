import math

import pytest
import torch

from leyden import ops
from leyden.ops.reference.sample import uniform


def draw(logits, n=20_000, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11):
    """Frequencies of n draws at n positions from one row of logits."""
    rows = torch.tensor(logits).repeat(n, 1)
    full = lambda value, dtype=torch.float32: torch.full((n,), value, dtype=dtype)  # noqa: E731
    ids = ops.sample(
        rows,
        full(temperature),
        full(top_k, torch.int64),
        full(top_p),
        full(min_p),
        full(seed, torch.int64),
        torch.arange(n),
    )
    return torch.bincount(ids, minlength=len(logits)) / n


def test_philox_gives_the_published_words():
    # known answer of Philox 4x32-10 for an all-zero key and counter (Random123's kat_vectors)
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    zero = torch.zeros(1, dtype=torch.int64)
    got = uniform(zero, zero, torch.arange(4)[None])
    assert got[0].tolist() == [((w >> 9) + 0.5) / 2**23 for w in words]


def test_philox_depends_on_all_of_seed_position_and_id():
    seed = torch.tensor([1, 1, 2, 1 + 2**32, -1])
    position = torch.tensor([0, 1, 0, 0, 0])
    got = uniform(seed, position, torch.arange(1000).expand(5, -1))
    assert got.unique().numel() > 0.99 * got.numel()
    assert abs(got.mean() - 0.5) < 0.01 and got.min() > 0 and got.max() < 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    want = (torch.tensor(logits) / temperature).softmax(0)
    got = draw(logits, temperature=temperature)
    # five standard deviations of a frequency over 20,000 draws
    assert (got - want).abs().max() < 5 * math.sqrt(0.25 / 20_000)


def test_filters_keep_what_their_definition_says():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05]).log().tolist()
    kept = lambda **changes: (draw(logits, 4000, **changes) > 0).nonzero()[:, 0].tolist()  # noqa: E731
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.6) == [1, 3]  # 0.4 is not enough, 0.65 is
    assert kept(top_p=0.66) == [1, 2, 3]
    assert kept(top_p=1e-6) == [1]
    assert kept(min_p=0.6) == [1, 3]  # at least 0.6 x 0.4
    assert kept(top_k=3, top_p=0.5) == [1, 3]  # 0.4 / 0.85 is below a half
    assert kept(temperature=1e-6) == [1]


def test_equal_logits_take_the_lowest_id():
    assert draw([1.0, 3.0, 3.0, 3.0], 100, temperature=0)[1] == 1
    assert draw([1.0, 3.0, 3.0, 3.0], 100, top_k=1)[1] == 1


def test_rows_do_not_depend_on_their_neighbours():
    torch.manual_seed(0)
    logits = torch.randn(6, 200)
    args = [
        torch.tensor([0.0, 1.0, 0.7, 1.0, 2.0, 1.0]),
        torch.tensor([0, 0, 5, 0, 50, 0]),
        torch.tensor([1, 1, 1, 0.8, 0.95, 1]),
        torch.tensor([0, 0, 0, 0, 0, 0.1]),
        torch.tensor([1, 2, 3, 4, 5, 6]),
        torch.tensor([9, 8, 7, 6, 5, 4]),
    ]
    together = ops.sample(logits, *args)
    alone = torch.cat([ops.sample(logits[i : i + 1], *(a[i : i + 1] for a in args)) for i in range(6)])
    assert together.tolist() == alone.tolist()


def test_penalties_as_defined():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]])
    counts = torch.tensor([[3, 0, 1, 0]], dtype=torch.int32)
    seen = torch.tensor([[True, True, True, False]])  # token 1 stands in the prompt only
    one = torch.ones(1)
    got = ops.penalize(logits, counts, seen, 0.5 * one, 0.25 * one, 2 * one)
    assert got.tolist() == [[2 / 2 - 0.75 - 0.5, -2 * 2, 1 / 2 - 0.25 - 0.5, 0]]


def test_logprobs_are_those_of_the_softmax():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, 1.0]])
    own, rank, top_ids, top = ops.logprobs(logits, torch.tensor([2, 0]), 2)
    want = logits.log_softmax(-1)
    torch.testing.assert_close(own, want[[0, 1], [2, 0]])
    assert rank.tolist() == [2, 1]
    assert top_ids[0].tolist() == [1, 2]
    torch.testing.assert_close(top, want.topk(2, -1).values)
