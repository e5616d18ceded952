"""Products with one matrix [N, K] for few rows: bound by reading the matrix once.

One row runs on the CUDA cores (a matrix-vector product with the matrix in registers), up to 16 on the tensor cores with
the matrix as the left operand: in bfloat16 straight from the registers into which it was loaded (_few), else from
shared memory (_narrow). More rows are cuBLAS's. A matrix in FP8 with one scale (formats/fp8.py) goes through packed.py.

_few is cut as packed.py cuts its products. A warp takes a band of 16 rows of the matrix, 64 columns at a time; those of
the next DEPTH steps are always on their way, the first before wait(). SPLIT warps of a program share the columns: their
sums meet in shared memory, so no program waits for another. The rows of x come from L1 for all but the first band of a
multiprocessor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.triton import packed
from leyden.ops.triton.fragments import mma, values, weights
from leyden.ops.triton.grouped import relu_squared
from leyden.ops.triton.launch import OPTIONS, ahead, arrive, counters, prefetch, release, wait

FP8_ROWS = 256  # up to here FP8 matrices are read as they are
NARROW_ROWS = 16  # up to here _few or _narrow; cuBLAS is faster from 32 on
FEW_SIZE = 12288, 4096  # rows of a matrix up to which _few is faster than _narrow, for up to 8 rows of x and for more
REGISTERS = 128  # of a thread of _few: 16 warps fit on a multiprocessor


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
def _step(band, step, inside):
    """A thread's words of its two rows, `step` columns further: of 64 columns eight of the first 32, then eight of the
    others. Two of a row that are next to each other are what mma() takes of 16 columns."""
    first, second = step // 2, step // 2 + 16
    return (
        weights(band[0] + first, inside, True) + weights(band[0] + second, inside, True)
        + weights(band[1] + first, inside, True) + weights(band[1] + second, inside, True)
    )  # fmt: skip


@triton.jit
def begun(
    matrix, first, N,
    K: tl.constexpr, SPLIT: tl.constexpr, THREADS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What can be done before wait() for bands `first` and following of matrix [N, K]: where a thread's two rows are,
    and their words of the first DEPTH steps. AHEAD: so many columns after those are asked to come into L2."""
    thread = tl.arange(0, THREADS)
    lane, part, row = thread % 32, thread // 32 % SPLIT, (first + thread // 32 // SPLIT) * 16
    n, own = row + lane // 4, part * 64 + lane % 4 * 8
    upper = matrix + (tl.minimum(n, N - 1).to(tl.int64) * K + own)
    lower = matrix + (tl.minimum(n + 8, N - 1).to(tl.int64) * K + own)
    band = upper.to(tl.pointer_type(tl.int32), bitcast=True), lower.to(tl.pointer_type(tl.int32), bitcast=True)
    words = ()  # type: tuple[object, ...]
    for i in tl.static_range(DEPTH):
        words = words + _step(band, i * SPLIT * 64, (part + i * SPLIT) * 64 < K)
    if AHEAD > 0:
        n = row + lane
        start = matrix + (n.to(tl.int64) * K + DEPTH * SPLIT * 64)
        prefetch(start, AHEAD * 2, (part == 0) & (lane < 16) & (n < N))
    return band, words


@triton.jit
def ended(
    x, band, words, M, x_stride,
    K: tl.constexpr, SPLIT: tl.constexpr, THREADS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """What is done after wait(): the products of x [M, K] and the bands, fp32 [8 GROUPS, their rows], GROUPS 1 or 2;
    beyond the last row of x that one again. The matrix is the right operand: mma() takes of it what a load has filled,
    register by register. The loop is unrolled as a whole, or ptxas lets the loads of several steps wait for the last.
    """
    STEPS: tl.constexpr = (K // 64 + SPLIT - 1) // SPLIT
    thread = tl.arange(0, THREADS)
    part, own = thread // 32 % SPLIT * 64, thread % 4 * 8
    sources, v = (), ()  # type: tuple[object, ...], tuple[object, ...]
    for j in tl.static_range(GROUPS):
        m = tl.minimum(j * 8 + thread % 32 // 4, M - 1).to(tl.int64)
        source = (x + (m * x_stride + part + own)).to(tl.pointer_type(tl.int32), bitcast=True)
        sources = sources + (source,)
        v = v + values(source, part < K, False) + values(source + 16, part < K, False)
    sums = ()  # type: tuple[object, ...]
    for _ in tl.static_range(8):
        sums = sums + (tl.zeros((THREADS,), dtype=tl.float32),)
    for i in tl.static_range(STEPS):
        later = (i + 1) * (SPLIT * 64)
        coming = ()  # type: tuple[object, ...]
        for j in tl.static_range(GROUPS if i + 1 < STEPS else 0):
            source, inside = sources[j] + later // 2, part + later < K
            coming = coming + values(source, inside, False) + values(source + 16, inside, False)
        made = ()  # type: tuple[object, ...]
        for half in tl.static_range(2):
            c = sums[4 * half], sums[4 * half + 1], sums[4 * half + 2], sums[4 * half + 3]
            for s in tl.static_range(4):
                c = mma(
                    c[0], c[1], c[2], c[3], v[2 * s], v[8 * (GROUPS - 1) + 2 * s],
                    v[2 * s + 1], v[8 * (GROUPS - 1) + 2 * s + 1],
                    words[8 * half + 2 * s], words[8 * half + 2 * s + 1],
                )  # fmt: skip
            made = made + c
        sums, v, words = made, coming, words[16:]
        if i + DEPTH < STEPS:
            later = (i + DEPTH) * (SPLIT * 64)
            words = words + _step(band, later, part + later < K)
    both = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[4], sums[5]))
    if GROUPS == 2:
        both = tl.join(both, tl.join(tl.join(sums[2], sums[3]), tl.join(sums[6], sums[7])))
    both = tl.sum(tl.reshape(both, (THREADS // 32 // SPLIT, SPLIT, 8, 4, 2, 2, GROUPS)), 1)  # band, g, t, odd, half
    return tl.reshape(tl.permute(both, (5, 1, 0, 4, 2, 3)), (8 * GROUPS, THREADS // 2 // SPLIT))


@triton.jit
def _few(
    x, matrix, to, out, M, N, x_stride, to_stride,
    K: tl.constexpr, SQUARE: tl.constexpr, SPLIT: tl.constexpr, THREADS: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k x[m, k] W[n, k] of up to 8 GROUPS rows, in bfloat16; SQUARE and `to` as in _vector."""
    BANDS: tl.constexpr = THREADS // 32 // SPLIT
    first = tl.program_id(0) * BANDS
    band, words = begun(matrix, first, N, K, SPLIT, THREADS, DEPTH, AHEAD)
    wait()
    release()
    total = ended(x, band, words, M, x_stride, K, SPLIT, THREADS, DEPTH, GROUPS)
    if SQUARE:
        total = tl.maximum(total.to(out.dtype.element_ty).to(tl.float32), 0.0)
        total *= total
    m, n = tl.arange(0, 8 * GROUPS), first * 16 + tl.arange(0, BANDS * 16)
    inside = (m < M)[:, None] & (n < N)[None, :]
    if to is not None:
        total += tl.load(to + m[:, None] * to_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=inside)


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


@dataclass(frozen=True)
class Cut:
    """How few() shares its work; see the top of the file. `split` divides `warps`; `early`: all of the matrix, as far
    as it fits, is asked for before wait()."""

    split: int
    warps: int
    depth: int = 4
    early: bool = False

    @property
    def rows(self) -> int:
        """Rows of the matrix for each program."""
        return 16 * self.warps // self.split

    def arguments(self, k: int, programs: int) -> tuple[int, int, int, int]:
        """SPLIT, THREADS, DEPTH and AHEAD of `programs` for matrices with k columns."""
        asked = ahead(2 * k * self.rows, programs, self.warps) // (2 * self.rows) - self.depth * self.split * 64
        return self.split, 32 * self.warps, self.depth, max(0, asked) // 8 * 8 if self.early else 0


def cut_of(size: int) -> Cut:
    """For `size` rows of a matrix."""
    return Cut(8, 8, 5 if size <= FEW_SIZE[1] else 4)


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


def add_linear(x: Tensor, weight: Weight, to: Tensor) -> Tensor:
    """See ops.add_linear."""
    return add_product(x, weight.dense(), to)


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.mlp."""
    return product(product(x, up.dense(), True, x.dtype), down.dense(), False, x.dtype)


def product(x: Tensor, matrix: Tensor, square: bool, dtype: torch.dtype) -> Tensor:
    """x [..., K] @ matrix [N, K]^T in `dtype`, then relu^2 if `square`."""
    rows = x.flatten(0, -2)
    size = matrix.shape[0]
    if not _ours(rows, matrix):
        if dtype == x.dtype or not x.is_cuda:
            out = F.linear(x, matrix).to(dtype)
        else:
            out = torch.mm(rows, matrix.t(), out_dtype=dtype).view(*x.shape[:-1], size)
        return relu_squared(out) if square else out
    return _chosen(rows, matrix)(rows, matrix, square, dtype).view(*x.shape[:-1], size)


def add_product(x: Tensor, matrix: Tensor, to: Tensor) -> Tensor:
    """to + x [M, K] @ matrix [N, K]^T in the dtype of to [M, N]."""
    if not _ours(x, matrix) or to.stride(1) != 1:
        return to + product(x, matrix, False, to.dtype)
    return _chosen(x, matrix)(x, matrix, dtype=to.dtype, to=to)


def _ours(x: Tensor, matrix: Tensor) -> bool:
    """Whether the kernels of this file multiply them."""
    return 0 < len(x) <= NARROW_ROWS and x.stride(1) == 1 and matrix.is_contiguous()


def _chosen(x: Tensor, matrix: Tensor) -> Callable[..., Tensor]:
    if len(x) == 1:
        return vector
    return few if len(matrix) <= FEW_SIZE[len(x) > 8] and readable(x, matrix) else narrow


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


def readable(x: Tensor, *matrices: Tensor) -> bool:
    """Whether few() takes them: all in bfloat16, columns in whole chunks of 64."""
    return x.dtype == torch.bfloat16 and all(m.dtype == x.dtype and m.shape[1] % 64 == 0 for m in matrices)


def few(
    x: Tensor,
    matrix: Tensor,
    square: bool = False,
    dtype: torch.dtype | None = None,
    shape: Cut | None = None,
    to: Tensor | None = None,
) -> Tensor:
    """x [M, K], M up to 16, @ matrix [N, K]^T, both readable(), then relu^2 if `square` or + `to` [M, N]."""
    x, count, (size, k) = packed.aligned(x), len(x), matrix.shape
    cut = shape or cut_of(size)
    out = torch.empty(count, size, dtype=dtype or x.dtype, device=x.device)
    programs = triton.cdiv(size, cut.rows)
    _few[(programs,)](
        x, matrix, to, out, count, size, x.stride(0), 0 if to is None else to.stride(0),
        k, square, *cut.arguments(k, programs), triton.cdiv(count, 8),
        num_warps=cut.warps, maxnreg=REGISTERS, **OPTIONS,
    )  # fmt: skip
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
