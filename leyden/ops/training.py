"""Differentiable versions of the ops for packed rows, as tensor code over the whole batch: training's hot path.

They differ from the references in speed only: no loop over rows, chunks or experts, and nothing that waits for the
device. States and caches are not their business; neither are quantised weights (the reference takes those).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leyden import ops
from leyden.formats import Weight
from leyden.ops.reference import moe as reference
from leyden.ops.reference.linear import mlp
from leyden.ops.rows import Rows

_CHUNK = 64  # tokens of a scan chunk: scores grow with it, states shrink
# Not cuDNN's, which PyTorch may prefer: it compiles for every new shape, and every batch has new shapes.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_ALL_EXPERTS = 8  # up to this many experts per chosen one, computing all of them beats sorting tokens by expert


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    gated = (y.float() * F.silu(z.float())).unflatten(-1, (groups, -1))
    return (F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2) * weight.float()).to(y.dtype)


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    """All experts as one wide MLP whose hidden units are scaled by the router, zero where an expert was not chosen."""
    count, width = up.shape[:2]
    if count > _ALL_EXPERTS * ids.shape[1]:
        return reference.experts(x, ids, weights, up, down)
    scale = weights.new_zeros(len(x), count).scatter(1, ids, weights).to(x.dtype)
    hidden = F.relu(F.linear(x, up.dense().flatten(0, 1))).square().unflatten(-1, (count, width)) * scale[..., None]
    return F.linear(hidden.flatten(1), down.dense().transpose(0, 1).flatten(1))


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    return experts(x, ids, weights, up, down) + mlp(x, shared_up, shared_down)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, rows: Rows) -> Tensor:
    """One line with K - 1 zeros before each row, so that each tap is a shifted view of it."""
    assert state is None
    reach = weight.shape[1] - 1
    cells = _line(rows.lens, reach, x.device)
    line = x.new_zeros(len(x) + len(rows.lens) * reach, x.shape[1]).index_copy(0, cells + reach, x).float()
    taps = weight.float().unbind(1)
    out = line[: len(line) - reach] * taps[0]
    for i, tap in enumerate(taps[1:], 1):
        out = torch.addcmul(out, line[i : len(line) - reach + i], tap)
    out = out.index_select(0, cells)
    return F.silu(out if bias is None else out + bias.float()).to(x.dtype)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    chunk: int,
    state: Tensor | None,
    rows: Rows,
) -> Tensor:
    """Chunks as in the reference; the states between them come from one matrix of decays instead of a walk.

    Mamba-2's minimal SSD (Dao and Gu 2024, listing 1), with rows of different lengths.
    """
    assert state is None
    grid = _grid(rows.lens, min(chunk, _CHUNK), x.device)
    groups = B.shape[1]
    # c chunk, g group, r head in the group, l and s token in the chunk, p head dim, n state: always in this order.
    # Decays are fp32; what is multiplied by the thousand has the activations' dtype, as in the paper's kernels.
    delta = F.softplus(dt.float() + dt_bias).clamp(*dt_limit)
    decay = grid.lay(delta * -A_log.exp()).unflatten(-1, (groups, -1)).permute(0, 2, 3, 1).cumsum(-1)  # [c, g, r, l]
    inputs = grid.lay(x * delta.to(x.dtype)[..., None]).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    keys, queries = (grid.lay(t).transpose(1, 2)[:, :, None] for t in (B, C))  # [c, g, 1, l, n]

    future = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=x.device).triu(1)
    since = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, float("-inf")).exp()  # [c, g, r, l, s]
    y = (queries @ keys.mT * since.to(x.dtype)) @ inputs

    total = decay[..., -1]  # [c, g, r]: log decay of a whole chunk
    added = ((total[..., None] - decay).exp().to(x.dtype)[..., None] * inputs).mT @ keys  # [c, g, r, p, n]
    # Sums over many chunks that are then subtracted: fp64, or the small differences drown.
    until = total.double().flatten(1).cumsum(0).T  # [heads, c]
    between = (until - total.double().flatten(1).T)[:, :, None] - until[:, None]  # [heads, c, earlier c]
    between = between.masked_fill(~grid.before, float("-inf")).exp().to(x.dtype)
    entering = (between @ added.flatten(1, 2).transpose(0, 1).flatten(2)).transpose(0, 1).view_as(added)
    y = y + (queries @ entering.mT) * decay.exp().to(x.dtype)[..., None]

    y = grid.take(y.permute(0, 3, 1, 2, 4)).flatten(1, 2)
    return (y + x.float() * D[:, None]).to(x.dtype)


def attention_packed(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Rows of similar length as one rectangle each: what stands behind a row's end is seen by nothing that is kept."""
    buckets, cells = _buckets(rows.lens, q.device)
    mixed = []
    for bucket in buckets:
        # [rows, heads, longest, dim]
        shape = bucket.shape
        queries, keys, values = (
            t.index_select(0, bucket.flatten()).unflatten(0, shape).transpose(1, 2) for t in (q, k, v)
        )
        with sdpa_kernel(_ATTENTION):
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed).index_select(0, cells)


@dataclass(frozen=True)
class _Grid:
    """Chunks of all rows one after the other, [chunks, size]; zeros where a row's last chunk is not full."""

    cells: Tensor  # [T]: grid cell of every token
    chunks: int
    size: int
    before: Tensor  # bool [chunks, chunks]: is the second an earlier chunk of the same row?

    def lay(self, x: Tensor) -> Tensor:
        flat = x.new_zeros(self.chunks * self.size, *x.shape[1:])
        return flat.index_copy(0, self.cells, x).unflatten(0, (self.chunks, self.size))

    def take(self, grid: Tensor) -> Tensor:
        return grid.flatten(0, 1).index_select(0, self.cells)


# A batch goes through many layers: its layout is computed once, on the host.
@lru_cache(maxsize=8)
def _grid(lens: tuple[int, ...], size: int, device: torch.device) -> _Grid:
    counts = -(-np.array(lens) // size)
    first = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(counts)), counts)
    before = (row[:, None] == row) & (np.arange(len(row))[:, None] > np.arange(len(row)))
    cells = np.repeat(first * size, lens) + _within(lens)
    return _Grid(_upload(cells, device), len(row), size, _upload(before, device))


@lru_cache(maxsize=8)
def _line(lens: tuple[int, ...], reach: int, device: torch.device) -> Tensor:
    """Position of every token in a line where each row is followed by `reach` more cells."""
    starts = np.cumsum(lens) - lens
    return _upload(np.repeat(starts + reach * np.arange(len(lens)), lens) + _within(lens), device)


@lru_cache(maxsize=8)
def _buckets(lens: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """(tokens of each rectangle [rows, longest], cell of every token in the rectangles one after the other).

    A rectangle holds the rows whose lengths have the same number of bits, so less than half of it is waste.
    """
    sizes = np.array(lens)
    starts = np.cumsum(sizes) - sizes
    bits = np.frexp(sizes)[1]
    buckets, first, taken = [], np.zeros(len(sizes), dtype=np.int64), 0
    for group in np.unique(bits):
        members = np.flatnonzero(bits == group)
        longest = sizes[members].max()
        tokens = starts[members, None] + np.arange(longest)
        buckets.append(_upload(np.minimum(tokens, sizes.sum() - 1), device))
        first[members] = taken + longest * np.arange(len(members))
        taken += longest * len(members)
    return buckets, _upload(np.repeat(first, sizes) + _within(lens), device)


def _within(lens: tuple[int, ...]) -> np.ndarray:
    """Index of every token in its row."""
    return np.arange(sum(lens)) - np.repeat(np.cumsum(lens) - lens, lens)


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


ops.rms_norm.register("training", rms_norm)
ops.add_rms_norm.register("training", add_rms_norm)
ops.gated_norm.register("training", gated_norm)
ops.experts.register("training", experts)
ops.moe.register("training", moe)
ops.causal_conv.register("training", causal_conv)
ops.ssd_scan.register("training", ssd_scan)
ops.attention_packed.register("training", attention_packed)
