"""The mixture-of-experts mixer, letter E."""

from typing import Any

import torch
from torch import Tensor, nn

from leyden import ops
from leyden.config.model import ModelConfig
from leyden.formats import Weight
from leyden.model.context import Context
from leyden.model.layers import MLP, RMSNorm


class Gate(nn.Module):
    """The router's parameters, fp32 whatever the model's dtype: near-ties decide which expert runs."""

    def __init__(self, experts: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts, dtype=torch.float32))


class Experts(nn.Module):
    """All routed experts of a layer, stacked."""

    def __init__(self, count: int, size: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.up_proj = Weight(count, width, size, dtype=dtype)
        self.down_proj = Weight(count, size, width, dtype=dtype)


class MoE(nn.Module):
    """k routed experts of E, inside a narrower latent space if the model has one, plus a shared expert for every token.

    Router and shared expert read the full width in either case.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.config = config
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.gate = Gate(config.n_routed_experts, hidden)
        self.experts = Experts(config.n_routed_experts, latent or hidden, config.moe_intermediate_size, dtype)
        self.fc1_latent_proj = Weight(latent, hidden, dtype=dtype) if latent else None
        self.fc2_latent_proj = Weight(hidden, latent, dtype=dtype) if latent else None
        self.shared_experts = MLP(hidden, config.shared_expert_width, dtype) if config.shared_expert_width else None

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        """x [T, H] -> [T, H]; tokens do not see each other, so the context does not matter."""
        return self._experts(x, *self.route(x))

    def added(self, norm: RMSNorm, delta: Tensor, residual: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """(forward() of the norm of delta + residual, the sum), all [T, H]: for few tokens norm and router are one."""
        hidden, total, *chosen = ops.add_norm_route(delta, residual, norm.weight, norm.eps, *self._router)
        return self._experts(hidden, *chosen), total

    def _experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        up, down, shared = self.experts.up_proj, self.experts.down_proj, self.shared_experts
        # Kernels for all of it are for matrices of one format; experts and the shared one have their own otherwise.
        if self.fc1_latent_proj is None and shared is not None and shared.up_proj.format.name == up.format.name:
            return ops.moe(x, ids, weights, up, down, shared.up_proj, shared.down_proj)
        routed = x if self.fc1_latent_proj is None else ops.linear(x, self.fc1_latent_proj)
        routed = ops.experts(routed, ids, weights, up, down)
        if self.fc2_latent_proj is not None:
            routed = ops.linear(routed, self.fc2_latent_proj)
        return routed if shared is None else routed + shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(ids [T, k], weights fp32 [T, k]) of the experts chosen for each row of x [T, H]."""
        return ops.route(x, *self._router)

    @property
    def _router(self) -> tuple[Any, ...]:
        """Its parameters, in the order in which the ops take them."""
        config, gate = self.config, self.gate
        return (
            gate.weight,
            gate.e_score_correction_bias,
            config.num_experts_per_tok,
            config.n_group,
            config.topk_group,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )
