"""Products of many rows with a stack of matrices, against the products one by one."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import grouped, moe  # noqa: E402

# the interpreter cuts 16 bits off where they are to be rounded
BOUND = 6e-3 if torch.cuda.is_available() else 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 32, 16, 1, 4), (64, 64, 16, 2, 4)])
def test_product(device: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int]):
    """Matrices that many rows chose, few and none; columns and rows that are left over."""
    generator = torch.Generator().manual_seed(3)
    counts = [70, 0, 33, 2, 45]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=device)
    order = torch.randperm(150, generator=generator).int().to(device)
    x = torch.randn(150, 48, generator=generator).to(device, dtype)
    matrices = torch.randn(5, 80, 48, generator=generator).to(device, dtype)
    assert grouped.fits(x, matrices)
    up = grouped.product(x, matrices, order, offsets, True, shape)
    down = grouped.product(x, matrices, order, offsets, False, shape)
    first = 0
    for count, matrix in zip(counts, matrices, strict=True):
        rows = slice(first, first + count)
        wanted = x[rows].double() @ matrix.double().t()
        hidden = wanted.to(dtype).double().relu().square()
        assert count == 0 or (up[rows].double() - hidden).norm() <= BOUND * hidden.norm()
        assert count == 0 or (down[order[rows].long()].double() - wanted).norm() <= BOUND * wanted.norm()
        first += count


def test_experts(device: str, monkeypatch: pytest.MonkeyPatch):
    """The same as by the kernel of fewer rows."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(20, 32, generator=generator).to(device, torch.float16)
    up, down = (torch.randn(3, n, k, generator=generator).to(device, torch.float16) for n, k in ((40, 32), (32, 40)))
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(20)]).to(device)
    weights = torch.rand(20, 2, generator=generator).to(device)
    before = moe.many_rows(x, ids, weights, up, down)
    monkeypatch.setattr(moe, "TILED_ROWS", 4)
    after = moe.many_rows(x, ids, weights, up, down)
    assert (before.double() - after.double()).norm() < BOUND * before.double().norm()
    assert not grouped.fits(x.float(), up, down) and not grouped.fits(x, up[..., :20])
