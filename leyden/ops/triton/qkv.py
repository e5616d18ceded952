"""Queries, keys and values of one token in one launch: three small matrices read as one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops import fused
from leyden.ops.rows import Rows
from leyden.ops.triton.attention import narrowed
from leyden.ops.triton.launch import OPTIONS, release, wait


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


def qkv_write(
    x: Tensor, q: Weight, k: Weight, v: Weight, cache: Tensor, rows: Rows, k_scale: float = 1.0, v_scale: float = 1.0,
    shape: tuple[int, int, int] = (4, 2048, 8),
) -> Tensor:  # fmt: skip
    """See ops.qkv_write. shape: the tile, and its warps."""
    matrices = q.dense(), k.dense(), v.dense()
    if len(x) != 1 or x.stride(1) != 1 or not all(matrix.is_contiguous() for matrix in matrices):
        return fused.qkv_write(x, q, k, v, cache, rows, k_scale, v_scale)
    assert rows.pages is not None and cache[0].is_contiguous()
    (size, inner), width, (block_n, block_k, warps) = matrices[0].shape, len(matrices[1]), shape
    most = torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else 0.0
    out = torch.empty(1, size, dtype=x.dtype, device=x.device)
    _qkv[(triton.cdiv(size, block_n) + 2 * triton.cdiv(width, block_n),)](
        x, *matrices, out, cache, rows.past, rows.pages, cache.stride(0), k_scale, v_scale,
        inner, size, width, cache.shape[2], most, block_n, block_k, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return out.view(1, -1, cache.shape[-1])
