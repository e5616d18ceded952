"""Causal grouped-query attention without rotary embedding, over KV pages or over packed rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.ops.rows import Rows


def kv_write(k: Tensor, v: Tensor, cache: Tensor, rows: Rows) -> None:
    """Put k, v [T, kv heads, dim] of the rows at their positions into cache [2, pages, page, kv heads, dim]."""
    assert rows.pages is not None
    page = cache.shape[2]
    lens = torch.tensor(rows.lens, device=k.device)
    row = torch.repeat_interleave(torch.arange(len(rows.lens), device=k.device), lens, output_size=rows.tokens)
    positions = torch.arange(rows.tokens, device=k.device) - rows.starts[row] + rows.past[row]
    pages, offsets = rows.pages[row, positions // page], positions % page
    cache[0, pages, offsets] = k.to(cache.dtype)
    cache[1, pages, offsets] = v.to(cache.dtype)


def attention(q: Tensor, cache: Tensor, rows: Rows) -> Tensor:
    """Rows of q [T, heads, dim] attend to everything before them and themselves -> [T, heads, dim].

    softmax(q k^T / sqrt(dim)) v in fp32; query head h reads kv head h // (heads / kv heads). The keys and values of
    the rows are already in cache [2, pages, page, kv heads, dim]. Reads `past` on the host: on CUDA it waits.
    """
    assert rows.pages is not None
    page = cache.shape[2]
    outputs = []
    for part, past, table in zip(q.split(rows.lens), rows.past.tolist(), rows.pages, strict=True):
        length = past + len(part)
        k, v = cache[:, table[: -(-length // page)]].flatten(1, 2)[:, :length].to(q.dtype)
        outputs.append(_causal(part, k, v))
    return torch.cat(outputs)


def attention_packed(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """The same without a cache: each row attends within itself. q [T, heads, dim], k and v [T, kv heads, dim]."""
    parts = zip(q.split(rows.lens), k.split(rows.lens), v.split(rows.lens), strict=True)
    return torch.cat([_causal(*part) for part in parts])


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, heads, dim] are the last n of the positions of k, v [length, kv heads, dim]."""
    n, length = len(q), len(k)
    mask = None
    if 1 < n < length:
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=1 < n == length, enable_gqa=True)
    return out[0].transpose(0, 1)
