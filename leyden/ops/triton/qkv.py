"""Queries, keys and values of up to 16 tokens in one launch: three small matrices read as one.

One token as linear._vector does it, more as linear._few; what those do not take is done by several launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops import fused
from leyden.ops.rows import Rows
from leyden.ops.triton import packed
from leyden.ops.triton.attention import narrowed
from leyden.ops.triton.launch import OPTIONS, release, wait
from leyden.ops.triton.linear import NARROW_ROWS, REGISTERS, Cut, begun, ended, readable

CUT = Cut(4, 4)


@triton.jit
def _qkv(
    x, q, k, v, out, cache, past, pages, half, k_scale, v_scale,
    K: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, MOST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """linear._vector over SIZE rows of q, then WIDTH of k and of v, which end in the cache."""
    AHEAD: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    EACH: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    is_q, is_k = pid < AHEAD, pid < AHEAD + EACH
    n = tl.where(is_q, pid, (pid - AHEAD) % EACH) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < tl.where(is_q, SIZE, WIDTH)
    matrix = tl.where(is_q, q, tl.where(is_k, k, v))
    i = tl.arange(0, BLOCK_K)
    tile = matrix + n[:, None] * K + i[None, :]
    w = tl.load(tile, mask=in_n[:, None] & (i < K)[None, :], other=0.0)
    wait()
    release()
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        value = tl.load(x + start + i, mask=start + i < K, other=0.0).to(tl.float32)
        following = tl.load(tile + start + BLOCK_K, mask=in_n[:, None] & (start + BLOCK_K + i < K)[None, :], other=0.0)
        acc += value[None, :] * w.to(tl.float32)
        w = following
    total = tl.sum(acc, 1).to(out.dtype.element_ty)
    if is_q:
        tl.store(out + n, total, mask=in_n)
    else:
        position = tl.load(past)
        page = tl.load(pages + position // PAGE).to(tl.int64)
        cell = tl.where(is_k, 0, half) + (page * PAGE + position % PAGE) * WIDTH + n
        scale = tl.where(is_k, k_scale, v_scale)
        tl.store(cache + cell, narrowed(total, scale, cache.dtype.element_ty, MOST), mask=in_n)


@triton.jit
def _few(
    x, q, k, v, out, cache, starts, past, pages, R, M, x_stride, half, pages_stride, k_scale, v_scale,
    K: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, MOST: tl.constexpr,
    SPLIT: tl.constexpr, THREADS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """linear._few over SIZE rows of q, then WIDTH of k and of v, for M tokens of R sequences."""
    BANDS: tl.constexpr = THREADS // 32 // SPLIT
    IN_Q: tl.constexpr = (SIZE + 16 * BANDS - 1) // (16 * BANDS)
    EACH: tl.constexpr = (WIDTH + 16 * BANDS - 1) // (16 * BANDS)
    pid = tl.program_id(0)
    is_q, is_k = pid < IN_Q, pid < IN_Q + EACH
    first = tl.where(is_q, pid, (pid - IN_Q) % EACH) * BANDS
    matrix, size = tl.where(is_q, q, tl.where(is_k, k, v)), tl.where(is_q, SIZE, WIDTH)
    band, words = begun(matrix, first, size, K, SPLIT, THREADS, DEPTH, AHEAD)
    m, n = tl.arange(0, 8 * GROUPS), first * 16 + tl.arange(0, BANDS * 16)
    r = tl.arange(0, BLOCK_R)
    ends = tl.load(starts + 1 + r, mask=r < R, other=2147483647)
    row = tl.sum((ends[None, :] <= m[:, None]).to(tl.int32), 1)
    position = m - tl.load(starts + row, mask=m < M, other=0) + tl.load(past + row, mask=m < M, other=0)
    page = tl.load(pages + row.to(tl.int64) * pages_stride + position // PAGE, mask=m < M, other=0).to(tl.int64)
    wait()
    release()
    total = ended(x, band, words, M, x_stride, K, SPLIT, THREADS, DEPTH, GROUPS).to(out.dtype.element_ty)
    inside = (m < M)[:, None] & (n < size)[None, :]
    if is_q:
        tl.store(out + m[:, None] * SIZE + n[None, :], total, mask=inside)
    else:
        cell = tl.where(is_k, 0, half) + (page * PAGE + position % PAGE)[:, None] * WIDTH + n[None, :]
        scale = tl.where(is_k, k_scale, v_scale)
        tl.store(cache + cell, narrowed(total, scale, cache.dtype.element_ty, MOST), mask=inside)


def qkv_write(
    x: Tensor, q: Weight, k: Weight, v: Weight, cache: Tensor, rows: Rows, k_scale: float = 1.0, v_scale: float = 1.0,
    shape: tuple[int, int, int] = (4, 2048, 8), cut: Cut | None = None,
) -> Tensor:  # fmt: skip
    """See ops.qkv_write. shape: the tile of one token, and its warps; cut: the share of a warp for more."""
    matrices, count = (q.dense(), k.dense(), v.dense()), len(x)
    few = 1 < count <= NARROW_ROWS and readable(x, *matrices)
    if not (few or count == 1) or x.stride(1) != 1 or not all(matrix.is_contiguous() for matrix in matrices):
        return fused.qkv_write(x, q, k, v, cache, rows, k_scale, v_scale)
    assert rows.pages is not None and cache[0].is_contiguous()
    (size, inner), width, page = matrices[0].shape, len(matrices[1]), cache.shape[2]
    most = torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else 0.0
    out = torch.empty(count, size, dtype=x.dtype, device=x.device)
    if few:
        x, number, cut = packed.aligned(x), len(rows.lens), cut or CUT
        programs = triton.cdiv(size, cut.rows) + 2 * triton.cdiv(width, cut.rows)
        _few[(programs,)](
            x, *matrices, out, cache, rows.starts, rows.past, rows.pages, number, count,
            x.stride(0), cache.stride(0), rows.pages.stride(0), k_scale, v_scale,
            inner, size, width, page, most, *cut.arguments(inner, programs),
            triton.cdiv(count, 8), triton.next_power_of_2(number),
            num_warps=cut.warps, maxnreg=REGISTERS, **OPTIONS,
        )  # fmt: skip
    else:
        block_n, block_k, warps = shape
        _qkv[(triton.cdiv(size, block_n) + 2 * triton.cdiv(width, block_n),)](
            x, *matrices, out, cache, rows.past, rows.pages, cache.stride(0), k_scale, v_scale,
            inner, size, width, page, most, block_n, block_k, num_warps=warps, **OPTIONS,
        )  # fmt: skip
    return out.view(count, -1, cache.shape[-1])
