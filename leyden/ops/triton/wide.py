"""Products of many rows with one matrix, or with those of a stack, each with rows of its own; of weights of 16, 8 or 4 bits.

A tile of the matrix is the left operand of wgmma, up to 256 rows of x at once are the right one. Codes are decoded in the
registers into which they were loaded: each weight once for all the rows of the tile, and nothing of it passes through
shared memory, as the fragments are those of fragments.py. For that the columns of x stand in the order in which
decoding leaves those of the matrix, 64 at a time: `ordered` brings them there.

Of a stack, a program takes one tile of one matrix and BLOCK_M rows that chose it, or half as many where no more are left.
Programs that share a tile of the matrix run at the same time, so that it is read from memory once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.triton import packed
from leyden.ops.triton.fragments import ASSEMBLY, eight, four
from leyden.ops.triton.launch import OPTIONS, arrive, counters, release, wait

COLUMNS = 64  # of a tile; K is a multiple


@triton.jit
def _order(x, out, x_stride, K: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One row of x, its columns in the order of _decoded."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    e, t, j = k % 2, k // 2 % 4, k // 8 % 8
    if BITS == 4:  # j: two runs of 32 columns, four pairs of a thread's eight
        source = j // 4 * 32 + t * 8 + j % 4 * 2 + e
    else:
        source = t * 16 + j * 2 + e
    wait()
    release()
    value = tl.load(x + row * x_stride + k // 64 * 64 + source, mask=k < K, other=0.0)
    tl.store(out + row * K + k, value, mask=k < K)


@triton.jit
def _pair(pairs):
    """int32 -> its two bfloat16, as a last dimension."""
    low = (pairs & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def _four_pairs(pairs):
    """-> [..., even or odd, low bit of the pair's number, high bit]"""
    return tl.join(tl.join(_pair(pairs[0]), _pair(pairs[1])), tl.join(_pair(pairs[2]), _pair(pairs[3])))


@triton.jit
def _decoded(words, scales, BITS: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """[BLOCK_N, 64] bfloat16, of which each thread has what it loaded."""
    if BITS == 4:
        # words [tiles, 32, 4]: (rows g and g + 8) x (two runs of columns)
        upper, lower = tl.split(tl.permute(tl.reshape(words, (BLOCK_N // 16, 32, 2, 2)), (0, 1, 3, 2)))
        w0, w1 = tl.split(upper)
        w2, w3 = tl.split(lower)
        first = tl.join(_four_pairs(four(w0, scales, 0)), _four_pairs(four(w1, scales, 1)))
        second = tl.join(_four_pairs(four(w2, scales, 2)), _four_pairs(four(w3, scales, 3)))
        both = tl.join(first, second)  # tile, thread, e, low bit, high bit, run, half
        both = tl.reshape(both, (BLOCK_N // 16, 8, 4, 2, 2, 2, 2, 2))
        return tl.reshape(tl.permute(both, (0, 7, 1, 6, 5, 4, 2, 3)), (BLOCK_N, 64))
    else:
        # words [BLOCK_N, 4, 4]: threads t, their words; rows as _tile has them
        first, second = eight(words)
        both = tl.join(_pair(first), _pair(second))  # row, t, word, e, pair
        both = tl.reshape(both, (BLOCK_N // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2))
        return tl.reshape(tl.permute(both, (0, 2, 1, 3, 5, 7, 4, 6)), (BLOCK_N, 64))


@triton.jit
def _tile(
    x, codes, scales, factor, out, order, partial, arrived, row, end, first, N, x_stride, split,
    K: tl.constexpr, BITS: tl.constexpr, CHOICES: tl.constexpr, UP: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Rows `row` to `end` of x, BLOCK_M at most, times rows of the matrix from `first` on. Beyond either end the last
    one is taken again, and left out in the end."""
    CHUNKS: tl.constexpr = K // 64
    SHARE: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    own, m, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, 64)
    at = tl.minimum(row + m, end - 1)
    source = at.to(tl.int64)
    if order is not None:
        listed = tl.load(order + at)
        if UP:
            source = (listed // CHOICES).to(tl.int64)
    right = x + source[None, :] * x_stride + k[:, None]
    if BITS == 4:
        band, thread, word = tl.arange(0, BLOCK_N // 16), tl.arange(0, 32), tl.arange(0, 4)
        place = tl.minimum(first // 16 + band, N // 16 - 1) * CHUNKS
        left = codes + place[:, None, None] * 128 + (thread[:, None] * 4 + word[None, :])[None, :, :]
        scale = scales + place[:, None] * 16 + (thread // 4 * 2 + thread % 4 // 2)[None, :]
    elif BITS == 8:
        # the order in which warps load rows: eight of each warp, then eight more of each
        n = own // (16 * WARPS) * (16 * WARPS) + own // 8 % WARPS * 16 + own // (8 * WARPS) % 2 * 8 + own % 8
        t, word = tl.arange(0, 4), tl.arange(0, 4)
        left = codes + (tl.minimum(first + n, N - 1) * (K // 4))[:, None, None]
        left += (t[:, None] * 4 + word[None, :])[None, :, :]
    else:
        left = codes + (tl.minimum(first + own, N - 1) * K)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for chunk in tl.range(split * SHARE, tl.minimum(split * SHARE + SHARE, CHUNKS), num_stages=STAGES):
        if BITS == 4:
            w = _decoded(tl.load(left + chunk * 128), tl.load(scale + chunk * 16), 4, BLOCK_N, WARPS)
        elif BITS == 8:
            w = _decoded(tl.load(left + chunk * 16), None, 8, BLOCK_N, WARPS)
        else:
            w = tl.load(left + chunk * 64)
        value = tl.load(right + chunk * 64)
        if ASSEMBLY:
            acc = tl.dot(w, value, acc)
        else:  # the interpreter multiplies bfloat16 as integers
            acc = tl.dot(w.to(tl.float32), value.to(tl.float32), acc)
    n = first + own
    inside = (row + m < end)[:, None] & (n < N)[None, :]
    if SPLITS > 1:
        cell = m[:, None] * N + n[None, :]
        tl.store(partial + split * BLOCK_M * N + cell, tl.trans(acc), mask=inside)
        if arrive(arrived, SPLITS):
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(partial + part * BLOCK_M * N + cell, mask=inside, other=0.0, cache_modifier=".cg")
            total = total * factor
            if UP:
                total = tl.maximum(total.to(out.dtype.element_ty).to(tl.float32), 0.0)
                total *= total
            tl.store(out + cell, total.to(out.dtype.element_ty), mask=inside)
    else:
        acc *= factor
        if UP:  # rounded as the reference rounds: after the product and after the square
            acc = tl.maximum(acc.to(out.dtype.element_ty).to(tl.float32), 0.0)
            acc *= acc
        target = (row + m).to(tl.int64)
        if order is not None and not UP:
            target = listed.to(tl.int64)
        made = tl.trans(acc.to(out.dtype.element_ty))
        tl.store(out + target[:, None] * N + n[None, :], made, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _product(
    x, codes, scales, whole, out, order, offsets, partial, arrived, M, N, x_stride,
    K: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr, CHOICES: tl.constexpr, UP: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out[i, n] = sum_k x[i, k] W[n, k]; with UP relu(.)^2.

    Without `offsets` one matrix and M rows, and SPLITS programs share K. With them a stack of E matrices, each with its
    rows on the list `order`: UP reads row order[i] // CHOICES and writes row i, else row i is read, order[i] written.
    """
    tiles = (N + BLOCK_N - 1) // BLOCK_N
    pid, split = tl.program_id(0), tl.program_id(1)
    wait()
    release()
    if offsets is not None:
        e = tl.arange(0, BLOCK_E)
        begins, ends = tl.load(offsets + e, mask=e < E, other=0), tl.load(offsets + e + 1, mask=e < E, other=0)
        blocks = (ends - begins + BLOCK_M - 1) // BLOCK_M
        behind = tl.cumsum(blocks, 0) * tiles
        expert = tl.sum((behind <= pid).to(tl.int32), 0)
        mine = e == expert
        row, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
        count = tl.sum(tl.where(mine, blocks, 0), 0)
        place = pid - (tl.sum(tl.where(mine, behind, 0), 0) - count * tiles)
        matrix = expert.to(tl.int64) * N
    else:
        row, end, count, place = 0, M, (M + BLOCK_M - 1) // BLOCK_M, pid
        matrix, expert = 0, 0
    if row < end:  # the grid is as large as it may have to be
        row += place % count * BLOCK_M
        first = place // count * BLOCK_N
        if BITS == 4:
            codes += matrix * (K // 8)
            scales += matrix * (K // 64)
            factor = tl.load(whole + expert) * 128.0
        elif BITS == 8:
            factor = tl.load(whole)
        else:
            codes += matrix * K
            factor = 1.0
        if offsets is None or BLOCK_M == 16 or end - row > BLOCK_M // 2:
            _tile(
                x, codes, scales, factor, out, order, partial, arrived + pid, row, end, first, N, x_stride, split,
                K, BITS, CHOICES, UP, SPLITS, BLOCK_M, BLOCK_N, STAGES, WARPS,
            )  # fmt: skip
        else:
            _tile(
                x, codes, scales, factor, out, order, partial, arrived + pid, row, end, first, N, x_stride, split,
                K, BITS, CHOICES, UP, SPLITS, BLOCK_M // 2, BLOCK_N, STAGES, WARPS,
            )  # fmt: skip


def bits(weight: Weight) -> int:
    return {"fp8": 8, "nvfp4_tiled": 4}.get(weight.format.name, 16)


def ordered(x: Tensor, bits: int) -> Tensor:
    """x [M, K] with its columns as products with weights of so many bits take them."""
    if bits == 16:
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _order[(len(x),)](x, out, x.stride(0), x.shape[1], bits, block, num_warps=4, **OPTIONS)
    return out


def product(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    up: bool = False,
    choices: int = 1,
    lists: tuple[Tensor, Tensor] | None = None,
    shape: tuple[int, int, int, int, int] | None = None,
) -> None:
    """x [M, K] bfloat16 times `weight` [N, K] to out [M, N]; relu^2 if `up`. With the `lists` of moe.listed() weight is
    [E, N, K]: see _product. K is a multiple of 64, M at most 256 without lists. shape: rows of x and of the matrix in a
    tile, splits, stages, warps."""
    (size, k), width, count = weight.shape[-2:], bits(weight), len(x)
    codes, scales, whole = (weight.dense(), None, None) if width == 16 else packed.stored(weight)
    total = weight.shape[0] if lists else 1
    pairs = len(lists[0]) if lists else count
    block_m, block_n, splits, stages, warps = shape or _shape(pairs / total, size, lists is not None)
    tiles = triton.cdiv(size, block_n)
    blocks = pairs // block_m + total if lists else triton.cdiv(count, block_m)
    assert splits == 1 or blocks == 1
    partial = torch.empty(splits, block_m, size, dtype=torch.float32, device=x.device) if splits > 1 else out
    order, offsets = lists or (None, None)
    _product[(blocks * tiles, splits)](
        ordered(x, width), codes, scales, whole, out, order, offsets, partial, counters(x.device, tiles), count, size,
        x.stride(0), k, total, width, choices, up, splits, block_m, block_n, stages, warps,
        triton.next_power_of_2(total), num_warps=warps, **OPTIONS,
    )  # fmt: skip


def _shape(rows: float, size: int, stack: bool) -> tuple[int, int, int, int, int]:
    """For so many rows for a matrix, on average."""
    block_m = max(16, triton.next_power_of_2(int(rows)))
    if stack:
        return (128, 256, 1, 3, 8) if rows > 64 else (min(64, block_m), 128, 1, 3, 8)
    block_n = 128 if size > 8192 or rows > 128 else 64
    splits = max(1, min(8, round(132 / triton.cdiv(size, block_n))))
    return min(256, block_m), block_n, splits, 3, 8 if block_n == 128 else 4
