"""4-bit integers as compressed-tensors packs them (pack-quantized, W4A16).

    weight_packed      I32 [N, K/8]          column 8j + i of a row is nibble i of word j, the lowest first
    weight_scale       BF16 [N, K/group]     of a run of `group` columns; [N, 1] if group is None: of a row
    weight_zero_point  I32 [N/8, K/group]    asymmetric only: nibbles as above, but along the rows
    weight_shape       I64 [2]               N and K

    W = (q - zero_point) * scale        a nibble holds q + 8, from 0 to 15; so does one of a zero point

Refused: rows that are no multiple of 8 or of the group (1856 columns do not divide into groups of 128), and
reordered columns (weight_g_idx).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.errors import ConfigError
from leyden.formats import Packed, Part, Spec
from leyden.formats.fp8 import amax
from leyden.formats.nvfp4 import pack, unpack

_WORD = 8  # nibbles
_LOW, _HIGH = -8, 7


@dataclass(frozen=True)
class Int4(Packed):
    group: int | None = 128
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.bfloat16
    name = "int4"

    @property
    def multiple(self) -> int:  # type: ignore[override]
        return self.group or _WORD

    @property
    def parts(self) -> dict[str, Part]:
        parts = {
            "weight_packed": Part(torch.int32, columns=_WORD),
            "weight_scale": Part(self.scale_dtype, columns=self.group),
        }
        return parts if self.symmetric else parts | {"weight_zero_point": Part(torch.int32, _WORD, self.group)}

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Spec]:
        return super().tensors(shape, dtype) | {"weight_shape": ((*shape[:-2], 2), torch.int64)}

    def shard(self, tensors: Mapping[str, Tensor], dim: int, rank: int, world: int) -> dict[str, Tensor]:
        shares = super().shard(tensors, dim, rank, world)
        return shares | {"weight_shape": _shape_of(shares["weight_packed"])}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Scales and zero points from the smallest and largest value of each run, as compressed-tensors sets them:
        in the dtype of the weight, and with room on one side only (largest magnitude / 7.5)."""
        runs = weight.unflatten(-1, (-1, self.group or weight.shape[-1]))
        if self.symmetric:
            scale, zero = amax(runs, -1) / 7.5, None
        else:
            low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
            scale = (high - low) / 15
            zero = (_LOW - low / scale).nan_to_num(0).round().clamp(_LOW, _HIGH)
        scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps).to(self.scale_dtype)
        codes = runs / scale.to(weight.dtype)[..., None]
        codes = (codes if zero is None else codes + zero[..., None]).round().clamp(_LOW, _HIGH).flatten(-2)
        tensors = {"weight_packed": _words(codes), "weight_scale": scale}
        if zero is not None:
            padded = F.pad(zero.mT, (0, -zero.shape[-2] % _WORD), value=_LOW)
            tensors["weight_zero_point"] = _words(padded).mT.contiguous()
        return tensors | {"weight_shape": _shape_of(tensors["weight_packed"])}

    def steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """ConfigError for asymmetric ones: their values are no multiples of the scale."""
        if not self.symmetric:
            raise ConfigError("error compensation needs symmetric int4, found an asymmetric one")
        scale = tensors["weight_scale"].float()
        columns = tensors["weight_packed"].shape[-1] * _WORD
        return scale.repeat_interleave(columns // scale.shape[-1], -1)

    def snap(self, units: Tensor) -> Tensor:
        return units.round().clamp(_LOW, _HIGH)

    def recode(self, tensors: Mapping[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        return {**tensors, "weight_packed": _words(units)}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes = _codes(tensors["weight_packed"])
        if not self.symmetric:
            zero = _codes(tensors["weight_zero_point"].mT).mT[..., : codes.shape[-2], :]
            codes = codes.unflatten(-1, (zero.shape[-1], -1)).sub(zero[..., None]).flatten(-2)
        scale = tensors["weight_scale"].float()
        return (codes.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).to(dtype)


def _words(codes: Tensor) -> Tensor:
    """Integers -8 to 7 of any dtype [..., K] -> I32 [..., K/8]."""
    return pack((codes - _LOW).to(torch.uint8).flatten()).view(torch.int32).view(*codes.shape[:-1], -1)


def _codes(words: Tensor) -> Tensor:
    """I32 [..., K/8] -> fp32 integers -8 to 7 [..., K]."""
    return unpack(words.flatten().view(torch.uint8)).view(*words.shape[:-1], -1).float() + _LOW


def _shape_of(words: Tensor) -> Tensor:
    *stack, n, k = words.shape
    return torch.tensor([n, k * _WORD], device=words.device).expand(*stack, 2).contiguous()
