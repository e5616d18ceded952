"""Products with stored codes, against the matrix that they stand for."""

import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.formats import Weight
from leyden.formats.fp8 import FP8
from leyden.formats.nvfp4 import NVFP4, Tiled, arrange

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import moe, nvfp4, packed, wide  # noqa: E402

# Where activations are bfloat16 between two products: the interpreter cuts values off where they are to be rounded.
BOUND = 8e-3 if torch.cuda.is_available() else 3e-2


def stored(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Weight:
    """Codes and scales of random bytes: all values of both come up, zero scales included."""
    generator = torch.Generator().manual_seed(sum(shape))
    made = Weight(*shape, dtype=dtype, format=NVFP4()).requires_grad_(False).to(device)
    parts = made.parts
    parts["weight"].copy_(torch.randint(256, parts["weight"].shape, generator=generator))
    scales = torch.randint(0x7F, parts["weight_scale"].shape, generator=generator, dtype=torch.uint8)
    parts["weight_scale"].copy_(torch.where(scales % 5 == 0, 0x30, scales).view(torch.float8_e4m3fn))
    parts["weight_scale_2"].copy_(torch.rand(shape[:-2], generator=generator) / 1e3 + 1e-4)
    return made


def random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)


def exact(weight: Weight) -> Tensor:
    return weight.format.dequantize(weight.parts, torch.float32).double()


def off(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("count", [1, 9])
def test_linear(device: str, count: int):
    weight, x = stored(device, 32, 192), random(device, count, 192)
    wanted = x.double() @ exact(weight).t()
    assert off(nvfp4.linear_nvfp4(x, weight, torch.float32), wanted) < 1e-6
    assert weight.format == Tiled(NVFP4())
    beside = random(device, count, 196)[:, 2:194]  # rows that are not aligned
    wanted = beside.double() @ exact(weight).t()
    assert off(nvfp4.linear_nvfp4(beside, weight, torch.float32), wanted) < 1e-6


@pytest.mark.parametrize("count", [1, 9, 20])
def test_a_product_that_is_added(device: str, count: int, monkeypatch: pytest.MonkeyPatch):
    """To rows of logits that are apart; many rows by way of the decoded matrix."""
    monkeypatch.setattr(nvfp4, "WIDE_ROWS", 16)
    weight, x = stored(device, 48, 192), random(device, count, 192) / 64
    to = random(device, count, 3 * 48).float().view(count, 3, 48)[:, 1]
    found = nvfp4.add_linear_nvfp4(x, weight, to)
    assert found.dtype == torch.float32 and weight.format == Tiled(NVFP4())
    assert off(found, to.double() + x.double() @ exact(weight).t()) < (1e-6 if count < 16 else BOUND)
    once = Weight(48, 192, dtype=torch.bfloat16, format=FP8()).requires_grad_(False).to(device)
    once.parts["weight"].copy_(torch.randn(48, 192)), once.parts["weight_scale"].fill_(0.5)
    assert off(ops.add_linear.reference(x, once, to), to.double() + x.double() @ exact(once).t()) < BOUND


@pytest.mark.parametrize("tiles, groups, split, warps", [(2, 1, 2, 4), (1, 2, 2, 2)])
def test_shapes(device: str, tiles: int, groups: int, split: int, warps: int):
    """However the work is cut: columns that the warps do not share evenly, tiles and rows that are left over."""
    weight, x = stored(device, 48, 192), random(device, 9, 192)
    assert arrange(weight)
    out = torch.full((10, 48), -1.0, device=device)
    packed.product(x, weight, out, 9, shape=packed.Shape(tiles, groups, split, warps))
    assert off(out[:9], x.double() @ exact(weight).t()) < 1e-6
    assert (out[9] == -1).all()


def test_mlp(device: str):
    up, down, x = stored(device, 64, 128), stored(device, 48, 64), random(device, 3, 128) / 64
    hidden = (x.double() @ exact(up).t()).bfloat16().double().relu().square().bfloat16()
    assert off(nvfp4.mlp_nvfp4(x, up, down), hidden.double() @ exact(down).t()) < BOUND


@pytest.mark.parametrize("count, joint, shared", [(1, 16, 128), (2, 16, 128), (3, 0, 128), (2, 16, 192), (9, 16, 128)])
def test_moe(device: str, count: int, joint: int, shared: int, monkeypatch: pytest.MonkeyPatch):
    """The shared expert among the others or by itself, as large as two of them or not to be divided."""
    monkeypatch.setattr(nvfp4, "JOINT_ROWS", joint)
    monkeypatch.setattr(packed, "WARPS", 1)
    inner = 128 if shared == 192 else 64
    up, down = stored(device, 3, inner, 64), stored(device, 3, 32, inner)
    shared_up, shared_down = stored(device, shared, 64), stored(device, 32, shared)
    generator = torch.Generator().manual_seed(2)
    x = random(device, count, 64) / 1e3
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(count)]).to(device)
    weights = torch.rand(count, 2, generator=generator).to(device)
    full = [Weight(*w.shape, dtype=torch.float32).requires_grad_(False) for w in (up, down, shared_up, shared_down)]
    for one, other in zip(full, (up, down, shared_up, shared_down), strict=True):
        one.parts["weight"].copy_(exact(other))
    with ops.using("reference"):
        wanted = ops.moe(x.float().cpu(), ids.cpu(), weights.cpu(), *(w.cpu() for w in full))
        routed = ops.experts(x.float().cpu(), ids.cpu(), weights.cpu(), *(w.cpu() for w in full[:2]))
    assert off(nvfp4.moe_nvfp4(x, ids, weights, up, down, shared_up, shared_down).cpu(), wanted) < BOUND
    if shared == 192 or count == 1:
        assert off(nvfp4.experts_nvfp4(x, ids, weights, up, down).cpu(), routed) < BOUND


@pytest.mark.parametrize(
    "shape",
    [(16, 64, 2, 4), (32, 64, 1, 4), (64, 128, 2, 8), (1, 32, 128, 2, 4), (1, 64, 128, 1, 8), (2, 32, 128, 2, 4)],
)
def test_many_rows_of_a_stack(device: str, shape: tuple[int, ...]):
    """Matrices that many rows chose, few and none; more tiles than rows, and rows that are left over, of both."""
    up, down, choices = stored(device, 4, 192, 128), stored(device, 4, 48, 64), 3
    ids = torch.tensor([[0, 1, 3]] * 33 + [[0, 3, 3]] * 7 + [[3, 0, 0]], device=device)
    x, h = random(device, len(ids), 128) / 1e3, random(device, ids.numel(), 64) / 1e3
    lists = order, offsets = moe.listed(ids, 4)
    assert arrange(up) and arrange(down)
    hidden, made = (torch.full((ids.numel(), size), torch.nan, device=device) for size in (192, 48))
    if len(shape) == 4:
        wide.product(wide.ordered(x), up, hidden, True, choices, lists, shape)
        wide.product(wide.ordered(h), down, made, False, choices, lists, shape)
    else:
        wide.gathered_product(wide.gathered(x, order, choices), up, hidden, True, lists, shape)
        wide.gathered_product(wide.ordered(h), down, made, False, lists, shape)
    hidden = wide.ordered(hidden)  # which brings the columns back, too
    for e in range(4):
        some = slice(int(offsets[e]), int(offsets[e + 1]))
        wanted = (x[order[some] // choices].double() @ exact(up)[e].t()).relu().square()
        assert len(wanted) == 0 or off(hidden[some], wanted) < 1e-6
        assert len(wanted) == 0 or off(made[order[some]], h[some].double() @ exact(down)[e].t()) < 1e-6


def test_gathered(device: str):
    x, order = random(device, 9, 196)[:, 2:194], torch.arange(27, device=device).int().flip(0)
    assert torch.equal(wide.gathered(x, order, 3), wide.ordered(x[(order // 3).long()]))


@pytest.mark.parametrize("limits", [(1, 9), (1, 1), (4, 9)])
def test_many_rows(device: str, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """Experts by lists, in the ways of few rows for each and of many, and the shared expert by its twins."""
    monkeypatch.setattr(nvfp4, "EXPERT_ROWS", limits[0])
    monkeypatch.setattr(wide, "GATHERED_ROWS", limits[1])
    monkeypatch.setattr(moe, "TILED_ROWS", 1)
    monkeypatch.setattr(nvfp4.linear, "NARROW_ROWS", 2)
    up, down = stored(device, 3, 64, 128), stored(device, 3, 64, 64)
    shared_up, shared_down = stored(device, 64, 128), stored(device, 64, 64)
    generator = torch.Generator().manual_seed(2)
    x = random(device, 5, 128) / 1e3
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(5)]).to(device)
    weights = torch.rand(5, 2, generator=generator).to(device)
    before = nvfp4.moe_nvfp4(x, ids, weights, up, down, shared_up, shared_down)
    for weight in (shared_up, shared_down):
        weight.twin = weight.dense()
        assert arrange(weight) and weight.twin is not None
    after = nvfp4.moe_nvfp4(x, ids, weights, up, down, shared_up, shared_down)
    full = [Weight(*w.shape, dtype=torch.float32).requires_grad_(False) for w in (up, down, shared_up, shared_down)]
    for one, other in zip(full, (up, down, shared_up, shared_down), strict=True):
        one.parts["weight"].copy_(exact(other))
    with ops.using("reference"):
        wanted = ops.moe(x.float().cpu(), ids.cpu(), weights.cpu(), *(w.cpu() for w in full))
    assert off(before.cpu(), wanted) < BOUND and off(after.cpu(), wanted) < BOUND


def test_decoding_is_exact(device: str):
    made = stored(device, 3, 48, 128)
    wanted = made.dense()
    if device == "cpu":  # cut off, see above
        cut = made.format.dequantize(made.parts, torch.float32).view(torch.int32) & -65536
        wanted = cut.view(torch.float32).bfloat16()
    assert arrange(made) and torch.equal(nvfp4.decoded(made), wanted)


def test_what_the_tiles_do_not_hold(device: str):
    """Activations in fp32, and matrices without whole tiles."""
    for rows, columns in ((32, 128), (32, 48), (24, 64)):
        weight = stored(device, rows, columns, dtype=torch.float32)
        x = random(device, 2, columns).float()
        assert off(nvfp4.linear_nvfp4(x, weight), x.double() @ exact(weight).t()) < 1e-5
        assert weight.format == NVFP4()


def test_all_in_tiles_or_none(device: str):
    """An op takes matrices of one format: up_proj would fit."""
    up, down = stored(device, 32, 64), stored(device, 64, 32)
    assert not nvfp4._ready(torch.bfloat16, up, down)
    assert up.format == down.format == NVFP4()
