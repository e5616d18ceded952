"""Rows of drafts, and the steps of a drafter network that the target does not have: rotary embedding, gated MLP,
attention of a block.

A block is the few rows that a drafter proposes from: the anchor (the newest token) and mask tokens after it. Its rows
see the context, which are the keys and values made of the target's residual stream, and each other. Source: DFlash
(arXiv 2602.06036), section 3; sinks and windows as NVIDIA's Model-Optimizer trains them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.ops.rows import Rows

SUREST = 40.0  # log-odds


def begin_drafts(
    slots: Tensor, last: Tensor, drafts: Tensor, committed: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What rows of the newest token and `count` drafts start from, for slots int32 [R]: (tokens int64, past int32 [R],
    positions int32, places int64), all but one [R * (count + 1)].

    last int64 [S]: the newest token of each slot; drafts int64 [S, W]: what is proposed behind it, -1 for nothing, in
    whose place token 0 is fed; committed int32 [S]: the tokens before it. `places` are those of the tokens that will be
    sampled, one behind each position.
    """
    past = committed[slots]
    tokens = torch.cat([last[slots, None], drafts[slots, :count].clamp(min=0)], dim=1)
    positions = past[:, None] + torch.arange(count + 1, dtype=torch.int32, device=past.device)
    return tokens.flatten(), past, positions.flatten(), positions.flatten().long() + 1


def accept(
    drawn: Tensor, guesses: Tensor, before: Tensor, positions: Tensor, stops: Tensor, open_at: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """How far guesses int64 [R, W] are what the target says, drawn int64 [R, W + 1] -> (kept int64 [R, W + 1], -1
    behind what is kept; counts int32 [R], how much that is; newest int64 [R], the last of it; its index in
    drawn.flatten() int32 [R]; its position int32 [R]).

    The first token of a row is always kept, each further one if the guess before it is right and no end. before int64
    [R]: the token before drawn[:, 0], behind which nothing counts if it is an end itself; positions int64 [R]: of
    drawn[:, 0]. An end is one of stops int64 [R, E] (-1: none) from position open_at int64 [R] on.
    """
    width = guesses.shape[1]
    reach = torch.arange(width + 1, device=drawn.device)

    def ends(tokens: Tensor, at: Tensor) -> Tensor:
        return (tokens[..., None] == stops[:, None]).any(-1) & (at >= open_at[:, None])

    running = ~ends(before[:, None], positions[:, None] - 1)
    said = drawn[:, :width]
    right = (said == guesses) & ~ends(said, positions[:, None] + reach[:width]) & running
    accepted = right.int().cumprod(1).sum(1)
    kept = torch.where(reach <= accepted[:, None], drawn, -1)
    newest = drawn.gather(1, accepted[:, None])[:, 0]
    first = torch.arange(0, drawn.numel(), width + 1, device=drawn.device)
    return kept, (accepted + 1).int(), newest, (first + accepted).int(), (positions + accepted).int()


def begin_block(anchors: Tensor, places: Tensor, rows: int, mask: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of `rows` rows for R sequences: anchors int64 [R], at places int32 [R], and masks behind each ->
    (tokens int64 [R * rows], positions int32 [R * rows], starts int32 [R + 1]: where the blocks begin, and end)."""
    masks = anchors.new_full((len(anchors), rows - 1), mask)
    reach = torch.arange(rows, dtype=torch.int32, device=places.device)
    starts = torch.arange(len(anchors) + 1, dtype=torch.int32, device=places.device) * rows
    return torch.cat([anchors[:, None], masks], dim=1).flatten(), (places[:, None] + reach).flatten(), starts


def ahead(places: Tensor, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """places int32 [R] and what is 1 .. count - 1 behind them -> [count, R]."""
    return (places + torch.arange(count, device=places.device)[:, None]).to(dtype)


def join(*parts: Tensor) -> Tensor:
    """Parts [T, ...] side by side -> [T, sum of their widths]."""
    return torch.cat(parts, dim=-1)


def likeliest(logits: Tensor) -> Tensor:
    """The most likely token of each row, the first of equals: logits fp32 [R, V] -> int64 [R]."""
    return logits.argmax(-1)


def angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin of positions int [...] times frequencies fp32 [n], each times `scale`: fp32 [..., n]."""
    angle = positions[..., None].float() * frequencies
    return angle.cos() * scale, angle.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in halves: (a, b) -> (a cos - b sin, b cos + a sin), fp32 inside.

    x [..., heads, dim], cos and sin fp32 [..., dim / 2]. (Su et al., "RoFormer" (2021), with the halves of GPT-NeoX.)
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape; silu is rounded to the dtype before the product."""
    return F.silu(gate) * up


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


def confidence(hidden: Tensor, also: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """Log-odds fp32 [...] that a logistic regression gives hidden [..., H] and, behind it, also [..., K]; weight fp32
    [1, H + K], bias fp32 [1]."""
    read = hidden.float() if also is None else torch.cat([hidden.float(), also.float()], dim=-1)
    return F.linear(read, weight, bias).squeeze(-1)


def certainty(logits: Tensor) -> Tensor:
    """Log-odds of the most likely of logits fp32 [R, V], log p - log(1 - p), from -40 to 40: fp32 [R]."""
    most, which = logits.max(-1, keepdim=True)
    others = logits.scatter(-1, which, float("-inf")).logsumexp(-1)
    return (most[..., 0] - others).clamp(-SUREST, SUREST)


def expect(scores: Tensor, weights: Tensor, open: Tensor, made_at: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    """Log-odds fp32 [R, count] that drafts are kept if those before them are: weights[0] * score + weights[1 + place].

    scores fp32 [R, count]: the certainty of each; weights fp64 [1 + W]: slope, biases. Until learn() they are open: in
    open fp32 [S, W], NaN behind them, at slots int [R]; and made at places int32 [R], those of the anchors.
    """
    count = scores.shape[1]
    open[slots] = float("nan")
    open[slots, :count] = scores
    made_at[slots] = places
    return (scores.double() * weights[0] + weights[1 : 1 + count]).float()


def learn(
    tokens: Tensor, following: Tensor, rows: Rows, open: Tensor, made_at: Tensor, memory: Tensor, at: Tensor
) -> None:
    """What became of the open drafts of R rows, each its anchor and the drafts behind it, goes to memory[:, at + r].

    tokens int64 [T]: as fed, -1 for none; following int64 [T]: what the target says after each. memory fp64 [3, M, W]:
    scores, whether the draft was right, whether that is known, which it is if all before it were; a ring whose next
    place is at int64 [1]. Rows whose drafts are from another place than their past count for nothing: a slot may have a
    new sequence. Whatever it was, nothing is open in these rows then.
    """
    assert rows.slots is not None
    device, width, slots = tokens.device, open.shape[1], rows.slots.long()
    first, last = rows.starts[:-1].long(), rows.tokens - 1
    places = first[:, None] + torch.arange(width, device=device)
    there = places + 1 < rows.starts[1:, None]
    tried = tokens[(places + 1).clamp(max=last)]
    there &= tried >= 0
    right = there & (tried == following[places.clamp(max=last)])
    reached = there & torch.cat([torch.ones_like(right[:, :1]), right[:, :-1].cumprod(1).bool()], 1)
    scores = open[slots]
    known = reached & (rows.past == made_at[slots])[:, None] & scores.isfinite()
    open[slots] = float("nan")
    blocks = torch.stack([scores.nan_to_num(0, 0, 0), right.float(), known.float()]).to(memory.dtype)[
        :, -memory.shape[1] :
    ]
    size = blocks.shape[1]
    memory[:, (torch.arange(size, device=device) + at) % memory.shape[1]] = blocks
    at.add_(size).remainder_(memory.shape[1])
