"""Products with one stored matrix."""

import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.cpu.matrix import MATRIX, Matrix, fits, matrix, operand
from leyden.ops.cpu.program import Kernel, Step, empty, has_rows, run, types
from leyden.ops.reference import linear as reference

_LINEAR = Kernel("linear", "ttttt" + MATRIX + "iiiii")
_EMBED = Kernel("embed", "tt" + MATRIX + "i")
_FEW = 8  # rows up to which codes are multiplied as they are, MOST_TOKENS in matrix.h


def product(x: Tensor, by: Matrix, out: Tensor, square: bool = False, add: Tensor | None = None) -> list[Step]:
    """out = x W^T, or relu(x W^T)^2, plus `add`, like out; x [T, K] of any type that kernels know."""
    widen, wide = operand(x, by.dot_type)
    prepare, ready = by.ready(x) if len(x) <= _FEW else ([], None)
    form = (len(x), wide.stride(0), types[out.dtype], square, 0 if add is None else add.stride(0))
    return [*widen, *prepare, _LINEAR(wide, ready, add, out, by.panels(), *by.fields, *form)]


def embed(tokens: Tensor, weight: Weight) -> Tensor:
    table = matrix(weight)
    if table is None:
        return reference.embed(tokens, weight)
    tokens = tokens.long().contiguous()
    out = empty(*tokens.shape, table.columns, dtype=table.dtype)
    run(_EMBED(tokens, out, *table.fields, tokens.numel()), work=out.numel())
    return out


def linear(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    by, rows = matrix(weight), x.flatten(0, -2) if x.dim() > 1 else x[None]
    if by is None or not fits(rows, by) or (dtype or x.dtype) not in types:
        return reference.linear(x, weight, dtype)
    out = empty(*x.shape[:-1], by.rows, dtype=dtype or x.dtype)
    run(*product(rows, by, out), work=len(rows) * by.rows * by.columns)
    return out


def add_linear(x: Tensor, weight: Weight, to: Tensor) -> Tensor:
    by = matrix(weight)
    if by is None or not (x.dim() == 2 and fits(x, by) and has_rows(to)):
        return reference.add_linear(x, weight, to)
    out = empty(len(x), by.rows, dtype=to.dtype)
    run(*product(x, by, out, add=to), work=len(x) * by.rows * by.columns)
    return out


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    first, second = matrix(up), matrix(down)
    if first is None or second is None or not fits(x, first, second):
        return reference.mlp(x, up, down)
    out = empty(len(x), second.rows, dtype=x.dtype)
    run(*two_products(x, first, second, out), work=len(x) * first.rows * first.columns)
    return out


def two_products(x: Tensor, up: Matrix, down: Matrix, out: Tensor, add: Tensor | None = None) -> list[Step]:
    """out = down(relu(up x)^2), plus `add`."""
    hidden = empty(len(x), up.rows, dtype=down.dot_type)
    return product(x, up, hidden, square=True) + product(hidden, down, out, add=add)
