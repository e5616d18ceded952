"""Products of many rows with a stack of matrices, for prompts: bound by the tensor cores.

The rows of each matrix lie side by side, in 16 bits, or in 8 with a scale for each row of both. A program makes one
tile of one matrix' product, 128 or, where no more are left, 64 of its rows; tiles of x and of the matrix come by the
hardware's tile copies (TMA). Tiles that share a part of the matrix run at the same time, so that the second finds it in
the L2 cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from leyden.ops.triton.launch import HOPPER, INTERPRETED, OPTIONS, ROOMY, release, wait


@triton.jit
def _gather(x, order, out, rows, x_stride, K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = x[order[i] // CHOICES], four rows"""
    row, k = tl.program_id(0).to(tl.int64) * 4, tl.arange(0, BLOCK)
    wait()
    release()
    for i in tl.static_range(4):
        inside = (k < K) & (row + i < rows)
        source = tl.load(order + row + i, mask=row + i < rows, other=0).to(tl.int64) // CHOICES
        tl.store(out + (row + i) * K + k, tl.load(x + source * x_stride + k, mask=inside), mask=inside)


@triton.jit
def _tile(
    x, matrix, scales, factors, out, order, row, end, n, place,
    K: tl.constexpr, N: tl.constexpr, UP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        left, right = x.load([row, k]), matrix.load([place, k])
        if INTERPRETED:  # which multiplies bfloat16 as integers
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right.T, acc)
    at, own = row + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    inside = at < end
    if scales is not None:
        acc *= tl.load(scales + at, mask=inside, other=0.0)[:, None]
        acc *= tl.load(factors + place + tl.arange(0, BLOCK_N), mask=own < N, other=0.0)[None, :]
    made = acc.to(out.dtype.element_ty)
    target = at.to(tl.int64)
    if UP:  # rounded as the reference rounds: after the product and after the square
        made = tl.maximum(made.to(tl.float32), 0.0)
        made = (made * made).to(out.dtype.element_ty)
    elif order is not None:
        target = tl.load(order + at, mask=inside, other=0).to(tl.int64)
    tl.store(out + target[:, None] * N + own[None, :], made, mask=inside[:, None] & (own < N)[None, :])


@triton.jit
def _grouped(
    x, half, matrix, rest, scales, factors, out, order, offsets,
    K: tl.constexpr, N: tl.constexpr, E: tl.constexpr, UP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """half, rest: x and the matrices again, in tiles of half as many rows, and of REST columns: the last ones. scales
    of the rows of x, factors of those of the matrices, or neither.

    UP writes relu^2 to row i; otherwise row i goes to row order[i], if there is an order.
    """
    WHOLE: tl.constexpr = N // BLOCK_N
    TILES: tl.constexpr = WHOLE + (1 if REST else 0)
    e = tl.arange(0, BLOCK_E)
    wait()
    release()
    begins = tl.load(offsets + e, mask=e < E, other=0)
    ends = tl.load(offsets + e + 1, mask=e < E, other=0)
    blocks = (ends - begins + BLOCK_M - 1) // BLOCK_M
    behind = tl.cumsum(blocks, 0) * TILES
    pid = tl.program_id(0)
    expert = tl.sum((behind <= pid).to(tl.int32), 0)
    if expert < E:
        mine = e == expert
        first, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
        count = tl.sum(tl.where(mine, blocks, 0), 0)
        place = pid - (tl.sum(tl.where(mine, behind, 0), 0) - count * TILES)
        row, column = first + place % count * BLOCK_M, place // count
        n = column * BLOCK_N
        short = end - row <= BLOCK_M // 2
        if column < WHOLE:
            if short:
                _tile(
                    half, matrix, scales, factors, out, order, row, end, n, expert * N + n,
                    K, N, UP, BLOCK_M // 2, BLOCK_N, BLOCK_K, STAGES,
                )  # fmt: skip
            else:
                _tile(
                    x, matrix, scales, factors, out, order, row, end, n, expert * N + n,
                    K, N, UP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                )  # fmt: skip
        elif REST:
            _tile(
                x, rest, scales, factors, out, order, row, end, n, expert * N + n,
                K, N, UP, BLOCK_M, REST, BLOCK_K, STAGES,
            )  # fmt: skip


@triton.jit
def _relu_squared(x, SIZE, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait()
    release()
    value = tl.maximum(tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32), 0.0)
    tl.store(x + at, (value * value).to(x.dtype.element_ty), mask=at < SIZE)


def relu_squared(x: Tensor) -> Tensor:
    """x, contiguous, which becomes max(x, 0)^2."""
    if size := x.numel():
        _relu_squared[(triton.cdiv(size, 4096),)](x, size, 4096, num_warps=4, **OPTIONS)
    return x


def fits(x: Tensor, *matrices: Tensor) -> bool:
    """Whether the kernels can do it: on Hopper and later, if it has room, in 16 bits, rows of whole 16 bytes."""
    half = x.dtype in (torch.bfloat16, torch.float16) and all(matrix.dtype == x.dtype for matrix in matrices)
    rows = all(matrix.shape[-1] % 8 == 0 and matrix.is_contiguous() for matrix in matrices)
    return HOPPER and ROOMY and half and rows


def gathered(x: Tensor, order: Tensor, choices: int) -> Tensor:
    """x [T, K], order int32 [P] -> x[order // choices], [P, K]"""
    rows, k = len(order), x.shape[1]
    out = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(k)
    _gather[(triton.cdiv(rows, 4),)](x, order, out, rows, x.stride(0), k, choices, block, num_warps=8, **OPTIONS)
    return out


def product(
    x: Tensor,
    matrices: Tensor,
    order: Tensor | None,
    offsets: Tensor,
    up: bool,
    shape: tuple[int, int, int, int, int] | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Rows offsets[e] to offsets[e + 1] of x [P, K] times matrices [E, N, K]; then relu^2 if `up`, else row i goes to
    row order[i]. With `scales` [P] and [E, N] both are E4M3, and what is made is bfloat16. shape: rows of x, rows of a
    matrix and columns of a tile, stages, warps."""
    (total, size, k), pairs = matrices.shape, len(x)
    block_m, block_n, block_k, stages, warps = shape or (128, 256, 64 if scales is None else 128, 4, 8)
    out = torch.empty(pairs, size, dtype=x.dtype if scales is None else torch.bfloat16, device=x.device)
    rest = max(16, triton.next_power_of_2(size % block_n)) if size % block_n else 0
    tiles = size // block_n + (1 if rest else 0)

    def tiled(tensor: Tensor, rows: int) -> Any:
        return TensorDescriptor.from_tensor(tensor, [rows, block_k])

    flat = matrices.view(total * size, k)
    _grouped[((pairs // block_m + total) * tiles,)](
        tiled(x, block_m), tiled(x, block_m // 2), tiled(flat, block_n), tiled(flat, rest or 16),
        *(scales or (None, None)), out, order, offsets,
        k, size, total, up, block_m, block_n, rest, block_k, stages, triton.next_power_of_2(total),
        num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return out
