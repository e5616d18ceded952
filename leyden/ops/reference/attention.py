"""Causal grouped-query attention without rotary embedding, over KV pages or over packed rows.

A cache of 8-bit floats holds k / k_scale and v / v_scale. Nothing is multiplied back element by element: k_scale is a
factor of the scores, v_scale one of the result. (As ModelOpt's k_scale and v_scale are meant: used = stored * scale.)
"""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.ops.rows import Rows


def kv_write(k: Tensor, v: Tensor, cache: Tensor, rows: Rows, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    """Put k, v [T, kv heads, dim] of the rows at their positions into cache [2, pages, page, kv heads, dim].

    A cache of 8-bit floats gets the nearest to k / k_scale (fp32), ties to even; what is beyond the largest becomes it.
    """
    assert rows.pages is not None
    page = cache.shape[2]
    lens = torch.tensor(rows.lens, device=k.device)
    row = torch.repeat_interleave(torch.arange(len(rows.lens), device=k.device), lens, output_size=rows.tokens)
    positions = torch.arange(rows.tokens, device=k.device) - rows.starts[row] + rows.past[row]
    pages, offsets = rows.pages[row, positions // page], positions % page
    cache[0, pages, offsets] = _stored(k, cache.dtype, k_scale)
    cache[1, pages, offsets] = _stored(v, cache.dtype, v_scale)


def _stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def attention(q: Tensor, cache: Tensor, rows: Rows, k_scale: float = 1.0, v_scale: float = 1.0) -> Tensor:
    """Rows of q [T, heads, dim] attend to everything before them and themselves -> [T, heads, dim].

    softmax(q k^T / sqrt(dim)) v in fp32; query head h reads kv head h // (heads / kv heads). The keys and values of
    the rows are already in cache [2, pages, page, kv heads, dim]. Reads `past` on the host: on CUDA it waits.
    """
    assert rows.pages is not None
    page = cache.shape[2]
    scaled = cache.dtype.itemsize == 1
    outputs = []
    for part, past, table in zip(q.split(rows.lens), rows.past.tolist(), rows.pages, strict=True):
        length = past + len(part)
        k, v = cache[:, table[: -(-length // page)]].flatten(1, 2)[:, :length].to(q.dtype)
        outputs.append(_causal(part, k, v, k_scale) * v_scale if scaled else _causal(part, k, v))
    return torch.cat(outputs)


def attention_packed(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """The same without a cache: each row attends within itself. q [T, heads, dim], k and v [T, kv heads, dim]."""
    parts = zip(q.split(rows.lens), k.split(rows.lens), v.split(rows.lens), strict=True)
    return torch.cat([_causal(*part) for part in parts])


def _causal(q: Tensor, k: Tensor, v: Tensor, k_scale: float = 1.0) -> Tensor:
    """q [n, heads, dim] are the last n of the positions of k, v [length, kv heads, dim]; scores are times k_scale."""
    n, length = len(q), len(k)
    mask = None
    if 1 < n < length:
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    scale = k_scale / sqrt(q.shape[-1])
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=1 < n == length, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
