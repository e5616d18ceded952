"""How a weight is stored. A format is four verbs; a Weight is the tensors of one matrix in one format.

    tensors      which tensors hold a matrix of this shape, under which names
    quantize     matrix -> tensors
    dequantize   tensors -> matrix
    shard        the part of one tensor-parallel rank

Names are those of the checkpoint: the Weight `mixer.in_proj` in dense format holds `mixer.in_proj.weight`.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Spec = tuple[tuple[int, ...], torch.dtype]


class Format(Protocol):
    """One way of storing a matrix [N, K], or a stack of them [E, N, K]."""

    name: str

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Spec]:
        """Name, shape and dtype of every stored tensor of a matrix of `shape` whose values are used as `dtype`."""

    def quantize(self, weight: Tensor) -> dict[str, Tensor]: ...

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor: ...

    def shard(self, tensors: Mapping[str, Tensor], dim: int, rank: int, world: int) -> dict[str, Tensor]:
        """Rank's share along `dim` (negative: counted from the matrix's last two dimensions)."""


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


class Weight(nn.Module):
    """The stored tensors of one matrix [N, K] or one stack [E, N, K], as parameters named as in the checkpoint."""

    def __init__(self, *shape: int, dtype: torch.dtype, format: Format | None = None):
        super().__init__()
        self.shape = shape
        self.dtype = dtype  # of the values, as the network computes with them
        self.format: Format = format or Dense()
        for name, (size, stored) in self.format.tensors(shape, dtype).items():
            parameter = nn.Parameter(torch.empty(size, dtype=stored), requires_grad=stored.is_floating_point)
            self.register_parameter(name, parameter)

    def dense(self) -> Tensor:
        """The matrix as the network computes with it, [*shape] in `dtype`; a view where nothing is to be done."""
        return self.format.dequantize(dict(self.named_parameters()), self.dtype)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.format.name}"
