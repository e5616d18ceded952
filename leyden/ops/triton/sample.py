"""From logits to one token per row, without a sort and without a word to the host.

Kept tokens are always a prefix of the order by (logit, lower id): a smallest logit and how many of its ties. _peaks
finds the largest logit of each row. Each launch of _narrow_down cuts the interval in which the smallest kept logit lies
into 32 parts: first for top_k (by count), then for top_p (by mass), until only one value is left in it; rows without a
filter and rows that are done pass through. _pick draws by the Gumbel trick among what is kept. Sums are taken in a
fixed order, so the same logits give the same token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.triton.launch import OPTIONS, arrive, counters, release, wait

_TILE = 4096
_PIVOTS = 32
_PASSES = 8  # what is not found by then is searched for by one program, however long it takes
_ALL = tl.constexpr(2147483647)


@triton.jit
def _peaks(
    logits, temperature, top_k, top_p, min_p, parts, part_ids, arrived, floats, ints, out, V,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """floats[row] = largest logit, interval lo .. hi, target, count and mass above hi; ints[row] = phase, ties kept."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    wait()
    release()
    value = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    finite = tl.where(value == float("-inf"), float("inf"), value)
    tl.store(parts + (row * TILES + tile) * 2, tl.max(value, 0))
    tl.store(parts + (row * TILES + tile) * 2 + 1, tl.min(finite, 0))
    tl.store(part_ids + row * TILES + tile, tile * TILE + tl.argmax(value, 0))
    if arrive(arrived + row, TILES):
        t = tl.arange(0, BLOCK_T)
        here = parts + (row * TILES + t) * 2
        highest = tl.load(here, mask=t < TILES, other=float("-inf"), cache_modifier=".cg")
        least = tl.min(tl.load(here + 1, mask=t < TILES, other=float("inf"), cache_modifier=".cg"), 0)
        top = tl.max(highest, 0)
        best = tl.load(part_ids + row * TILES + tl.argmax(highest, 0), cache_modifier=".cg")
        tl.store(out + row, best.to(tl.int64))
        heat = tl.load(temperature + row)
        share = tl.load(min_p + row)
        lower = tl.where(share > 0.0, top + heat * tl.log(tl.maximum(share, 1e-37)), least)
        lower = tl.maximum(lower, least)
        by_count, by_mass = tl.load(top_k + row) > 0, tl.load(top_p + row) < 1.0
        tl.store(floats + row * 6, top)
        tl.store(floats + row * 6 + 1, lower)
        tl.store(floats + row * 6 + 2, top + tl.abs(top) * 4e-7 + 1e-30)
        tl.store(floats + row * 6 + 3, -1.0)  # mass to reach: not known yet
        tl.store(floats + row * 6 + 4, 0.0)
        tl.store(floats + row * 6 + 5, 0.0)
        phase = tl.where(heat < 1e-5, 2, tl.where(by_count, 0, tl.where(by_mass, 1, 2)))
        tl.store(ints + row * 2, phase)
        tl.store(ints + row * 2 + 1, _ALL)


@triton.jit
def _pivots(lo, hi, i, PIVOTS: tl.constexpr):
    """The i-th of the pivots: the same bits wherever it is computed, hence the explicit fused multiply-add."""
    return tl.fma(
        tl.zeros_like(i).to(tl.float32) + (hi - lo), i.to(tl.float32) / PIVOTS, tl.zeros_like(i).to(tl.float32) + lo
    )


@triton.jit
def _sweep(logits, first, end, V, lo, hi, top, heat, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Of the logits in pivot .. hi: count and mass for each pivot; the least and the greatest logit in lo .. hi."""
    at, i = tl.arange(0, BLOCK), tl.arange(0, PIVOTS)
    pivots = _pivots(lo, hi, i, PIVOTS)
    count = tl.zeros((BLOCK, PIVOTS), dtype=tl.float32)
    mass = tl.zeros((BLOCK, PIVOTS), dtype=tl.float32)
    least = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
    most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(first, end, BLOCK):
        value = tl.load(logits + start + at, mask=start + at < V, other=float("-inf"))
        inside = (value >= lo) & (value < hi)
        weight = tl.where(inside, tl.exp((value - top) / heat), 0.0)
        reached = inside[:, None] & (value[:, None] >= pivots[None, :])
        count += reached.to(tl.float32)
        mass += tl.where(reached, weight[:, None], 0.0)
        least = tl.minimum(least, tl.where(inside, value, float("inf")))
        most = tl.maximum(most, tl.where(inside, value, float("-inf")))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _decide(
    count, mass, least, most, lo, hi, target, n_above, m_above, phase, keep, top, heat, k, p, PIVOTS: tl.constexpr
):
    """The next interval, or the next phase."""
    i = tl.arange(0, PIVOTS)
    if (phase == 1) & (target < 0.0):
        target = p * tl.max(mass, 0)
    needed = tl.where(phase == 0, k.to(tl.float32) - n_above, target - m_above)
    reached = tl.where(phase == 0, count, mass) >= needed
    if (most <= least) | (tl.sum(reached.to(tl.int32), 0) == 0):
        # found (one value is left), or everything from lo on is less than what may be kept
        found = most <= least
        weight = tl.exp((least - top) / heat)
        if phase == 0:
            ties = tl.minimum(needed, tl.max(count, 0))
            target = tl.where(found, p * (m_above + ties * weight), p * tl.max(mass, 0))
            keep = tl.where(found, ties, 2147483520.0).to(tl.int32)
            lo = tl.where(found, least, lo)
            hi = top + tl.abs(top) * 4e-7 + 1e-30
            n_above = 0.0
            m_above = 0.0
            phase = tl.where(p < 1.0, 1, 2)
        else:
            ties = tl.where(found, tl.minimum(tl.maximum(tl.ceil(needed / weight), 1.0), 2147483520.0), 2147483520.0)
            same = found & (lo < least)
            # ties at the border of top_k were limited already
            keep = tl.where(same, ties.to(tl.int32), tl.minimum(keep, ties.to(tl.int32)))
            lo = tl.where(found, least, lo)
            phase = 2
    else:
        last = tl.max(tl.where(reached, i, 0), 0)
        following = last + 1
        n_above += tl.sum(tl.where(i == following, count, 0.0), 0)
        m_above += tl.sum(tl.where(i == following, mass, 0.0), 0)
        upper = _pivots(lo, hi, following, PIVOTS)
        lo = _pivots(lo, hi, last, PIVOTS)
        hi = tl.where(following < PIVOTS, upper, hi)
    return lo, hi, target, n_above, m_above, phase, keep


@triton.jit
def _narrow_down(
    logits, temperature, top_k, top_p, part_counts, part_masses, part_ends, arrived, floats, ints, V,
    LAST: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PIVOTS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    BLOCK: tl.constexpr = TILE if TILE < 128 else 128
    i, t = tl.arange(0, PIVOTS), tl.arange(0, BLOCK_T)
    wait()
    release()
    phase = tl.load(ints + row * 2)
    if phase < 2:
        top = tl.load(floats + row * 6)
        lo = tl.load(floats + row * 6 + 1)
        hi = tl.load(floats + row * 6 + 2)
        heat = tl.load(temperature + row)
        line = logits + row * V
        count, mass, least, most = _sweep(line, tile * TILE, tile * TILE + TILE, V, lo, hi, top, heat, BLOCK, PIVOTS)
        part = row * TILES + tile
        tl.store(part_counts + part * PIVOTS + i, count)
        tl.store(part_masses + part * PIVOTS + i, mass)
        tl.store(part_ends + part * 2, least)
        tl.store(part_ends + part * 2 + 1, most)
        if arrive(arrived + row, TILES):
            base = row * TILES + t
            cells = base[:, None] * PIVOTS + i[None, :]
            inside = (t < TILES)[:, None] & (i < PIVOTS)[None, :]
            count = tl.sum(tl.load(part_counts + cells, mask=inside, other=0.0, cache_modifier=".cg"), 0)
            mass = tl.sum(tl.load(part_masses + cells, mask=inside, other=0.0, cache_modifier=".cg"), 0)
            ends = part_ends + base * 2
            least = tl.min(tl.load(ends, mask=t < TILES, other=float("inf"), cache_modifier=".cg"), 0)
            most = tl.max(tl.load(ends + 1, mask=t < TILES, other=float("-inf"), cache_modifier=".cg"), 0)
            target = tl.load(floats + row * 6 + 3)
            n_above = tl.load(floats + row * 6 + 4)
            m_above = tl.load(floats + row * 6 + 5)
            keep = tl.load(ints + row * 2 + 1)
            k, p = tl.load(top_k + row), tl.load(top_p + row)
            lo, hi, target, n_above, m_above, phase, keep = _decide(
                count, mass, least, most, lo, hi, target, n_above, m_above, phase, keep, top, heat, k, p, PIVOTS
            )
            if LAST:
                while phase < 2:
                    count, mass, least, most = _sweep(line, 0, V, V, lo, hi, top, heat, BLOCK, PIVOTS)
                    lo, hi, target, n_above, m_above, phase, keep = _decide(
                        count, mass, least, most, lo, hi, target, n_above, m_above, phase, keep, top, heat, k, p, PIVOTS
                    )
            tl.store(floats + row * 6 + 1, lo)
            tl.store(floats + row * 6 + 2, hi)
            tl.store(floats + row * 6 + 3, target)
            tl.store(floats + row * 6 + 4, n_above)
            tl.store(floats + row * 6 + 5, m_above)
            tl.store(ints + row * 2, phase)
            tl.store(ints + row * 2 + 1, keep)


@triton.jit
def _drawn(line, tile, V, lo, heat, seed, position, TILE: tl.constexpr):
    """(logits, z + Gumbel noise, ids) of a tile, [TILE / 4, 4]: one Philox call gives the noise of four tokens."""
    four = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    column = tl.arange(0, 4)[None, :]
    ids = four[:, None] * 4 + column
    value = tl.load(line + ids, mask=ids < V, other=float("-inf"))
    zero = tl.zeros_like(four)
    w0, w1, w2, w3 = tl.philox(seed, four, zero + position, zero, zero, 10)
    low = tl.where(column == 0, w0[:, None], w1[:, None])
    high = tl.where(column == 2, w2[:, None], w3[:, None])
    word = tl.where(column < 2, low, high)
    uniform = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return value, value / heat - tl.log(-tl.log(uniform)), ids


@triton.jit
def _best(score, ids):
    """(largest score, the lowest id that has it)"""
    most = tl.max(tl.max(score, 1), 0)
    at = tl.min(tl.min(tl.where(score == most, ids, _ALL), 1), 0)
    return most, at


@triton.jit
def _joined(
    line, scores, places, V, lo, keep, heat, seed, position,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The token, from every tile's best above the border, its best tie and its number of ties."""
    t = tl.arange(0, BLOCK_T)
    inside = t < TILES
    scores, places = scores + t * 2, places + t * 3
    most = tl.load(scores, mask=inside, other=float("-inf"), cache_modifier=".cg")
    at = tl.load(places, mask=inside, other=_ALL, cache_modifier=".cg")
    ties = tl.load(places + 2, mask=inside, other=0, cache_modifier=".cg")
    before = tl.cumsum(ties, 0) - ties
    tie_most = tl.load(scores + 1, mask=inside, other=float("-inf"), cache_modifier=".cg")
    tie_at = tl.load(places + 1, mask=inside, other=_ALL, cache_modifier=".cg")
    tie_most = tl.where(before + ties <= keep, tie_most, float("-inf"))
    best = tl.maximum(tl.max(most, 0), tl.max(tie_most, 0))
    token = tl.minimum(tl.min(tl.where(most == best, at, _ALL), 0), tl.min(tl.where(tie_most == best, tie_at, _ALL), 0))
    cut = (before < keep) & (before + ties > keep)
    if tl.sum(cut.to(tl.int32), 0) > 0:  # one tile's ties are kept in part
        border = tl.sum(tl.where(cut, t, 0), 0)
        left = keep - tl.sum(tl.where(cut, before, 0), 0)
        value, score, ids = _drawn(line, border, V, lo, heat, seed, position, TILE)
        ones = (value == lo).to(tl.int32)
        each = tl.sum(ones, 1)
        place = (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(ones, 1)  # 1 for the first tie
        more, more_at = _best(tl.where((ones > 0) & (place <= left), score, float("-inf")), ids)
        token = tl.where(more > best, more_at, token)
    return token


@triton.jit
def _pick(
    logits, temperature, seeds, positions, part_scores, part_ids, arrived, floats, ints, out, V,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Best token above the smallest kept logit, or the best of its first `keep` ties."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait()
    release()
    heat = tl.load(temperature + row)
    if heat >= 1e-5:
        lo, keep = tl.load(floats + row * 6 + 1), tl.load(ints + row * 2 + 1)
        seed, position = tl.load(seeds + row), tl.load(positions + row).to(tl.int32)
        line = logits + row * V
        value, score, ids = _drawn(line, tile, V, lo, heat, seed, position, TILE)
        most, at = _best(tl.where(value > lo, score, float("-inf")), ids)
        tied = value == lo
        tie_most, tie_at = _best(tl.where(tied, score, float("-inf")), ids)
        base = (row * TILES + tile) * 2
        tl.store(part_scores + base, most)
        tl.store(part_scores + base + 1, tie_most)
        store = part_ids + (row * TILES + tile) * 3
        tl.store(store, at)
        tl.store(store + 1, tie_at)
        tl.store(store + 2, tl.sum(tl.sum(tied.to(tl.int32), 1), 0))
        if arrive(arrived + row, TILES):
            scores, places = part_scores + row * TILES * 2, part_ids + row * TILES * 3
            token = _joined(line, scores, places, V, lo, keep, heat, seed, position, TILE, TILES, BLOCK_T)
            tl.store(out + row, token.to(tl.int64))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """See ops.sample."""
    logits = logits.contiguous()
    (count, vocabulary), device = logits.shape, logits.device
    out = torch.empty(count, dtype=torch.int64, device=device)
    if not count:
        return out
    tile = min(_TILE, max(16, triton.next_power_of_2(vocabulary)))
    tiles = triton.cdiv(vocabulary, tile)
    block_t = triton.next_power_of_2(tiles)
    arrived = counters(device, count)
    floats = torch.empty(count, 6, dtype=torch.float32, device=device)
    ints = torch.empty(count, 2, dtype=torch.int32, device=device)
    ends = torch.empty(count, tiles, 2, dtype=torch.float32, device=device)
    places = torch.empty(count, tiles, 3, dtype=torch.int32, device=device)
    sums = torch.empty(2, count, tiles, _PIVOTS, dtype=torch.float32, device=device)
    temperature, top_k, top_p, min_p, seed, position = (
        t.contiguous() for t in (temperature, top_k, top_p, min_p, seed, position)
    )
    grid = (tiles, count)
    _peaks[grid](
        logits, temperature, top_k, top_p, min_p, ends, places, arrived, floats, ints, out, vocabulary,
        tile, tiles, block_t, num_warps=4, **OPTIONS,
    )  # fmt: skip
    for number in range(_PASSES):
        _narrow_down[grid](
            logits, temperature, top_k, top_p, sums[0], sums[1], ends, arrived, floats, ints, vocabulary,
            number == _PASSES - 1, tile, tiles, _PIVOTS, block_t, num_warps=4, **OPTIONS,
        )  # fmt: skip
    _pick[grid](
        logits, temperature, seed, position, ends, places, arrived, floats, ints, out, vocabulary,
        tile, tiles, block_t, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return out
