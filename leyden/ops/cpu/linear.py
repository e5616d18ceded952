"""Products with one stored matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.formats import Weight
from leyden.ops import fused
from leyden.ops.cpu.matrix import MATRIX, Matrix, fits, matrix, operand
from leyden.ops.cpu.program import Kernel, Step, constant, empty, has_rows, recording, run, types
from leyden.ops.reference import linear as reference

_LINEAR = Kernel("linear", "ttttt" + MATRIX + "iiiii")
_EMBED = Kernel("embed", "tt" + MATRIX + "i")
_FEW = 8  # rows up to which codes are multiplied as they are, MOST_TOKENS in matrix.h
_MANY = 128  # rows from which on oneDNN's products by tiles are worth its call and an order of the matrix of its own
_has_tiles = bool(constant("has_tiles"))


def product(x: Tensor, by: Matrix, out: Tensor, square: bool = False, add: Tensor | None = None) -> list[Step]:
    """out = x W^T, or relu(x W^T)^2, plus `add`, like out; x [T, K] of any type that kernels know."""
    widen, wide = operand(x, by.dot_type)
    prepare, ready = by.ready(x) if len(x) <= _FEW else ([], None)
    form = (len(x), wide.stride(0), types[out.dtype], square, 0 if add is None else add.stride(0))
    return [*widen, *prepare, _LINEAR(wide, ready, add, out, by.panels(), *by.fields, *form)]


def tiled(x: Tensor) -> bool:
    """Whether products with x [T, K] are torch's, which are oneDNN's: those of many rows where the machine has AMX."""
    return _has_tiles and len(x) >= _MANY and x.dtype == torch.bfloat16 and not recording()


def product_by_tiles(x: Tensor, weight: Weight) -> Tensor:
    """x W^T; codes become a matrix of BF16 first."""
    rows = torch.arange(weight.shape[0])
    return F.linear(x, weight.dense() if weight.format.name == "dense" else embed(rows, weight))


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
    if tiled(rows):
        return product_by_tiles(x, weight).to(dtype or x.dtype)
    out = empty(*x.shape[:-1], by.rows, dtype=dtype or x.dtype)
    run(*product(rows, by, out), work=len(rows) * by.rows * by.columns)
    return out


def add_linear(x: Tensor, weight: Weight, to: Tensor) -> Tensor:
    by = matrix(weight)
    if by is None or not (x.dim() == 2 and fits(x, by) and has_rows(to)):
        return fused.add_linear(x, weight, to)
    if tiled(x):
        return to + product_by_tiles(x, weight).to(to.dtype)
    out = empty(len(x), by.rows, dtype=to.dtype)
    run(*product(x, by, out, add=to), work=len(x) * by.rows * by.columns)
    return out


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    first, second = matrix(up), matrix(down)
    if first is None or second is None or not fits(x, first, second):
        return reference.mlp(x, up, down)
    if tiled(x):
        return product_by_tiles(F.relu(product_by_tiles(x, up)).square(), down)
    out = empty(len(x), second.rows, dtype=x.dtype)
    run(*two_products(x, first, second, out), work=len(x) * first.rows * first.columns)
    return out


def two_products(x: Tensor, up: Matrix, down: Matrix, out: Tensor, add: Tensor | None = None) -> list[Step]:
    """out = down(relu(up x)^2), plus `add`."""
    hidden = empty(len(x), up.rows, dtype=down.dot_type)
    return product(x, up, hidden, square=True) + product(hidden, down, out, add=add)
