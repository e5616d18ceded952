"""Keeps the experts evenly busy without a loss of its own, and tells how busy they are."""

from math import log
from typing import Any

import torch
from torch import Tensor, nn

from leyden.model.moe import MoE


class Balance:
    """After each step, the selection bias of busy experts goes down and that of idle ones up, by a fixed amount.

    DeepSeek-V3, section 2.1.2 (Wang et al. 2024): bias += rate * sign(mean load - load). The bias decides who is
    chosen, never how much a chosen expert counts, so it needs no gradient.
    """

    def __init__(self, network: nn.Module):
        self._layers = [module for module in network.modules() if isinstance(module, MoE)]
        self._loads = [torch.zeros_like(layer.gate.e_score_correction_bias) for layer in self._layers]
        for layer, load in zip(self._layers, self._loads, strict=True):
            layer.gate.e_score_correction_bias.requires_grad_(False)
            layer.register_forward_pre_hook(lambda layer, args, load=load: _count(layer, args[0], load))

    @torch.no_grad()
    def update(self, rate: float) -> Tensor:
        """Move the biases by the loads since the last update -> entropy of the loads, 1 if all are equally busy.

        A scalar on the model's device, the mean over the layers, all of which have been used.
        """
        entropies = []
        for layer, load in zip(self._layers, self._loads, strict=True):
            layer.gate.e_score_correction_bias.add_((load.mean() - load).sign(), alpha=rate)
            share = load / load.sum()
            entropies.append(torch.special.entr(share).sum() / log(max(2, len(load))))
            load.zero_()
        return torch.stack(entropies).mean() if entropies else torch.tensor(1.0)


@torch.no_grad()
def _count(layer: Any, x: Tensor, load: Tensor) -> None:
    """Routes a second time: cheaper than a way out of the layer that serving does not need."""
    if layer.training:
        ids, _ = layer.route(x)
        load += (ids[..., None] == torch.arange(len(load), device=load.device)).sum((0, 1))
