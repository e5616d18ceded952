"""NVFP4: 4-bit floats in blocks of 16 columns, an 8-bit float scale for each block, one float scale for the matrix.

    weight          U8 [N, K/2]      two E2M1 codes a byte, the even column in the low nibble
    weight_scale    E4M3 [N, K/16]   scale of a block
    weight_scale_2  F32 []           scale of the matrix
    input_scale     F32 []           scale of the activations, in checkpoints made for 4-bit activations (W4A4)

    W = e2m1(code) * (weight_scale * weight_scale_2)

The layout is ModelOpt's; compressed-tensors' nvfp4-pack-quantized differs in names and in a reciprocal (the loader sees
to both). Activations are not quantised here: `input_scale` is kept so that a checkpoint can be written again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.errors import ConfigError
from leyden.formats import Format, Packed, Part, Spec, Weight
from leyden.formats.fp8 import E4M3, E4M3_MAX, amax, to_e4m3

E2M1_MAX = 6.0
BLOCK = 16
TILE = (16, 64)  # rows and columns, of Tiled
# Where the bits of a code (mantissa, exponent, sign) are in the half of a word, for the four codes there: every code
# comes to its place in a bfloat16 by a shift, or two of them do (leyden/ops/triton/fragments.py).
_PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 14), (9, 10, 11, 13))
_LEAST = 0x7600  # of the bits of a scale times 2^119 as bfloat16; the smallest, 2^-9, has 0x7680
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between them lie the borders. A value on a border goes to the even code: up at the second, fourth and sixth, which
# are therefore one unit in the last place lower, so that "greater than the border" says it all.
_BORDERS = tuple(
    torch.nextafter(torch.tensor(border), torch.tensor(0.0)).item() if i % 2 else border
    for i, border in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
)


def to_e2m1(x: Tensor) -> Tensor:
    """fp32 -> codes 0 to 15 (uint8): the nearest value, ties to even, everything beyond 6 to 6; bit 3 is the sign."""
    codes = torch.bucketize(x.abs(), torch.tensor(_BORDERS, device=x.device), out_int32=True).to(torch.uint8)
    return codes | ((x < 0).to(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    """Codes 0 to 15 -> fp32; code 8 is a zero like code 0."""
    return _table(codes.device)[codes.int()]


@cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(_VALUES + tuple(0.0 - value for value in _VALUES), device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2]: the values of the two codes in a byte."""
    bytes_ = torch.arange(256, dtype=torch.uint8, device=device)
    return from_e2m1(unpack(bytes_[:, None]))


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] -> bytes [..., K/2], the even column in the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """bytes [..., K/2] -> uint8 codes [..., K]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


@dataclass(frozen=True)
class NVFP4(Packed):
    """`four_over_six` only matters to quantize: it spreads each block over +-6 or +-4, whichever errs less (the values
    of E2M1 are coarse between 4 and 6)."""

    input_scale: bool = False
    four_over_six: bool = field(default=False, compare=False)
    name = "nvfp4"
    multiple = BLOCK

    @property
    def parts(self) -> dict[str, Part]:
        parts = {
            "weight": Part(torch.uint8, columns=2),
            "weight_scale": Part(E4M3, columns=BLOCK),
            "weight_scale_2": Part(torch.float32, None, None),
        }
        return parts | ({"input_scale": Part(torch.float32, None, None)} if self.input_scale else {})

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Scales from the largest magnitudes, as ModelOpt sets them; input_scale 1.

        With four_over_six the scale of the matrix leaves room above the largest block scale (256 of 448), because a
        block that is spread over +-4 has a scale half as large again.
        """
        weight = weight.float()
        blocks, largest = weight.unflatten(-1, (-1, BLOCK)), amax(weight, -2, -1)
        peaks = amax(blocks, -1)
        empty = peaks == 0
        if not self.four_over_six:
            scale_2 = largest / (E2M1_MAX * E4M3_MAX)
            codes, scale = _encode(
                blocks, (peaks / (E2M1_MAX * scale_2[..., None, None])).masked_fill(empty, 1), scale_2
            )
        else:
            scale_2 = largest / (E2M1_MAX * 256)
            unit = (largest / E2M1_MAX)[..., None, None]
            tried = []
            for stretch in (1.0, 1.5):  # to +-6, to +-4
                wanted = (peaks * stretch / E2M1_MAX).masked_fill(empty, 1) * 256 / unit
                codes, scale = _encode(blocks, wanted, scale_2)
                tried.append((codes, scale, (blocks - _decode(codes, scale, scale_2)).square().sum(-1)))
            (codes, scale, error), (codes_4, scale_4, error_4) = tried
            four = error_4 < error
            codes = torch.where(four[..., None], codes_4, codes)
            scale = torch.where(four, scale_4.float(), scale.float()).to(E4M3)
        tensors = {"weight": pack(codes.flatten(-2)), "weight_scale": scale, "weight_scale_2": scale_2}
        return tensors | ({"input_scale": torch.ones_like(scale_2)} if self.input_scale else {})

    def steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return (
            _steps(tensors["weight_scale"], tensors["weight_scale_2"])
            .expand(*tensors["weight_scale"].shape, BLOCK)
            .flatten(-2)
        )

    def snap(self, units: Tensor) -> Tensor:
        return from_e2m1(to_e2m1(units))

    def recode(self, tensors: Mapping[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        return {**tensors, "weight": pack(to_e2m1(units))}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        values = F.embedding(tensors["weight"].int(), _pairs(tensors["weight"].device)).flatten(-2)
        steps = _steps(tensors["weight_scale"], tensors["weight_scale_2"])
        return (values.unflatten(-1, (-1, BLOCK)) * steps).flatten(-2).to(dtype)


def _encode(blocks: Tensor, wanted: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 blocks [..., 16] and the scales wanted for them -> (codes, scales as stored)."""
    scale = to_e4m3(wanted.clamp(min=2.0**-9))
    return to_e2m1((blocks / _steps(scale, scale_2)).nan_to_num(0)), scale  # 0 / 0 in a matrix of zeros


def _decode(codes: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    return from_e2m1(codes) * _steps(scale, scale_2)


def _steps(scale: Tensor, scale_2: Tensor) -> Tensor:
    return (scale.float() * scale_2[..., None, None])[..., None]


@dataclass(frozen=True)
class Tiled:
    """A matrix of `plain` in the order in which the tensor cores of a GPU take it: only in memory, never in files.

        weight          I32 [N/16, K/64, 32, 4]   tiles of 16 rows and 64 columns, thread by thread of a warp
        weight_scale    U8 [N/16, K/64, 64]       scale * 2^119 as bfloat16, without the bits that all have; 0 for zero
        weight_scale_2, input_scale               as they are

    Thread 4 g + t has rows g and g + 8, columns 8 t to 8 t + 7 and 32 + 8 t to 39 + 8 t: four words of eight codes.
    Even columns are in the low half of a word; where the bits of a code are in the half says _PLACES. Codes under a
    scale of zero become zeros. Scales must not be negative.
    """

    plain: NVFP4
    name = "nvfp4_tiled"

    @staticmethod
    def fits(shape: tuple[int, ...]) -> bool:
        return shape[-2] % TILE[0] == 0 and shape[-1] % TILE[1] == 0

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Spec]:
        """ConfigError if there are no whole tiles in the shape."""
        if not self.fits(shape):
            raise ConfigError(f"format {self.name} stores tiles of {TILE[0]} x {TILE[1]}; a matrix has {list(shape)}")
        *stack, n, k = shape
        tiles = (*stack, n // TILE[0], k // TILE[1])
        return self.plain.tensors(shape, dtype) | {
            "weight": ((*tiles, 32, 4), torch.int32),
            "weight_scale": ((*tiles, 64), torch.uint8),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return self.tile(self.plain.quantize(weight))

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return self.plain.dequantize(self.untile(tensors), dtype)

    def shard(self, tensors: Mapping[str, Tensor], dim: int, rank: int, world: int) -> dict[str, Tensor]:
        return self.tile(self.plain.shard(self.untile(tensors), dim, rank, world))

    def tile(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of `plain` in this order."""
        scales = tensors["weight_scale"].float()
        table = _words(scales.device)
        codes = tensors["weight"].unflatten(-1, (-1, 4))
        words = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=scales.device)
        for i in range(4):
            words |= table[i, codes[..., i].int()]
        words.masked_fill_((scales == 0).repeat_interleave(2, -1), 0)
        short = ((scales * 2.0**119).bfloat16().view(torch.int16) - _LEAST) >> 4
        short = short.masked_fill(scales == 0, 0).to(torch.uint8)
        ordered = words.unflatten(-2, (-1, 2, 8)).unflatten(-1, (-1, 2, 4))  # [tiles, half, g, chunks, run, t]
        spread = short.unflatten(-2, (-1, 2, 8)).unflatten(-1, (-1, 2, 2))
        return {
            **tensors,
            "weight": _moved(ordered, 0, 3, 2, 5, 1, 4).flatten(-4, -3).flatten(-2),
            "weight_scale": _moved(spread, 0, 3, 2, 5, 1, 4).flatten(-4),
        }

    def untile(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of `plain`, as they were but for codes under a scale of zero."""
        ordered = tensors["weight"].unflatten(-2, (8, 4)).unflatten(-1, (2, 2))  # [tiles, chunks, g, t, half, run]
        words = _moved(ordered, 0, 4, 2, 1, 5, 3).flatten(-3).flatten(-4, -2)
        spread = tensors["weight_scale"].unflatten(-1, (8, 2, 2, 2))
        short = _moved(spread, 0, 4, 2, 1, 5, 3).flatten(-3).flatten(-4, -2)
        codes = torch.zeros(*words.shape, 4, dtype=torch.uint8, device=words.device)
        for i, places in enumerate(_PLACES):
            for bit, place in enumerate(places):
                for half in range(2):
                    codes[..., i] |= ((words >> (place + 16 * half)) & 1).to(torch.uint8) << (bit + 4 * half)
        scales = ((short.to(torch.int16) << 4) + _LEAST).view(torch.bfloat16).float() * 2.0**-119
        return {
            **tensors,
            "weight": codes.flatten(-2),
            "weight_scale": scales.masked_fill(short == 0, 0).to(E4M3),
        }


def arrange(weight: Weight) -> bool:
    """Whether `weight`, in NVFP4 or Tiled, is Tiled: from now on, if it has whole tiles."""
    if isinstance(weight.format, Tiled):
        return True
    assert isinstance(weight.format, NVFP4)
    if not Tiled.fits(weight.shape):
        return False
    format = Tiled(weight.format)
    _change(weight, format, format.tile)
    return True


def restore(weight: Weight) -> None:
    """Bring a Tiled matrix back into the order of checkpoints."""
    assert isinstance(weight.format, Tiled)
    _change(weight, weight.format.plain, weight.format.untile)


def _change(weight: Weight, format: Format, made: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> None:
    """A stack goes some matrices at a time: `made` needs several times the memory of what it works on."""
    parts, twin = {name: part.detach() for name, part in weight.parts.items()}, weight.twin
    weight.allot(format, parts["weight"].device)
    weight.twin = twin
    stack = len(weight.shape) == 3
    for some in [slice(i, i + 16) for i in range(0, weight.shape[0], 16)] if stack else [...]:
        for name, tensor in made({name: part[some] for name, part in parts.items()}).items():
            weight.parts[name].detach()[some].copy_(tensor)


def _moved(x: Tensor, *order: int) -> Tensor:
    """The last dimensions in another order."""
    before = x.dim() - len(order)
    return x.permute(*range(before), *(before + i for i in order)).contiguous()


@cache
def _words(device: torch.device) -> Tensor:
    """int32 [4, 256]: what each byte of four contributes to a word of Tiled."""
    bytes_ = torch.arange(256)
    made = torch.zeros(4, 256, dtype=torch.int64)
    for i, places in enumerate(_PLACES):
        for bit, place in enumerate(places):
            for half in range(2):
                made[i] |= ((bytes_ >> (bit + 4 * half)) & 1) << (place + 16 * half)
    return torch.where(made < 2**31, made, made - 2**32).int().to(device)
