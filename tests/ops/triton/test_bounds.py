"""Rows whose lengths only the device knows: what the host says is the most that they can be, and only sizes grids."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.ops.reference import attention as reference_attention
from leyden.ops.reference import mamba as reference_mamba
from leyden.ops.rows import Rows

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import attention, conv, scan  # noqa: E402

LENS = [2], [7, 1], [1, 1, 1], [40, 24], [35, 2, 17], [16, 64, 16], [3, 61]
SHAPES = (
    scan.Shape(64, 16, (16, 2, 4, 255), (32, 1, 4, 255)),
    scan.Shape(16, 16, (32, 1, 4, 255), (16, 2, 4, 255)),
    scan.Shape(32, 16, (32, 1, 4, 255), (16, 2, 4, 255)),
)


def draw(device: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def both(device: str, lens: list[int], page: int = 4, behind: int = 2) -> tuple[Rows, Rows]:
    """Rows as the host knows them, and as a recorded step has them, with rows of no tokens on the padding slot."""
    tokens, count, width = sum(lens), len(lens), 30
    starts = torch.tensor([0, *lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    past = torch.tensor([0, 5, 18][:count], dtype=torch.int32, device=device)
    slots = torch.arange(count, 0, -1, dtype=torch.int32, device=device)
    table = torch.randperm(count * width, generator=torch.Generator().manual_seed(1)).add(1).view(count, width)
    known = Rows(tuple(lens), starts, past, slots, table.int().to(device))
    padded = [F.pad(part, (0, behind)) for part in (past, slots)]
    starts, pages = F.pad(starts, (0, behind), value=tokens), F.pad(known.pages, (0, 0, 0, behind))
    return known, Rows((tokens,) * (count + behind), starts, *padded, pages, total=tokens)


@pytest.mark.parametrize("lens", LENS)
def test_convolution(device: str, lens: list[int]) -> None:
    known, recorded = both(device, lens)
    assert recorded.tokens == known.tokens
    x, weight, bias = draw(device, known.tokens, 60)[:, 7:47], draw(device, 40, 4), draw(device, 40)
    state = draw(device, 5, 3, 40)
    wanted_state = state.clone()
    got = conv.causal_conv(x, weight, bias, state, recorded)
    torch.testing.assert_close(got, reference_mamba.causal_conv(x, weight, bias, wanted_state, known))
    assert torch.equal(state[1:], wanted_state[1:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lens", LENS)
def test_scan(device: str, lens: list[int], shape: scan.Shape) -> None:
    known, recorded = both(device, lens)
    tokens = known.tokens
    x, B, C, dt = (draw(device, tokens, *size) for size in ((3, 8), (1, 8), (1, 8), (3,)))
    recurrence = *(draw(device, 3, seed=i) for i in range(3)), (1e-3, float("inf")), 16
    state = draw(device, 5, 3, 8, 8)
    wanted_state = state.clone()
    wanted = reference_mamba.ssd_scan(x, dt, B, C, *recurrence, wanted_state, known)
    got = scan.ssd_scan(x, dt, B, C, *recurrence, state, recorded, shape)
    assert (got - wanted).norm() < 2e-5 * wanted.norm()
    torch.testing.assert_close(state[1:], wanted_state[1:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("lens", LENS)
def test_attention(device: str, lens: list[int]) -> None:
    known, recorded = both(device, lens)
    q, k, v = (draw(device, known.tokens, heads, 16) for heads in (6, 2, 2))
    cache = draw(device, 2, 91, 4, 2, 16)
    wanted_cache = cache.clone()
    reference_attention.kv_write(k, v, wanted_cache, known)
    attention.kv_write(k, v, cache, recorded)
    assert torch.equal(cache, wanted_cache)
    got = attention.attention(q, cache, recorded)
    torch.testing.assert_close(got, reference_attention.attention(q, cache, known), atol=2e-5, rtol=2e-5)


def test_the_row_that_fills_up_starts_from_nothing(device: str) -> None:
    """It is on the padding slot, whatever is there, and its keys go to the padding page."""
    _, recorded = both(device, [35, 2, 27])
    assert recorded.slots is not None and recorded.pages is not None
    recorded.slots[2], recorded.past[2], recorded.pages[2] = 0, 0, 0
    cache, state = draw(device, 2, 91, 4, 2, 16), draw(device, 5, 3, 8, 8)
    cache[:, 0], state[0] = torch.nan, torch.nan
    q, k = draw(device, 64, 6, 16), draw(device, 64, 2, 16)
    attention.kv_write(k, k, cache, recorded)
    assert cache.isfinite().all() and attention.attention(q, cache, recorded).isfinite().all()
    x, B, dt, rate = (draw(device, *size) for size in ((64, 3, 8), (64, 1, 8), (64, 3), (3,)))
    y = scan.ssd_scan(x, dt, B, B, rate, rate, rate, (1e-3, 9.0), 16, state, recorded, SHAPES[1])
    assert y.isfinite().all() and state.isfinite().all()
