"""Products in 8 bits against their arithmetic in plain PyTorch."""

import pytest
import torch
from torch import Tensor

from leyden.formats import Format, Weight
from leyden.formats.fp8 import FP8, FP8Channel
from leyden.formats.nvfp4 import NVFP4, Tiled, arrange
from leyden.ops import eight
from leyden.ops.reference import eight as reference

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import eight as kernels  # noqa: E402
from leyden.ops.triton import grouped, linear, nvfp4  # noqa: E402

# Of two products: what falls to the other of two values in BF16 may fall to the other in E4M3. The interpreter cuts
# off what lies between them, where it is to be rounded to BF16.
BETWEEN = 2e-2 if torch.cuda.is_available() else 4e-2


def stored(device: str, format: Format, *shape: int) -> Weight:
    """With rows of different size, one of them zeros, and blocks of zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    matrix = (
        torch.randn(shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator) / shape[-1] ** 0.5
    )
    matrix[..., 1, :] = 0
    matrix[..., 3, 16:32] = 0
    made = Weight(*shape, dtype=torch.bfloat16, format=format).requires_grad_(False)
    for name, tensor in format.quantize(matrix).items():
        made.parts[name].copy_(tensor)
    return made.to(device)


def random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)


def off(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def same(got: eight.Scaled, wanted: eight.Scaled, device: str) -> None:
    """On a GPU a quotient may be off by its last bit, and what lies between two values falls to the other one."""
    assert got[0].dtype == torch.float8_e4m3fn and got[1].dtype == torch.float32 and got[1].is_contiguous()
    if device == "cpu":
        assert torch.equal(got[0].float(), wanted[0].float()) and torch.equal(got[1], wanted[1])
    else:
        assert off(got[0].float(), wanted[0].float()) < 1e-3 and off(got[1], wanted[1]) < 1e-6


def test_activations(device: str):
    """All exponents, values on the border between two, a row of zeros, rows that are not next to each other."""
    x = torch.cat(
        [random(device, 5, 100), torch.arange(100, device=device)[None] + 400, torch.zeros(1, 100, device=device)]
    )
    x[0] *= torch.exp2(torch.arange(100, device=device) % 24 - 12)
    x = x.bfloat16()
    same(kernels.rounded(x), reference.rounded(x), device)
    beside = random(device, 4, 120)[:, 7:107]
    same(kernels.rounded(beside), reference.rounded(beside), device)
    same(kernels.rounded(x, square=True), reference.rounded(x.float().relu().square()), device)


def test_activations_in_the_order_of_experts(device: str):
    x, order = random(device, 3, 48), torch.tensor([4, 0, 5, 1, 3, 2], dtype=torch.int32, device=device)
    same(kernels.rounded(x, False, order, 2), reference.rounded(x[order // 2]), device)


@pytest.mark.parametrize("format", [FP8(), FP8Channel(), NVFP4(), NVFP4(four_over_six=True)])
@pytest.mark.parametrize("shape", [(32, 192), (2, 48, 64 * 9)])
def test_matrices(device: str, format: Format, shape: tuple[int, ...]):
    weight = stored(device, format, *shape)
    wanted, exact = reference.operand(weight), weight.format.dequantize(weight.parts, torch.float32)
    codes, factors = kernels.operand(weight)
    assert torch.equal(codes.float(), wanted[0].float()) and torch.equal(factors, wanted[1])
    got = codes.float() * factors[..., None]
    if isinstance(format, NVFP4):
        assert weight.format == Tiled(format) and off(got, exact) < 0.02
        assert torch.equal(reference.operand(weight)[0].float(), wanted[0].float())
    else:
        assert off(got, exact) < 1e-7


def test_extreme_scales(device: str):
    """The largest and the smallest block scales that there are, in one row and in rows of their own."""
    weight = stored(device, NVFP4(), 16, 128)
    bits = torch.arange(128, dtype=torch.uint8, device=device).view(16, 8).clamp(max=126)
    bits[0, 0], bits[0, 1] = 126, 1
    weight.parts["weight_scale"].copy_(bits.view(torch.float8_e4m3fn))
    wanted = reference.operand(weight)
    codes, factors = kernels.operand(weight)
    assert torch.equal(codes.float(), wanted[0].float()) and torch.equal(factors, wanted[1])
    assert 224 < float(codes.float().abs().amax()) <= 448


@pytest.mark.parametrize("format", [FP8(), FP8Channel(), NVFP4()])
def test_ops(device: str, format: Format):
    """Experts of which one has nobody to work for."""
    up, down = stored(device, format, 4, 64, 128), stored(device, format, 4, 32, 64)
    shared_up, shared_down = stored(device, format, 128, 128), stored(device, format, 32, 128)
    x, generator = random(device, 7, 128), torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(7)]).to(device)
    weights = torch.rand(7, 2, generator=generator).to(device)
    assert off(kernels.linear(x, up_one := stored(device, format, 48, 128)), reference.linear(x, up_one)) < 4e-3
    assert kernels.linear(x[None], up_one, torch.float32).shape == (1, 7, 48)
    assert kernels.linear(x, up_one, torch.float32).dtype == torch.float32
    assert off(kernels.mlp(x, shared_up, shared_down), reference.mlp(x, shared_up, shared_down)) < BETWEEN
    arguments = x, ids, weights, up, down
    assert off(kernels.experts(*arguments), reference.experts(*arguments)) < BETWEEN
    arguments += shared_up, shared_down
    assert off(kernels.moe(*arguments), reference.moe(*arguments)) < BETWEEN


def test_a_stack(device: str):
    """Rows by their matrices: many, none, one; tiles that are not full."""
    x, generator = random(device, 71, 128), torch.Generator().manual_seed(5)
    weight = stored(device, FP8Channel(), 3, 48, 128)
    offsets = torch.tensor([0, 70, 70, 71], dtype=torch.int32, device=device)
    (codes, scales), (matrices, factors) = reference.rounded(x), reference.operand(weight)
    order = torch.randperm(71, generator=generator).int().to(device)
    wanted = torch.cat([
        reference.linear(x[:70], _one(weight, 0)), reference.linear(x[70:], _one(weight, 2))
    ])  # fmt: skip
    for shape in ((32, 32, 64, 1, 4), (64, 64, 128, 1, 4)):
        got = grouped.product(codes, matrices, None, offsets, False, shape, (scales, factors))
        assert off(got, wanted) < (3e-3 if device == "cuda" else 8e-3)
        got = grouped.product(codes, matrices, order, offsets, False, shape, (scales, factors))
        assert off(got[order.long()], wanted) < (3e-3 if device == "cuda" else 8e-3)


def _one(stack: Weight, index: int) -> Weight:
    one = Weight(*stack.shape[1:], dtype=stack.dtype, format=stack.format).requires_grad_(False)
    for name, part in stack.parts.items():
        one.parts[name] = torch.nn.Parameter(part[index], requires_grad=False)
    return one


def test_off_not_one_bit_changes(device: str):
    """Weights that take part in rows up to their limit, and weights that do not in any number."""
    for format, few, shape in ((NVFP4(), nvfp4.linear_nvfp4, (32, 64)), (FP8(), linear.linear_fp8, (32, 64))):
        weight, x = stored(device, format, *shape), random(device, 6, 64)
        kernel = eight.above(few, kernels.linear)
        assert torch.equal(kernel(x, weight), few(x, weight))
        weight.eight_above = 5
        assert torch.equal(kernel(x, weight), kernels.linear(x, weight))
        assert torch.equal(kernel(x[:5], weight), few(x[:5], weight))
        assert not torch.equal(kernel(x, weight), few(x, weight))


def test_tiles_are_left_as_they_are(device: str):
    weight = stored(device, NVFP4(), 32, 64)
    assert arrange(weight)
    before = weight.parts["weight"].clone()
    kernels.operand(weight)
    assert torch.equal(weight.parts["weight"], before)
