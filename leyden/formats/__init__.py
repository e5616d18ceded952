"""How a weight is stored. A format is four verbs; a Weight is the tensors of one matrix in one format.

    tensors      which tensors hold a matrix of this shape, under which names
    quantize     matrix -> tensors
    dequantize   tensors -> matrix
    shard        the part of one tensor-parallel rank

Names are those of the checkpoint: the Weight `mixer.in_proj` in dense format holds `mixer.in_proj.weight`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from leyden.errors import ConfigError

Spec = tuple[tuple[int, ...], torch.dtype]


class Format(Protocol):
    """One way of storing a matrix [N, K], or a stack of them [E, N, K]. Formats are values: equal ones store alike."""

    @property
    def name(self) -> str: ...

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Spec]:
        """Name, shape and dtype of every stored tensor of a matrix of `shape` whose values are used as `dtype`.

        ConfigError if the format cannot hold a matrix of this shape.
        """

    def quantize(self, weight: Tensor) -> dict[str, Tensor]: ...

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor: ...

    def shard(self, tensors: Mapping[str, Tensor], dim: int, rank: int, world: int) -> dict[str, Tensor]:
        """Rank's share along `dim` (negative: counted from the matrix's last two dimensions)."""


@runtime_checkable
class Grid(Format, Protocol):
    """A format whose values are whole steps of a scale, or other fixed multiples: what error compensation needs."""

    def steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What one unit is worth for each element of the matrix, fp32 [..., N, K]."""

    def snap(self, units: Tensor) -> Tensor:
        """The nearest values that can be stored, in units."""

    def recode(self, tensors: Mapping[str, Tensor], units: Tensor) -> dict[str, Tensor]:
        """The same scales with other values [..., N, K], which `snap` gave."""


@dataclass(frozen=True)
class Dense:
    """The matrix itself, in any floating-point dtype: makes "not quantised" a value, not a branch."""

    name = "dense"

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Spec]:
        return {"weight": (shape, dtype)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight}

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return tensors["weight"].to(dtype)

    def shard(self, tensors: Mapping[str, Tensor], dim: int, rank: int, world: int) -> dict[str, Tensor]:
        return {"weight": tensors["weight"].chunk(world, dim)[rank].contiguous()}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a format, by what each of its elements covers of the matrix.

    rows, columns   how many of them one element stands for, the last one perhaps fewer; None: all there are.
    A part of which one element covers the whole matrix is a scalar, and [E] for a stack.
    """

    dtype: torch.dtype
    rows: int | None = 1
    columns: int | Fraction | None = 1

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        *stack, n, k = matrix
        if self.rows is None and self.columns is None:
            return tuple(stack)
        return (*stack, *(1 if per is None else ceil(size / per) for size, per in ((n, self.rows), (k, self.columns))))


class Packed:
    """What the formats that store a matrix in regular parts have in common: `parts` says it all.

    multiple   K must be one of this: rows are stored in runs of so many columns
    """

    name: str
    multiple = 1

    @property
    def parts(self) -> dict[str, Part]:
        raise NotImplementedError

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Spec]:
        if shape[-1] % self.multiple:
            raise ConfigError(f"format {self.name} stores {self.multiple} columns at a time; a matrix has {shape[-1]}")
        return {name: (part.shape(shape), part.dtype) for name, part in self.parts.items()}

    def shard(self, tensors: Mapping[str, Tensor], dim: int, rank: int, world: int) -> dict[str, Tensor]:
        """ConfigError if a border would fall inside something that is stored in one piece."""
        first = next(iter(self.parts))
        axis = dim % tensors[first].dim() - tensors[first].dim()  # -1 columns, -2 rows, -3 stack
        covers = {name: {-1: part.columns, -2: part.rows, -3: 1}[axis] for name, part in self.parts.items()}
        size = int(tensors[first].shape[axis] * (covers[first] or 1))
        run = max([per for per in covers.values() if isinstance(per, int)] + [self.multiple if axis == -1 else 1])
        if size % (world * run):
            raise ConfigError(
                f"format {self.name} cannot divide {size} {('columns', 'rows', 'matrices')[-1 - axis]} among {world}"
                f" ranks: it stores {run} of them together"
            )
        at = 0 if axis == -3 else axis  # scalars are [E] in a stack
        return {
            name: tensors[name] if per is None else tensors[name].chunk(world, at)[rank].contiguous()
            for name, per in covers.items()
        }


class Weight(nn.Module):
    """The stored tensors of one matrix [N, K] or one stack [E, N, K], as parameters named as in the checkpoint."""

    def __init__(self, *shape: int, dtype: torch.dtype, format: Format | None = None):
        super().__init__()
        self.shape = shape
        self.dtype = dtype  # of the values, as the network computes with them
        self.eight_above = inf  # rows of activations above which a product may round them to 8 bits (leyden.ops.eight)
        self.allot(format or Dense())

    def allot(self, format: Format, device: torch.device | None = None) -> None:
        """Room for the matrix in `format`, uninitialised, in place of what was there. Only dense weights can learn."""
        self.format = format
        self.twin: Tensor | None = None  # what dense() gives, kept beside codes for products of many rows
        self._parameters.clear()
        for name, (size, stored) in format.tensors(self.shape, self.dtype).items():
            empty = torch.empty(size, dtype=stored, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=format == Dense()))

    @property
    def parts(self) -> dict[str, Any]:
        """The stored tensors by their names; named_parameters() has the same ones, slowly."""
        return self._parameters

    def dense(self) -> Tensor:
        """The matrix as the network computes with it, [*shape] in `dtype`; a view where nothing is to be done."""
        return self.format.dequantize(self.parts, self.dtype)

    def members(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Some matrices of a stack by their indices, as dense() has them; no others are dequantised."""
        if self.format == Dense():  # unbound: one gradient for the whole stack, not one stack of zeros for each matrix
            whole = self.dense().unbind()
            return {i: whole[i] for i in indices}
        parts = self.parts.items()
        return {i: self.format.dequantize({name: part[i] for name, part in parts}, self.dtype) for i in indices}

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.format.name}"
