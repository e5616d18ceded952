"""The network. Its modules and parameters carry the names of the checkpoint; experts alone are stacked in memory."""

from collections.abc import Collection, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from leyden import ops
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.model.attention import Attention
from leyden.model.context import Context
from leyden.model.layers import MLP, RMSNorm
from leyden.model.mamba import Mamba
from leyden.model.moe import MoE


class Layer(nn.Module):
    """One norm and one mixer: x + mixer(norm(x)). `before` is the pattern up to this layer."""

    def __init__(self, letter: str, before: str, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, dtype)
        index = before.count(letter)
        self.mixer: nn.Module
        match letter:
            case "M":
                self.mixer = Mamba(config, index, dtype)
            case "*":
                self.mixer = Attention(config, index, dtype)
            case "E":
                self.mixer = MoE(config, dtype)
            case "-":
                self.mixer = MLP(config.hidden_size, config.intermediate_sizes[index], dtype)
            case _:
                raise ConfigError(f"a layer must be M (mamba), * (attention), E (MoE) or - (MLP), got {letter!r}")


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.embeddings = Weight(config.vocab_size, config.hidden_size, dtype=dtype)
        letters = enumerate(config.pattern)
        self.layers = nn.ModuleList(Layer(letter, config.pattern[:i], config, dtype) for i, letter in letters)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon, dtype)


class Nemotron(nn.Module):
    """Parameters are left uninitialised: a loader fills them. device="meta" builds the structure without memory."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"):
        super().__init__()
        self.config = config
        with torch.device(device):
            self.backbone = Backbone(config, dtype)
            self.lm_head = Weight(config.vocab_size, config.hidden_size, dtype=dtype)
            if config.tie_word_embeddings:
                self.lm_head = self.backbone.embeddings

    def forward(self, tokens: Tensor, ctx: Context, taps: Collection[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """tokens int [T] -> (hidden [T, H] after norm_f, the residual stream [T, H] after each layer of `taps`).

        The taps come in the order of the layers. The residual stream has the model's dtype: sums are rounded to it.
        """
        layers = list(cast(Iterable[Layer], self.backbone.layers))
        norms = [*(layer.norm for layer in layers), self.backbone.norm_f]
        residual = self.embed(tokens)
        hidden = norms[0](residual)
        tapped = []
        for i, layer in enumerate(layers):
            hidden, residual = norms[i + 1].add(layer.mixer(hidden, ctx), residual)
            if i in taps:
                tapped.append(residual)
        return hidden, tapped

    def embed(self, tokens: Tensor) -> Tensor:
        """int [T] -> [T, H]"""
        return ops.embed(tokens, self.backbone.embeddings)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> fp32 [..., V]"""
        return ops.linear(hidden, self.lm_head).float()
