"""Products of a few rows with matrices of 4- or 8-bit floats, decoded in registers on their way to the tensor cores.

A warp takes TILES tiles of 16 rows of the matrix, 64 columns at a time, and reads each of them once for eight times
GROUPS rows of x; the next are always on their way. SPLIT warps share the columns and add up what they have; the other
warps of a program have other rows of the matrix and, with luck, find the rows of x where the first one left them.

Rows of x are bfloat16 and 16-byte aligned, their length a multiple of 16. Codes of 4 bits are formats/nvfp4.Tiled,
those of 8 bits lie as the checkpoint has them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.triton.fragments import eight, four, mma, quad
from leyden.ops.triton.launch import OPTIONS, release, wait


@triton.jit
def _tile(
    codes, scales, row, step, g, t, inside, N, chunks,
    K: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A tile of 16 x 64: the words of rows g and g + 8, and the four scales or nothing."""
    if BITS == 4:
        at = row * chunks + step
        words = quad(codes + (at * 128 + g * 16 + t * 4), inside, True)
        return words + (tl.load(scales + (at * 16 + g * 2 + t // 2), mask=inside, other=0),)
    else:
        n = row * 16 + g
        at = (step * 16 + t * 4)
        inside = inside & (at * 4 < K)
        upper = quad(codes + (tl.minimum(n, N - 1).to(tl.int64) * (K // 4) + at), inside, True)
        lower = quad(codes + (tl.minimum(n + 8, N - 1).to(tl.int64) * (K // 4) + at), inside, True)
        return upper + lower


@triton.jit
def _tiles(
    codes, scales, first, step, g, t, some, N, chunks,
    K: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr, BANDS: tl.constexpr,
):  # fmt: skip
    """TILES of them, each warp's own, BANDS rows of tiles apart."""
    words = ()
    for i in tl.static_range(TILES):
        row = first + i * BANDS
        inside = some & (row * 16 < N) & (step * 64 < K)
        words = words + _tile(codes, scales, row, step, g, t, inside, N, chunks, K, BITS)
    return words


@triton.jit
def _fragments(words, FIRST: tl.constexpr, BITS: tl.constexpr):
    """The tile whose words begin at FIRST, decoded: for each 16 columns rows g and g + 8, then their next columns."""
    if BITS == 4:
        scales = words[FIRST + 4]
        a = four(words[FIRST], scales, 0)
        b = four(words[FIRST + 2], scales, 2)
        c = four(words[FIRST + 1], scales, 1)
        d = four(words[FIRST + 3], scales, 3)
        return (
            a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3],
            c[0], d[0], c[1], d[1], c[2], d[2], c[3], d[3],
        )  # fmt: skip
    else:
        made = ()
        for i in tl.static_range(4):
            a = eight(words[FIRST + i])
            b = eight(words[FIRST + 4 + i])
            made = made + (a[0], b[0], a[1], b[1])
        return made


@triton.jit
def _product(
    x, codes, scales, whole, shared_codes, shared_scales, shared_whole, out, ids, order, offsets, M, N, x_stride,
    K: tl.constexpr, BITS: tl.constexpr, CHOICES: tl.constexpr, PARTS: tl.constexpr, UP: tl.constexpr,
    EARLY: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """out[i, n] = sum_k x[i, k] W[n, k]; with UP relu(.)^2.

    Without ids and offsets one matrix and M rows. Else the second dimension of the grid counts matrices. First PARTS of
    a shared expert, each as large as a routed one, for M rows: rows of its up_proj, columns of its down_proj. Then, if
    there are `offsets`, those of a stack, each with its rows on the list `order`: UP reads row order[i] // CHOICES and
    writes row i; otherwise row i is read and row order[i] written. If there are `ids` instead, M is 1, and there is one
    matrix for each choice. Between the products the rows of the parts lie after those of the choices. EARLY: all that
    says which matrix it is was written two kernels ago or earlier.
    """
    CHUNKS: tl.constexpr = (K + 63) // 64
    STEPS: tl.constexpr = (CHUNKS + SPLIT - 1) // SPLIT
    BANDS: tl.constexpr = THREADS // 32 // SPLIT
    EACH: tl.constexpr = 5 if BITS == 4 else 8  # words of a tile
    thread = tl.arange(0, THREADS)
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    part, own = warp % SPLIT, tl.program_id(0) * (TILES * BANDS) + warp // SPLIT
    if not EARLY:
        wait()
        release()
    item = tl.program_id(1)
    first, end, base = 0, M, 0
    chunks = CHUNKS
    if PARTS > 0 or ids is not None or offsets is not None:
        routed = item >= PARTS
        expert = item - PARTS
        if offsets is not None:
            first = tl.load(offsets + expert, mask=routed, other=0)
            end = tl.load(offsets + expert + 1, mask=routed, other=M)
        else:
            first = tl.maximum(expert, 0)
            end = tl.where(routed, expert + 1, M)
            expert = tl.load(ids + expert, mask=routed, other=0).to(tl.int32)
        tiles = tl.maximum(expert, 0).to(tl.int64) * (N // 16 * CHUNKS)
        if PARTS > 0:
            tiles = tl.where(routed, tiles, item * (N // 16 * CHUNKS if UP else CHUNKS))
            chunks = tl.where(routed, CHUNKS, CHUNKS if UP else CHUNKS * PARTS)
            codes = tl.where(routed, codes, shared_codes)
            scales = tl.where(routed, scales, shared_scales)
            base = tl.where(routed, 0, M * CHOICES + item * M)
            whole = tl.where(routed, whole + tl.maximum(expert, 0), shared_whole)
        else:
            whole += expert
        codes += tiles * 128
        scales += tiles * 16
    else:
        routed = True
    first += tl.program_id(2) * (8 * GROUPS)
    stride = tl.num_programs(2) * (8 * GROUPS)
    words = _tiles(codes, scales, own, part, g, t, first < end, N, chunks, K, BITS, TILES, BANDS)
    if EARLY:
        wait()
        release()
    factor = tl.load(whole)
    if BITS == 4:
        factor *= 128.0
    start = t * 8 if BITS == 4 else t * 16
    NEXT: tl.constexpr = 32 if BITS == 4 else 8
    for block in range(first, end, stride):
        sources, insides = (), ()
        for j in tl.static_range(GROUPS):
            at = block + j * 8 + g
            row = at
            if order is not None:
                row = tl.load(order + at, mask=(at < end) & routed, other=0) if UP else at
            if UP:
                row = tl.where(routed, row // CHOICES, at) if PARTS > 0 else row // CHOICES
            else:
                row += base
            sources = sources + (x + row.to(tl.int64) * x_stride + start,)
            insides = insides + (at < end,)
        sums = ()
        for _ in tl.static_range(TILES * GROUPS * 4):
            sums = sums + (tl.zeros((THREADS,), dtype=tl.float32),)
        for i in range(STEPS):
            step = i * SPLIT + part
            following = _tiles(
                codes, scales, own, step + SPLIT, g, t, i + 1 < STEPS, N, chunks, K, BITS, TILES, BANDS
            )
            column = step * 64
            values = ()
            for j in tl.static_range(GROUPS):
                source = (sources[j] + column).to(tl.pointer_type(tl.int32), bitcast=True)
                inside = insides[j] & (start + column < K)
                values = values + quad(source, inside, False)
                values = values + quad(source + NEXT // 2, insides[j] & (start + column + NEXT < K), False)
            made = ()
            for r in tl.static_range(TILES):
                a = _fragments(words, r * EACH, BITS)
                for j in tl.static_range(GROUPS):
                    C: tl.constexpr = (r * GROUPS + j) * 4
                    c = (sums[C], sums[C + 1], sums[C + 2], sums[C + 3])
                    for s in tl.static_range(4):
                        c = mma(
                            c[0], c[1], c[2], c[3], a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3],
                            values[j * 8 + 2 * s], values[j * 8 + 2 * s + 1],
                        )  # fmt: skip
                    made = made + (c[0], c[1], c[2], c[3])
            sums = made
            words = following
        m, q = tl.arange(0, 8), tl.arange(0, 16 * BANDS)
        for j in tl.static_range(GROUPS):
            at = block + j * 8 + m
            target = at
            if order is not None and not UP:
                target = tl.load(order + at, mask=(at < end) & routed, other=0)
                if PARTS > 0:
                    target = tl.where(routed, target, at)
            target = (target + base).to(tl.int64)
            for r in tl.static_range(TILES):
                C: tl.constexpr = (r * GROUPS + j) * 4
                both = tl.join(tl.join(sums[C], sums[C + 1]), tl.join(sums[C + 2], sums[C + 3]))
                both = tl.sum(tl.reshape(both, (BANDS, SPLIT, 8, 4, 2, 2)), 1)  # bands, g, t, even or odd, half
                made = tl.reshape(tl.permute(both, (2, 3, 0, 4, 1)), (8, 16 * BANDS)) * factor
                if UP:
                    made = tl.maximum(made.to(out.dtype.element_ty).to(tl.float32), 0.0)
                    made *= made
                n = (tl.program_id(0) * TILES + r) * (16 * BANDS) + q
                tl.store(
                    out + target[:, None] * N + n[None, :], made.to(out.dtype.element_ty),
                    mask=(at < end)[:, None] & (n < N)[None, :],
                )  # fmt: skip
        words = _tiles(codes, scales, own, part, g, t, block + stride < end, N, chunks, K, BITS, TILES, BANDS)


@dataclass(frozen=True)
class Shape:
    """How the work is cut; see the top of the file. `split` divides `warps`."""

    tiles: int
    groups: int
    split: int
    warps: int


def stored(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor]:
    """(words, scales of four blocks, scale of the matrix or of each of a stack)"""
    parts = weight.parts
    if weight.format.name == "fp8":
        return parts["weight"].view(torch.int32), None, parts["weight_scale"]
    return parts["weight"], parts["weight_scale"].view(torch.int32), parts["weight_scale_2"]


def readable(x: Tensor) -> bool:
    """Whether the rows of x [M, K] can be read as they are."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1
    return x.dtype == torch.bfloat16 and aligned and x.shape[1] % 16 == 0


def product(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    count: int,
    up: bool = False,
    choices: int = 1,
    ids: Tensor | None = None,
    lists: tuple[Tensor, Tensor] | None = None,
    shared: Weight | None = None,
    parts: int = 0,
    shape: Shape | None = None,
) -> None:
    """Rows of x, which are readable(), times one matrix, or with `ids` of one row or `lists` of moe.listed() those of a
    stack, of which `count` rows have chosen `choices` each; and times `parts` of the shared expert, see _product."""
    size, k = weight.shape[-2:]
    four = weight.format.name != "fp8"
    codes, scales, whole = stored(weight)
    shared_codes, shared_scales, shared_whole = stored(shared) if shared else (codes, scales, whole)
    order, offsets = lists or (None, None)
    total = weight.shape[0] if lists else choices if ids is not None else 1
    mean = count * choices / total if lists else 1 if ids is not None else count
    how = shape or chosen(mean, size, k, total, four)
    routed = lists is not None or ids is not None
    bands = how.warps // how.split
    grid = (
        triton.cdiv(size, 16 * how.tiles * bands),
        parts + total,
        max(1, round(mean / (8 * how.groups))) if mean > 8 * how.groups else 1,
    )
    _product[grid](
        x, codes, scales, whole, shared_codes, shared_scales, shared_whole, out, ids, order, offsets, count, size,
        x.stride(0), k, 4 if four else 8, choices, parts, up, not (routed and up),
        how.tiles, how.groups, how.split, 32 * how.warps, num_warps=how.warps, **OPTIONS,
    )  # fmt: skip


def chosen(mean: float, size: int, k: int, total: int, four: bool) -> Shape:
    """For `mean` rows of x for each of `total` matrices [size, k]."""
    tiles = size // 16 * total
    if mean <= 4:
        split = 8 if tiles < 256 else 4
        return Shape(1, 1, split, split)
    if tiles < 512:
        return Shape(1, min(4, -(-int(mean) // 8)), 8, 8)
    return Shape(2, 1 if mean <= 6 else 2 if mean <= 14 else 4, 1, 4)
