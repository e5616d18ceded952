"""What is asked for in advance: all of the weights that a program will read, and nothing outside the matrices."""

from typing import Any

import pytest
import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.formats.fp8 import FP8
from leyden.formats.nvfp4 import NVFP4, arrange

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import launch, linear, moe, nvfp4, packed  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU was asked for nobody can say")
Asked = list[tuple[int, int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """(address, bytes) of what is asked for; the interpreter asks for nothing."""
    spans: Asked = []

    def value(one: Any) -> Tensor:
        return torch.as_tensor(
            one.handle.data.astype("int64") if hasattr(one, "handle") else getattr(one, "value", one)
        )

    def prefetch(start: Any, size: Any, asks: Any) -> None:
        starts, sizes, asking = torch.broadcast_tensors(value(start), value(size), value(asks))
        spans.extend((int(a), int(n)) for a, n, yes in zip(starts, sizes, asking, strict=True) if yes and n > 0)

    for module in (launch, packed, moe):
        monkeypatch.setattr(module, "prefetch", prefetch)
    return spans


def share(asked: Asked, matrix: Tensor) -> float:
    """How much of the matrix is asked for."""
    seen = torch.zeros(matrix.numel() * matrix.itemsize, dtype=torch.bool)
    for address, size in asked:
        if 0 <= (at := address - matrix.data_ptr()) < len(seen):
            assert at + size <= len(seen)
            seen[at : at + size] = True
    return float(seen.float().mean())


def outside(asked: Asked, *matrices: Tensor) -> Asked:
    ends = [(m.data_ptr(), m.data_ptr() + m.numel() * m.itemsize) for m in matrices]
    return [one for one in asked if not any(first <= one[0] and sum(one) <= end for first, end in ends)]


def weight(*shape: int, form: Any = None) -> Weight:
    made = Weight(*shape, dtype=torch.bfloat16, format=form).requires_grad_(False)
    for part in made.parts.values():
        part.copy_(torch.zeros(part.shape).to(part.dtype))
    if form == NVFP4():
        assert arrange(made)
    return made


def codes(one: Weight) -> list[Tensor]:
    return [one.parts[name] for name in ("weight", "weight_scale") if one.parts[name].dim() > 1]


def row(size: int, count: int = 1) -> Tensor:
    return torch.zeros(count, size, dtype=torch.bfloat16)


@pytest.mark.parametrize("form", [FP8(), NVFP4()])
@pytest.mark.parametrize("megabytes, part", [(32, 1), (0, 0)])
def test_products_in_few_bits(asked: Asked, form: Any, megabytes: int, part: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "AHEAD", megabytes << 20)
    made, run = weight(80, 192, form=form), linear.linear_fp8 if form == FP8() else nvfp4.linear_nvfp4
    run(row(192), made)
    assert not outside(asked, *codes(made)) and all(share(asked, one) == part for one in codes(made))


def test_a_part_is_the_first_columns(asked: Asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "AHEAD", 2 * 64 * 16)
    made = weight(32, 192, form=FP8())
    packed.product(row(192), made, row(32), 1, shape=packed.Shape(1, 1, 4, 4))
    (matrix,) = codes(made)
    assert sorted(asked) == [(matrix.data_ptr() + n * 192, 64) for n in range(32)]


def test_experts_in_few_bits(asked: Asked):
    """Those that are chosen, and all of the shared one; of one row only."""
    up, down, ids = weight(4, 64, 64, form=NVFP4()), weight(4, 32, 64, form=NVFP4()), torch.tensor([[2, 0], [2, 3]])
    shared = weight(128, 64, form=NVFP4()), weight(32, 128, form=NVFP4())
    nvfp4.moe_nvfp4(row(64, 2), ids, torch.ones(2, 2), up, down, *shared)
    assert not asked
    nvfp4.moe_nvfp4(row(64), ids[:1], torch.ones(1, 2), up, down, *shared)
    stacks = codes(up) + codes(down)
    assert not outside(asked, *stacks, *(part for one in shared for part in codes(one)))
    assert all(share(asked, part) == 1 for one in shared for part in codes(one))
    for stack in stacks:
        assert [share(asked, stack[i]) for i in range(4)] == [1, 0, 1, 0]
