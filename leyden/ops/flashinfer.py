"""Kernels of FlashInfer, for those who ask for them: --mamba-backend flashinfer, --moe-backend flashinfer_cutlass.

    step       ops.mamba_step with its state update by flashinfer.mamba.selective_state_update
    Cutlass    the format of dense experts that flashinfer.fused_moe.cutlass_fused_moe multiplies

Only steps of single tokens: the package has no update that leaves states where they are and moves them later. Only
dense experts: it has relu^2 between two products without a gate, but on a Hopper GPU no NVFP4 with 16-bit activations.
The package compiles its kernels when they are first called. Written for version 0.7.4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from leyden import ops
from leyden.errors import ConfigError
from leyden.formats import Dense, Weight
from leyden.ops.foreign import find, installed
from leyden.ops.reference.mamba import mamba_step
from leyden.ops.rows import Rows

PACKAGE = "flashinfer-python"
ALGORITHMS = ("auto", "simple", "vertical", "horizontal")
_UPDATE = (
    *("state", "x", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "state_batch_indices", "pad_slot_id", "out"),
    *("rand_seed", "philox_rounds", "algorithm"),
)
_EXPERTS = (
    *("input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_weights"),
    *("output_dtype", "quant_scales", "output", "enable_pdl", "activation_type", "use_fused_finalize"),
)
_LARGEST = 3e38  # from here on a limit of time steps limits nothing


def step(flag: str, algorithm: str = "auto") -> ops.Op:
    """ops.mamba_step by FlashInfer on CUDA; elsewhere it is its reference. ConfigError if the package cannot be used.

    Random bits for rounding depend on the slots, not on the layer: they are not those of ops.mamba_step.
    """
    update = find(flag, PACKAGE, "flashinfer.mamba", "selective_state_update", _UPDATE)
    op = ops.Op(mamba_step)
    op.register("cuda", Step(update, algorithm))
    return op


def check_limit(flag: str, limit: tuple[float, float]) -> None:
    """ConfigError if a model cuts its time steps: the package does not."""
    if limit[0] > 0 or limit[1] < _LARGEST:
        raise ConfigError(
            f"{flag}: flashinfer does not limit time steps, and the model has a time_step_limit of {list(limit)}; leave"
            " the flag away"
        )


class Step:
    """Convolution and norm are ours. States and slots have the same meaning on both sides, but a state is read even if
    nothing is past: such a row's is cleared before. Slot 0 is the one for padding there, too."""

    def __init__(self, update: Callable[..., Tensor], algorithm: str):
        self._update, self._algorithm = update, algorithm
        self._rates: Any = WeakTensorKeyDictionary()  # A_log -> A

    def __call__(
        self,
        projected: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        A_log: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        norm_weight: Tensor,
        groups: int,
        eps: float,
        conv_state: Tensor,
        ssm_state: Tensor,
        rows: Rows,
        rounds: int = 0,
    ) -> Tensor:
        """See ops.mamba_step; the limit of time steps must limit nothing."""
        count, inner = len(projected), len(norm_weight)
        _, heads, dim, n = ssm_state.shape
        assert rows.slots is not None
        z, xBC, dt = projected.split([inner, inner + 2 * groups * n, heads], dim=-1)
        if not count:
            return torch.empty_like(z)
        xBC = ops.causal_conv(xBC, conv_weight, conv_bias, conv_state, rows)
        x, B, C = xBC.split([inner, groups * n, groups * n], dim=-1)
        ops.clear(ssm_state, rows.slots, rows.past)
        random = rounds and ssm_state.dtype == torch.float16
        y = torch.empty(count, heads, dim, dtype=x.dtype, device=x.device)
        self._update(
            state=ssm_state,
            x=x.unflatten(-1, (heads, dim)),
            dt=dt.float()[..., None].expand(-1, -1, dim),
            A=self._rate(A_log)[:, None, None].expand(-1, dim, n),
            B=B.unflatten(-1, (groups, n)),
            C=C.unflatten(-1, (groups, n)),
            D=D[:, None].expand(-1, dim),
            dt_bias=dt_bias[:, None].expand(-1, dim),
            dt_softplus=True,
            state_batch_indices=rows.slots,
            pad_slot_id=0,
            out=y,
            rand_seed=rows.past.sum(0, keepdim=True, dtype=torch.int64) if random else None,
            philox_rounds=rounds or 10,
            algorithm=self._algorithm,
        )
        return ops.gated_norm(y.flatten(1), z, norm_weight, groups, eps)

    def _rate(self, A_log: Tensor) -> Tensor:
        if A_log not in self._rates:
            self._rates[A_log] = -A_log.float().exp()
        return self._rates[A_log]


@dataclass(frozen=True)
class Cutlass(Dense):
    """Dense stacks, as they are, for FlashInfer's products."""

    name = "dense_cutlass"


def register_experts(flag: str) -> None:
    """The kernel of ops.experts for stacks that are Cutlass. ConfigError if the package cannot be used."""
    multiply = find(flag, PACKAGE, "flashinfer.fused_moe", "cutlass_fused_moe", _EXPERTS)
    activation = getattr(find(flag, PACKAGE, "flashinfer", "ActivationType"), "Relu2", None)
    if activation is None:
        raise ConfigError(f"{flag}: {installed(PACKAGE)} has no relu^2; install 0.7.4, or leave the flag away")

    def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
        """See ops.experts. Summed without atomics, so that equal requests have equal answers."""
        out = torch.empty(len(x), down.shape[1], dtype=x.dtype, device=x.device)
        if len(x):
            multiply(
                input=x.contiguous(),
                token_selected_experts=ids.int(),
                token_final_scales=weights,
                fc1_expert_weights=up.dense(),
                fc2_expert_weights=down.dense(),
                output_dtype=x.dtype,
                quant_scales=[],
                output=out,
                enable_pdl=False,
                activation_type=activation,
                use_fused_finalize=False,
            )
        return out

    ops.experts.register("cuda", experts, Cutlass.name)
