"""The steps of a drafter network that the target does not have: rotary embedding, gated MLP, attention of a block.

A block is the few rows that a drafter proposes from: the anchor (the newest token) and mask tokens after it. Its rows
see the context, which are the keys and values made of the target's residual stream, and each other. Source: DFlash
(arXiv 2602.06036), section 3; sinks and windows as NVIDIA's Model-Optimizer trains them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.reference.linear import linear
from leyden.ops.rows import Rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in halves: (a, b) -> (a cos - b sin, b cos + a sin), fp32 inside.

    x [..., heads, dim], cos and sin fp32 [..., dim / 2]. (Su et al., "RoFormer" (2021), with the halves of GPT-NeoX.)
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def swiglu(x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """down(silu(gate x) * up x): x [..., K], gate and up [I, K], down [N, I] -> [..., N]. (Shazeer, 2020.)"""
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, rows: Rows, causal: bool, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Blocks of q [T, heads, dim] attend to their context in the cache and to themselves -> [T, heads, dim].

    Row r of `rows` is one block; its context are positions 0 .. past[r] - 1 of cache [2, pages, page, kv heads, dim],
    and k, v [T, kv heads, dim] are its own keys and values, which the cache need not hold. Caches of drafters have no
    scales, of 8-bit floats neither. Visibility, sinks and arithmetic as in block_attention_packed. Reads `past` on the
    host: on CUDA it waits.
    """
    assert rows.pages is not None
    page = cache.shape[2]
    outputs = []
    blocks = zip(q.split(rows.lens), k.split(rows.lens), v.split(rows.lens), rows.past, rows.pages, strict=True)
    for own_q, own_k, own_v, past, table in blocks:
        context = cache[:, table[: -(-int(past) // page)]].flatten(1, 2)[:, : int(past)].to(q.dtype)
        q1, k1, v1 = (t[None, None] for t in (own_q, own_k, own_v))
        context_k, context_v = context[:, None]
        out = block_attention_packed(q1, k1, v1, context_k, context_v, past.view(1, 1), causal, window, sinks)
        outputs.append(out[0, 0])
    return torch.cat(outputs)


def block_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    anchors: Tensor,
    causal: bool,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """M blocks of W rows for each of S sequences, all over one context per sequence -> [S, M, W, heads, dim].

    q [S, M, W, heads, dim]; k, v [S, M, W, kv heads, dim] of the blocks; context_k, context_v [S, L, kv heads, dim] of
    positions 0 .. L - 1; anchors int [S, M]: position of each block's first row. Row i of a block sees context
    positions j < anchor, with a window only j > anchor + i - window, and of its own block all rows, or rows 0 .. i if
    causal. Blocks do not see each other. A sink (fp32 [heads]) is one more logit in the softmax, without a value.
    """
    groups, width, scale = k.shape[-2], q.shape[2], q.shape[-1] ** -0.5
    # s sequence, m block, i row of it, j key, g kv head, r query head of that kv head, d head dim
    queries = q.float().unflatten(-2, (groups, -1)) * scale
    to_context = torch.einsum("smigrd,sjgd->smigrj", queries, context_k.float())
    to_block = torch.einsum("smigrd,smjgd->smigrj", queries, k.float())

    row, key = torch.arange(width, device=q.device), torch.arange(context_k.shape[1], device=q.device)
    hidden = key >= anchors[..., None, None]  # [S, M, 1, L]
    if window is not None:
        hidden = hidden | (key <= anchors[..., None, None] + row[:, None] - window)
    logits = [to_context.masked_fill(hidden[..., None, None, :], float("-inf"))]
    later = row > row[:, None]
    logits.append(to_block.masked_fill(later[:, None, None], float("-inf")) if causal else to_block)
    if sinks is not None:
        logits.append(sinks.float().view(groups, -1, 1).expand(*to_block.shape[:-1], 1))
    weights = torch.cat(logits, dim=-1).softmax(-1)

    of_context, of_block = weights.split([len(key), width, weights.shape[-1] - len(key) - width], dim=-1)[:2]
    out = torch.einsum("smigrj,sjgd->smigrd", of_context, context_v.float())
    out = out + torch.einsum("smigrj,smjgd->smigrd", of_block, v.float())
    return out.flatten(-3, -2).to(q.dtype)
