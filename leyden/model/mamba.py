"""The Mamba-2 mixer, letter M."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from leyden import ops
from leyden.cache.pool import Pool
from leyden.config.model import ModelConfig
from leyden.formats import Weight
from leyden.model.context import Context, joined
from leyden.model.layers import RMSNorm
from leyden.ops.rows import Rows


class Conv1d(nn.Module):
    """The parameters of the depthwise convolution, in the checkpoint's shape [channels, 1, kernel]."""

    def __init__(self, channels: int, kernel: int, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, dtype=dtype)) if bias else None


class Mamba(nn.Module):
    """in_proj -> convolution of x, B and C -> selective scan -> gate and group norm -> out_proj.

    `index` counts the mamba layers: it finds this layer's states in the pool. `step` is ops.mamba_step, or what an
    engine was told to take for it.
    """

    step: Callable[..., Tensor] = ops.mamba_step

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype):
        super().__init__()
        heads, inner, conv = config.mamba_num_heads, config.mamba_inner, config.conv_dim
        self.config = config
        self.index = index
        self.in_proj = Weight(inner + conv + heads, config.hidden_size, dtype=dtype)
        self.conv1d = Conv1d(conv, config.conv_kernel, config.use_conv_bias, dtype)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.norm = RMSNorm(inner, config.layer_norm_epsilon, dtype)
        self.out_proj = Weight(config.hidden_size, inner, dtype=dtype)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """x [T, H] -> [T, H]; the states of the rows move to the end of the rows, but for guesses: those wait."""
        projected = ops.linear(x, self.in_proj)
        conv, ssm = (ctx.pool.conv[self.index], ctx.pool.ssm[self.index]) if ctx.pool else (None, None)
        mixed = []
        for span, rows, narrow in ctx.parts():
            if not narrow:
                mixed.append(self._scan(projected[span], conv, ssm, rows))
                continue
            assert ctx.pool is not None
            layer = (*self._recurrence, self.norm.weight, self.config.n_groups, self.norm.eps, conv, ssm)
            if ctx.guesses:
                mixed.append(ops.mamba_verify(projected[span], *layer, ctx.pool.ring[self.index], rows))
            elif (shape := ctx.pool.shape).period > 1:
                waiting = ctx.pool.recent[self.index], ctx.pool.began
                mixed.append(ops.mamba_lazy_step(projected[span], *layer, *waiting, rows, shape.rounds))
            else:
                mixed.append(self.step(projected[span], *layer, rows, shape.rounds))
        return ops.linear(joined(mixed), self.out_proj)

    def replay(self, ctx: Context, counts: Tensor) -> None:
        """Move the states of the narrow rows, which waited, over the first counts (int [R]) tokens of each."""
        pool, rows = ctx.pool, ctx.narrow
        assert pool is not None
        layer = (pool.conv[self.index], pool.ssm[self.index], pool.ring[self.index])
        ops.mamba_replay(
            *self._recurrence, self.config.n_groups, *layer, rows.slots, rows.past, counts, pool.shape.rounds
        )

    def fold(self, pool: Pool, slots: Tensor, held: Tensor, counts: Tensor) -> None:
        """Move the states of slots, which hold so many tokens, over the counts (all int [R]) tokens that wait."""
        states, limit = (pool.ssm[self.index], pool.recent[self.index]), self.config.time_step_limit
        rates = self.A_log, self.dt_bias, limit, self.config.n_groups
        ops.mamba_fold(*rates, *states, slots, held, counts, pool.shape.rounds)

    @property
    def _recurrence(self) -> tuple[Tensor | None | tuple[float, float], ...]:
        """The parameters of convolution and scan, in the order in which the ops take them."""
        conv, limit = self.conv1d, self.config.time_step_limit
        return conv.weight[:, 0], conv.bias, self.A_log, self.D, self.dt_bias, limit

    def _scan(self, projected: Tensor, conv: Tensor | None, ssm: Tensor | None, rows: Rows) -> Tensor:
        config = self.config
        inner, heads, groups = config.mamba_inner, config.mamba_num_heads, config.n_groups
        z, xBC, dt = projected.split([inner, config.conv_dim, heads], dim=-1)
        xBC = ops.causal_conv(xBC, self.conv1d.weight[:, 0], self.conv1d.bias, conv, rows)
        x, B, C = xBC.split([inner, groups * config.ssm_state_size, groups * config.ssm_state_size], dim=-1)
        y = ops.ssd_scan(
            x.unflatten(-1, (heads, -1)),
            dt,
            B.unflatten(-1, (groups, -1)),
            C.unflatten(-1, (groups, -1)),
            self.A_log,
            self.D,
            self.dt_bias,
            config.time_step_limit,
            config.chunk_size,
            ssm,
            rows,
        )
        return ops.gated_norm(y.flatten(-2), z, self.norm.weight, groups, self.norm.eps)
