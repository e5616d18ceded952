"""Products of many rows in 8 bits: see leyden.ops.eight. One kernel rounds activations, one recodes NVFP4 matrices;
products with one matrix are torch's.

Experts take the rows of x in the order of moe.listed(): the kernel that rounds them also gathers them. Their products
are those of grouped.py, with 8-bit operands.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.formats.fp8 import E4M3, E4M3_MAX
from leyden.formats.nvfp4 import NVFP4, Tiled, arrange
from leyden.ops.eight import Scaled, as_stored, empty, product
from leyden.ops.triton import grouped
from leyden.ops.triton import moe as routed
from leyden.ops.triton.launch import INTERPRETED, OPTIONS, release, wait

_MOST = tl.constexpr(E4M3_MAX)
_TILES = 8  # of a matrix in NVFP4 at a time


@triton.jit
def _to_e4m3(x):
    """fp32 -> E4M3, to nearest even; before, in the interpreter, which loses the carry from mantissa to exponent."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        x = tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def _round(
    x, codes, scales, order, x_stride,
    K: tl.constexpr, CHOICES: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, with SQUARE its relu^2. With `order` row i is that of the choice order[i]."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wait()
    release()
    source = row
    if order is not None:
        source = (tl.load(order + row) // CHOICES).to(tl.int64)
    value = tl.load(x + source * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if SQUARE:
        value = tl.maximum(value, 0.0)
        value *= value
    largest = tl.max(tl.abs(value), 0)
    tl.store(codes + row * K + k, _to_e4m3(value * (_MOST / tl.maximum(largest, 1e-30))), mask=k < K)
    tl.store(scales + row, largest / _MOST)


@triton.jit
def _recode(
    codes, scales, whole, out, factors, N,
    K: tl.constexpr, CHUNKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """16 rows of formats/nvfp4.Tiled as E4M3, four columns as one int32, and what these rows are multiplied with."""
    matrix, band = tl.program_id(1).to(tl.int64), tl.program_id(0)
    first = matrix * (N // 16) + band
    chunk, byte = tl.arange(0, CHUNKS), tl.arange(0, 64)
    wait()
    release()
    whole_rows = scales + first * K + chunk[:, None] * 64 + byte[None, :]
    every = tl.load(whole_rows, mask=(chunk < K // 64)[:, None], other=0).to(tl.int32)
    # of rows g and g + 8 the largest scale, as 8 * exponent + mantissa: 6 times it is 448 units or less
    most = tl.max(tl.max(tl.reshape(tl.max(every, 0), (8, 2, 2, 2)), 3), 1)
    power = ((most + 1) >> 3) - 16  # a unit is 1.5 * 2^power
    row = band * 16 + tl.arange(0, 2)[None, :] * 8 + tl.arange(0, 8)[:, None]
    factor = ((power + 127) << 23).to(tl.float32, bitcast=True) * 1.5 * tl.load(whole + matrix)
    tl.store(factors + matrix * N + row, factor)
    wide = tl.broadcast_to(tl.reshape(power, (8, 1, 2, 1)), (8, 4, 2, 2))
    power = tl.reshape(wide, (1, 128))  # of the words of a tile
    place = tl.arange(0, 128)[None, :]
    g, t, word = place // 16, place % 16 // 4, place % 4
    at = matrix * (N.to(tl.int64) * (K // 4)) + (band * 16 + word // 2 * 8 + g).to(tl.int64) * (K // 4)
    at += word % 2 * 8 + t * 2
    for start in range(0, K // 64, TILES):
        tile = start + tl.arange(0, TILES)[:, None]
        inside = tile < K // 64
        q = tl.load(codes + first * (2 * K) + tile * 128 + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
        s = tl.load(scales + first * K + tile * 64 + g * 8 + t // 2 * 4 + word, mask=inside, other=0).to(tl.int32)
        # 2^14 brings the codes to their values; the rest is the scale of the block in units of the row
        scale = (((s >> 3) + (14 - 10 + 127) - power) << 23 | (s & 7) << 20).to(tl.float32, bitcast=True) * (2 / 3)
        first_two = _pair(q & 0x81C081C0, scale) | (_pair((q << 3) & 0x81C081C0, scale) << 16)
        third = _pair(((q << 6) & 0x01C001C0) | ((q << 1) & 0x80008000), scale)
        fourth = _pair(((q >> 3) & 0x01C001C0) | ((q << 2) & 0x80008000), scale)
        both = tl.join(first_two, third | (fourth << 16)).to(tl.int32, bitcast=True)
        to = out + (at + tile * 16)
        tl.store(to[:, :, None] + tl.arange(0, 2)[None, None, :], both, mask=inside[:, :, None])


@triton.jit
def _pair(bits, scale):
    """Two codes, in the places of nvfp4._pair, as two bytes."""
    half = (bits & 0x80008000) | ((bits & 0x01C001C0) << 3)
    low = _to_e4m3((half & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * scale)
    high = _to_e4m3((half >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * scale)
    return low.to(tl.uint8, bitcast=True).to(tl.uint32) | (high.to(tl.uint8, bitcast=True).to(tl.uint32) << 8)


def linear(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """See ops.linear."""
    out = product(rounded(x.flatten(0, -2)), operand(weight))
    return out.view(*x.shape[:-1], -1).to(dtype or x.dtype)


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.mlp."""
    hidden = product(rounded(x.flatten(0, -2)), operand(up))
    return product(rounded(hidden, square=True), operand(down)).view(*x.shape[:-1], -1)


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.experts."""
    (count, choices), size = ids.shape, down.shape[1]
    order, offsets = routed.listed(ids.contiguous(), up.shape[0])
    hidden = _grouped(rounded(x, False, order, choices), operand(up), None, offsets)
    done = _grouped(rounded(hidden, square=True), operand(down), order, offsets)
    return routed.combined(done, weights.contiguous(), count, size, 0)


def _grouped(x: Scaled, weight: Scaled, order: Tensor | None, offsets: Tensor) -> Tensor:
    """Rows offsets[e] to offsets[e + 1] of x [P, K] times weight[e] of [E, N, K] -> bfloat16 [P, N]; with `order` row i
    goes to row order[i]."""
    return grouped.product(x[0], weight[0], order, offsets, False, scales=(x[1], weight[1]))


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    """See ops.moe."""
    return experts(x, ids, weights, up, down).add_(mlp(x, shared_up, shared_down))


def rounded(x: Tensor, square: bool = False, order: Tensor | None = None, choices: int = 1) -> Scaled:
    """x [M, K] as E4M3 with a scale for each row, of its relu^2 if `square`. With `order` int32 [P] the rows of these
    choices, P of them."""
    x = x if x.stride(1) == 1 else x.contiguous()
    count, size = len(x) if order is None else len(order), x.shape[1]
    codes, scale = empty(count, size, x.device)
    _round[(count,)](
        x, codes, scale, order, x.stride(0), size, choices, square, triton.next_power_of_2(size), num_warps=4,
        **OPTIONS,
    )  # fmt: skip
    return codes, scale


def operand(weight: Weight) -> Scaled:
    """The matrix, or the stack of them, in E4M3, and a scale for each row: as it is stored, or recoded from NVFP4."""
    if not isinstance(weight.format, NVFP4 | Tiled):
        return as_stored(weight)
    tiled = arrange(weight)
    assert tiled
    parts = weight.parts
    *stack, size, k = weight.shape
    codes = torch.empty(weight.shape, dtype=E4M3, device=parts["weight"].device)
    factors = torch.empty(weight.shape[:-1], dtype=torch.float32, device=codes.device)
    _recode[(size // 16, stack[0] if stack else 1)](
        parts["weight"], parts["weight_scale"], parts["weight_scale_2"], codes.view(torch.int32), factors,
        size, k, triton.next_power_of_2(k // 64), _TILES, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return codes, factors
