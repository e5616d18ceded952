"""Rows of drafts against the references."""

import pytest
import torch

from leyden.formats import Weight
from leyden.ops.reference import draft as reference

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import draft, linear  # noqa: E402


@pytest.mark.parametrize("count", [0, 1, 3])
def test_begin_drafts(device: str, count: int):
    slots = torch.tensor([3, 1, 0, 1], dtype=torch.int32, device=device)
    last, drafts = torch.arange(7, 12, device=device), torch.randint(-1, 90, (5, 3), device=device)
    committed = torch.tensor([0, 5, 6, 2**31 - 9, 9], dtype=torch.int32, device=device)
    got, wanted = (run.begin_drafts(slots, last, drafts, committed, count) for run in (draft, reference))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("width", [0, 1, 3, 7])
@pytest.mark.parametrize("ends", [1, 3])
def test_accept(device: str, width: int, ends: int):
    torch.manual_seed(width)
    rows = 40
    guesses = torch.randint(-1, 3, (rows, width + 2), device=device)[:, :width]
    drawn = torch.randint(0, 3, (rows, width + 1), device=device)
    drawn[: rows // 2, :width] = guesses[: rows // 2].clamp(min=0)
    before, stops = torch.randint(0, 4, (rows,), device=device), torch.randint(-1, 9, (rows, ends), device=device)
    positions = torch.randint(5, 9, (rows, 2), device=device)[:, 0]
    open_at = torch.randint(0, 14, (rows,), device=device)
    got, wanted = (run.accept(drawn, guesses, before, positions, stops, open_at) for run in (draft, reference))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    assert width == 0 or int(got[1].max()) > 1


@pytest.mark.parametrize("half", [12, 64])
def test_angles(device: str, half: int):
    positions = torch.tensor([[0, 1, 77], [4000, 5, 1_000_000]], dtype=torch.int32, device=device)
    frequencies = 1e4 ** -(torch.arange(half, device=device) / half)
    for one, other in zip(*(run.angles(positions, frequencies, 1.25) for run in (draft, reference)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 6, 16), (2, 3, 3, 10)])
def test_rotate(device: str, shape: tuple[int, ...]):
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(shape, device=device), torch.randn(2, *shape[:-2], shape[-1] // 2, device=device)
    torch.testing.assert_close(draft.rotate(x, cos, sin), reference.rotate(x, cos, sin))


@pytest.mark.parametrize("shape", [(0, 40), (1, 40), (2, 3, 40), (20, 1024)])
def test_silu_times(device: str, shape: tuple[int, ...]):
    torch.manual_seed(0)
    wide = torch.randn(*shape[:-1], 2 * shape[-1], device=device)
    gate, up = wide.split(shape[-1], -1)
    torch.testing.assert_close(draft.silu_times(gate, up), reference.silu_times(gate, up))


@pytest.mark.parametrize(
    "count, dtype", [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16), (20, torch.float32)]
)
def test_add_linear(device: str, count: int, dtype: torch.dtype):
    """Onto every third row of logits, as those of one draft lie between those of the others; K cut among programs."""
    torch.manual_seed(0)
    weight = Weight(70, 1024, dtype=torch.float32).requires_grad_(False).to(device)
    weight.parts["weight"].normal_(std=0.1)
    x, to = torch.randn(count, 1024, device=device), torch.randn(count, 3, 70, device=device).to(dtype)[:, 1]
    found, wanted = linear.add_linear(x, weight, to), to.double() + x.double() @ weight.dense().double().T
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, wanted.to(dtype), **({"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {})
    )
