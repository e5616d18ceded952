"""Products with matrices in NVFP4 (formats/nvfp4.py), read as they are stored.

A code is a sign, two bits of exponent and one of mantissa. With the sign in front and the other three where exponent
and mantissa meet, a half (or a bfloat16) has its value times 2^-14 (2^-126), subnormals included: two shifts and two
masks decode two codes, without a table or an addition. The product with the scale of a block has six bits and is exact.

One row of x runs on the CUDA cores in fp32; up to WIDE_ROWS per matrix on the tensor cores, the columns of both
operands in the order in which codes come out of a word (0, 4, 1, 5, 2, 6, 3, 7), for which the rows of x are laid out
anew; beyond, the matrix is decoded to memory once and multiplied as a dense one.
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


# A word -> its codes 0 and 4, 1 and 5, 2 and 6, 3 and 7 as two bfloat16 each.
_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b;"
    "shl.b32 a, $4, 6; shl.b32 b, $4, 12; and.b32 b, b, 0x80008000; lop3.b32 $0, a, 0x01C001C0, b, 0xEA;"
    "shl.b32 a, $4, 2; shl.b32 b, $4, 8; and.b32 b, b, 0x80008000; lop3.b32 $1, a, 0x01C001C0, b, 0xEA;"
    "shr.b32 a, $4, 2; shl.b32 b, $4, 4; and.b32 b, b, 0x80008000; lop3.b32 $2, a, 0x01C001C0, b, 0xEA;"
    "shr.b32 a, $4, 6; and.b32 b, $4, 0x80008000; lop3.b32 $3, a, 0x01C001C0, b, 0xEA; }"
)


@triton.jit
def _column(i):
    """Which column of a word's eight the i-th value of its first half is; those of the second are two further."""
    return i // 2 % 2 + i % 2 * 4


@triton.jit
def _plain(weight, base, column, inside, dtype: tl.constexpr):
    """The codes at `column` of the words at byte `base`: their values times 2^-14."""
    byte = tl.load(weight + base + column // 2, mask=inside, other=0).to(tl.uint16)
    code = byte >> (column % 2 * 4).to(tl.uint16)
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def _values(
    weight, scales, row, in_n, first, factor,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Columns first .. first + BLOCK_K - 1 of some rows in two halves [BLOCK_N, BLOCK_K / 2], in the order of _column:
    the codes' values, times 2^-126 for bfloat16 and else 2^-14, times the scales, times `factor`."""
    RUNS: tl.constexpr = BLOCK_K // 16
    run = tl.arange(0, RUNS)
    at = first // 16 + run
    inside = in_n[:, None] & (at < K // 16)[None, :]
    scale = tl.load(scales + row[:, None] * (K // 16) + at[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = (scale * factor).to(dtype)
    if dtype == tl.bfloat16:
        byte = tl.arange(0, 8)
        q = tl.load(
            weight + row[:, None, None] * (K // 2) + (at * 8)[None, :, None] + byte[None, None, :],
            mask=inside[:, :, None], other=0,
        )  # fmt: skip
        one, two = tl.inline_asm_elementwise(
            _PAIRS, "=r,=r,=r,=r,r", [q], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        i = tl.arange(0, 8)
        base = row[:, None, None] * (K // 2) + (at * 8)[None, :, None] + (i // 4 * 4)[None, None, :]
        column = _column(i)[None, None, :]
        one = _plain(weight, base, column, inside[:, :, None], dtype)
        two = _plain(weight, base, column + 2, inside[:, :, None], dtype)
    HALF: tl.constexpr = BLOCK_K // 2
    return (tl.reshape(one * scale[:, :, None], (BLOCK_N, HALF)), tl.reshape(two * scale[:, :, None], (BLOCK_N, HALF)))


@triton.jit
def _grouped(
    x, weight, scales, whole, out, order, offsets, x_stride, M, N,
    K: tl.constexpr, CHOICES: tl.constexpr, STACK: tl.constexpr, UP: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """moe._grouped for stored matrices; without STACK one matrix times all rows. The columns of x are in the order of
    words; those of `out`, too, if it is HIDDEN: between two products, and relu^2 of the first."""
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
            one, two = _values(weight, scales, row, in_n, start, RAISED, K, BLOCK_N, BLOCK_K, x.dtype.element_ty)
            at_k = (start + k // 4 * 8 + k % 4)[:, None]
            inside = in_m[None, :] & (at_k < K)
            acc = tl.dot(one, tl.load(right + at_k, mask=inside, other=0.0), acc, input_precision="ieee")
            acc = tl.dot(two, tl.load(right + at_k + 4, mask=inside, other=0.0), acc, input_precision="ieee")
        made = tl.trans(acc) * factor
        place = n
        if HIDDEN:
            made = tl.maximum(made.to(out.dtype.element_ty).to(tl.float32), 0.0)
            made *= made
            place = n // 8 * 8 + n % 4 * 2 + n % 8 // 4
        cell = target[:, None] * N + place[None, :]
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
    one, two = _values(weight, scales, row, n < N, start, factor, K, BLOCK_N, BLOCK_K, tl.float32)
    k = tl.arange(0, BLOCK_K // 2)
    at = start + k // 4 * 8 + _column(k)
    cell, inside = out + row[:, None] * K + at[None, :], (n < N)[:, None] & (at < K)[None, :]
    tl.store(cell, one.to(out.dtype.element_ty), mask=inside)
    tl.store(cell + 2, two.to(out.dtype.element_ty), mask=inside)


def linear_nvfp4(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """See ops.linear."""
    return _product(x, weight, False, dtype or x.dtype)


def mlp_nvfp4(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.mlp."""
    rows = x.flatten(0, -2)
    if not 1 < len(rows) <= WIDE_ROWS:
        return _product(_product(x, up, True, x.dtype), down, False, x.dtype)
    h, out = (torch.empty(len(rows), w.shape[0], dtype=x.dtype, device=x.device) for w in (up, down))
    grouped(_ordered(rows), up, h, True, None, 1, True)
    grouped(h, down, out, False, None, 1, True)
    return out.view(*x.shape[:-1], -1)


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
        grouped(_ordered(x), up, h, True, lists, choices, True)
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
        assert not square
        grouped(_ordered(rows), weight, out, False, None, 1, True)
    return out.view(*x.shape[:-1], size)


def _ordered(x: Tensor) -> Tensor:
    """The columns in the order in which codes come out of a word."""
    return x.unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1)


def vector(
    x: Tensor, weight: Weight, out: Tensor, square: bool, ids: Tensor | None, x_stride: int,
    shape: tuple[int, int, int] = (16, 128, 4),
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
    x: Tensor, weight: Weight, out: Tensor, hidden: bool, lists: tuple[Tensor, Tensor] | None, choices: int, up: bool,
    shape: tuple[int, int, int, int, int] | None = None,
) -> None:  # fmt: skip
    """Rows of x (_ordered) times one matrix, or by lists as moe.listed() makes them. shape: rows of x, rows and columns
    of a tile, stages, warps."""
    codes, scales, whole = _parts(weight)
    size, k = weight.shape[-2:]
    total = weight.shape[0] if lists else 1
    mean = len(out) / total
    block_m, block_n, block_k, stages, warps = shape or (16 if mean <= 8 else 32 if mean <= 20 else 64, 64, 128, 3, 4)
    order, offsets = lists or (None, None)
    _grouped[(triton.cdiv(size, block_n), total, max(1, round(mean / block_m)))](
        x, codes, scales, whole, out, order, offsets, x.stride(0), len(out), size,
        k, choices, lists is not None, up, hidden, block_m, block_n, block_k, stages, num_warps=warps, **OPTIONS,
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
