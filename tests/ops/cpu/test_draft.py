"""The small steps around drafts: kernels against references, and the references by hand."""

import pytest
import torch

from leyden import ops
from leyden.ops.cpu.program import available
from tests.ops.cpu.test_kernels import both

pytestmark = pytest.mark.skipif(not available, reason="the kernels need a C compiler")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_begin_drafts(count: int):
    slots, committed = torch.tensor([3, 1, 4], dtype=torch.int32), torch.arange(5, dtype=torch.int32) * 10
    last, drafts = torch.arange(5) + 100, torch.randint(-1, 50, (5, 3))
    found, expected = both(ops.begin_drafts, slots, last, drafts, committed, count)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    assert found[0].view(3, -1)[:, 0].tolist() == [103, 101, 104] and found[0].min() >= 0
    assert found[3].view(3, -1)[0].tolist() == [31 + i for i in range(count + 1)]


@pytest.mark.parametrize("width", [0, 1, 4])
def test_accept(width: int):
    random = torch.Generator().manual_seed(width)

    def ids(*shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, 3, shape, generator=random)

    for _ in range(50):
        drawn, guesses, before, stops = ids(6, width + 1), ids(6, width, low=-1), ids(6), ids(6, 2, low=-1) * 4 - 3
        stops[:, 1] = ids(6)
        positions, open_at = torch.arange(6) * 7, torch.arange(6) * 7 + torch.randint(-2, 8, (6,), generator=random)
        given = drawn, guesses, before, positions, stops, open_at
        found, expected = both(ops.accept, *given)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and one.tolist() == other.tolist()
        for row in range(6):
            kept = by_hand(*(t[row].tolist() for t in given))
            assert found[0][row].tolist() == kept + [-1] * (width + 1 - len(kept))
            assert found[1][row] == len(kept) and found[2][row] == kept[-1]
            assert found[3][row] == row * (width + 1) + len(kept) - 1
            assert found[4][row] == positions[row] + len(kept) - 1


def by_hand(drawn, guesses, before, position, stops, open_at) -> list[int]:
    kept = [drawn[0]]
    if before in stops and position - 1 >= open_at:
        return kept
    for i, guess in enumerate(guesses):
        if guess != drawn[i] or (drawn[i] in stops and position + i >= open_at):
            break
        kept.append(drawn[i + 1])
    return kept


@pytest.mark.parametrize("rows", [1, 4])
def test_begin_block(rows: int):
    anchors, places = torch.tensor([7, 3, 9]), torch.tensor([20, 0, 5], dtype=torch.int32)
    found, expected = both(ops.begin_block, anchors, places, rows, 99)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    assert found[0].view(3, -1)[1].tolist() == [3, *[99] * (rows - 1)]
    assert found[1].view(3, -1)[0].tolist() == list(range(20, 20 + rows))
    assert found[2].tolist() == [0, rows, 2 * rows, 3 * rows]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ahead(dtype: torch.dtype):
    found, expected = both(ops.ahead, torch.tensor([5, 0, 9], dtype=torch.int32), 4, dtype)
    assert found[0].dtype == dtype and found[0].tolist() == expected[0].tolist() == [
        [5 + i, i, 9 + i] for i in range(4)
    ]


def test_join():
    parts = [torch.randn(5, 8)[:, 1:4], torch.randn(5, 2), torch.randn(5, 1)]
    found, expected = both(ops.join, *parts)
    assert torch.equal(found[0], expected[0])
    found, _ = both(ops.join, *(torch.arange(4)[:, None] + i for i in range(3)))
    assert found[0].tolist() == [[i, i + 1, i + 2] for i in range(4)]


def test_likeliest_is_the_first_of_equals():
    logits = torch.randn(7, 33).round()
    found, expected = both(ops.likeliest, logits)
    assert found[0].tolist() == expected[0].tolist() == [row.index(max(row)) for row in logits.tolist()]
