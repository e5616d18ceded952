"""Ops that are made of others: what a device may do in one launch. Where it has no kernel, these run."""

from torch import Tensor

from leyden import ops
from leyden.formats import Weight
from leyden.ops.rows import Rows


def qkv_write(
    x: Tensor,
    q: Weight,
    k: Weight,
    v: Weight,
    cache: Tensor,
    rows: Rows,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Queries of x [T, H], as [T, heads, dim]; its keys and values go into cache [2, pages, page, kv heads, dim]."""
    queries, keys, values = (ops.linear(x, weight).unflatten(-1, (-1, cache.shape[-1])) for weight in (q, k, v))
    ops.kv_write(keys, values, cache, rows, k_scale, v_scale)
    return queries


def add_linear(x: Tensor, weight: Weight, to: Tensor) -> Tensor:
    """to + x @ W^T in the dtype of to [T, N], which the products may be rounded from that of x [T, K] to."""
    return to + ops.linear(x, weight, to.dtype)


def swiglu(x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """down(silu(gate x) * up x): x [..., K], gate and up [I, K], down [N, I] -> [..., N]. (Shazeer, 2020.)"""
    return ops.linear(ops.silu_times(ops.linear(x, gate), ops.linear(x, up)), down)


def add_norm_route(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, gate: Tensor, bias: Tensor, *options: int | bool | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(norm of the sum [T, H], the sum [T, H], ids, weights): add_rms_norm, and route of what it gives with the options
    that route takes."""
    hidden, total = ops.add_rms_norm(x, residual, weight, eps)
    return hidden, total, *ops.route(hidden, gate, bias, *options)
