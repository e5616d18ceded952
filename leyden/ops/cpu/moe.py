"""Mixture of experts."""

import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.cpu.linear import dot_type, fits, operand, product
from leyden.ops.cpu.program import Kernel, Step, empty, has_rows, run, types
from leyden.ops.reference import moe as reference

_CHOOSE = Kernel("choose", "tttttiiiiiid")
_GROUP = Kernel("group", "tttii")
_UP = Kernel("experts_up", "tttttiiiiiii")
_DOWN = Kernel("experts_down", "tttttttiiiiiii")


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    k: int,
    groups: int = 1,
    kept: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    single = gate.dtype == bias.dtype == torch.float32 and gate.is_contiguous()
    if not (single and has_rows(x)):
        return reference.route(x, gate, bias, k, groups, kept, normalize, scale)
    rows, count = len(x), len(gate)
    steps, wide = operand(x, torch.float32)
    logits, weights = empty(rows, count, dtype=torch.float32), empty(rows, k, dtype=torch.float32)
    scratch, ids = empty(rows, 2 * count + groups, dtype=torch.float32), empty(rows, k, dtype=torch.int64)
    choose = _CHOOSE(logits, bias, ids, weights, scratch, rows, count, k, groups, kept, normalize, scale)
    run(*steps, product(wide, gate, logits), choose, work=rows * gate.numel())
    return ids, weights


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    first, second = up.dense(), down.dense()
    if not fits(x, first, second):
        return reference.experts(x, ids, weights, up, down)
    steps, wide = operand(x, dot_type(first))
    more, out = _experts(wide, x.dtype, ids, weights, first, second)
    run(*steps, *more, work=ids.numel() * first[0].numel())
    return out


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    first, second = up.dense(), down.dense()
    first_shared, second_shared = shared_up.dense(), shared_down.dense()
    if not fits(x, first, second, first_shared, second_shared):
        return reference.moe(x, ids, weights, up, down, shared_up, shared_down)
    steps, wide = operand(x, dot_type(first))
    more, out = _experts(wide, x.dtype, ids, weights, first, second)
    hidden = empty(len(x), len(first_shared), dtype=dot_type(second_shared))
    shared = product(wide, first_shared, hidden, square=True), product(hidden, second_shared, out, add=out)
    run(*steps, *more, *shared, work=ids.numel() * first[0].numel())
    return out


def _experts(
    x: Tensor, dtype: torch.dtype, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor
) -> tuple[list[Step], Tensor]:
    """(the steps of the routed experts, their result in `dtype`); x as operand() gives it."""
    (tokens, k), (count, inner, inputs), outputs = ids.shape, up.shape, down.shape[1]
    ids, weights, type = ids.contiguous(), weights.contiguous(), types[up.dtype]
    order, borders = empty(tokens * k, dtype=torch.int64), empty(count + 1, dtype=torch.int64)
    hidden = empty(tokens * k, inner, dtype=dot_type(down))
    sums, out = empty(tokens, outputs, dtype=torch.float32), empty(tokens, outputs, dtype=dtype)
    first = (count, inputs, inner, k, x.stride(0), types[hidden.dtype], type)
    second = (tokens, count, inner, outputs, k, types[dtype], type)
    steps = [
        _GROUP(ids, order, borders, tokens * k, count),
        _UP(order, borders, x, up, hidden, *first),
        _DOWN(order, borders, weights, hidden, down, sums, out, *second),
    ]
    return steps, out
