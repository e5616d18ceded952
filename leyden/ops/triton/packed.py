"""Products of a few rows with matrices of 4- or 8-bit floats, decoded in registers on their way to the tensor cores.

A warp takes TILES tiles of 16 rows of the matrix, 64 columns at a time, and reads each of them once for eight times
GROUPS rows of x; those of the next DEPTH steps are always on their way. SPLIT warps share the columns and add up what
they have; the other warps of a program have other rows of the matrix and, with luck, find the rows of x where the first
one left them.

Rows of x are bfloat16 and 16-byte aligned, their length a multiple of 16. Codes of 4 bits are formats/nvfp4.Tiled,
those of 8 bits lie as the checkpoint has them.
"""

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.triton.fragments import eight, four, mma, values, weights
from leyden.ops.triton.launch import (
    MULTIPROCESSORS,
    OPTIONS,
    ahead,
    arrive,
    counters,
    prefetch,
    prefetch_share,
    release,
    shares,
    wait,
)
from leyden.ops.triton.moe import leads

WARPS = 1800  # at least, to keep the memory of an H200 busy; 2.3 times as many are there at once
DEPTH = 3  # where eight rows are all


@triton.jit
def _places(
    codes, scales, first, part, g, t, N, chunks,
    K: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr, BANDS: tl.constexpr,
):  # fmt: skip
    """Where the first of a thread's words are in each of the warp's TILES, which are BANDS apart, and whether any."""
    made = ()  # type: tuple[object, ...]
    for i in tl.static_range(TILES):
        row = first + i * BANDS
        inside = row * 16 < N
        if BITS == 4:
            at = row * chunks + part
            made = made + (codes + at * 128 + (g * 16 + t * 4), scales + at * 16 + (g * 2 + t // 2), inside)
        else:
            n, at = row * 16 + g, part * 16 + t * 4
            upper, lower = tl.minimum(n, N - 1).to(tl.int64), tl.minimum(n + 8, N - 1).to(tl.int64)
            made = made + (codes + upper * (K // 4) + at, codes + lower * (K // 4) + at, inside)
    return made


@triton.jit
def _tiles(places, step, some, BITS: tl.constexpr, TILES: tl.constexpr):
    """`step` tiles further: the words of rows g and g + 8 of each, and four scales or nothing."""
    words = ()  # type: tuple[object, ...]
    for i in tl.static_range(TILES):
        inside = places[3 * i + 2] & some
        words = words + weights(places[3 * i] + step * (128 if BITS == 4 else 16), inside, False)
        if BITS == 4:  # a scale of zero under codes that mean nothing
            words = words + (tl.load(places[3 * i + 1] + step * 16, mask=inside, other=0),)
        else:
            words = words + weights(places[3 * i + 1] + step * 16, inside, False)
    return words


@triton.jit
def _first_tiles(
    places, part, own_k, some,
    K: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The words of the DEPTH steps from the first on."""
    words = ()  # type: tuple[object, ...]
    for i in tl.static_range(DEPTH):
        inside = some & (own_k + (part + i * SPLIT) * 64 < K)
        words = words + _tiles(places, i * SPLIT, inside, BITS, TILES)
    return words


@triton.jit
def _ask(
    codes, scales, first, chunks, asks, lane, N,
    K: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr, BANDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """prefetch() of the first 64 times AHEAD columns of a warp's tiles, by its first threads."""
    for i in tl.static_range(TILES if AHEAD > 0 else 0):
        row = first + i * BANDS
        if BITS == 4:
            asking = asks & (lane == 0) & (row * 16 < N)
            prefetch(codes + row * chunks * 128, AHEAD * 512, asking)
            prefetch(scales + row * chunks * 16, AHEAD * 64, asking)
        elif AHEAD * 64 >= K:
            prefetch(codes + row.to(tl.int64) * (K * 4), tl.minimum(16, N - row * 16) * K, asks & (lane == 0))
        else:
            n = row * 16 + lane
            prefetch(codes + n.to(tl.int64) * (K // 4), AHEAD * 64, asks & (lane < 16) & (n < N))


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
        made = ()  # type: tuple[object, ...]
        for i in tl.static_range(4):
            a = eight(words[FIRST + i])
            b = eight(words[FIRST + 4 + i])
            made = made + (a[0], b[0], a[1], b[1])
        return made


@triton.jit
def _choice(ids, row, choice, expert, CHOICES: tl.constexpr, LONE: tl.constexpr):
    """Which of the choices of all rows is that of `expert` by each `row`, or -1. LONE: it is `choice`."""
    found = row * 0 + (choice if LONE else -1)
    for c in tl.static_range(0 if LONE else CHOICES):
        at = row * CHOICES + c
        found = tl.where(tl.load(ids + at) == expert, at, found)
    return found


@triton.jit(do_not_specialize=["M"])
def _product(
    x, codes, scales, whole, shared_codes, shared_scales, shared_whole, out, ids, order, offsets,
    scores, joined, arrived, later_codes, later_scales, later_bytes, to,
    M, N, x_stride, to_stride,
    K: tl.constexpr, BITS: tl.constexpr, CHOICES: tl.constexpr, PARTS: tl.constexpr, UP: tl.constexpr,
    EARLY: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr, THREADS: tl.constexpr,
    DEPTH: tl.constexpr, AHEAD: tl.constexpr, LATER: tl.constexpr, LONE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """out[i, n] = sum_k x[i, k] W[n, k]; with UP relu(.)^2.

    Without ids and offsets one matrix and M rows. Else the second dimension of the grid counts matrices. First PARTS of
    a shared expert, each as large as a routed one, for M rows: rows of its up_proj, columns of its down_proj. Then, if
    there are `offsets`, those of a stack, each with its rows on the list `order`: UP reads row order[i] // CHOICES and
    writes row i; otherwise row i is read and row order[i] written. If there are `ids` [M, CHOICES] instead, for few
    rows, there is one matrix for each choice: the first choice of an expert takes all rows, as many as the tensor cores
    do at once in any case, and those are written that have chosen it. LONE: there is one row. Between the products the
    rows of the parts lie after those of the choices.

    EARLY: all that says which matrix it is was written two kernels ago or earlier. AHEAD: see _ask. LATER: bytes of
    codes that a warp asks for of what the next kernel reads of the shared expert.

    With `to` [M, N] what is written is the sum with that. With `scores` [M, CHOICES], where not UP, the last program of
    some columns adds up what a row's choices and the shared expert gave, into `joined` [M, N].
    """
    CHUNKS: tl.constexpr = (K + 63) // 64
    STEPS: tl.constexpr = (CHUNKS + SPLIT - 1) // SPLIT
    BANDS: tl.constexpr = THREADS // 32 // SPLIT
    EACH: tl.constexpr = 5 if BITS == 4 else 8  # words of a tile
    STEP: tl.constexpr = TILES * EACH  # and of a step
    APART: tl.constexpr = 32 if BITS == 4 else 8
    EVEN: tl.constexpr = K % (64 * SPLIT) == 0
    thread = tl.arange(0, THREADS)
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    part, own = warp % SPLIT, tl.program_id(0) * (TILES * BANDS) + warp // SPLIT
    item, asks = tl.program_id(1), warp % SPLIT == 0
    if not EARLY:
        if PARTS > 0:
            there = item * (N // 16 * CHUNKS)
            _ask(
                shared_codes + there * 128, shared_scales + there * 16, own, CHUNKS, asks & (item < PARTS),
                thread % 32, N, K, BITS, TILES, BANDS, AHEAD,
            )  # fmt: skip
            asks = asks & (item >= PARTS)
        if LATER > 0:
            program = item * tl.num_programs(0) + tl.program_id(0)
            prefetch_share(later_codes, later_bytes, program, LATER, THREADS)
            prefetch_share(later_scales, later_bytes // 8, program, LATER // 8, THREADS)
        wait()
        release()
    first, end, base = 0, M, 0
    chunks = CHUNKS
    if PARTS > 0 or ids is not None or offsets is not None:
        routed = item >= PARTS
        expert = item - PARTS
        if offsets is not None:
            first = tl.load(offsets + expert, mask=routed, other=0)
            end = tl.load(offsets + expert + 1, mask=routed, other=M)
        else:
            choice = tl.maximum(expert, 0)
            expert = tl.load(ids + choice).to(tl.int32)
            if not LONE:
                end = tl.where(leads(ids, choice, expert, BLOCK_P) | (item < PARTS), M, 0)
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
    places = _places(codes, scales, own, part, g, t, N, chunks, K, BITS, TILES, BANDS)
    own_k = t * 8 if BITS == 4 else t * 16  # of 64 columns; the second half of a thread's is APART from the first
    words = _first_tiles(places, part, own_k, first < end, K, BITS, TILES, SPLIT, DEPTH)
    _ask(codes, scales, own, chunks, asks & (first < end), thread % 32, N, K, BITS, TILES, BANDS, AHEAD)
    factor = tl.load(whole)  # used at the very end: nobody is to wait for it before
    if EARLY:
        wait()
        release()
    for block in range(first, end, stride):
        sources = ()  # type: tuple[object, ...]
        for j in tl.static_range(GROUPS):
            at = tl.minimum(block + j * 8 + g, end - 1)  # beyond the last row that one again
            row = at
            if UP:
                if order is not None:
                    row = tl.load(order + at, mask=routed, other=0)
                    row = tl.where(routed, row // CHOICES, at)
            elif ids is not None:
                row = tl.where(routed, tl.maximum(_choice(ids, at, choice, expert, CHOICES, LONE), 0), at)
            sources = sources + (x + (row if UP else row + base).to(tl.int64) * x_stride + (own_k + part * 64),)
        sums = ()  # type: tuple[object, ...]
        for _ in tl.static_range(TILES * GROUPS * 4):
            sums = sums + (tl.zeros((THREADS,), dtype=tl.float32),)
        for i in tl.range(STEPS, loop_unroll_factor=max(2, DEPTH)):
            some = (i + DEPTH < STEPS) & (own_k + (part + (i + DEPTH) * SPLIT) * 64 < K)
            following = _tiles(places, (i + DEPTH) * SPLIT, some, BITS, TILES)
            column = i * (SPLIT * 64)
            inside = own_k + part * 64 + column < K
            v = ()  # type: tuple[object, ...]
            for j in tl.static_range(GROUPS):
                source = (sources[j] + column).to(tl.pointer_type(tl.int32), bitcast=True)
                v = v + values(source, inside, EVEN) + values(source + APART // 2, inside, EVEN)
            made = ()  # type: tuple[object, ...]
            for r in tl.static_range(TILES):
                a = _fragments(words, r * EACH, BITS)
                for j in tl.static_range(GROUPS):
                    c = (
                        sums[(r * GROUPS + j) * 4], sums[(r * GROUPS + j) * 4 + 1],
                        sums[(r * GROUPS + j) * 4 + 2], sums[(r * GROUPS + j) * 4 + 3],
                    )  # fmt: skip
                    for s in tl.static_range(4):
                        c = mma(
                            c[0], c[1], c[2], c[3], a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3],
                            v[j * 8 + 2 * s], v[j * 8 + 2 * s + 1],
                        )  # fmt: skip
                    made = made + c
            sums = made
            words = words[STEP:] + following
        m, q = tl.arange(0, 8), tl.arange(0, 16 * BANDS)
        scale = factor * (128.0 if BITS == 4 else 1.0)
        for j in tl.static_range(GROUPS):
            at = block + j * 8 + m
            target = at
            if order is not None and not UP:
                target = tl.load(order + at, mask=(at < end) & routed, other=0)
                if PARTS > 0:
                    target = tl.where(routed, target, at)
            kept = at < end
            if ids is not None:
                target = tl.where(routed, _choice(ids, tl.minimum(at, M - 1), choice, expert, CHOICES, LONE), at)
                kept = kept & (target >= 0)
            target = (target + base).to(tl.int64)
            for r in tl.static_range(TILES):
                both = tl.join(
                    tl.join(sums[(r * GROUPS + j) * 4], sums[(r * GROUPS + j) * 4 + 1]),
                    tl.join(sums[(r * GROUPS + j) * 4 + 2], sums[(r * GROUPS + j) * 4 + 3]),
                )
                both = tl.sum(tl.reshape(both, (BANDS, SPLIT, 8, 4, 2, 2)), 1)  # bands, g, t, even or odd, half
                total = tl.reshape(tl.permute(both, (2, 3, 0, 4, 1)), (8, 16 * BANDS)) * scale
                if UP:
                    total = tl.maximum(total.to(out.dtype.element_ty).to(tl.float32), 0.0)
                    total *= total
                n = (tl.program_id(0) * TILES + r) * (16 * BANDS) + q
                written = kept[:, None] & (n < N)[None, :]
                if to is not None:
                    more = tl.load(to + target[:, None] * to_stride + n[None, :], mask=written, other=0.0)
                    total += more.to(tl.float32)
                tl.store(out + target[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=written)
        words = _first_tiles(places, part, own_k, block + stride < end, K, BITS, TILES, SPLIT, DEPTH)
    if scores is not None:  # noqa: SIM102 - decided when the kernel is compiled
        if arrive(arrived + tl.program_id(0), tl.num_programs(1) * tl.num_programs(2)):
            n = tl.program_id(0) * (16 * TILES * BANDS) + tl.arange(0, 16 * TILES * BANDS)
            _join(out, scores, joined, n, M, N, CHOICES, PARTS)


@triton.jit
def _join(done, scores, joined, n, M, N, CHOICES: tl.constexpr, PARTS: tl.constexpr):
    """moe._combine for some columns and all rows, of what other programs have just written."""
    m = tl.arange(0, 8)
    for first in range(0, M, 8):
        row = first + m
        inside = (row < M)[:, None] & (n < N)[None, :]
        total = tl.zeros((8, n.shape[0]), dtype=tl.float32)
        for choice in tl.static_range(CHOICES):
            at = row * CHOICES + choice
            score = tl.load(scores + at, mask=row < M, other=0.0)
            value = tl.load(done + at[:, None] * N + n[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            total += score[:, None] * value.to(tl.float32)
        for part in tl.static_range(PARTS):
            at = M * CHOICES + part * M + row
            value = tl.load(done + at[:, None] * N + n[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            total += value.to(tl.float32)
        tl.store(joined + row[:, None] * N + n[None, :], total.to(joined.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Shape:
    """How the work is cut; see the top of the file. `split` divides `warps`."""

    tiles: int
    groups: int
    split: int
    warps: int
    depth: int = 1


def stored(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor]:
    """(words, scales of four blocks, scale of the matrix or of each of a stack)"""
    parts = weight.parts
    if weight.format.name == "fp8":
        return parts["weight"].view(torch.int32), None, parts["weight_scale"]
    return parts["weight"], parts["weight_scale"].view(torch.int32), parts["weight_scale_2"]


def aligned(x: Tensor) -> Tensor:
    """x [M, K], with rows that can be read."""
    return x if x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) == 1 else x.contiguous()


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
    scores: Tensor | None = None,
    joined: Tensor | None = None,
    shape: Shape | None = None,
    later: Weight | None = None,
    to: Tensor | None = None,
) -> None:
    """Rows of x, bfloat16 and aligned(), times one matrix, or with `ids` of few rows or `lists` of moe.listed() those
    of a stack, of which `count` rows have chosen `choices` each; and times `parts` of the shared expert. The sums over
    a row's choices with its `scores` [count, choices] go to `joined`, if that is wanted. `later`: the shared expert's
    matrix for the next product, to be asked for. `to`: what is added to the product with one matrix. See _product."""
    size, k = weight.shape[-2:]
    bits = 8 if weight.format.name == "fp8" else 4
    codes, scales, whole = stored(weight)
    shared_codes, shared_scales, shared_whole = stored(shared) if shared else (codes, scales, whole)
    order, offsets = lists or (None, None)
    routed = lists is not None or ids is not None
    total = weight.shape[0] if lists else count * choices if ids is not None else 1
    rows: float = count
    if routed and count > 1:
        mean = max(1, count * choices / weight.shape[0])
        rows = mean + 1.5 * mean**0.5  # some matrices of a stack have more than others
    how = shape or chosen(rows, size, k, min(total, weight.shape[0]) + parts if routed else 1, bits)
    bands = how.warps // how.split
    grid = (
        triton.cdiv(size, 16 * how.tiles * bands),
        parts + total,
        max(1, round(rows / (8 * how.groups))),
    )
    arrived = counters(x.device, grid[0]) if joined is not None else None
    asked = asked_later = later_bytes = 0
    if count == 1:
        # what a program reads of 64 columns: codes and, with 4 bits, scales
        each, programs = how.tiles * bands * (576 if bits == 4 else 1024), prod(grid)
        asked = ahead(triton.cdiv(k, 64) * each, programs, how.warps) // each
        if later:
            later_bytes = prod(later.shape) // 2
            asked_later = shares(later_bytes, min(programs, 4 * MULTIPROCESSORS), how.warps)
    later_codes, later_scales, _ = stored(later) if later else (None, None, None)
    _product[grid](
        x, codes, scales, whole, shared_codes, shared_scales, shared_whole, out, ids, order, offsets,
        scores, joined, arrived, later_codes, later_scales, later_bytes, to,
        count, size, x.stride(0), to.stride(0) if to is not None else 0,
        k, bits, choices, parts, up, not (routed and up),
        how.tiles, how.groups, how.split, 32 * how.warps, how.depth, asked, asked_later,
        count == 1, triton.next_power_of_2(count * choices) if ids is not None else 1,
        num_warps=how.warps, **OPTIONS,
    )  # fmt: skip


def chosen(rows: float, size: int, k: int, matrices: int, bits: int) -> Shape:
    """For `rows` of x for each of `matrices` [size, k] that are read: enough warps for every multiprocessor, and two
    tiles for each, which share the rows of x, where issuing instructions is what takes time. Programs that are all
    there at once need not be as many as those that take turns."""
    groups = min(4, -(-int(rows) // 8))
    work = size / 16 * matrices * max(1, rows / (8 * groups))
    depth = max(1, DEPTH + 1 - groups)  # registers hold no more
    for tiles in (2, 1) if bits == 4 and groups > 1 else (1,):
        for split in (1, 2, 4, 8):
            warps = work / tiles * split
            if split * 128 <= k and (WARPS <= warps <= 2.3 * WARPS or warps >= 3.2 * WARPS):
                return Shape(tiles, groups, split, max(4, split), depth)
    return Shape(1, groups, 8, 8, depth)
