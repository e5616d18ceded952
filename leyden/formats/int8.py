"""8-bit integers as compressed-tensors keeps them (int-quantized, W8A16).

    weight         I8 [N, K]
    weight_scale   BF16 [N, K/group]    of a run of `group` columns; [N, 1] if group is None: of a row

    W = weight * weight_scale

Refused: rows that are no multiple of the group, and zero points.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.formats import Packed, Part
from leyden.formats.fp8 import amax

_LOW, _HIGH = -128, 127


@dataclass(frozen=True)
class Int8(Packed):
    group: int | None = None
    scale_dtype: torch.dtype = torch.bfloat16
    name = "int8"

    @property
    def multiple(self) -> int:  # type: ignore[override]
        return self.group or 1

    @property
    def parts(self) -> dict[str, Part]:
        return {"weight": Part(torch.int8), "weight_scale": Part(self.scale_dtype, columns=self.group)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Scales as compressed-tensors sets them: largest magnitude of a run / 127.5, in the dtype of the weight."""
        runs = weight.unflatten(-1, (-1, self.group or weight.shape[-1]))
        scale = amax(runs, -1) / 127.5
        scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps).to(self.scale_dtype)
        codes = (runs / scale.to(weight.dtype)[..., None]).round().clamp(_LOW, _HIGH).flatten(-2)
        return {"weight": codes.to(torch.int8), "weight_scale": scale}

    def steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        scale = tensors["weight_scale"].float()
        return scale.repeat_interleave(tensors["weight"].shape[-1] // scale.shape[-1], -1)

    def snap(self, units: Tensor) -> Tensor:
        return units.round().clamp(_LOW, _HIGH)

    def recode(self, tensors: Mapping[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        return {**tensors, "weight": units.to(torch.int8)}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scale = tensors["weight_scale"].float()
        runs = tensors["weight"].float().unflatten(-1, (scale.shape[-1], -1))
        return (runs * scale[..., None]).flatten(-2).to(dtype)
