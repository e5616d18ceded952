"""What products of 8-bit activations with 8-bit weights compute, in plain PyTorch: the oracle of ops/triton/eight.py.

Activations are rounded row by row to E4M3, the largest magnitude of a row to 448. Weights in FP8 are what they are.
Those in NVFP4 are rounded with a scale for each row, 1.5 times a power of two times the scale of the matrix: so the
codes 6, 3 and 1.5, which are the most of a block, stay exactly what they are, and others err by 4 % at most.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.formats import Weight
from leyden.formats.fp8 import E4M3_MAX, amax, to_e4m3
from leyden.formats.nvfp4 import BLOCK, E2M1_MAX, NVFP4, Tiled, from_e2m1, unpack
from leyden.ops.eight import Scaled, as_stored


def rounded(x: Tensor) -> Scaled:
    """x [M, K] -> E4M3 [M, K] and fp32 scales [M]; a row of zeros has a scale of zero."""
    largest = amax(x.float(), -1)
    codes = to_e4m3(x.float() * (E4M3_MAX / largest.clamp(min=1e-30))[:, None])
    return codes, largest / E4M3_MAX


def operand(weight: Weight) -> Scaled:
    """A matrix [N, K] or a stack [E, N, K] in FP8 or NVFP4 -> E4M3 of its shape and fp32 scales [..., N]."""
    if not isinstance(weight.format, NVFP4 | Tiled):
        return as_stored(weight)
    parts = weight.parts
    plain = weight.format.untile(parts) if isinstance(weight.format, Tiled) else parts
    blocks = plain["weight_scale"].float()
    most = E4M3_MAX * 1.5 / E2M1_MAX
    fraction, exponent = torch.frexp(amax(blocks, -1).clamp(min=2.0**-10) / most)  # a fraction of 0.5: a power of two
    unit = 1.5 * 2.0 ** (exponent - (fraction == 0.5).int())
    values = from_e2m1(unpack(plain["weight"])).unflatten(-1, (-1, BLOCK)) * blocks[..., None]
    codes = to_e4m3(values.flatten(-2) / unit[..., None])
    return codes, unit * parts["weight_scale_2"][..., None]


def linear(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """ops.linear; x [..., K]"""
    return _product(x.flatten(0, -2), operand(weight)).view(*x.shape[:-1], -1).to(dtype or x.dtype)


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """ops.mlp; what is between the products is rounded to bfloat16 before it is squared."""
    return _mlp(x, operand(up), operand(down)).to(x.dtype)


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    """ops.experts"""
    return _experts(x, ids, weights, up, down).to(x.dtype)


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    """ops.moe"""
    return (_experts(x, ids, weights, up, down) + _mlp(x, operand(shared_up), operand(shared_down))).to(x.dtype)


def _product(x: Tensor, weight: Scaled) -> Tensor:
    (codes, scale), (matrix, factor) = rounded(x), weight
    return ((codes.float() @ matrix.float().t()) * scale[:, None] * factor).bfloat16()


def _mlp(x: Tensor, up: Scaled, down: Scaled) -> Tensor:
    return _product(F.relu(_product(x, up).float()).square(), down).float()


def _experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    (ups, up_scales), (downs, down_scales) = operand(up), operand(down)
    out = torch.zeros(len(x), downs.shape[1], dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        row, choice = (ids == expert).nonzero().unbind(1)
        done = _mlp(x[row], (ups[expert], up_scales[expert]), (downs[expert], down_scales[expert]))
        out.index_add_(0, row, done * weights[row, choice, None])
    return out
