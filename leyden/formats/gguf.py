"""GGUF's block formats: a row is a run of blocks, each a few bytes that hold 32 or 256 numbers and their scales.

    weight   U8 [N, K / size * bytes]     the blocks as the file has them

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q4_K, Q5_K and Q6_K are read; Q4_0 and Q8_0 are written. The layouts are
ggml's (ggml-quants.c); values are equal, bit for bit, to those of its Python package. NVFP4 blocks become and come
from leyden.formats.nvfp4, which holds the same numbers in another order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leyden.config import gguf
from leyden.errors import ConfigError
from leyden.formats import Packed, Part
from leyden.formats.fp8 import E4M3, amax, from_e8m0
from leyden.formats.nvfp4 import from_e2m1, pack, unpack

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Blocks(Packed):
    """`kind` as GGUF spells it: Q4_K."""

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in _DECODERS:
            raise ConfigError(f"GGUF blocks must be of kind {', '.join(_DECODERS)}; found {self.kind}")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.kind.lower()

    @property
    def multiple(self) -> int:  # type: ignore[override]
        return gguf.KINDS[self.kind].size

    @property
    def parts(self) -> dict[str, Part]:
        kind = gguf.KINDS[self.kind]
        return {"weight": Part(torch.uint8, columns=Fraction(kind.size, kind.bytes))}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """ConfigError for kinds that are only read."""
        if self.kind not in _ENCODERS:
            raise ConfigError(f"GGUF kinds that can be written are {', '.join(_ENCODERS)}; {self.kind} is only read")
        return {"weight": _ENCODERS[self.kind](weight.float().unflatten(-1, (-1, self.multiple))).flatten(-2)}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        blocks = tensors["weight"].unflatten(-1, (-1, gguf.KINDS[self.kind].bytes))
        return _DECODERS[self.kind](blocks).flatten(-2).to(dtype)


class File:
    """An opened GGUF file; tensors are views of the mapped file until somebody writes to them."""

    def __init__(self, path: Path):
        self.header = gguf.read(path)
        self._bytes = np.memmap(path, mode="c")

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes

    def get_tensor(self, name: str) -> Tensor:
        """In its dtype if it is of floats, else as the bytes of its rows."""
        info = self.header.tensors[name]
        content = torch.from_numpy(self._bytes[info.offset : info.offset + info.bytes])
        if info.kind in gguf.FLOATS:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.kind]
            return content.view(dtype).view(info.shape)
        return content.view(*info.shape[:-1], -1)


def from_nvfp4_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [..., K/64 * 36] -> (weight, weight_scale) of the format NVFP4. The byte 0x7F stands for a scale of 0."""
    blocks = blocks.unflatten(-1, (-1, 36))
    scale = blocks[..., :4] & 127
    codes = _halves(blocks[..., 4:].unflatten(-1, (4, 8)))
    scale = torch.where(scale == 127, 0, scale)
    return pack(codes.flatten(-3)), scale.flatten(-2).view(E4M3)


def to_nvfp4_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """The other way round."""
    codes = unpack(weight).unflatten(-1, (-1, 4, 2, 8))
    scales = scale.view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.cat([scales, (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-2)], dim=-1).flatten(-2)


def _halves(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n]: all low nibbles, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _half_float(blocks: Tensor, at: int) -> Tensor:
    """The fp16 at a byte of each block -> fp32 [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _fifth_bits(packed: Tensor) -> Tensor:
    """4 bytes -> 32 bits, each worth 16."""
    bits = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return (packed[..., None] >> bits & 1).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half_float(blocks, 0) * (_halves(blocks[..., 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half_float(blocks, 0) * _halves(blocks[..., 4:]).float() + _half_float(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _half_float(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _half_float(blocks, 0) * codes.float() + _half_float(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half_float(blocks, 0) * blocks[..., 2:].contiguous().view(torch.int8).float()


def _iq4_nl(blocks: Tensor) -> Tensor:
    values = torch.tensor(_IQ4_NL, device=blocks.device, dtype=torch.float32)
    return _half_float(blocks, 0) * values[_halves(blocks[..., 2:]).int()]


def _mxfp4(blocks: Tensor) -> Tensor:
    return from_e8m0(blocks[..., :1].contiguous()) * from_e2m1(_halves(blocks[..., 1:]))


def _eight_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minima of 6 bits each (Q4_K and Q5_K): four as they are, four in pieces."""
    first, second, third = packed.unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minimum = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return scale.float(), minimum.float()


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled(blocks, _halves(blocks[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    bits = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    high = blocks[..., None, 16:48] >> bits[:, None] & 1
    return _scaled(blocks, low | high << 4)


def _scaled(blocks: Tensor, codes: Tensor) -> Tensor:
    """codes [..., 8, 32] of Q4_K or Q5_K"""
    scale, minimum = _eight_scales(blocks[..., 4:16])
    step, low = _half_float(blocks, 0) * scale, _half_float(blocks, 2) * minimum
    return (step[..., None] * codes.float() - low[..., None]).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat([low & 15, low >> 4], dim=-2).flatten(-3)
    shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-3)
    codes = (low | high << 4).float() - 32
    scale = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half_float(blocks, 208)
    return (scale[..., None] * codes.unflatten(-1, (16, 16))).flatten(-2)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _to_q8_0(runs: Tensor) -> Tensor:
    """The largest magnitude becomes 127; halves are rounded away from zero."""
    step = amax(runs, -1)[..., None] / 127
    scaled = runs * step.reciprocal().masked_fill(step == 0, 0)
    codes = (scaled.abs() + 0.5).floor() * scaled.sign()
    return torch.cat([_half_bytes(step), codes.to(torch.int8).view(torch.uint8)], dim=-1)


def _to_q4_0(runs: Tensor) -> Tensor:
    """The number of the largest magnitude becomes -8, whatever its sign: the step may be negative."""
    largest = runs.gather(-1, runs.abs().argmax(-1, keepdim=True))
    step = largest / -8
    codes = (runs * step.reciprocal().masked_fill(step == 0, 0) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat([_half_bytes(step), codes[..., :16] | codes[..., 16:] << 4], dim=-1)


def _half_bytes(step: Tensor) -> Tensor:
    return step.to(torch.float16).view(torch.uint8)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _to_q8_0, "Q4_0": _to_q4_0}
