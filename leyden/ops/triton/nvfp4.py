"""Products with matrices in NVFP4 (formats/nvfp4.py), read as they are stored.

A code is a sign, two bits of exponent and one of mantissa. With the sign in front and the other three where exponent
and mantissa meet, a half (or a bfloat16) has its value times 2^-14 (2^-126), subnormals included: two shifts and two
masks decode two codes, without a table or an addition. The product with the scale of a block has six bits and is exact.

One row of x runs on the CUDA cores in fp32; up to WIDE_ROWS per matrix on the tensor cores, even and odd columns apart,
as they lie in different halves of a byte; beyond, the matrix is decoded to memory once and multiplied as a dense one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.triton import linear, moe
from leyden.ops.triton.launch import OPTIONS, release, wait

WIDE_ROWS = 64  # rows of x for one matrix, on average over those of a stack


@triton.jit
def _vector(
    x, weight, scales, whole, ids, out, x_stride, out_stride, N,
    K: tl.constexpr, STACK: tl.constexpr, SQUARE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """out[i, n] = sum_k x[i, k] W[n, k], with SQUARE relu(.)^2; of a STACK the matrix ids[i]. A word is eight codes:
    columns 0 to 3 in its low half, 4 to 7 in its high half."""
    WORDS: tl.constexpr = K // 8
    i = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = tl.arange(0, BLOCK_W)
    in_n = (n < N)[:, None]
    wait()
    release()
    matrix = tl.full((), 0, dtype=tl.int64)
    if STACK:
        matrix += tl.load(ids + i)
    row = (matrix * N + n)[:, None]
    factor = tl.load(whole + matrix) * 16384.0
    acc = tl.zeros((BLOCK_N, BLOCK_W), dtype=tl.float32)
    for start in range(0, WORDS, BLOCK_W):
        at = start + w
        inside = in_n & (at < WORDS)[None, :]
        q = tl.load(weight + row * WORDS + at[None, :], mask=inside, other=0).to(tl.uint32, bitcast=True)
        scale = tl.load(scales + row * (WORDS // 2) + (at // 2)[None, :], mask=inside, other=0.0).to(tl.float32)
        d = tl.zeros((BLOCK_N, BLOCK_W), dtype=tl.float32)
        for p in tl.static_range(4):
            moved = (q << (9 - 4 * p)) if p < 3 else (q >> 3)
            pair = (moved & 0x0E000E00) | ((q << (12 - 4 * p)) & 0x80008000)
            low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            column = x + i * x_stride + at * 8 + p
            d += low * tl.load(column, mask=at < WORDS, other=0.0).to(tl.float32)[None, :]
            d += high * tl.load(column + 4, mask=at < WORDS, other=0.0).to(tl.float32)[None, :]
        acc += d * scale
    total = tl.sum(acc, 1) * factor
    if SQUARE:
        total = tl.maximum(total.to(out.dtype.element_ty).to(tl.float32), 0.0)
        total *= total
    tl.store(out + i * out_stride + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _nibble(codes, dtype: tl.constexpr):
    """Codes 0 to 15 (uint8) -> their values times 2^-14 (or 2^-126, in bfloat16), exactly."""
    if dtype == tl.bfloat16:
        bits = ((codes.to(tl.uint16) & 7) << 6) | ((codes.to(tl.uint16) & 8) << 12)
        return bits.to(tl.bfloat16, bitcast=True)
    bits = ((codes.to(tl.uint16) & 7) << 9) | ((codes.to(tl.uint16) & 8) << 12)
    return bits.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def _halves(
    weight, scales, row, in_n, first, factor,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Columns first .. first + BLOCK_K - 1 of some rows -> (even ones, odd ones), [BLOCK_N, BLOCK_K / 2] each: what
    _nibble makes of the codes, times the scales, times `factor`. Blocks of 16 columns are eight bytes."""
    RUNS: tl.constexpr = BLOCK_K // 16
    run, byte = tl.arange(0, RUNS), tl.arange(0, 8)
    at = first // 16 + run
    inside = in_n[:, None] & (at < K // 16)[None, :]
    q = tl.load(
        weight + row[:, None, None] * (K // 2) + (at * 8)[None, :, None] + byte[None, None, :],
        mask=inside[:, :, None], other=0,
    )  # fmt: skip
    scale = tl.load(scales + row[:, None] * (K // 16) + at[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = (scale * factor).to(dtype)
    even = _nibble(q & 15, dtype) * scale[:, :, None]
    odd = _nibble(q >> 4, dtype) * scale[:, :, None]
    return tl.reshape(even, (BLOCK_N, BLOCK_K // 2)), tl.reshape(odd, (BLOCK_N, BLOCK_K // 2))


@triton.jit
def _grouped(
    x, weight, scales, whole, out, order, offsets, x_stride, M, N,
    K: tl.constexpr, CHOICES: tl.constexpr, STACK: tl.constexpr, UP: tl.constexpr, SQUARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """moe._grouped for stored matrices; without STACK one matrix times all rows."""
    # 2^7 stay behind in either case: a scale times 2^119 is the largest that bfloat16 holds
    RAISED: tl.constexpr = 6.646139978924579e35 if x.dtype.element_ty == tl.bfloat16 else 128.0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(1).to(tl.int64)
    k, m = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_M)
    in_n = n < N
    row = expert * N + n
    wait()
    release()
    first, end = 0, M
    if STACK:
        first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    factor = tl.load(whole + expert) * 128.0
    for block in range(first + tl.program_id(2) * BLOCK_M, end, tl.num_programs(2) * BLOCK_M):
        at = block + m
        in_m = at < end
        source, target = at.to(tl.int64), at.to(tl.int64)
        if STACK:
            listed = tl.load(order + at, mask=in_m, other=0).to(tl.int64)
            if UP:
                source = listed // CHOICES
            else:
                target = listed
        right = x + source[None, :] * x_stride
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            even, odd = _halves(weight, scales, row, in_n, start, RAISED, K, BLOCK_N, BLOCK_K, x.dtype.element_ty)
            column = start + 2 * k[:, None]
            inside = in_m[None, :] & (column < K)
            acc = tl.dot(even, tl.load(right + column, mask=inside, other=0.0), acc, input_precision="ieee")
            acc = tl.dot(odd, tl.load(right + column + 1, mask=inside, other=0.0), acc, input_precision="ieee")
        made = tl.trans(acc) * factor
        if SQUARE:
            made = tl.maximum(made.to(out.dtype.element_ty).to(tl.float32), 0.0)
            made *= made
        cell = target[:, None] * N + n[None, :]
        tl.store(out + cell, made.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _decode(weight, scales, whole, out, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The matrix as the network computes with it."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, expert = tl.program_id(1) * BLOCK_K, tl.program_id(2).to(tl.int64)
    row = expert * N + n
    wait()
    release()
    factor = tl.load(whole + expert) * 16384.0
    even, odd = _halves(weight, scales, row, n < N, start, factor, K, BLOCK_N, BLOCK_K, tl.float32)
    both = tl.interleave(even, odd).to(out.dtype.element_ty)
    at = start + tl.arange(0, BLOCK_K)
    tl.store(out + row[:, None] * K + at[None, :], both, mask=(n < N)[:, None] & (at < K)[None, :])


def linear_nvfp4(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """See ops.linear."""
    return _product(x, weight, False, dtype or x.dtype)


def mlp_nvfp4(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.mlp."""
    return _product(_product(x, up, True, x.dtype), down, False, x.dtype)


def experts_nvfp4(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.experts."""
    (count, choices), (total, inner, _), size = ids.shape, up.shape, down.shape[1]
    ids, weights = ids.contiguous(), weights.contiguous()
    pairs = count * choices
    if count == 0 or pairs > WIDE_ROWS * total:
        return moe.many_rows(x, ids, weights, decoded(up), decoded(down)) if count else x.new_empty(0, size)
    x = x if x.stride(1) == 1 else x.contiguous()
    h = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    done = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    if count == 1:
        vector(x, up, h, True, ids, 0)
        vector(h, down, done, False, ids, inner)
    else:
        lists = moe.listed(ids, total)
        grouped(x, up, h, True, lists, choices, True)
        grouped(h, down, done, False, lists, choices, False)
    return moe.combined(done, weights, count, size, 0)


def moe_nvfp4(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    """See ops.moe."""
    return experts_nvfp4(x, ids, weights, up, down) + mlp_nvfp4(x, shared_up, shared_down)


def _product(x: Tensor, weight: Weight, square: bool, dtype: torch.dtype) -> Tensor:
    rows = x.flatten(0, -2)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, size = len(rows), weight.shape[0]
    if count == 0 or count > WIDE_ROWS:
        return linear.product(x, decoded(weight), square, dtype)
    out = torch.empty(count, size, dtype=dtype, device=x.device)
    if count == 1:
        vector(rows, weight, out, square, None, 0)
    else:
        grouped(rows, weight, out, square, None, 1, True)
    return out.view(*x.shape[:-1], size)


def vector(
    x: Tensor, weight: Weight, out: Tensor, square: bool, ids: Tensor | None, x_stride: int,
    shape: tuple[int, int, int] = (8, 128, 4),
) -> None:  # fmt: skip
    """One row for each of `out`: a matrix times x, or ids[i]'s times row i of x (all the same if x_stride is 0). shape:
    rows and words of a tile, warps."""
    codes, scales, whole = _parts(weight)
    (size, k), (block_n, block_w, warps) = weight.shape[-2:], shape
    _vector[(triton.cdiv(size, block_n), len(out))](
        x, codes.view(torch.int32), scales, whole, ids, out, x_stride, out.stride(0), size,
        k, ids is not None, square, block_n, min(block_w, triton.next_power_of_2(k // 8)), num_warps=warps, **OPTIONS,
    )  # fmt: skip


def grouped(
    x: Tensor, weight: Weight, out: Tensor, square: bool, lists: tuple[Tensor, Tensor] | None, choices: int, up: bool,
    shape: tuple[int, int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """Rows of x times one matrix, or by lists as moe.listed() makes them. shape: rows of x, rows and columns of a tile,
    stages, warps."""
    codes, scales, whole = _parts(weight)
    size, k = weight.shape[-2:]
    total = weight.shape[0] if lists else 1
    mean = len(out) / total
    block_m, block_n, block_k, stages, warps = shape or (16 if mean <= 8 else 32 if mean <= 20 else 64, 64, 128, 3, 4)
    order, offsets = lists or (None, None)
    _grouped[(triton.cdiv(size, block_n), total, max(1, round(mean / block_m)))](
        x, codes, scales, whole, out, order, offsets, x.stride(0), len(out), size,
        k, choices, lists is not None, up, square, block_m, block_n, block_k, stages, num_warps=warps, **OPTIONS,
    )  # fmt: skip


def decoded(weight: Weight) -> Tensor:
    """The matrix, or the stack of them, in the dtype of its values."""
    codes, scales, whole = _parts(weight)
    *stack, size, k = weight.shape
    out = torch.empty(weight.shape, dtype=weight.dtype, device=codes.device)
    _decode[(triton.cdiv(size, 16), triton.cdiv(k, 128), stack[0] if stack else 1)](
        codes, scales, whole, out, size, k, 16, 128, num_warps=4, **OPTIONS
    )
    return out


def _parts(weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    parts = weight.parts
    return parts["weight"], parts["weight_scale"], parts["weight_scale_2"]
