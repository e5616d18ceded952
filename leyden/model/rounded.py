"""Matrices that are quantised while they are loaded: `--quantization int8`, `int4`, `nvfp4` or `fp8`.

    narrow     gives the dense matrices of a network their formats
    Rounded    takes the values of one of them, in place of a tensor

The embeddings and the router stay as they are. Attention, the head and the MTP module are small, and errors there cost
most: where others get 4 bits, these get 8. Matrices that the files hold quantised are left alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.errors import ConfigError
from leyden.formats import Dense, Format, Packed, Weight
from leyden.formats.fp8 import FP8Channel
from leyden.formats.int4 import Int4
from leyden.formats.int8 import Int8
from leyden.formats.nvfp4 import NVFP4
from leyden.model.nemotron import Nemotron

QUANTIZATIONS = ("int8", "int4", "nvfp4", "fp8")
_DELICATE = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
_BLOCK = 2**20  # values that are rounded at a time


def narrow(model: Nemotron, quantization: str) -> dict[str, Weight]:
    """Give every dense matrix but the embeddings its format; returns those that got one, by name.

    ConfigError for a name that is not in QUANTIZATIONS.
    """
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"--quantization must be one of {', '.join(QUANTIZATIONS)} to quantise, got {quantization!r}")
    changed = {}
    for name, weight in model.named_modules():
        if not isinstance(weight, Weight) or weight.format != Dense() or weight is model.backbone.embeddings:
            continue
        format = _format(name, weight.shape[-1], quantization)
        if format != Dense():
            weight.allot(format, next(weight.parameters()).device)
            weight.requires_grad_(False)
            changed[name] = weight
    return changed


def _format(name: str, columns: int, quantization: str) -> Format:
    """What the rows of a matrix can be stored in: its groups must divide them."""
    delicate = name.startswith("mtp.") or name.endswith(_DELICATE)
    int8 = Int8(next((group for group in (128, 64, 32) if columns % group == 0), None))
    match quantization:
        case "fp8":
            return FP8Channel()
        case "int4" if not delicate and columns % 32 == 0:
            return Int4(64 if columns % 64 == 0 else 32)
        case "nvfp4" if not delicate and columns % NVFP4.multiple == 0:
            return NVFP4(four_over_six=True)
    return int8


@dataclass(frozen=True)
class Rounded:
    """Stands for the tensor [N, K] or [E, N, K] that a matrix would be if it was dense."""

    shape: tuple[int, ...]
    format: Format
    parts: dict[str, Tensor]

    @classmethod
    def of(cls, weight: Weight, member: int | None = None) -> "Rounded":
        """The whole matrix or stack, or one member of the stack."""
        parts = {name: part.detach() for name, part in weight.parts.items()}
        if member is None:
            return cls(weight.shape, weight.format, parts)
        return cls(weight.shape[1:], weight.format, {name: part[member] for name, part in parts.items()})

    def copy_(self, values: Tensor) -> None:
        """Quantise `values`, of any float dtype: some rows at a time, where rows have nothing to do with each other."""
        if len(self.shape) == 3:
            for i, one in enumerate(values):
                Rounded(self.shape[1:], self.format, {name: part[i] for name, part in self.parts.items()}).copy_(one)
            return
        rows, columns = self.shape
        regular = self.format.parts if isinstance(self.format, Packed) else {}
        apart = all(part.rows == 1 for part in regular.values())
        step = max(1, _BLOCK // columns) if apart else rows
        for start in range(0, rows, step):
            made = self.format.quantize(values[start : start + step].float())
            for name in regular:
                target = self.parts[name]
                (target[start : start + step] if apart else target).copy_(made[name])
        if "weight_shape" in self.parts:
            self.parts["weight_shape"].copy_(torch.tensor(self.shape))
