"""The attention mixer, letter *: grouped queries, causal, no rotary embedding."""

import torch
from torch import Tensor, nn

from leyden import ops
from leyden.config.model import ModelConfig
from leyden.formats import Weight
from leyden.model.context import Context, joined


class Attention(nn.Module):
    """`index` counts the attention layers: it finds this layer's keys and values in the pool."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype):
        super().__init__()
        hidden, self.head_dim, self.index = config.hidden_size, config.head_dim, index
        self.q_proj = Weight(config.num_attention_heads * self.head_dim, hidden, dtype=dtype)
        self.k_proj = Weight(config.num_key_value_heads * self.head_dim, hidden, dtype=dtype)
        self.v_proj = Weight(config.num_key_value_heads * self.head_dim, hidden, dtype=dtype)
        self.o_proj = Weight(hidden, config.num_attention_heads * self.head_dim, dtype=dtype)
        self.k_scale = self.v_scale = 1.0  # of an fp8 cache, which holds k / k_scale

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """x [T, H] -> [T, H]; the rows' keys and values go into their pages."""
        parts = ctx.parts()
        if ctx.pool and len(parts) == 1:
            cache, (_, rows, _), scales = ctx.pool.kv[self.index], parts[0], (self.k_scale, self.v_scale)
            q = ops.qkv_write(x, self.q_proj, self.k_proj, self.v_proj, cache, rows, *scales)
            return ops.linear(ops.attention(q, cache, rows, *scales).flatten(-2), self.o_proj)
        q, k, v = (
            ops.linear(x, weight).unflatten(-1, (-1, self.head_dim))
            for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = []
        for span, rows, _ in parts:
            if ctx.pool:
                cache = ctx.pool.kv[self.index]
                ops.kv_write(k[span], v[span], cache, rows, self.k_scale, self.v_scale)
                mixed.append(ops.attention(q[span], cache, rows, self.k_scale, self.v_scale))
            else:
                mixed.append(ops.attention_packed(q[span], k[span], v[span], rows))
        return ops.linear(joined(mixed).flatten(-2), self.o_proj)
