"""Mixture of experts."""

import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.cpu.linear import dot_type, fits, operand, product
from leyden.ops.cpu.program import Kernel, has_rows, run, types
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
    logits, scratch = torch.empty(rows, count), torch.empty(rows, 2 * count + groups)
    ids, weights = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
    choose = _CHOOSE(logits, bias, ids, weights, scratch, rows, count, k, groups, kept, normalize, scale)
    run(*steps, product(wide, gate, logits), choose, work=rows * gate.numel())
    return ids, weights


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    first, second = up.dense(), down.dense()
    if not fits(x, first, second):
        return reference.experts(x, ids, weights, up, down)
    (tokens, k), (count, inner, _), outputs = ids.shape, first.shape, second.shape[1]
    order, borders = torch.empty(tokens * k, dtype=torch.int64), torch.empty(count + 1, dtype=torch.int64)
    hidden = torch.empty(tokens * k, inner, dtype=dot_type(second))
    sums, out = torch.empty(tokens, outputs), torch.empty(tokens, outputs, dtype=x.dtype)
    ids, weights = ids.contiguous(), weights.contiguous()
    steps, wide = operand(x, dot_type(first))
    type = types[first.dtype]
    run(
        *steps,
        _GROUP(ids, order, borders, tokens * k, count),
        _UP(
            order, borders, wide, first, hidden, count, x.shape[1], inner, k, wide.stride(0), types[hidden.dtype], type
        ),
        _DOWN(
            order, borders, weights, hidden, second, sums, out, tokens, count, inner, outputs, k, types[x.dtype], type
        ),
        work=tokens * k * inner * x.shape[1],
    )
    return out
