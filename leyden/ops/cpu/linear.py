"""Products with one stored matrix."""

import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.cpu.program import Kernel, Step, dot_bf16, empty, has_rows, run, types
from leyden.ops.reference import linear as reference

_LINEAR = Kernel("linear", "ttttiiiiiii")
_WIDEN = Kernel("widen", "ttiiii")
_EMBED = Kernel("embed", "tttii")


def fits(x: Tensor, *matrices: Tensor) -> bool:
    """Whether rows x [T, K] can be multiplied with these matrices, each [N, K] or [E, N, K]."""
    plain = all(m.dtype == x.dtype and m.is_contiguous() for m in matrices)
    return plain and has_rows(x) and x.dtype in (torch.float32, torch.bfloat16)


def dot_type(matrix: Tensor) -> torch.dtype:
    """The type in which rows meet a matrix: its own, but for BF16 on machines that cannot multiply it."""
    return matrix.dtype if dot_bf16 else torch.float32


def operand(x: Tensor, type: torch.dtype) -> tuple[list[Step], Tensor]:
    """(steps that make it, x [T, K] in the type in which it meets a matrix)"""
    if x.dtype == type:
        return [], x
    wide = empty(*x.shape, dtype=torch.float32)
    return [_WIDEN(x, wide, *x.shape, x.stride(0), types[x.dtype])], wide


def product(x: Tensor, matrix: Tensor, out: Tensor, square: bool = False, add: Tensor | None = None) -> Step:
    """out = x W^T, or relu(x W^T)^2, plus `add`; x as operand() gives it."""
    outputs, inputs = matrix.shape
    return _LINEAR(
        x, matrix, add, out, len(x), inputs, outputs, x.stride(0), types[out.dtype], types[matrix.dtype], square
    )


def embed(tokens: Tensor, weight: Weight) -> Tensor:
    table = weight.dense()
    if not table.is_contiguous():
        return reference.embed(tokens, weight)
    tokens = tokens.long().contiguous()
    out = empty(*tokens.shape, table.shape[1], dtype=table.dtype)
    run(_EMBED(tokens, table, out, tokens.numel(), table.shape[1] * table.element_size()), work=out.numel())
    return out


def linear(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    matrix, rows = weight.dense(), x.flatten(0, -2) if x.dim() > 1 else x[None]
    if not fits(rows, matrix) or (dtype or x.dtype) not in types:
        return reference.linear(x, weight, dtype)
    out = empty(*x.shape[:-1], len(matrix), dtype=dtype or x.dtype)
    steps, wide = operand(rows, dot_type(matrix))
    run(*steps, product(wide, matrix, out), work=len(rows) * matrix.numel())
    return out


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    first, second = up.dense(), down.dense()
    if not fits(x, first, second):
        return reference.mlp(x, up, down)
    steps, wide = operand(x, dot_type(first))
    hidden = empty(len(x), len(first), dtype=dot_type(second))
    out = empty(len(x), len(second), dtype=x.dtype)
    steps += [product(wide, first, hidden, square=True), product(hidden, second, out)]
    run(*steps, work=len(x) * first.numel())
    return out
