"""Mixture of experts: who computes what, and the computation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.reference.linear import mlp


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
    """Choose k of E experts for each row of x [T, H]; gate fp32 [E, H], bias fp32 [E] -> ids int64, weights fp32.

    s = sigmoid(gate x). The bias takes part in the choice only. With groups > 1 (contiguous blocks of E / groups
    experts) only the `kept` groups with the largest sum of their two best keys compete. weights = s of the chosen,
    divided by their sum if `normalize`, times `scale`. Equal keys: the lower index wins. (DeepSeek-V3, section 2.1.2.)
    """
    scores = F.linear(x.float(), gate).sigmoid()
    keys = scores + bias
    if groups > 1:
        blocks = keys.unflatten(-1, (groups, -1))
        best_two = blocks.topk(min(2, blocks.shape[-1]), dim=-1).values.sum(-1)
        dropped = torch.ones_like(best_two, dtype=torch.bool).scatter(-1, _largest(best_two, kept), False)
        keys = blocks.masked_fill(dropped[..., None], float("-inf")).flatten(-2)
    ids = _largest(keys, k)
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    """sum_j weights[:, j] * down[ids[:, j]](relu(up[ids[:, j]](x))^2) -> [T, N], summed in fp32 and rounded once.

    x [T, K], ids int64 [T, k], weights fp32 [T, k], up [E, I, K], down [E, N, I]. Reads the row counts of the experts
    on the host, so on CUDA it waits for the device.
    """
    k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)  # (token, choice) pairs, grouped by expert
    counts = ids.flatten().bincount(minlength=up.shape[0]).tolist()
    chosen = [expert for expert, count in enumerate(counts) if count]
    ups, downs = up.members(chosen), down.members(chosen)
    groups = x[order // k].split(counts)
    done = [F.linear(F.relu(F.linear(g, ups[e])).square(), downs[e]) for e, g in enumerate(groups) if counts[e]]
    pairs = torch.cat(done)[order.argsort()].unflatten(0, (-1, k))
    return (pairs * weights[..., None]).sum(1).to(x.dtype)


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    """The routed experts and the shared one: experts(x, ...) + mlp(x, shared_up, shared_down) -> [T, N]."""
    return experts(x, ids, weights, up, down) + mlp(x, shared_up, shared_down)


def _largest(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of the last dimension, the lower index first among equals (topk promises no order)."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
