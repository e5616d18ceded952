"""Products of many rows with a stack of matrices in four bits (formats/nvfp4.Tiled), each with rows of its own.

A tile of the matrix is the left operand of wgmma, the rows that chose it are the right one. Codes are decoded in the
registers from which wgmma takes them: each weight once for all the rows of the tile, and nothing of it passes through
shared memory, as the fragments are those of fragments.py. For that the columns of x stand in the order in which
decoding leaves those of the matrix: `ordered` and `gathered` bring them there, and what is made with `up` has it.

A program takes one tile of one matrix and some rows, or fewer where no more are left. Programs that share a tile of the
matrix run at the same time, so that it is read from memory once. `product` fetches the rows as they are listed. Above
GATHERED_ROWS for a matrix memory is not what it waits for: `gathered_product` takes rows that lie side by side, and
they, codes and scales come by the hardware's tile copies (TMA), which want Hopper.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from leyden.formats import Weight
from leyden.ops.triton import fragments, packed
from leyden.ops.triton.launch import INTERPRETED, OPTIONS, complete, release, wait

Shape = tuple[int, int, int, int, int]

GATHERED_ROWS = 16  # for a matrix, on average
# Products in turns, rows of x of each and rows of the matrix in a tile, stages, warps.
GATHERED: Shape = (1, 128, 128, 4, 4)  # two programs of a multiprocessor decode and multiply in turn
GATHERED_FEW: Shape = (1, 64, 128, 4, 4)  # up to 64 rows for a matrix


@triton.jit
def _order(x, out, K: tl.constexpr, BLOCK: tl.constexpr):
    """One row of x. Of 64 columns of the matrix each of four threads has eight of either half."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    k = place % 64
    source = place // 64 * 64 + k // 32 * 32 + k % 8 // 2 * 8 + k // 8 % 4 * 2 + k % 2
    wait()
    release()
    tl.store(out + row * K + place, tl.load(x + row * K + source, mask=place < K), mask=place < K)


@triton.jit
def _gather(x, order, out, rows, x_stride, K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = x[order[i] // CHOICES], in the order of decoding; four rows"""
    row, k = tl.program_id(0) * 4 + tl.arange(0, 4), tl.arange(0, BLOCK)
    wait()
    release()
    source = tl.load(order + row, mask=row < rows, other=0).to(tl.int64) // CHOICES
    inside = (row < rows)[:, None] & (k < K)[None, :]
    value = tl.load(x + source[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64)[:, None] * K + k[None, :], _swapped(value, 4, BLOCK), mask=inside)


@triton.jit
def _four(words, scales, INDEX: tl.constexpr):
    """-> [..., low bit of the pair's number, high bit]"""
    pairs = fragments.four(words, scales, INDEX)
    return tl.join(tl.join(pairs[0], pairs[1]), tl.join(pairs[2], pairs[3]))


@triton.jit
def _decoded(words, scales):
    """[tiles, 32, 4] words of eight codes, (rows g and g + 8) x (halves of 64 columns), and [tiles, 32] of four scales
    -> pairs of bfloat16 [tiles, 32, 2, 2, 2, 2]: low and high bit of the pair's number, half, row."""
    tiles: tl.constexpr = words.shape[0]
    upper, lower = tl.split(tl.permute(tl.reshape(words, (tiles, 32, 2, 2)), (0, 1, 3, 2)))
    w0, w1 = tl.split(upper)
    w2, w3 = tl.split(lower)
    first = tl.join(_four(w0, scales, 0), _four(w1, scales, 1))
    return tl.join(first, tl.join(_four(w2, scales, 2), _four(w3, scales, 3)))


@triton.jit
def _matrix(pairs):
    """_decoded() -> [16 tiles, 64], of which each thread has what it had."""
    tiles: tl.constexpr = pairs.shape[0]
    low = (pairs & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    both = tl.join(low, (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
    both = tl.reshape(both, (tiles, 8, 4, 2, 2, 2, 2, 2))  # tile, g, t, low bit, high bit, half, row, e
    return tl.reshape(tl.permute(both, (0, 6, 1, 5, 4, 3, 2, 7)), (tiles * 16, 64))


@triton.jit
def _swapped(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS], its columns in the order of decoding: of 64 of them the two pairs of bits change places."""
    split = tl.reshape(tile, (ROWS, COLUMNS // 32, 4, 4, 2))
    return tl.reshape(tl.permute(split, (0, 1, 3, 2, 4)), (ROWS, COLUMNS))


@triton.jit
def _store(acc, factor, out, order, row, end, first, N, UP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    acc *= factor
    at, own = row + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    inside = at < end
    if UP:  # rounded as the reference rounds: after the product and after the square
        acc = tl.maximum(acc.to(out.dtype.element_ty).to(tl.float32), 0.0)
        made = _swapped(tl.trans((acc * acc).to(out.dtype.element_ty)), BLOCK_M, BLOCK_N)
        target = at
    else:
        made = tl.trans(acc.to(out.dtype.element_ty))
        target = tl.load(order + at, mask=inside, other=0)
    tl.store(out + target.to(tl.int64)[:, None] * N + own[None, :], made, mask=inside[:, None] & (own < N)[None, :])


@triton.jit
def _whose(offsets, TILES, ROWS: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """-> (matrix, first and end of its rows, tile of it) for this program, ROWS for each at most; matrix E if there is
    nothing to do: there are as many programs as there may be tiles."""
    e = tl.arange(0, BLOCK_E)
    begins, ends = tl.load(offsets + e, mask=e < E, other=0), tl.load(offsets + e + 1, mask=e < E, other=0)
    blocks = (ends - begins + ROWS - 1) // ROWS
    behind = tl.cumsum(blocks, 0) * TILES
    pid = tl.program_id(0)
    expert = tl.sum((behind <= pid).to(tl.int32), 0)
    mine = e == expert
    row, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
    count = tl.maximum(tl.sum(tl.where(mine, blocks, 0), 0), 1)
    place = pid - tl.sum(tl.where(mine, behind - blocks * TILES, 0), 0)
    return tl.minimum(expert, E), row + place % count * ROWS, end, place // count


@triton.jit
def _tile(
    x, codes, scales, factor, out, order, row, end, first, N,
    K: tl.constexpr, CHOICES: tl.constexpr, UP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `row` to `end` of x, BLOCK_M at most, times rows of the matrix from `first` on. Beyond either end the last
    one is taken again, and left out in the end."""
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, 64)
    at = tl.minimum(row + m, end - 1)
    listed = tl.load(order + at)
    right = x + (listed // CHOICES if UP else at).to(tl.int64)[None, :] * K + k[:, None]
    band, thread, word = tl.arange(0, BLOCK_N // 16), tl.arange(0, 32), tl.arange(0, 4)
    place = tl.minimum(first // 16 + band, N // 16 - 1) * (K // 64)
    left = codes + place[:, None, None] * 128 + (thread[:, None] * 4 + word[None, :])[None, :, :]
    scale = scales + place[:, None] * 16 + (thread // 4 * 2 + thread % 4 // 2)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for chunk in tl.range(0, K // 64, num_stages=STAGES):
        w = _matrix(_decoded(tl.load(left + chunk * 128), tl.load(scale + chunk * 16)))
        value = tl.load(right + chunk * 64)
        if INTERPRETED:  # which multiplies bfloat16 as integers
            w, value = w.to(tl.float32), value.to(tl.float32)
        acc = complete(tl.dot(w, value, acc))
    _store(acc, factor, out, order, row, end, first, N, UP, BLOCK_M, BLOCK_N)


@triton.jit
def _product(
    x, codes, scales, whole, out, order, offsets, N,
    K: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr, UP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """UP reads row order[i] // CHOICES and writes relu^2 to row i; otherwise row i is read and row order[i] written."""
    wait()
    release()
    expert, row, end, tile = _whose(offsets, (N + BLOCK_N - 1) // BLOCK_N, BLOCK_M, E, BLOCK_E)
    if expert < E:
        first = tile * BLOCK_N
        codes += expert.to(tl.int64) * (N * K // 8)
        scales += expert.to(tl.int64) * (N * K // 64)
        factor = tl.load(whole + expert) * 128.0
        if BLOCK_M == 16 or end - row > BLOCK_M // 2:
            _tile(
                x, codes, scales, factor, out, order, row, end, first, N, K, CHOICES, UP, BLOCK_M, BLOCK_N, STAGES
            )  # fmt: skip
        else:
            _tile(
                x, codes, scales, factor, out, order, row, end, first, N, K, CHOICES, UP, BLOCK_M // 2, BLOCK_N, STAGES
            )  # fmt: skip


@triton.jit
def _pairs(words, scales):
    """_decoded() of tile copies, [tiles, 128] and [tiles, 16]: two neighbours have one scale."""
    tiles: tl.constexpr = words.shape[0]
    both = tl.broadcast_to(tl.reshape(scales, (tiles, 16, 1)), (tiles, 16, 2))
    return _decoded(tl.reshape(words, (tiles, 32, 4)), tl.reshape(both, (tiles, 32)))


@triton.jit
def _times(pairs, right, acc):
    left = _matrix(pairs)
    if INTERPRETED:  # which multiplies bfloat16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right.T, acc)


@triton.jit
def _gathered_tile(
    x, codes, scales, factor, out, order, row, end, first, band, N,
    K: tl.constexpr, UP: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `row` to `end` of x, PARTS times BLOCK_M at most, times rows of the matrix: from `first` on, or tiles of the
    stack from `band` on. Beyond either end others are taken, and left out in the end.

    In two parts the product of the first still runs while the codes of the next columns are decoded; that of the second
    is waited for. Scales are loaded before codes there, else the compiler takes the pairs through shared memory.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if PARTS == 2:
        early = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        scale = scales.load([band, 0])
        pairs = _pairs(codes.load([band, 0]), scale)
        for chunk in tl.range(0, K // 64, num_stages=STAGES):
            right, other = x.load([row, chunk * 64]), x.load([row + BLOCK_M, chunk * 64])
            early = _times(pairs, right, early)
            scale = scales.load([band, chunk * 16 + 16])
            later = _pairs(codes.load([band, chunk * 128 + 128]), scale)  # in the end zeros
            acc = complete(_times(pairs, other, acc))
            pairs = later
        _store(early, factor, out, order, row, end, first, N, UP, BLOCK_M, BLOCK_N)
        row += BLOCK_M
    else:
        for chunk in tl.range(0, K // 64, num_stages=STAGES):
            words, scale = codes.load([band, chunk * 128]), scales.load([band, chunk * 16])
            acc = complete(_times(_pairs(words, scale), x.load([row, chunk * 64]), acc))
    _store(acc, factor, out, order, row, end, first, N, UP, BLOCK_M, BLOCK_N)


@triton.jit
def _gathered_product(
    x, half, codes, scales, whole, out, order, offsets, N,
    K: tl.constexpr, E: tl.constexpr, UP: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """half: x again, in tiles of half as many rows. Row i is read; UP writes relu^2 to row i, otherwise row order[i] is
    written."""
    wait()
    release()
    expert, row, end, tile = _whose(offsets, (N + BLOCK_N - 1) // BLOCK_N, PARTS * BLOCK_M, E, BLOCK_E)
    if expert < E:
        first = tile * BLOCK_N
        band = (expert * N + first) // 16
        factor = tl.load(whole + expert) * 128.0
        if PARTS == 2 and end - row > BLOCK_M:
            _gathered_tile(
                x, codes, scales, factor, out, order, row, end, first, band, N,
                K, UP, PARTS, BLOCK_M, BLOCK_N, STAGES,
            )  # fmt: skip
        elif end - row > BLOCK_M // 2:
            _gathered_tile(
                x, codes, scales, factor, out, order, row, end, first, band, N,
                K, UP, 1, BLOCK_M, BLOCK_N, STAGES,
            )  # fmt: skip
        else:
            _gathered_tile(
                half, codes, scales, factor, out, order, row, end, first, band, N,
                K, UP, 1, BLOCK_M // 2, BLOCK_N, STAGES,
            )  # fmt: skip


def ordered(x: Tensor) -> Tensor:
    """x [M, K], its columns in the order of decoding."""
    x, k = x.contiguous(), x.shape[1]
    out = torch.empty_like(x)
    _order[(len(x),)](x, out, k, triton.next_power_of_2(k), num_warps=4, **OPTIONS)
    return out


def gathered(x: Tensor, order: Tensor, choices: int) -> Tensor:
    """x [T, K], order int32 [P] -> x[order // choices] [P, K], its columns in the order of decoding."""
    x, rows, k = packed.aligned(x), len(order), x.shape[1]
    out = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(k)
    _gather[(triton.cdiv(rows, 4),)](x, order, out, rows, x.stride(0), k, choices, block, num_warps=8, **OPTIONS)
    return out


def product(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    up: bool,
    choices: int,
    lists: tuple[Tensor, Tensor],
    shape: tuple[int, int, int, int] | None = None,
) -> None:
    """x, bfloat16 and ordered, times `weight` [E, N, K] by the `lists` of moe.listed(): with `up` x [T, K] to rows of
    `out` [P, N] in the lists' order, relu^2, ordered (N in whole 64s); otherwise x [P, K] in that order to rows of each
    choice. shape: rows of x and of the matrix in a tile, stages, warps."""
    (total, size, k), pairs = weight.shape, len(out)
    assert not up or size % 64 == 0
    codes, scales, whole = packed.stored(weight)
    block_m, block_n, stages, warps = shape or ((32, 64, 5, 4) if pairs <= 32 * total else (128, 128, 4, 8))
    blocks = pairs // block_m + total
    _product[(blocks * triton.cdiv(size, block_n),)](
        x, codes, scales, whole, out, *lists, size, k, total, choices, up, block_m, block_n, stages,
        triton.next_power_of_2(total), num_warps=warps, **OPTIONS,
    )  # fmt: skip


def gathered_product(
    x: Tensor, weight: Weight, out: Tensor, up: bool, lists: tuple[Tensor, Tensor], shape: Shape | None = None
) -> None:
    """As product(), but x [P, K] are gathered() rows with `up`, too. shape: see GATHERED."""
    (total, size, k), pairs = weight.shape, len(out)
    assert not up or size % 64 == 0
    codes, scales, whole = packed.stored(weight)
    assert scales is not None
    parts, block_m, block_n, stages, warps = shape or (GATHERED if pairs > 64 * total else GATHERED_FEW)
    assert block_n % 128 == 0  # eight tiles of 16: a copy of fewer lies differently in shared memory
    bands = total * size // 16

    def tiled(tensor: Tensor, rows: int, columns: int) -> Any:
        return TensorDescriptor.from_tensor(tensor, [rows, columns])

    _gathered_product[((pairs // (parts * block_m) + total) * triton.cdiv(size, block_n),)](
        tiled(x, block_m, 64), tiled(x, block_m // 2, 64),
        tiled(codes.view(bands, k * 2), block_n // 16, 128), tiled(scales.view(bands, k // 4), block_n // 16, 16),
        whole, out, *lists, size, k, total, up, parts, block_m, block_n, stages, triton.next_power_of_2(total),
        num_warps=warps, **OPTIONS,
    )  # fmt: skip
