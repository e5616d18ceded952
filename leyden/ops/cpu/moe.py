"""Mixture of experts."""

import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.cpu.linear import product
from leyden.ops.cpu.matrix import MATRIX, Matrix, fits, matrix, operand, plain
from leyden.ops.cpu.program import Kernel, Step, apart, empty, has_rows, run, types
from leyden.ops.reference import moe as reference

_CHOOSE = Kernel("choose", "tttttiiiiiid")
_GROUP = Kernel("group", "tttii")
_EXPERTS = "tttttttt" + MATRIX + "iiiii"
_UP = Kernel("experts_up", _EXPERTS)
_DOWN = Kernel("experts_down", _EXPERTS)
_SPREAD = 32  # tokens up to which most experts have few of them


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
    logits, weights = empty(rows, count, dtype=torch.float32), empty(rows, k, dtype=torch.float32)
    scratch, ids = empty(rows, 2 * count + groups, dtype=torch.float32), empty(rows, k, dtype=torch.int64)
    choose = _CHOOSE(logits, bias, ids, weights, scratch, rows, count, k, groups, kept, normalize, scale)
    run(*product(x, plain(gate), logits), choose, work=rows * gate.numel())
    return ids, weights


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    first, second = matrix(up), matrix(down)
    if first is None or second is None or not fits(x, first, second):
        return reference.experts(x, ids, weights, up, down)
    before, (up_step, prepared, down_step), out = _experts(x, ids, weights, first, second)
    run(*before, up_step, *prepared, down_step, work=ids.numel() * first.rows * first.columns)
    return out


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    first, second, third, fourth = (matrix(w) for w in (up, down, shared_up, shared_down))
    if not first or not second or not third or not fourth or not fits(x, first, second, third, fourth):
        return reference.moe(x, ids, weights, up, down, shared_up, shared_down)
    before, (up_step, prepared, down_step), out = _experts(x, ids, weights, first, second)
    hidden = empty(len(x), third.rows, dtype=fourth.dot_type)
    *prepare, shared_up_step = product(x, third, hidden, square=True)
    *prepare_hidden, shared_down_step = product(hidden, fourth, out, add=out)
    # A thread has the same rows of `out` in both products, so it adds to what it wrote itself.
    run(
        *prepare,
        *before,
        *apart(up_step, shared_up_step),
        *(apart(*prepared, *prepare_hidden) if prepared or prepare_hidden else []),
        *apart(down_step, shared_down_step),
        work=ids.numel() * first.rows * first.columns,
    )
    return out


def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: Matrix, down: Matrix
) -> tuple[list[Step], tuple[Step, list[Step], Step], Tensor]:
    """(steps before, the routed experts themselves: up, between, down; their result)"""
    tokens, k = ids.shape
    pairs, count = tokens * k, up.members
    order, borders = empty(pairs, dtype=torch.int64), empty(count + 1, dtype=torch.int64)
    hidden, sums = empty(pairs, up.rows, dtype=down.dot_type), empty(tokens, down.rows, dtype=torch.float32)
    out, weights = empty(tokens, down.rows, dtype=x.dtype), weights.contiguous()
    widen, wide = operand(x, up.dot_type)
    prepare, ready = up.ready(x) if tokens <= _SPREAD else ([], None)
    prepare_hidden, ready_hidden = down.ready(hidden) if tokens <= _SPREAD else ([], None)
    counts = (tokens, count, k)
    group = _GROUP(ids.contiguous(), order, borders, pairs, count)
    up_step = _UP(
        order, borders, wide, ready, None, None, hidden, up.panels(),
        *up.fields, *counts, wide.stride(0), types[hidden.dtype],
    )  # fmt: skip
    down_step = _DOWN(
        order, borders, hidden, ready_hidden, weights, sums, out, down.panels(),
        *down.fields, *counts, hidden.stride(0), types[x.dtype],
    )  # fmt: skip
    return apart(*widen, *prepare, group), (up_step, prepare_hidden, down_step), out
