"""Packages that are not installed here, as far as leyden calls them: what they are given is held against the rules that
they state themselves, and what they give is computed from that, by their conventions, in plain code."""

import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class ActivationType(IntEnum):
    Swiglu = 3
    Relu2 = 6


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Both are in 16 bits, rounded at different places: within 1% of the largest."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert (found - wanted).float().abs().max() <= 0.01 * wanted.float().abs().max()


def flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Install it; returns a list of what each call gets besides tensors."""
    calls: list[dict[str, Any]] = []

    def selective_state_update(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        state_batch_indices: Tensor | None = None,
        pad_slot_id: int = -1,
        out: Tensor | None = None,
        rand_seed: Tensor | None = None,
        philox_rounds: int = 10,
        algorithm: str = "auto",
    ) -> Tensor:
        count, (slots, heads, dim, n), groups = len(x), state.shape, B.shape[1]
        assert dt_bias is not None and state_batch_indices is not None and out is not None and z is None
        assert slots >= count and heads % groups == 0
        assert x.shape == dt.shape == out.shape == (count, heads, dim) and out.is_contiguous()
        assert B.shape == C.shape == (count, groups, n) and A.shape == (heads, dim, n)
        assert x.stride()[1:] == (dim, 1) and B.stride()[1:] == C.stride()[1:] == (n, 1)
        assert dt.stride()[1:] == (1, 0) and A.stride() == (1, 0, 0)
        assert D.shape == dt_bias.shape == (heads, dim) and D.stride() == dt_bias.stride() == (1, 0)
        assert state.stride()[1:] == (dim * n, n, 1) and state_batch_indices.shape == (count,)
        assert dt.dtype == D.dtype == dt_bias.dtype and x.dtype == B.dtype == C.dtype == out.dtype
        if rand_seed is not None:
            assert (rand_seed.shape, rand_seed.dtype, state.dtype) == ((1,), torch.int64, torch.float16)
        seed = None if rand_seed is None else rand_seed.item()
        calls.append({"seed": seed, "rounds": philox_rounds, "algorithm": algorithm})
        for row, slot in enumerate(state_batch_indices.tolist()):
            before = torch.zeros(heads, dim, n) if slot == pad_slot_id else state[slot].float()
            step = dt[row].float() + dt_bias
            step = (F.softplus(step) if dt_softplus else step)[..., None]
            b, c = (t[row].float().repeat_interleave(heads // groups, 0)[:, None] for t in (B, C))
            after = before * (A * step).exp() + step * b * x[row].float()[..., None]
            out[row] = ((after * c).sum(-1) + D * x[row].float()).to(out.dtype)
            if slot != pad_slot_id:
                state[slot] = after.to(state.dtype)
        return out

    def cutlass_fused_moe(
        input: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        fc1_expert_weights: Tensor,
        fc2_expert_weights: Tensor,
        output_dtype: torch.dtype,
        quant_scales: list[Tensor],
        output: Tensor | None = None,
        enable_pdl: bool | None = None,
        activation_type: ActivationType = ActivationType.Swiglu,
        use_fused_finalize: bool | None = None,
    ) -> Tensor:
        assert token_selected_experts.dtype == torch.int32 and token_final_scales.dtype == torch.float32
        assert input.dtype == fc1_expert_weights.dtype == fc2_expert_weights.dtype == output_dtype
        assert fc1_expert_weights.shape[1] == fc2_expert_weights.shape[2], "twice as many rows if there is a gate"
        assert activation_type == ActivationType.Relu2 and not quant_scales and output is not None
        calls.append({"atomics": use_fused_finalize})
        up, down = fc1_expert_weights.float(), fc2_expert_weights.float()
        for row, (ids, scales) in enumerate(zip(token_selected_experts.tolist(), token_final_scales, strict=True)):
            hidden = [F.relu(up[e] @ input[row].float()).square().to(input.dtype).float() for e in ids]
            made = [scale * (down[e] @ h) for e, scale, h in zip(ids, scales, hidden, strict=True)]
            output[row] = torch.stack(made).sum(0).to(output.dtype)
        return output

    _install(monkeypatch, "flashinfer", ActivationType=ActivationType)
    _install(monkeypatch, "flashinfer.mamba", selective_state_update=selective_state_update)
    _install(monkeypatch, "flashinfer.fused_moe", cutlass_fused_moe=cutlass_fused_moe)
    return calls


class HummingLayer(nn.Module):
    """Of the schema modelopt/nvfp4: the tensors of a checkpoint first, others after transform()."""

    def __init__(
        self,
        shape_n: int,
        shape_k: int,
        weight_config: dict[str, Any],
        input_config: dict[str, Any] | None = None,
        num_experts: int | None = None,
        torch_dtype: torch.dtype | None = None,
        pad_n_to_multiple: int = 1,
    ):
        super().__init__()
        assert weight_config == {"quant_method": "modelopt", "quant_algo": "nvfp4"}
        assert -shape_n % pad_n_to_multiple % 8 == 0 and shape_k % 64 == 0
        assert pad_n_to_multiple % 128 == 0, "there is no kernel for a part of 128 rows"
        self.padding = (0, -shape_n % pad_n_to_multiple)
        stack = (num_experts,) if num_experts else ()
        self.num_experts, self.torch_dtype, self.ready = num_experts, torch_dtype, False
        for name, shape, dtype in (
            ("weight", (*stack, shape_n, shape_k // 2), torch.uint8),
            ("weight_scale", (*stack, shape_n, shape_k // 16), torch.float8_e4m3fn),
            ("weight_scale_2", stack or (1,), torch.float32),
        ):
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def load_from_tensors(self, tensors: dict[str, Tensor], prefix: str = "") -> None:
        assert tensors.keys() == {"weight", "weight_scale", "weight_scale_2"}
        for name, tensor in tensors.items():
            mine = getattr(self, name)
            assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype), name
            mine.copy_(tensor)

    def transform(self, allow_inplace: bool = False) -> None:
        for name, made in (
            ("weight", F.pad(self.weight.view(torch.int32).transpose(-1, -2), self.padding)),
            ("weight_scale", F.pad(self.weight_scale.float().transpose(-1, -2), self.padding)),
            ("weight_scale_2", self.weight_scale_2),
        ):
            setattr(self, name, nn.Parameter(made, requires_grad=False))
        self.ready = True

    def forward(
        self, inputs: Tensor, expert_layout: Tensor | None = None, compute_config: dict[str, Any] | str | None = None
    ) -> Tensor:
        assert self.ready and inputs.dim() == 2 and inputs.is_contiguous() and inputs.dtype == self.torch_dtype
        words = self.weight.transpose(-1, -2).contiguous().view(torch.uint8)
        values = E2M1[torch.stack([words & 15, words >> 4], -1).flatten(-2).long()]
        scale = self.weight_scale.transpose(-1, -2).repeat_interleave(16, -1)
        matrix = values * scale * self.weight_scale_2.view(-1, *[1] * (values.dim() - 1))
        matrix = matrix[..., : matrix.shape[-2] - self.padding[1], :]
        if self.num_experts is None:
            assert compute_config is None
            return F.linear(inputs.float(), matrix.squeeze(0)).to(inputs.dtype)
        assert compute_config == '{"gemm_type": "grouped_contiguous"}' and expert_layout is not None
        assert expert_layout.shape == (self.num_experts + 1,) and not expert_layout.is_floating_point()
        groups = inputs.float().split(expert_layout.diff().tolist())
        return torch.cat([F.linear(g, m) for g, m in zip(groups, matrix, strict=True)]).to(inputs.dtype)


def humming(monkeypatch: pytest.MonkeyPatch, layer: type = HummingLayer) -> None:
    """Install it."""
    _install(monkeypatch, "humming")
    _install(monkeypatch, "humming.layer", HummingLayer=layer)


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__path__ = []  # a package
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
