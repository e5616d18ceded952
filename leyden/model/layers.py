"""The parts that several mixers share."""

import torch
from torch import Tensor, nn

from leyden import ops
from leyden.formats import Weight
from leyden.model.context import Context


class RMSNorm(nn.Module):
    """Plain RMSNorm of the last dimension, without +1 on the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)"""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class MLP(nn.Module):
    """Two matrices with relu^2 between them: the dense layer `-` and the shared expert."""

    def __init__(self, size: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.up_proj = Weight(width, size, dtype=dtype)
        self.down_proj = Weight(size, width, dtype=dtype)

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        """x [T, H] -> [T, H]; tokens do not see each other, so the context does not matter."""
        return ops.mlp(x, self.up_proj, self.down_proj)
