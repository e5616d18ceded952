"""From logits to one token per row, without a sort and without a word to the host.

Tokens are ordered by logit, the lower id first among equals; what top_k, top_p and min_p keep is always a beginning of
that order. So the Gumbel trick comes first and the filters after it: the best of all tokens, noise included, is the
best of the kept ones if it is kept itself, which one sum over the more likely tokens tells. If it is not, neither is
anything less likely, and the best of what is left is tried (with top_p 0.95 one row in twenty). top_k is found before,
by counting above several borders at once. A row is a small state machine; _pick and _weigh take turns, rows that are
done pass through, and the last launch finishes what is not. Sums are taken in a fixed order, so the same logits give
the same token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.triton.launch import INTERPRETED, OPTIONS, arrive, counters, release, wait

# Turns of _pick and _weigh, for few rows and for many; what is not done by then is done by one program, however long it
# takes. With top_p 0.95 that is one row in 8,000, or in 160,000.
_TURNS = (3, 4)
_PROGRAMS = 528
_TILE = 8192  # logits of a row for one program, at most
_BORDERS = 64  # of the search for top_k, in one turn
_LOWEST = tl.constexpr(-(2**63))
_PICK, _NARROW, _WEIGH, _DONE = (tl.constexpr(phase) for phase in range(4))


@triton.jit
def _key(value, ids):
    """The order of the tokens as int64: greater for a greater logit, then for a lower id."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # there are two zeros, which are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids)


@triton.jit
def _logit(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _id(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _log2(value):
    """To 22 bits, of what is neither zero nor subnormal: one instruction."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(value)


@triton.jit
def _score(value, word, rate):
    """z + Gumbel noise"""
    uniform = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return value * rate - tl.log(-tl.log(uniform))


@triton.jit
def _words(seed, position, quad):
    """The random words of four tokens, from one Philox call: [..., 4]"""
    zero = tl.zeros_like(quad)
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero, zero, 10)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (quad.shape[0], 4))


@triton.jit
def _best(
    line, first, end, V, out, heat, seed, position,
    ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the tokens first .. end - 1: the largest z + Gumbel noise above `out` (ALL: nothing is below it) and its key;
    the largest key of all; a key that the largest of each quarter reach.

    Two logarithms for each token would take most of the time. As -log u >= 1 - u, z - log(1 - u) is never less than
    z + noise, and hardly more where it is large. Only the token of each four lines of four columns for which it is
    largest is looked at closely; all are if one of the others could still be better.
    """
    line4, column = tl.arange(0, BLOCK // 4), tl.arange(0, 4)[None, :]
    slot = line4[:, None] * 4 + column
    lowest = float("-inf")
    bounds = tl.full((BLOCK // 4, 4), lowest, dtype=tl.float32)
    seconds, largest = bounds, bounds
    starts = tl.full((BLOCK // 4, 4), first, dtype=tl.int32)
    tops = starts
    rate = 1.0 / heat
    steep = rate * 1.4426950408889634
    for start in range(first, end, BLOCK):
        ids = start + slot
        value = tl.load(line + ids, mask=ids < V, other=lowest)
        tops = tl.where(value > largest, start, tops)
        largest = tl.maximum(largest, value)
        word = _words(seed, position, start // 4 + line4)
        # 1 - u: the 23 bits turned round, as the fraction of a number from 1 on
        rest = ((word >> 9) ^ 0x3FFFFFFF).to(tl.float32, bitcast=True) - 0.999999940395355224609375
        bound = value * steep - _log2(rest)
        if not ALL:
            bound = tl.where(_key(value, ids) > out, bound, lowest)
        seconds = tl.maximum(seconds, tl.minimum(bounds, bound))
        starts = tl.where(bound > bounds, start, starts)
        bounds = tl.maximum(bounds, bound)
    quarters = tl.max(largest, 0)
    top, ids = tl.max(quarters, 0), tops + slot
    ids = tl.min(tl.min(tl.where((largest == top) & (ids < V), ids, 0x7FFFFFFF), 1), 0)
    top, least = tl.where(ids < V, _key(top, ids), _LOWEST), _key(tl.min(quarters, 0), 0x7FFFFFFF)
    ids = starts + slot
    bound = tl.max(bounds, 1)
    chosen = tl.max(tl.where(bounds == bound[:, None], ids, -1), 1)
    other = tl.max(tl.max(tl.where(ids == chosen[:, None], seconds, bounds), 1), 0)
    inside = bound > lowest
    value = tl.load(line + chosen, mask=inside, other=lowest)
    word = tl.where(chosen[:, None] % 4 == column, _words(seed, position, chosen // 4), 0)
    score = _score(value, tl.sum(word, 1), rate)
    most = tl.max(score, 0)
    at = tl.max(tl.where(inside & (score == most), _key(value, chosen), _LOWEST), 0)
    bar = most * 1.4426950408889634
    if other > bar - (1e-4 + 1e-6 * tl.abs(bar)):
        most, at = _closely(line, first, end, V, out, rate, seed, position, BLOCK)
    return most, at, top, least


@triton.jit
def _closely(line, first, end, V, out, rate, seed, position, BLOCK: tl.constexpr):
    """The largest z + Gumbel noise above `out` and its key, with everything computed for all tokens."""
    line4, column = tl.arange(0, BLOCK // 4), tl.arange(0, 4)[None, :]
    scores = tl.full((BLOCK // 4, 4), float("-inf"), dtype=tl.float32)
    keys = tl.full((BLOCK // 4, 4), _LOWEST, dtype=tl.int64)
    for start in range(first, end, BLOCK):
        ids = start + line4[:, None] * 4 + column
        value = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        key = tl.where(ids < V, _key(value, ids), _LOWEST)
        score = _score(value, _words(seed, position, start // 4 + line4), rate)
        score = tl.where(key > out, score, float("-inf"))
        keys = tl.where(score > scores, key, keys)
        scores = tl.maximum(scores, score)
    most = tl.max(tl.max(scores, 1), 0)
    return most, tl.max(tl.max(tl.where(scores == most, keys, _LOWEST), 1), 0)


@triton.jit
def _masses(line, first, end, V, out, pivot, top, heat, BLOCK: tl.constexpr):
    """Sum of exp(z - largest z) over the tokens above `out`, and over those above `pivot`."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    above = tl.zeros((BLOCK,), dtype=tl.float32)
    rate = 1.4426950408889634 / heat
    for start in range(first, end, BLOCK):
        ids = start + at
        value = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        key = _key(value, ids)
        weight = tl.exp2((value - top) * rate)
        total += tl.where(key > out, weight, 0.0)
        above += tl.where(key > pivot, weight, 0.0)
    return tl.sum(total, 0), tl.sum(above, 0)


@triton.jit
def _bits(low, high, BORDERS: tl.constexpr):
    """The borders between two keys are 2^bits apart. (Their distance is a uint64: it may not fit otherwise.)"""
    distance = high.to(tl.uint64) - low.to(tl.uint64)
    needed = tl.floor(tl.log2(distance.to(tl.float32) / BORDERS)) + 1
    return tl.maximum(needed, 0.0).to(tl.int64)


@triton.jit
def _counts(line, first, end, V, low, high, BLOCK: tl.constexpr, BORDERS: tl.constexpr):
    """How many tokens are above each of the borders low, low + 2^bits, ...: int32 [BORDERS]."""
    at = tl.arange(0, BLOCK)
    bits = _bits(low, high, BORDERS).to(tl.uint64)
    between = tl.zeros((BORDERS,), dtype=tl.int32)
    for start in range(first, end, BLOCK):
        ids = start + at
        value = tl.load(line + ids, mask=ids < V, other=float("-inf"))
        key = _key(value, ids)
        above = (key.to(tl.uint64) - low.to(tl.uint64) - 1) >> bits
        border = tl.where(above < BORDERS, above, BORDERS - 1).to(tl.int32)
        between += tl.histogram(border, BORDERS, mask=(ids < V) & (key > low))
    return tl.cumsum(between, 0, reverse=True)


@triton.jit
def _narrowed(count, low, high, k, BORDERS: tl.constexpr):
    """(phase, low, high): more than k tokens above `low`, fewer above `high`; or k above `low`, and done."""
    i = tl.arange(0, BORDERS)
    step = tl.full((), 1, dtype=tl.int64) << _bits(low, high, BORDERS)
    last = tl.max(tl.where(count >= k, i, -1), 0)
    found = tl.sum(tl.where(i == last, count, 0), 0) == k
    phase = tl.where(found | (last < 0), _PICK, _NARROW)  # last < 0: fewer than k compete
    high = tl.where(last + 1 < BORDERS, tl.minimum(high, low + step * (last + 1)), high)
    return phase, low + step * tl.maximum(last, 0), high


@triton.jit
def _weighed(total, above, known, pivot, out, top, p):
    """(phase, out, mass of all that competed at first)"""
    total = tl.where(known < 0.0, total, known)
    kept = (pivot == top) | ((above >= p * total) == 0)
    return tl.where(kept, _DONE, _PICK), tl.where(kept, out, pivot), total


@triton.jit
def _pick(
    logits, temperature, top_k, top_p, min_p, seeds, positions, floats_stride, ints_stride,
    part_scores, part_keys, arrived, keys, phases, totals, ids, V,
    FIRST: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The best token above `out`; keys[row] = out, pivot (or the upper end of the search for top_k), largest key."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait()
    release()
    phase, out = _PICK, tl.full((), _LOWEST, dtype=tl.int64)
    if not FIRST:
        phase, out = tl.load(phases + row), tl.load(keys + row * 3)
    if phase == _PICK:
        heat = tl.load(temperature + row * floats_stride)
        greedy = heat < 1e-5
        heat = tl.where(greedy, 1.0, heat)
        seed, position = tl.load(seeds + row * ints_stride), tl.load(positions + row).to(tl.int32)
        line, first = logits + row * V, tile * TILE
        most, pivot, top, least = _best(line, first, first + TILE, V, out, heat, seed, position, FIRST, BLOCK)
        own = row * TILES + tile
        tl.store(part_scores + own, most)
        tl.store(part_keys + own * 3, pivot)
        tl.store(part_keys + own * 3 + 1, top)
        tl.store(part_keys + own * 3 + 2, least)
        if arrive(arrived + row, TILES):
            t = tl.arange(0, BLOCK_T)
            inside = t < TILES
            part = row * TILES + t
            score = tl.load(part_scores + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
            key = tl.load(part_keys + part * 3, mask=inside, other=_LOWEST, cache_modifier=".cg")
            pivot = tl.max(tl.where(score == tl.max(score, 0), key, _LOWEST), 0)
            top = tl.max(tl.load(part_keys + part * 3 + 1, mask=inside, other=_LOWEST, cache_modifier=".cg"), 0)
            pivot = tl.where(pivot == _LOWEST, top, pivot)  # everything is -inf
            phase = tl.where(tl.load(top_p + row * floats_stride) < 1.0, _WEIGH, _DONE)
            if FIRST:
                share, k = tl.load(min_p + row * floats_stride), tl.load(top_k + row * ints_stride)
                border = _logit(top) + heat * tl.log(tl.maximum(share, 1e-37))
                out = tl.where(share > 0.0, _key(border, 0x7FFFFFFF) - 1, out)
                phase = tl.where(pivot > out, phase, _PICK)
                if greedy:
                    pivot, phase = top, _DONE
                elif (k > 0) & (k < V):
                    pivot, phase = top, _NARROW
                    # as many quarters of tiles as k have a token that is no less than this one
                    least = tl.min(tl.load(part_keys + part * 3 + 2, mask=inside, other=top, cache_modifier=".cg"), 0)
                    out = tl.where((k <= 4 * TILES) & (least > _LOWEST), tl.maximum(out, least - 1), out)
                tl.store(keys + row * 3 + 2, top)
                tl.store(totals + row, -1.0)
            tl.store(keys + row * 3, out)
            tl.store(keys + row * 3 + 1, pivot)
            tl.store(phases + row, phase)
            tl.store(ids + row, _id(pivot))


@triton.jit
def _weigh(
    logits, temperature, top_k, top_p, seeds, positions, floats_stride, ints_stride,
    part_masses, part_counts, arrived, keys, phases, totals, ids, V,
    LAST: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
    BORDERS: tl.constexpr,
):  # fmt: skip
    """Whether the pivot is kept; or a step of the search for top_k. The LAST one also does what others left undone."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait()
    release()
    phase = tl.load(phases + row)
    if (phase < _DONE) & ((phase > _PICK) | LAST):
        out, pivot, top = tl.load(keys + row * 3), tl.load(keys + row * 3 + 1), tl.load(keys + row * 3 + 2)
        heat, largest = tl.load(temperature + row * floats_stride), _logit(top)
        line, first = logits + row * V, tile * TILE
        i, t = tl.arange(0, BORDERS), tl.arange(0, BLOCK_T)
        own = row * TILES + tile
        if phase == _WEIGH:
            total, above = _masses(line, first, first + TILE, V, out, pivot, largest, heat, BLOCK)
            tl.store(part_masses + own * 2, total)
            tl.store(part_masses + own * 2 + 1, above)
        if phase == _NARROW:
            tl.store(part_counts + own * BORDERS + i, _counts(line, first, first + TILE, V, out, pivot, BLOCK, BORDERS))
        if arrive(arrived + row, TILES):
            part = row * TILES + t
            inside = t < TILES
            known = tl.load(totals + row)
            k, p = tl.load(top_k + row * ints_stride), tl.load(top_p + row * floats_stride)
            if phase == _WEIGH:
                total = tl.sum(tl.load(part_masses + part * 2, mask=inside, other=0.0, cache_modifier=".cg"), 0)
                above = tl.sum(tl.load(part_masses + part * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg"), 0)
                phase, out, known = _weighed(total, above, known, pivot, out, top, p)
            elif phase == _NARROW:
                cells = part[:, None] * BORDERS + i[None, :]
                counts = tl.load(part_counts + cells, mask=inside[:, None], other=0, cache_modifier=".cg")
                phase, out, pivot = _narrowed(tl.sum(counts, 0), out, pivot, k, BORDERS)
            if LAST:
                seed, position = tl.load(seeds + row * ints_stride), tl.load(positions + row).to(tl.int32)
                while phase != _DONE:
                    if phase == _WEIGH:
                        total, above = _masses(line, 0, V, V, out, pivot, largest, heat, BLOCK)
                        phase, out, known = _weighed(total, above, known, pivot, out, top, p)
                    elif phase == _NARROW:
                        count = _counts(line, 0, V, V, out, pivot, BLOCK, BORDERS)
                        phase, out, pivot = _narrowed(count, out, pivot, k, BORDERS)
                    else:
                        pivot = _best(line, 0, V, V, out, heat, seed, position, False, BLOCK)[1]
                        pivot = tl.where(pivot == _LOWEST, top, pivot)
                        phase = tl.where(p < 1.0, _WEIGH, _DONE)
                tl.store(ids + row, _id(pivot))
            tl.store(keys + row * 3, out)
            tl.store(keys + row * 3 + 1, pivot)
            tl.store(totals + row, known)
            tl.store(phases + row, phase)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """See ops.sample."""
    logits, position = logits.contiguous(), position.contiguous()
    (count, vocabulary), device = logits.shape, logits.device
    ids = torch.empty(count, dtype=torch.int64, device=device)
    if not count:
        return ids
    floats, floats_stride = _aligned(temperature, top_p, min_p)
    ints, ints_stride = _aligned(top_k, seed)
    tile = _tile(count, vocabulary)
    tiles = triton.cdiv(vocabulary, tile)
    block_t, arrived = triton.next_power_of_2(tiles), counters(device, count)
    keys, part_keys = (torch.empty(count, n, dtype=torch.int64, device=device) for n in (3, 3 * tiles))
    phases, part_counts = (torch.empty(count, n, dtype=torch.int32, device=device) for n in (1, tiles * _BORDERS))
    totals, parts = (torch.empty(count, n, dtype=torch.float32, device=device) for n in (1, tiles * 2))
    (heat, p, least), (k, seeds) = floats, ints
    grid = (tiles, count)
    turns = _TURNS[count > 8]
    for turn in range(turns):
        _pick[grid](
            logits, heat, k, p, least, seeds, position, floats_stride, ints_stride,
            parts, part_keys, arrived, keys, phases, totals, ids, vocabulary,
            turn == 0, tile, tiles, min(tile, 1024), block_t, num_warps=4, **OPTIONS,
        )  # fmt: skip
        _weigh[grid](
            logits, heat, k, p, seeds, position, floats_stride, ints_stride,
            parts, part_counts, arrived, keys, phases, totals, ids, vocabulary,
            turn == turns - 1, tile, tiles, min(tile, 1024), block_t, _BORDERS, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return ids


def _tile(count: int, vocabulary: int) -> int:
    """Logits of a row for one program: a power of two, with enough programs for the device where there are few rows."""
    fair = triton.next_power_of_2(triton.cdiv(vocabulary * count, _PROGRAMS))
    return min(max(fair, 1024), _TILE, max(16, triton.next_power_of_2(vocabulary)))


def _aligned(*columns: Tensor) -> tuple[list[Tensor], int]:
    """The columns, and the stride that all of them have."""
    strides = {column.stride(0) for column in columns}
    return (list(columns), strides.pop()) if len(strides) == 1 else ([c.contiguous() for c in columns], 1)
