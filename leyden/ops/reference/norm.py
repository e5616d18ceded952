"""RMS norms. All compute in fp32, weight multiply included, and round once to the dtype of their input."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension of x [..., H]; plain weight [H], no +1."""
    return (_normalized(x.float(), eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = x + residual [T, H], rounded to the dtype of the residual stream before the norm."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Gate, then norm: g = y * silu(z) [T, I]; each of the `groups` contiguous blocks of g is normalised alone.

    Mamba-2's RMSNormGated with norm_before_gate=False (state-spaces/mamba).
    """
    g = (y.float() * F.silu(z.float())).unflatten(-1, (groups, -1))
    return (_normalized(g, eps).flatten(-2) * weight.float()).to(y.dtype)


def _normalized(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
