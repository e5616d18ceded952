"""What drafters have of their own, against the references."""

import pytest
import torch

from leyden import ops
from leyden.formats.int4 import Int4
from leyden.ops.cpu.program import Arena, Program, available
from tests.ops.cpu.test_formats import weight as stored
from tests.ops.cpu.test_kernels import DTYPES, agree, among_nan, both, close, draw, rows, solid, weight

pytestmark = pytest.mark.skipif(not available, reason="the kernels need a C compiler")

__all__ = ["draw"]  # a fixture


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 24, 64, 130])
def test_rotate(draw, dim: int, dtype: torch.dtype) -> None:
    angles = draw(2, 3, dim // 2, scale=3)
    agree(ops.rotate, solid(draw(2, 3, 5, dim).to(dtype)), solid(angles.cos()), solid(angles.sin()), scale=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 8, 19])
def test_swiglu(draw, count: int, dtype: torch.dtype) -> None:
    x = among_nan(draw(count, 64).to(dtype))
    gate, up, down = (weight(draw(*shape, scale=0.1).to(dtype)) for shape in ((96, 64), (96, 64), (64, 96)))
    agree(ops.swiglu, x, gate, up, down, scale=4)
    codes = [stored(Int4(group=32), *shape, dtype=dtype) for shape in ((96, 64), (96, 64), (64, 96))]
    agree(ops.swiglu, x / 100, *codes, scale=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_times(draw, dtype: torch.dtype) -> None:
    agree(ops.silu_times, *(solid(draw(3, 5, 21).to(dtype)) for _ in range(2)))


def test_matrices_of_several_formats(draw) -> None:
    """Where there is no kernel for all three, each goes its own way."""
    x, gate, up = draw(3, 64), weight(draw(96, 64, scale=0.1)), stored(Int4(group=32), 96, 64, dtype=torch.float32)
    down = weight(draw(64, 96, scale=0.1))
    g = x @ gate.dense().T
    close(ops.swiglu(x, gate, up, down), (g * g.sigmoid() * (x @ up.dense().T)) @ down.dense().T, scale=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize(("heads", "kv", "dim", "sinks"), [(6, 2, 8, False), (4, 1, 20, True), (8, 4, 64, True)])
def test_block_attention(draw, heads, kv, dim, sinks, window, causal, dtype) -> None:
    lens, before = [4, 1, 8], [0, 37, 9]
    batch, tokens = rows(before, lens, tokens=64), sum(lens)
    wide = among_nan(draw(tokens, (heads + 2 * kv) * dim).to(dtype))
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in wide.split([heads * dim, kv * dim, kv * dim], dim=-1))
    cache = torch.full((2, 3 * 16 + 1, 4, kv, dim), float("nan"), dtype=dtype)
    for pages, past in zip(batch.pages, before, strict=True):
        for i in range(past):
            cache[:, pages[i // 4], i % 4] = draw(2, kv, dim).to(dtype)
    sink = draw(heads).to(dtype) if sinks else None
    found = ops.block_attention(q, k, v, cache, batch, causal, window, sink)
    assert ops.block_attention._kernels["cpu", "dense"].__module__.startswith("leyden.ops.cpu")
    close(found, ops.block_attention.reference(q, k, v, cache, batch, causal, window, sink), scale=2)
    out = Program(lambda: ops.block_attention(q, k, v, cache, batch, causal, window, sink), Arena())()
    assert torch.equal(out, found), "and it can be recorded"


@pytest.mark.parametrize("half", [1, 12, 32])
def test_angles(draw, half: int) -> None:
    positions, frequencies = torch.tensor([[0, 1, 77], [4000, 5, 1_000_000]], dtype=torch.int32), draw(half).abs()
    for found, expected in zip(*both(ops.angles, positions, solid(frequencies), 1.25), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "more"), [(5, 0), (64, 0), (33, 7), (256, 64)])
def test_confidence(draw, width: int, more: int, dtype: torch.dtype) -> None:
    also = solid(draw(2, 3, more).to(dtype)) if more else None
    hidden, head = solid(draw(2, 3, width).to(dtype)), solid(draw(1, width + more))
    agree(ops.confidence, hidden, also, head, solid(draw(1)), scale=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3, 300])
def test_add_linear(draw, count: int, dtype: torch.dtype) -> None:
    """Onto every third row of logits, as those of one draft lie between those of the others."""
    x, to = draw(count, 48).to(dtype), draw(count, 3, 50)[:, 1]
    matrix = weight(draw(50, 48, scale=0.2).to(dtype))
    found = ops.add_linear._kernels["cpu", "dense"](x, matrix, to)
    expected = to + x.float() @ matrix.weight.float().T
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    close(ops.add_linear.reference(x, matrix, to).to(dtype), expected.to(dtype), scale=4)


@pytest.mark.parametrize("vocabulary", [2, 3, 16, 50, 2048])
def test_certainty(draw, vocabulary: int) -> None:
    logits = among_nan(draw(5, vocabulary, scale=4))
    logits[0] = -torch.arange(vocabulary) * 1e4
    logits[1, 0], logits[2] = float("nan"), 0.0
    found, expected = both(ops.certainty, logits)
    torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=1e-5, equal_nan=True)


def test_expect_and_learn() -> None:
    """Over 40 steps of three rows with their own numbers of drafts; twice round the memory."""
    random = torch.Generator().manual_seed(0)

    def ids(*shape: int, low: int = 0, high: int = 2) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    width, weights = 3, torch.tensor([0.5, -0.2, 0.1, 0.3], dtype=torch.float64)
    tables = [
        (
            torch.full((6, width), float("nan")),
            torch.zeros(6, dtype=torch.int32),
            torch.zeros(3, 64, width, dtype=torch.float64),
            torch.zeros(1, dtype=torch.int64),
        )
        for _ in range(2)
    ]
    for step in range(40):
        slots = (torch.randperm(5, generator=random)[:3] + 1).int()
        lens = [1 + int(n) for n in ids(3, high=width + 1)]
        batch = rows([step, 3, step], lens, slots.tolist())
        scores, places = torch.randn(3, int(ids(1, low=1, high=width + 1)), generator=random), batch.past.int()
        scores[0, 0] = float("inf") if step % 7 == 0 else 1.0
        tokens, following = ids(sum(lens), low=-1), ids(sum(lens))
        made = []
        for table, run_expect, run_learn in zip(
            tables, (ops.expect._kernels["cpu", "dense"], ops.expect.reference),
            (ops.learn._kernels["cpu", "dense"], ops.learn.reference), strict=True,
        ):  # fmt: skip
            open_, made_at, memory, at = table
            made.append(run_expect(scores, weights, open_, made_at, slots, places))
            run_learn(tokens, following, batch, open_, made_at, memory, at)
        torch.testing.assert_close(*made)
        for one, other in zip(*tables, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
    assert tables[0][2][2].sum() > 40 and int(tables[0][3]) == 120 % 64
