"""The 8-bit float formats: weights in E4M3, and a scale for the matrix, each row, each 128 x 128 block, or 32 columns.

    fp8          weight_scale F32 []                          ModelOpt FP8; input_scale for static activations
    fp8_channel  weight_scale F32 [N, 1]                      FP8_PER_CHANNEL_PER_TOKEN, compressed-tensors
    fp8_block    weight_scale F32 [ceil(N/128), ceil(K/128)]  FP8_PB_WO
    mxfp8        weight_scale U8 [N, K/32], a power of two    MXFP8 (OCP microscaling, E8M0 scales)

    W = e4m3(weight) * weight_scale

E4M3 here is the finite kind of the OCP 8-bit floats: no infinities, largest value 448. Activations are not quantised;
`input_scale` is kept for kernels that do, and so that a checkpoint can be written again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.formats import Packed, Part

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SIDE = 128  # of a block
RUN = 32  # columns that share an E8M0 scale


def amax(x: Tensor, *dims: int) -> Tensor:
    """Largest magnitude along the dimensions."""
    return x.abs().amax(dims)


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest, ties to even; everything beyond 448 to 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _divide(weight: Tensor, scale: Tensor) -> Tensor:
    return to_e4m3((weight / scale).nan_to_num(0))  # 0 / 0 where everything is zero


@dataclass(frozen=True)
class FP8(Packed):
    """One scale for the matrix."""

    input_scale: bool = False
    name = "fp8"

    @property
    def parts(self) -> dict[str, Part]:
        scalar = Part(torch.float32, None, None)
        return {"weight": Part(E4M3), "weight_scale": scalar} | ({"input_scale": scalar} if self.input_scale else {})

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """weight_scale = largest magnitude / 448; input_scale 1."""
        scale = amax(weight.float(), -2, -1) / E4M3_MAX
        tensors = {"weight": _divide(weight.float(), scale[..., None, None]), "weight_scale": scale}
        return tensors | ({"input_scale": torch.ones_like(scale)} if self.input_scale else {})

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (tensors["weight"].float() * tensors["weight_scale"][..., None, None]).to(dtype)


@dataclass(frozen=True)
class FP8Channel(Packed):
    """A scale for each row."""

    name = "fp8_channel"

    @property
    def parts(self) -> dict[str, Part]:
        return {"weight": Part(E4M3), "weight_scale": Part(torch.float32, 1, None)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """weight_scale = largest magnitude of the row / 448."""
        scale = amax(weight.float(), -1)[..., None] / E4M3_MAX
        return {"weight": _divide(weight.float(), scale), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (tensors["weight"].float() * tensors["weight_scale"]).to(dtype)


@dataclass(frozen=True)
class FP8Block(Packed):
    """A scale for each block of 128 x 128; the last block of a dimension may be smaller."""

    name = "fp8_block"

    @property
    def parts(self) -> dict[str, Part]:
        return {"weight": Part(E4M3), "weight_scale": Part(torch.float32, SIDE, SIDE)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """weight_scale = largest magnitude of the block / 448."""
        n, k = weight.shape[-2:]
        padded = torch.nn.functional.pad(weight.float(), (0, -k % SIDE, 0, -n % SIDE))
        blocks = padded.unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE))
        scale = amax(blocks, -3, -1) / E4M3_MAX
        return {"weight": _divide(weight.float(), _spread(scale, n, k)), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight = tensors["weight"].float()
        return (weight * _spread(tensors["weight_scale"], *weight.shape[-2:])).to(dtype)


@dataclass(frozen=True)
class MXFP8(Packed):
    """A power of two for each 32 columns of a row, stored as its exponent plus 127."""

    name = "mxfp8"
    multiple = RUN

    @property
    def parts(self) -> dict[str, Part]:
        return {"weight": Part(E4M3), "weight_scale": Part(torch.uint8, 1, RUN)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """The smallest power of two that brings the largest magnitude to 448 or less; 2^-127 for a run of zeros."""
        runs = weight.float().unflatten(-1, (-1, RUN))
        largest = amax(runs, -1)
        fraction, exponent = torch.frexp(largest / E4M3_MAX)  # fraction in [0.5, 1): 0.5 is a power of two
        scale = (exponent - (fraction == 0.5).int() + 127).clamp(0, 254).masked_fill(largest == 0, 0).to(torch.uint8)
        return {"weight": to_e4m3(runs / from_e8m0(scale)[..., None]).flatten(-2), "weight_scale": scale}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        runs = tensors["weight"].float().unflatten(-1, (-1, RUN))
        return (runs * from_e8m0(tensors["weight_scale"])[..., None]).flatten(-2).to(dtype)


def from_e8m0(exponents: Tensor) -> Tensor:
    """uint8 -> fp32 2^(byte - 127)."""
    return exponents.view(torch.float8_e8m0fnu).float()


def _spread(scale: Tensor, n: int, k: int) -> Tensor:
    """[..., blocks, blocks] -> [..., n, k]"""
    return scale.repeat_interleave(SIDE, -2).repeat_interleave(SIDE, -1)[..., :n, :k]
