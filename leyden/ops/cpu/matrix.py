"""Stored matrices as the kernels take them, and what products with them need."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leyden.formats import Dense, Weight
from leyden.formats.fp8 import FP8, MXFP8, RUN, SIDE, FP8Block, FP8Channel
from leyden.formats.gguf import Blocks
from leyden.formats.int4 import Int4
from leyden.formats.int8 import Int8
from leyden.formats.nvfp4 import BLOCK, NVFP4
from leyden.ops.cpu.program import Kernel, Step, constant, empty, has_rows, types

MATRIX = "ttt" + "iiiiiii"  # the fields of a Matrix in a kernel's layout
FORMATS = [
    "dense",
    "fp8",
    "fp8_channel",
    "fp8_block",
    "mxfp8",
    "nvfp4",
    "int4",
    "int8",
    "q8_0",
    "q4_0",
]  # by their names

_WIDEN = Kernel("widen", "ttiiii")
_READY = Kernel("make_rows_ready", "tt" + MATRIX + "iii")

_PLAIN, _E4M3, _E2M1, _INT4, _Q8_0, _Q4_0, _INT8 = range(7)  # as in matrix.h
_SCALE_E4M3, _SCALE_E8M0 = 3, 4
_MOST_SCALES = 2048
# Of rows made ready, as in dots.h: bytes before the columns; columns, bytes for them
_CHUNKS = {_E4M3: (320, 64, constant("floats_bytes"))}
_CHUNKS |= dict.fromkeys((_E2M1, _INT4, _Q8_0, _Q4_0, _INT8), (64, 128, constant("fixed_bytes")))
_PANEL = 24  # rows of codes that are unpacked together, as in product.h
_dot_bf16 = bool(constant("dot_bf16"))


@dataclass(slots=True)
class Matrix:
    """A matrix [rows, columns] or a stack of them. `fields` are those of the C struct."""

    members: int
    rows: int
    columns: int
    dtype: torch.dtype  # of its values
    kind: int
    fields: tuple[Any, ...]

    @property
    def dot_type(self) -> torch.dtype:
        """The type in which rows meet it: its own, but for BF16 on machines that cannot multiply it."""
        return self.dtype if _dot_bf16 else torch.float32

    def panels(self) -> Tensor | None:
        """Room for every thread to unpack codes."""
        if self.kind == _PLAIN:
            return None
        return empty(torch.get_num_threads(), _PANEL * self.columns, dtype=self.dtype)

    def ready(self, x: Tensor) -> tuple[list[Step], Tensor | None]:
        """(the step that makes them, rows x [T, columns] ready for codes), or nothing where they are of no use.

        Fixed point has 16 bits for a row: more than BF16 has for its larger numbers, but less than F32 has.
        """
        head, taken, size = _CHUNKS.get(self.kind, (0, 1, 0))
        if not size or self.dtype != torch.bfloat16:
            return [], None
        out = empty(len(x), head + -(-self.columns // taken) * size, dtype=torch.uint8)
        return [_READY(x, out, *self.fields, len(x), x.stride(0), types[x.dtype])], out


def matrix(weight: Weight) -> Matrix | None:
    """The matrix of a Weight; None if the kernels do not know its format or cannot read its memory."""
    parts, format = weight.parts, weight.format
    scale_type, tall, wide = 0, 1, weight.shape[-1]
    codes, scales, whole = parts.get("weight"), None, None
    match format:
        case Dense():
            kind = _PLAIN
        case NVFP4():
            kind, scale_type, wide = _E2M1, _SCALE_E4M3, BLOCK
            scales, whole = parts["weight_scale"], parts["weight_scale_2"]
        case Int4(symmetric=True):
            codes, scales, kind = parts["weight_packed"], parts["weight_scale"], _INT4
            wide = format.group or wide
            scale_type = types.get(format.scale_dtype, -1)
        case Int8():
            kind, scales, wide = _INT8, parts["weight_scale"], format.group or wide
            scale_type = types.get(format.scale_dtype, -1)
        case FP8():
            kind, whole = _E4M3, parts["weight_scale"]
        case FP8Channel():
            kind, scales = _E4M3, parts["weight_scale"]
        case FP8Block():
            kind, scales, tall, wide = _E4M3, parts["weight_scale"], SIDE, SIDE
        case MXFP8():
            kind, scales, scale_type, wide = _E4M3, parts["weight_scale"], _SCALE_E8M0, RUN
        case Blocks(kind="Q8_0"):
            kind = _Q8_0
        case Blocks(kind="Q4_0"):
            kind = _Q4_0
        case _:
            return None
    *stack, rows, columns = weight.shape
    tensors = [t for t in (codes, scales, whole) if t is not None]
    groups_fit = kind == _PLAIN or wide in (columns, SIDE) or (wide % 16 == 0 and SIDE % wide == 0)
    readable = codes is not None and all(t.is_contiguous() for t in tensors) and torch.float16 in types
    if not (readable and groups_fit) or scale_type < 0 or weight.dtype not in types or columns // wide > _MOST_SCALES:
        return None
    if kind == _PLAIN and tensors[0].dtype != weight.dtype:
        return None
    fields = (codes, scales, whole, rows, columns, kind, types[weight.dtype], scale_type, tall, wide)
    return Matrix(stack[0] if stack else 1, rows, columns, weight.dtype, kind, fields)


def plain(x: Tensor) -> Matrix:
    """A contiguous tensor [rows, columns] as it is."""
    rows, columns = x.shape
    return Matrix(
        1, rows, columns, x.dtype, _PLAIN, (x, None, None, rows, columns, _PLAIN, types[x.dtype], 0, 1, columns)
    )


def fits(x: Tensor, *matrices: Matrix | None) -> bool:
    """Whether rows x [T, K] can be multiplied with all of these."""
    same = all(m is not None and m.dtype == x.dtype for m in matrices)
    return same and has_rows(x) and x.dtype in (torch.float32, torch.bfloat16)


def operand(x: Tensor, type: torch.dtype) -> tuple[list[Step], Tensor]:
    """(steps that make it, x [T, K] in the type in which it meets a matrix)"""
    if x.dtype == type:
        return [], x
    wide = empty(*x.shape, dtype=torch.float32)
    return [_WIDEN(x, wide, *x.shape, x.stride(0), types[x.dtype])], wide
