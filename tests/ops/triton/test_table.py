"""Rows of tables by slot, against plain indexing."""

import pytest
import torch

from leyden.ops.reference import table as reference

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import table  # noqa: E402


def test_begin(device: str):
    slots, last = torch.tensor([3, 1, 1], dtype=torch.int32, device=device), torch.arange(7, 12, device=device)
    committed = torch.tensor([0, 5, 6, 2**31 - 2, 9], dtype=torch.int32, device=device)
    for got, wanted in zip(table.begin(slots, last, committed), reference.begin(slots, last, committed), strict=True):
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 1500)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_rows_go_both_ways(device: str, shape: tuple[int, ...], dtype: torch.dtype):
    whole = torch.randint(100, shape, device=device).to(dtype)
    slots = torch.tensor([4, 1, 2], dtype=torch.int32, device=device)
    assert torch.equal(table.take(whole, slots), whole[slots])
    if len(shape) > 1:
        assert torch.equal(table.take(whole[:, :2], slots), whole[slots, :2])
    wanted = whole.clone()
    values = torch.randint(100, (3, *shape[1:]), device=device).to(dtype)
    reference.put(values, wanted, slots)
    table.put(values, whole, slots)
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize("shape", [(6, 3), (6, 2, 700)])
def test_rows_without_a_past_are_cleared(device: str, shape: tuple[int, ...]):
    whole = torch.rand(shape, device=device) + 1
    slots, past = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([4, 1, 2], [0, 5, 0]))
    wanted = whole.clone()
    reference.clear(wanted, slots, past)
    table.clear(whole, slots, past)
    assert torch.equal(whole, wanted)
    assert (whole == 0).flatten(1).all(1).tolist() == [False, False, True, False, True, False]
