"""Products with one matrix [N, K] for few rows: bound by reading the matrix once.

One row runs on the CUDA cores (a matrix-vector product with the matrix in registers), up to 16 on the tensor cores with
the matrix as the left operand, straight from shared memory. More rows are cuBLAS's. A matrix in FP8 with one scale
(formats/fp8.py) goes through packed.py.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops import fused
from leyden.ops.triton import packed
from leyden.ops.triton.grouped import relu_squared
from leyden.ops.triton.launch import OPTIONS, arrive, counters, release, wait

FP8_ROWS = 256  # up to here FP8 matrices are read as they are
NARROW_ROWS = 16  # up to here _narrow; cuBLAS is faster from 32 on


@triton.jit
def _embed(tokens, weight, out, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    wait()
    release()
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + row * H + at, tl.load(weight + token * H + at, mask=at < H), mask=at < H)


@triton.jit
def _vector(
    x, weight, to, out, N,
    K: tl.constexpr, SQUARE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[n] = sum_k x[k] W[n, k]; with SQUARE relu(.)^2, with `to` plus to[n]. The next tile of W is always on its
    way."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tile = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    in_n = (n < N)[:, None]
    w = tl.load(tile, mask=in_n & (k < K)[None, :], other=0.0)
    wait()
    release()
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        value = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        following = tl.load(tile + start + BLOCK_K, mask=in_n & (start + BLOCK_K + k < K)[None, :], other=0.0)
        acc += value[None, :] * w.to(tl.float32)
        w = following
    total = tl.sum(acc, 1)
    if SQUARE:
        total = tl.maximum(total.to(out.dtype.element_ty).to(tl.float32), 0.0)
        total *= total
    if to is not None:
        total += tl.load(to + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _widen(matrix, factor, out, SIZE, BLOCK: tl.constexpr):
    """8-bit values times their factor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait()
    release()
    value = tl.load(matrix + at, mask=at < SIZE, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _narrow(
    x, weight, to, out, partial, arrived, M, N, x_stride, to_stride,
    K: tl.constexpr, SQUARE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same on tensor cores; SPLITS programs share K and the last of them adds the parts, in their order."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    SHARE: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    first = split * SHARE
    k = first + tl.arange(0, BLOCK_K)
    wait()
    release()
    left = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    right = x + m[None, :] * x_stride + k[:, None]
    in_n, in_m = (n < N)[:, None], (m < M)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in tl.range(0, SHARE, BLOCK_K, num_stages=STAGES):
        inside = start + k < K
        w = tl.load(left + start, mask=in_n & inside[None, :], other=0.0)
        value = tl.load(right + start, mask=in_m & inside[:, None], other=0.0)
        acc = tl.dot(w, value, acc, input_precision="ieee")
    if SPLITS > 1:
        cell = n[:, None] * BLOCK_M + m[None, :]
        every = in_n & (m < BLOCK_M)[None, :]
        tl.store(partial + split * N * BLOCK_M + cell, acc, mask=every)
        if arrive(arrived + tl.program_id(0), SPLITS):
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(partial + part * N * BLOCK_M + cell, mask=every, other=0.0, cache_modifier=".cg")
            _finish(acc, to, out, m, n, M, N, to_stride, SQUARE)
    else:
        _finish(acc, to, out, m, n, M, N, to_stride, SQUARE)


@triton.jit
def _finish(acc, to, out, m, n, M, N, to_stride, SQUARE: tl.constexpr):
    if SQUARE:
        acc = tl.maximum(acc.to(out.dtype.element_ty).to(tl.float32), 0.0)
        acc *= acc
    inside = (m < M)[:, None] & (n < N)[None, :]
    total = tl.trans(acc)
    if to is not None:
        total += tl.load(to + m[:, None] * to_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=inside)


def embed(tokens: Tensor, weight: Weight) -> Tensor:
    """See ops.embed."""
    matrix, tokens = weight.dense(), tokens.contiguous()
    size = matrix.shape[1]
    out = torch.empty(*tokens.shape, size, dtype=matrix.dtype, device=tokens.device)
    if tokens.numel():
        _embed[(tokens.numel(),)](tokens, matrix, out, size, triton.next_power_of_2(size), num_warps=4, **OPTIONS)
    return out


def linear(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """See ops.linear."""
    return product(x, weight.dense(), square=False, dtype=dtype or x.dtype)


def linear_fp8(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """See ops.linear."""
    rows, dtype = x.flatten(0, -2), dtype or x.dtype
    if weight.twin is not None and len(rows) > NARROW_ROWS:
        return product(x, weight.twin, False, dtype)
    matrix, factor = weight.parts["weight"], weight.parts["weight_scale"]
    if not 0 < len(rows) <= FP8_ROWS or x.dtype != torch.bfloat16 or weight.shape[1] % 16:
        wide = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
        _widen[(triton.cdiv(matrix.numel(), 4096),)](matrix, factor, wide, matrix.numel(), 4096, num_warps=4, **OPTIONS)
        return product(x, wide, False, dtype)
    out = torch.empty(len(rows), weight.shape[0], dtype=dtype, device=x.device)
    packed.product(packed.aligned(rows), weight, out, len(rows))
    return out.view(*x.shape[:-1], -1)


def add_norm_linear_fp8(x: Tensor, residual: Tensor, norm: Tensor, eps: float, weight: Weight) -> tuple[Tensor, Tensor]:
    """See ops.add_norm_linear. Of one row every program makes the norm for itself, which is quicker than to wait."""
    if len(x) != 1 or x.dtype != torch.bfloat16 or residual.stride(1) != 1 or weight.shape[1] % 16:
        return fused.add_norm_linear(x, residual, norm, eps, weight)
    return packed.add_norm_linear(x, residual, norm, eps, weight)


def add_linear(x: Tensor, weight: Weight, to: Tensor) -> Tensor:
    """See ops.add_linear."""
    return add_product(x, weight.dense(), to)


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.mlp."""
    return product(product(x, up.dense(), True, x.dtype), down.dense(), False, x.dtype)


def product(x: Tensor, matrix: Tensor, square: bool, dtype: torch.dtype) -> Tensor:
    """x [..., K] @ matrix [N, K]^T in `dtype`, then relu^2 if `square`."""
    rows = x.flatten(0, -2)
    count, size = len(rows), matrix.shape[0]
    if not _few(rows, matrix):
        if dtype == x.dtype or not x.is_cuda:
            out = F.linear(x, matrix).to(dtype)
        else:
            out = torch.mm(rows, matrix.t(), out_dtype=dtype).view(*x.shape[:-1], size)
        return relu_squared(out) if square else out
    made = vector(rows, matrix, square, dtype) if count == 1 else narrow(rows, matrix, square, dtype)
    return made.view(*x.shape[:-1], size)


def add_product(x: Tensor, matrix: Tensor, to: Tensor) -> Tensor:
    """to + x [M, K] @ matrix [N, K]^T in the dtype of to [M, N]."""
    if not _few(x, matrix) or to.stride(1) != 1:
        return to + product(x, matrix, False, to.dtype)
    return (vector if len(x) == 1 else narrow)(x, matrix, dtype=to.dtype, to=to)


def _few(x: Tensor, matrix: Tensor) -> bool:
    """Whether the kernels of this file multiply them."""
    return 0 < len(x) <= NARROW_ROWS and x.stride(1) == 1 and matrix.is_contiguous()


def vector(
    x: Tensor,
    matrix: Tensor,
    square: bool = False,
    dtype: torch.dtype | None = None,
    shape: tuple[int, int, int] = (4, 2048, 8),
    to: Tensor | None = None,
) -> Tensor:
    """x [1, K] @ matrix [N, K]^T, then relu^2 if `square` or + `to` [1, N]; shape: the tile, and its warps."""
    size, k = matrix.shape
    block_n, block_k, warps = shape
    out = torch.empty(1, size, dtype=dtype or x.dtype, device=x.device)
    _vector[(triton.cdiv(size, block_n),)](
        x, matrix, to, out, size, k, square, block_n, block_k, num_warps=warps, **OPTIONS
    )
    return out


def narrow(
    x: Tensor,
    matrix: Tensor,
    square: bool = False,
    dtype: torch.dtype | None = None,
    shape: tuple[int, int, int, int, int] | None = None,
    to: Tensor | None = None,
) -> Tensor:
    """x [M, K], M small, @ matrix [N, K]^T, then relu^2 if `square` or + `to` [M, N], whose rows may be apart; shape:
    tile, splits, stages, warps."""
    count, (size, k) = len(x), matrix.shape
    block_n, block_k, splits, stages, warps = shape or _narrow_shape(size, k)
    block_m = max(16, triton.next_power_of_2(count))
    tiles = triton.cdiv(size, block_n)
    out = torch.empty(count, size, dtype=dtype or x.dtype, device=x.device)
    partial = torch.empty(splits, size, block_m, dtype=torch.float32, device=x.device) if splits > 1 else out
    _narrow[(tiles, splits)](
        x, matrix, to, out, partial, counters(x.device, tiles), count, size, x.stride(0),
        to.stride(0) if to is not None else 0,
        k, square, splits, block_m, block_n, block_k, stages, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return out


def _narrow_shape(size: int, k: int) -> tuple[int, int, int, int, int]:
    """Enough programs for every multiprocessor to hold three, as far as K can be cut."""
    tiles = triton.cdiv(size, 64)
    splits = min(8, max(1, round(396 / tiles)), max(1, k // 256))
    if splits == 1:
        return 64, 128, 1, 4, 4
    return (128 if splits == 8 and size >= 2048 else 64), 64, splits, 4, 4
