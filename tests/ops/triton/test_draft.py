"""Rows of drafts against the references."""

import pytest
import torch

from leyden.formats import Weight
from leyden.ops.reference import draft as reference

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import draft  # noqa: E402


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


@pytest.mark.parametrize("shape", [(5, 6, 16), (2, 3, 3, 10)])
def test_rotate(device: str, shape: tuple[int, ...]):
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(shape, device=device), torch.randn(2, *shape[:-2], shape[-1] // 2, device=device)
    torch.testing.assert_close(draft.rotate(x, cos, sin), reference.rotate(x, cos, sin))


@pytest.mark.parametrize("shape", [(1, 40), (2, 3, 40), (20, 40)])
def test_swiglu(device: str, shape: tuple[int, ...]):
    torch.manual_seed(0)
    weights = []
    for size in ((24, 40), (24, 40), (56, 24)):
        made = Weight(*size, dtype=torch.float32).requires_grad_(False).to(device)
        made.parts["weight"].normal_()
        weights.append(made)
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(draft.swiglu(x, *weights), reference.swiglu(x, *weights), atol=1e-4, rtol=1e-4)
