"""Attention over pages and over packed rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from leyden.ops.cpu.program import Kernel, empty, has_rows, run, types
from leyden.ops.reference import attention as reference
from leyden.ops.reference import draft
from leyden.ops.rows import Rows

STORE, ROWS = "tttiiiii", "ttti"
_WRITE = Kernel("kv_write", "tt" + STORE + ROWS + "iii")
_ATTENTION_LAYOUT = "ttttttt" + STORE + ROWS + "iiiiiiiiiiid"
_ATTENTION = Kernel("attention", _ATTENTION_LAYOUT)
_JOIN = Kernel("attention_join", _ATTENTION_LAYOUT)

_TILE = 32  # keys compared at once, as in attention.c
_QUERIES = 32  # of a block: heads that share their keys, times tokens
_MOST_QUERIES, _MOST_DIM = 128, 512


def kv_write(k: Tensor, v: Tensor, cache: Tensor, rows: Rows, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    k2, v2 = k.flatten(-2), v.flatten(-2)
    if not (has_rows(k2) and has_rows(v2) and k.dtype == v.dtype and cache.dtype in types and cache.is_contiguous()):
        return reference.kv_write(k, v, cache, rows, k_scale, v_scale)
    step = _WRITE(k2, v2, *pages(cache, rows), *places(rows), k2.stride(0), v2.stride(0), types[k.dtype])
    run(step, work=4 * k.numel())
    return None


def attention(q: Tensor, cache: Tensor, rows: Rows, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:
    flat = q.flatten(-2)
    if not (known(q, cache.shape[3]) and cache.dtype in types and cache.is_contiguous()):
        return reference.attention(q, cache, rows, k_scale, v_scale)
    return _attention(flat, q.shape[1], pages(cache, rows), cache.shape[3], cache.shape[4], rows)


def attention_packed(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    flat = q.flatten(-2)
    if not (known(q, k.shape[1]) and k.is_contiguous() and v.is_contiguous() and q.dtype == k.dtype == v.dtype):
        return reference.attention_packed(q, k, v, rows)
    _, heads, dim = k.shape
    return _attention(flat, q.shape[1], (k, v, None, 0, 1, heads, dim, types[k.dtype]), heads, dim, rows)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, rows: Rows, causal: bool, window: int | None, sinks: Tensor | None
) -> Tensor:
    flat = [t.flatten(1) for t in (q, k, v)]
    alike = q.dtype == k.dtype == v.dtype and all(has_rows(t) for t in flat)
    plain = cache.dtype in types and cache.is_contiguous() and (sinks is None or sinks.dtype in types)
    if not (alike and plain and known(q, k.shape[1])):
        return draft.block_attention(q, k, v, cache, rows, causal, window, sinks)
    own = _Own(flat[1], flat[2], sinks, causal, window or 0)
    return _attention(flat[0], q.shape[1], pages(cache, rows), cache.shape[3], cache.shape[4], rows, own)


class _Own(NamedTuple):
    """What a drafter's blocks have beside the store."""

    k: Tensor | None = None  # [T, kv heads * dim]
    v: Tensor | None = None
    sinks: Tensor | None = None
    causal: bool = True
    window: int = 0

    def fields(self) -> tuple[int, ...]:
        """strides, type of the sinks, causal, window"""
        strides = (0 if t is None else t.stride(0) for t in (self.k, self.v))
        return *strides, 0 if self.sinks is None else types[self.sinks.dtype], self.causal, self.window


_NOTHING = _Own()


def _attention(
    q: Tensor, heads: int, store: tuple[object, ...], kv_heads: int, dim: int, rows: Rows, own: _Own = _NOTHING
) -> Tensor:
    threads, group = torch.get_num_threads(), heads // kv_heads
    narrow = max(rows.lens) == 1 and own.k is None
    # Single tokens leave most of many threads idle unless their past is split; longer rows have blocks enough.
    splits = -(-threads // kv_heads) if narrow else 1
    block = 1 if narrow else max(1, _QUERIES // group)
    queries, width = block * group, -(-dim // 16) * 16
    size = 2 * (queries + _TILE) * width + queries * (_TILE + 4)
    desk, out = empty(threads, size, dtype=torch.float32), empty(len(q), heads, dim, dtype=q.dtype)
    parts = empty(len(q), heads, splits, dim + 2, dtype=torch.float32) if splits > 1 else None
    k_stride, v_stride, *others = own.fields()
    form = (heads, q.stride(0), k_stride, v_stride, block, splits, size, types[q.dtype], *others, dim**-0.5)
    arguments = (q, own.k, own.v, own.sinks, out, parts, desk, *store, *places(rows), *form)
    steps = [_ATTENTION(*arguments)] + ([_JOIN(*arguments)] if splits > 1 else [])
    run(*steps)
    return out


def known(q: Tensor, kv_heads: int) -> bool:
    _, heads, dim = q.shape
    return has_rows(q.flatten(-2)) and heads // kv_heads <= _MOST_QUERIES and dim <= _MOST_DIM


def pages(cache: Tensor, rows: Rows) -> tuple[object, ...]:
    """The fields of a Store for cache [2, pages, page, heads, dim]."""
    assert rows.pages is not None and rows.pages.stride(1) == 1
    _, _, page, heads, dim = cache.shape
    return cache[0], cache[1], rows.pages, rows.pages.stride(0), page, heads, dim, types[cache.dtype]


def places(rows: Rows) -> tuple[object, ...]:
    return rows.starts, rows.past, rows.slots, len(rows.lens)
