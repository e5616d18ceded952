"""Products with NVFP4 matrices by Humming, for those who ask for them: --moe-backend humming, --linear-backend humming.

    lay        brings a matrix, or a stack of experts, into the order in which the package takes it, in place
    register   the ops that multiply with such matrices

Activations have 16 bits, as in the kernels of ours. The package compiles a kernel for each shape when it is first
needed, with the compiler that comes as a library. Written for humming-kernels 0.1.20.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden import ops
from leyden.errors import ConfigError
from leyden.formats import Spec, Weight
from leyden.formats.nvfp4 import NVFP4
from leyden.ops.foreign import find
from leyden.ops.triton.moe import combined, listed

PACKAGE = "humming-kernels"
ROWS, COLUMNS = 8, 64  # matrices have a multiple of so many
_PADDED = 128  # rows of what the package's choice of kernels divides a matrix into: it appends zeros
_LAYER = ("shape_n", "shape_k", "weight_config", "num_experts", "torch_dtype", "pad_n_to_multiple")
_GROUPED = '{"gemm_type": "grouped_contiguous"}'


@dataclass(frozen=True)
class Laid:
    """A matrix of `plain` as the package arranges it: only in memory, and there is no way back. `layer` multiplies."""

    plain: NVFP4
    layer: Any = field(repr=False)
    name = "nvfp4_humming"

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Spec]:
        return {name: (tuple(part.shape), part.dtype) for name, part in self.layer.named_parameters()}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        raise ConfigError(f"format {self.name} is made of nvfp4 at the start, not of values")

    def dequantize(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        raise ConfigError(f"format {self.name} can only be multiplied with")

    def shard(self, tensors: Mapping[str, Tensor], dim: int, rank: int, world: int) -> dict[str, Tensor]:
        raise ConfigError(f"format {self.name} cannot be divided")


def find_layer(flag: str) -> Callable[..., Any]:
    """The package's layer. ConfigError if it cannot be used."""
    layer = find(flag, PACKAGE, "humming.layer", "HummingLayer", _LAYER)
    find(flag, PACKAGE, "humming.layer", "HummingLayer.forward", ("self", "inputs", "expert_layout", "compute_config"))
    find(flag, PACKAGE, "humming.layer", "HummingLayer.load_from_tensors", ("self", "tensors"))
    find(flag, PACKAGE, "humming.layer", "HummingLayer.transform", ("self", "allow_inplace"))
    return layer


def fits(weight: Weight) -> bool:
    """Whether lay() can take it."""
    *_, n, k = weight.shape
    whole = n % ROWS == 0 and k % COLUMNS == 0
    return whole and isinstance(weight.format, NVFP4) and weight.dtype in (torch.bfloat16, torch.float16)


def lay(weight: Weight, make: Callable[..., Any]) -> None:
    """Give `weight`, which fits, to a layer that `make` makes: what find_layer() found. A twin is dropped."""
    assert isinstance(weight.format, NVFP4)
    *stack, n, k = weight.shape
    parts = {name: weight.parts[name].detach() for name in ("weight", "weight_scale", "weight_scale_2")}
    device = parts["weight"].device
    with torch.device(device), torch.cuda.device_of(parts["weight"]):
        layer = make(
            shape_n=n,
            shape_k=k,
            weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
            num_experts=stack[0] if stack else None,
            torch_dtype=weight.dtype,
            pad_n_to_multiple=_PADDED,
        )
        parts["weight_scale_2"] = parts["weight_scale_2"].reshape(layer.weight_scale_2.shape)  # [1] of one matrix
        layer.load_from_tensors(parts)
        layer.transform(allow_inplace=True)
    weight.allot(Laid(weight.format, layer), torch.device("meta"))
    for name, part in layer.named_parameters():
        weight.parts[name] = part


def linear(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """See ops.linear."""
    return _product(x.flatten(0, -2), weight).to(dtype or x.dtype).view(*x.shape[:-1], weight.shape[0])


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.mlp."""
    return linear(F.relu(linear(x, up)).square_(), down)


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.experts. The rows are brought into the order of their experts first."""
    (count, choices), total = ids.shape, up.shape[0]
    if not count:
        return x.new_empty(0, down.shape[1])
    order, bounds = listed(ids.contiguous(), total)
    order = order.long()
    options = {"expert_layout": bounds, "compute_config": _GROUPED}
    hidden = F.relu(_product(x[order // choices], up, **options)).square_()
    made = _product(hidden, down, **options)
    done = torch.empty_like(made).index_copy_(0, order, made)
    return combined(done, weights.contiguous(), count, down.shape[1], 0)


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    """See ops.moe."""
    return experts(x, ids, weights, up, down) + mlp(x, shared_up, shared_down)


def register() -> None:
    """The ops of matrices that are Laid."""
    for op, kernel in ((ops.linear, linear), (ops.mlp, mlp), (ops.experts, experts), (ops.moe, moe)):
        op.register("cuda", kernel, Laid.name)


def _product(x: Tensor, weight: Weight, **options: Any) -> Tensor:
    """x [M, K] -> [M, N]"""
    assert isinstance(weight.format, Laid)
    return weight.format.layer(x.contiguous(), **options) if len(x) else x.new_empty(0, weight.shape[-2])
