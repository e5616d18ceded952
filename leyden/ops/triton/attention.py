"""Grouped-query attention over KV pages: split-KV for rows of few tokens, query tiles for longer rows.

All query heads of a KV head share a tile, so keys and values are read once per KV head. Softmax in base 2, fp32. Of a
cache of 8-bit floats k_scale is a factor of the scores and v_scale one of the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.rows import Rows
from leyden.ops.triton.launch import INTERPRETED, MULTIPROCESSORS, OPTIONS, PDL, ROOMY, ahead, prefetch, release, wait

_LOG2E = 1.4426950408889634
_FEW = 8  # tokens of a row whose queries are one tile
SPLITS = 64  # programs that share the keys of a row, at most
# Keys of a tile, stages (two for a tile that is on its way: its pages come first) and warps of _decode: where programs
# share a row; where one has a multiprocessor to itself; where several take turns.
CUT, CUT_OF_MANY, CUT_OF_MOST = (128, 5, 4), (64, 5, 8), (64, 3, 4)
_EMPTY = tl.constexpr(-1)  # bits of a number that no kernel writes into a cell
_CELLS = 1 << 22
_cells: dict[torch.device, Tensor] = {}


@triton.jit
def _kv_write(
    k, v, cache, starts, past, pages, R, k_stride, v_stride, half, pages_stride, k_scale, v_scale,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One token. MOST: largest number of a cache of 8-bit floats, 0 for others."""
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    r = tl.arange(0, BLOCK_R)
    ends = tl.load(starts + 1 + r, mask=r < R, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32))
    position = token - tl.load(starts + row) + tl.load(past + row)
    page = tl.load(pages + row.to(tl.int64) * pages_stride + position // PAGE).to(tl.int64)
    cell = (page * PAGE + position % PAGE) * WIDTH + at
    wait()
    release()
    key = tl.load(k + token.to(tl.int64) * k_stride + at, mask=inside, other=0.0)
    tl.store(cache + cell, narrowed(key, k_scale, cache.dtype.element_ty, MOST), mask=inside)
    value = tl.load(v + token.to(tl.int64) * v_stride + at, mask=inside, other=0.0)
    tl.store(cache + half + cell, narrowed(value, v_scale, cache.dtype.element_ty, MOST), mask=inside)


@triton.jit
def narrowed(value, scale, dtype: tl.constexpr, MOST: tl.constexpr):
    if MOST > 0.0:
        value = tl.minimum(tl.maximum(value.to(tl.float32) / scale, 0.0 - MOST), MOST)
    return value.to(dtype)


@triton.jit
def _seen(pointers, in_s, in_d, MASKED: tl.constexpr):
    """Keys or values [keys, dim]; a mask costs, so it is there only where something is left out."""
    if MASKED:
        return tl.load(pointers, mask=in_s[:, None] & in_d[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _more(q, acc, most, total, key, value, visible, scale, MASKED: tl.constexpr):
    """Online softmax takes some more keys and values in. `most` is the largest product of a query before scaling."""
    scores = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision="ieee")
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    # a row that has seen no key yet keeps -inf: subtract 0 then, so that no NaN arises
    pivot = tl.where(higher == float("-inf"), 0.0, higher) * scale
    p = tl.exp2(scores * scale - pivot[:, None])
    shrink = tl.exp2(most * scale - pivot)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), value.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit
def _attend(
    q, acc, most, total, cache, pages, half, first, end, after, limit, scale,
    KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, head, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A sweep over the keys first .. end - 1. MASKED: query row i sees those above after[i] and up to limit[i];
    otherwise all, and end - first is a multiple of BLOCK_S."""
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    for start in tl.range(first, end, BLOCK_S, num_stages=STAGES):
        at = start + s
        if MASKED:
            page = tl.load(pages + at // PAGE, mask=at < end, other=0).to(tl.int64)
        else:
            page = tl.load(pages + at // PAGE).to(tl.int64)
        cell = ((page * PAGE + at % PAGE) * KV + head)[:, None] * D + d[None, :]
        key = _seen(cache + cell, at < end, d < D, MASKED or D < BLOCK_D)
        value = _seen(cache + half + cell, at < end, d < D, MASKED or D < BLOCK_D)
        visible = (at[None, :] <= limit[:, None]) & (at[None, :] > after[:, None]) & (at < end)[None, :]
        acc, most, total = _more(q, acc, most, total, key, value, visible, scale, MASKED)
    return acc, most, total


@triton.jit
def _loaded(x):
    """x, by an instruction without instructions. Triton puts an operand into shared memory as soon as it is loaded, and
    asks for what comes next only then; loads before this are on their way together."""
    if not INTERPRETED:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    return x


@triton.jit
def _decode(
    q, cache, starts, past, pages, out, cells, q_stride, half, pages_stride, scale, v_scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
    JOINED: tl.constexpr, COPIES: tl.constexpr, ASKED: tl.constexpr, THREADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of up to TOKENS tokens, whose queries are one tile. SPLITS programs share the keys of a row, as many as find
    some; then all of them share its queries, and each joins the parts of its own, in the order of the keys.

    Parts go through `cells`, which are _EMPTY but for those with a number that was written and not yet read. A cell has
    one writer, and one reader, which looks at it until a number is there and empties it: neither has to know what other
    cells hold, so nothing needs an order, and numbers travel as fast as memory lets them. It takes that all programs of
    a row run at the same time, so where there is something to join the launch has no more programs than the device has
    multiprocessors. (Two of them may find no room on one that was set up with less shared memory for another kernel.)
    Kernels before this one may hold multiprocessors; they end without it. Kernels after it may not: they begin when
    every program of this one has called release(), which is when all are there.

    Before it waits a program reads the keys and values that are older than this step, and asks for what it will read
    later of up to ASKED pages of a row's share."""
    SHARE: tl.constexpr = HEADS // KV
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    m, d, s = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    before = tl.load(past + row)
    first, count = row, 1
    if TOKENS > 1:
        first = tl.load(starts + row).to(tl.int64)
        count = tl.load(starts + row + 1) - first.to(tl.int32)
    token, query = m // SHARE, head * SHARE + m % SHARE
    in_q, in_d = (token < count)[:, None] & (d < D)[None, :], (d < D)[None, :]
    length = before + count
    each = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), 16) * 16, BLOCK_S)
    active = tl.cdiv(length, each)
    parts = active if SPLITS > 1 else 1  # known to the compiler
    begin, end = split * each, tl.minimum(length, (split + 1) * each)
    table, at = pages + row * pages_stride, begin + s
    page = tl.load(table + at // PAGE, mask=at < end, other=0).to(tl.int64)
    keys = cache + ((page * (PAGE * KV * D))[:, None] + ((at % PAGE * KV + head)[:, None] * D + d[None, :]))
    old = (at < tl.minimum(before, end))[:, None] & in_d
    key, value = tl.load(keys, mask=old, other=0.0), tl.load(keys + half, mask=old, other=0.0)
    if ASKED:
        i = tl.arange(0, THREADS)
        later = (begin + BLOCK_S) // PAGE + i // 2
        asks = (i < 2 * ASKED) & (i % KV == head) & (later * PAGE < end)
        size: tl.constexpr = PAGE * KV * D
        asked = cache + i % 2 * half + tl.load(table + later, mask=asks, other=0).to(tl.int64) * size
        prefetch(asked, size * cache.dtype.element_ty.primitive_bitwidth // 8, asks)
    base = cells + (row * KV + head) * SPLITS * (BLOCK_M * (BLOCK_D + COPIES))
    wait()
    release()
    if split < active:
        tile = tl.load(q + (first + token)[:, None] * q_stride + query[:, None] * D + d[None, :], mask=in_q, other=0.0)
        new = ((at >= before) & (at < end))[:, None] & in_d
        key, value = tl.load(keys, mask=new, other=key), tl.load(keys + half, mask=new, other=value)
        tile, key, value = _loaded(tile), _loaded(key), _loaded(value)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        limit = before + token
        visible = (at[None, :] <= limit[:, None]) & (at < end)[None, :]
        acc, most, total = _more(tile, acc, most, total, key, value, visible, scale, True)
        if begin + BLOCK_S < end:
            acc, most, total = _attend(
                tile, acc, most, total, cache, table, half, begin + BLOCK_S, end, token * 0 - 1, limit, scale,
                KV, D, PAGE, head, BLOCK_D, BLOCK_S, STAGES, True,
            )  # fmt: skip
        if parts > 1:
            # of several queries some may have seen none of a program's keys
            seen, sent = total > 0, (m < count * SHARE)[:, None]
            mass = tl.where(seen, total, 1.0)
            lse = tl.where(seen, most * scale + tl.log2(mass), float("-inf"))
            own, copy = split * BLOCK_M + m[:, None], SPLITS * (BLOCK_M * BLOCK_D) + tl.arange(0, COPIES)
            _send(base + (own * BLOCK_D + d[None, :]), acc / mass[:, None], sent)
            _send(base + (own * COPIES + copy[None, :]), tl.broadcast_to(lse[:, None], (BLOCK_M, COPIES)), sent)
        else:
            cell = (first + token)[:, None] * (HEADS * D) + query[:, None] * D + d[None, :]
            tl.store(out + cell, (acc * (v_scale / total)[:, None]).to(out.dtype.element_ty), mask=in_q)
    if parts > 1:
        start, step = (SPLITS - 1 - split) * JOINED, SPLITS * JOINED  # those with the fewest keys first
        if INTERPRETED:  # one program after the other: the last of a row finds everything
            start, step = tl.where(split < SPLITS - 1, BLOCK_M, 0), JOINED
        while start < count * SHARE:
            _join(
                base, out, start, active, count, first, head, v_scale,
                HEADS, KV, D, SPLITS, BLOCK_M, BLOCK_D, BLOCK_P, JOINED, COPIES,
            )  # fmt: skip
            start += step


@triton.jit
def _send(cells, value, mask):
    value = tl.where(value == value, value, float("nan"))  # other bits than those of _EMPTY
    tl.store(cells, value.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _join(
    base, out, start, active, count, first, head, v_scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, JOINED: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Waits for the parts of JOINED queries, adds them up and leaves their cells empty.

    A cell must not be looked at by two threads: one of them could see a number before the other does. So the tensors
    have as many cells as the program has threads, or more, and of the logarithms of the sums there are COPIES."""
    SHARE: tl.constexpr = HEADS // KV
    p, m = tl.arange(0, BLOCK_P), start + tl.arange(0, JOINED)
    d, copy = tl.arange(0, BLOCK_D), SPLITS * (BLOCK_M * BLOCK_D) + tl.arange(0, COPIES)
    wanted = ((p < active)[:, None] & (m < count * SHARE)[None, :])[:, :, None]
    part = (p[:, None] * BLOCK_M + m[None, :])[:, :, None]
    values, in_values = base + (part * BLOCK_D + d[None, None, :]), wanted & (d >= 0)[None, None, :]
    sums, in_sums = base + (part * COPIES + copy[None, None, :]), wanted & (copy >= 0)[None, None, :]
    lse = tl.load(sums, mask=in_sums, other=0, volatile=True)
    value = tl.load(values, mask=in_values, other=0, volatile=True)
    while tl.max((value == _EMPTY).to(tl.int32), None) + tl.max((lse == _EMPTY).to(tl.int32), None) > 0:
        lse = tl.load(sums, mask=in_sums, other=0, volatile=True)
        value = tl.load(values, mask=in_values, other=0, volatile=True)
    tl.store(values, tl.full((BLOCK_P, JOINED, BLOCK_D), _EMPTY, dtype=tl.int32), mask=in_values)
    tl.store(sums, tl.full((BLOCK_P, JOINED, COPIES), _EMPTY, dtype=tl.int32), mask=in_sums)
    size = tl.max(lse.to(tl.float32, bitcast=True), 2)  # copies are equal
    size = tl.where((p < active)[:, None], size, float("-inf"))
    weight = tl.exp2(size - tl.max(size, 0)[None, :])
    weight = weight / tl.sum(weight, 0)[None, :]
    joined = tl.sum(value.to(tl.float32, bitcast=True) * weight[:, :, None], 0) * v_scale
    cell = (first + m // SHARE)[:, None] * (HEADS * D) + (head * SHARE + m % SHARE)[:, None] * D + d[None, :]
    tl.store(out + cell, joined.to(out.dtype.element_ty), mask=(m < count * SHARE)[:, None] & (d < D)[None, :])


@triton.jit
def _prefill(
    q, cache, starts, past, pages, out, q_stride, half, pages_stride, scale, v_scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of any length: QUERIES tokens times the query heads of one KV head are the rows of a tile."""
    SHARE: tl.constexpr = HEADS // KV
    head, row = tl.program_id(1), tl.program_id(2)
    # the longest programs first
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    wait()
    release()
    start, before = tl.load(starts + row), tl.load(past + row)
    length = tl.load(starts + row + 1) - start
    first = block * QUERIES
    if first < length:
        token = first + m // SHARE
        query = head * SHARE + m % SHARE
        in_q = ((token < length) & (m < QUERIES * SHARE))[:, None] & (d < D)[None, :]
        index = (start + token).to(tl.int64)[:, None]
        tile = tl.load(q + index * q_stride + query[:, None] * D + d[None, :], mask=in_q, other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        end = before + tl.minimum(length, first + QUERIES)
        common = (before + first + 1) // BLOCK_S * BLOCK_S  # keys that every query of the tile sees
        table, none = pages + row.to(tl.int64) * pages_stride, token * 0 - 1
        acc, most, total = _attend(
            tile, acc, most, total, cache, table, half, 0, common, none, before + token, scale,
            KV, D, PAGE, head, BLOCK_D, BLOCK_S, STAGES, False,
        )  # fmt: skip
        acc, most, total = _attend(
            tile, acc, most, total, cache, table, half, common, end, none, before + token, scale,
            KV, D, PAGE, head, BLOCK_D, BLOCK_S, STAGES, True,
        )  # fmt: skip
        value = acc * v_scale / total[:, None]
        tl.store(out + index * (HEADS * D) + query[:, None] * D + d[None, :], value.to(out.dtype.element_ty), mask=in_q)


@triton.jit
def _block(
    q, k, v, cache, sinks, starts, past, pages, out,
    q_stride, k_stride, v_stride, half, pages_stride, scale, reach,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A drafter's block over `past` keys of its context, the last `reach` of them for its first query, and itself."""
    SHARE: tl.constexpr = HEADS // KV
    head, row = tl.program_id(1), tl.program_id(2)
    m, d, w = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    in_d = d < D
    wait()
    release()
    start, before = tl.load(starts + row), tl.load(past + row)
    length = tl.load(starts + row + 1) - start
    first = tl.program_id(0) * QUERIES
    if first < length:
        token, query = first + m // SHARE, head * SHARE + m % SHARE
        in_q = ((token < length) & (m < QUERIES * SHARE))[:, None] & in_d[None, :]
        index = (start + token).to(tl.int64)[:, None]
        tile = tl.load(q + index * q_stride + query[:, None] * D + d[None, :], mask=in_q, other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if SINKS:  # one more logit, without a value
            sink = tl.load(sinks + query, mask=m < QUERIES * SHARE, other=0.0).to(tl.float32)
            most, total = sink * 1.4426950408889634 / scale, total + 1.0
        earliest = tl.maximum(before - reach + first, -1)
        acc, most, total = _attend(
            tile, acc, most, total, cache, pages + row.to(tl.int64) * pages_stride, half,
            (earliest + 1) // BLOCK_S * BLOCK_S, before, before - reach + token, token * 0 + before, scale,
            KV, D, PAGE, head, BLOCK_D, BLOCK_S, STAGES, True,
        )  # fmt: skip
        own = (start + w).to(tl.int64)[:, None]
        key = _seen(k + own * k_stride + head * D + d[None, :], w < length, in_d, True)
        value = _seen(v + own * v_stride + head * D + d[None, :], w < length, in_d, True)
        visible = (w < length)[None, :] & (m >= 0)[:, None]
        if CAUSAL:
            visible = visible & (w[None, :] <= token[:, None])
        acc, most, total = _more(tile, acc, most, total, key, value, visible, scale, True)
        value = acc / total[:, None]
        tl.store(out + index * (HEADS * D) + query[:, None] * D + d[None, :], value.to(out.dtype.element_ty), mask=in_q)


def kv_write(k: Tensor, v: Tensor, cache: Tensor, rows: Rows, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    """See ops.kv_write. Page tables and lengths must be older than the kernel launched just before."""
    count, width = len(k), k.shape[1] * k.shape[2]
    assert rows.pages is not None and k[0].is_contiguous() and v[0].is_contiguous() and cache[0].is_contiguous()
    if count:
        number, most = len(rows.lens), torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else 0.0
        _kv_write[(count,)](
            k, v, cache, rows.starts, rows.past, rows.pages, number,
            k.stride(0), v.stride(0), cache.stride(0), rows.pages.stride(0), k_scale, v_scale,
            cache.shape[2], width, most, triton.next_power_of_2(width), triton.next_power_of_2(number),
            num_warps=1, **OPTIONS,
        )  # fmt: skip


def attention(q: Tensor, cache: Tensor, rows: Rows, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:
    """See ops.attention. Page tables, lengths and what the cache held before this step must be older than the kernel
    launched just before, which may have written the rows' own keys and values."""
    if cache.dtype.itemsize > 1:
        k_scale = v_scale = 1.0
    (count, heads, dim), (_, _, page, kv, _) = q.shape, cache.shape
    assert rows.pages is not None and q[:1].is_contiguous() and cache[0].is_contiguous()
    out = torch.empty(count, heads, dim, dtype=q.dtype, device=q.device)
    if not count:
        return out
    block_d, scale = max(16, triton.next_power_of_2(dim)), dim**-0.5 * _LOG2E * k_scale
    longest, share, number = max(rows.lens), heads // kv, len(rows.lens)
    if longest > _FEW:
        queries = max(1, 128 // share)
        block_m = max(16, triton.next_power_of_2(queries * share))
        _prefill[(triton.cdiv(longest, queries), kv, number)](
            q, cache, rows.starts, rows.past, rows.pages, out,
            q.stride(0), cache.stride(0), rows.pages.stride(0), scale, v_scale,
            heads, kv, dim, page, queries, block_m, block_d, 64, 3, num_warps=8, **OPTIONS,
        )  # fmt: skip
        return out
    block_m = max(16, triton.next_power_of_2(longest * share))
    together = min(_multiprocessors(q.device), _CELLS // (2 * block_m * block_d))
    splits = min(SPLITS, together // (number * kv))
    if block_m >= 64:
        block_s, stages, warps = 64, 3, 4 if block_m == 64 else 8
    else:
        block_s, stages, warps = CUT if splits > 1 and ROOMY else CUT_OF_MANY if splits else CUT_OF_MOST
    threads, size = 32 * warps, page * kv * dim * cache.dtype.itemsize  # bytes of a page of keys
    reach = triton.cdiv(rows.pages.shape[1] * page, block_s)  # tiles of keys that a row can have at most
    splits = max(1, min(splits, reach))
    block_p = max(triton.next_power_of_2(splits), threads // block_d)
    joined = max(1, min(64 * threads // (block_p * block_d), triton.next_power_of_2(triton.cdiv(block_m, splits))))
    copies = max(1, threads // (block_p * joined))
    asked = min(threads // 2, ahead(threads * size, number * kv * splits, warps) * kv // (2 * size)) if PDL.value else 0
    if q.device not in _cells:
        _cells[q.device] = torch.full((_CELLS,), _EMPTY.value, dtype=torch.int32, device=q.device)
    _decode[(splits, kv, number)](
        q, cache, rows.starts, rows.past, rows.pages, out, _cells[q.device],
        q.stride(0), cache.stride(0), rows.pages.stride(0), scale, v_scale,
        heads, kv, dim, page, longest, splits, block_m, block_d, block_s, block_p, joined, copies, asked, threads,
        stages, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return out


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, rows: Rows, causal: bool, window: int | None, sinks: Tensor | None
) -> Tensor:
    """See ops.block_attention."""
    (count, heads, dim), (_, _, page, kv, _) = q.shape, cache.shape
    assert rows.pages is not None and cache[0].is_contiguous()
    assert all(t[:1].is_contiguous() for t in (q, k, v))
    out = torch.empty(count, heads, dim, dtype=q.dtype, device=q.device)
    if not count:
        return out
    longest, share = max(rows.lens), heads // kv
    queries = max(1, min(longest, 64 // share))
    _block[(triton.cdiv(longest, queries), kv, len(rows.lens))](
        q, k, v, cache, sinks, rows.starts, rows.past, rows.pages, out,
        q.stride(0), k.stride(0), v.stride(0), cache.stride(0), rows.pages.stride(0), dim**-0.5 * _LOG2E,
        2**30 if window is None else window,
        heads, kv, dim, page, queries, causal, sinks is not None, max(16, triton.next_power_of_2(queries * share)),
        max(16, triton.next_power_of_2(dim)), 64, max(16, triton.next_power_of_2(longest)), 3,
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    return out
