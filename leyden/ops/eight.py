"""Products of activations in 8 bits with weights in 8 bits: what prompts may be computed with.

    out[m, n] = sx[m] sw[n] sum_k xq[m, k] wq[n, k]        xq, wq in E4M3, the sum in fp32, out in bfloat16

Decode steps never come here: a Weight says above how many rows (Weight.eight_above) its products may be rounded so, and
the engine sets that above its widest step of single tokens and guesses (leyden.model.eight). Refuses, at the start,
devices and torch versions that do not have these products; those of experts are ours, for compute capability 9.0 on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.formats.fp8 import E4M3

Scaled = tuple[Tensor, Tensor]  # E4M3 [..., M, K], and what its rows are to be multiplied with, fp32 [..., M]

# Tensor cores add up 8-bit products in fewer bits than fp32 has, some 13; without this they are moved to fp32 every
# 128 columns, which takes time. Rounding to E4M3 errs by 2^-5 in the mean, so nothing is gained by it.
FAST = True
_BEHIND = 256  # scales: torch's kernels may read those of a whole tile behind the last row (pytorch/pytorch#133334)


def above(few: Callable[..., Any], many: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that is `many` for more rows of x than every weight among its arguments asks for, else `few`."""

    def kernel(x: Tensor, *args: Any, **options: Any) -> Any:
        count = x.numel() // x.shape[-1]
        limit = max(weight.eight_above for weight in args if isinstance(weight, Weight))
        return (many if count > limit else few)(x, *args, **options)

    return kernel


def as_stored(weight: Weight) -> Scaled:
    """A matrix [N, K] or a stack [E, N, K] in FP8, with one scale for the matrix or one for each row."""
    matrix, scale = weight.parts["weight"], weight.parts["weight_scale"]
    scale = scale.squeeze(-1) if scale.dim() == matrix.dim() else scale[..., None]
    return matrix, scale.expand(matrix.shape[:-1]).contiguous()


def empty(count: int, size: int, device: torch.device) -> Scaled:
    """Room for `count` rows of activations."""
    codes = torch.empty(count, size, dtype=E4M3, device=device)
    return codes, torch.empty(count + _BEHIND, dtype=torch.float32, device=device)[:count]


def product(x: Scaled, weight: Scaled) -> Tensor:
    """x [M, K] @ weight [N, K]^T -> bfloat16 [M, N]; K and N multiples of 16."""
    (codes, scale), (matrix, factor) = x, weight
    return torch._scaled_mm(
        codes, matrix.t(), scale[:, None], factor[None], out_dtype=torch.bfloat16, use_fast_accum=FAST
    )


def check(device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError if `device` cannot do these products for activations of `dtype`; it tries both, on a few numbers."""
    if device.type != "cuda":
        raise ConfigError(
            f"--prefill-dtype fp8 needs a GPU of compute capability 9.0 or more; the device is {device.type}, where it"
            " would save no time: leave it out"
        )
    if dtype != torch.bfloat16:
        raise ConfigError(f"--prefill-dtype fp8 needs activations in bfloat16, got {str(dtype)[6:]}: see --dtype")
    if wrong := _wrong(device):
        raise ConfigError(
            f"--prefill-dtype fp8: torch {torch.__version__} has no products of 8-bit floats for"
            f" {torch.cuda.get_device_name(device)} ({wrong}); leave it out"
        )


def _wrong(device: torch.device) -> str:
    """What is wrong with them, if anything is."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "compute capability 9.0 is needed"
    try:
        off = _tried(device)
    except Exception as error:  # whatever a library says that does not have them
        return f"{type(error).__name__}: {error}"
    return "" if off < 1e-2 else f"its results are off by {off:.1e}"


def _tried(device: torch.device) -> float:
    """How far some numbers are from products in fp32."""
    codes, scale = empty(40, 64, device)
    codes.copy_(torch.arange(40 * 64, device=device).view(40, 64) % 13 - 6)
    scale.copy_(torch.arange(1, 41, device=device) / 8)
    matrix = (torch.arange(32 * 64, device=device).view(32, 64) % 7 - 3).to(E4M3)
    factor = (torch.arange(32, device=device) + 1) / 4
    exact = (codes.float() * scale[:, None]) @ (matrix.float() * factor[:, None]).t()
    return float((product((codes, scale), (matrix, factor)) - exact).norm() / exact.norm())
