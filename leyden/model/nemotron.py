"""The network. Its modules and parameters carry the names of the checkpoint; experts alone are stacked in memory."""

from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from leyden import ops
from leyden.cache.pool import Pool
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.model.attention import Attention
from leyden.model.context import Context
from leyden.model.layers import MLP, RMSNorm
from leyden.model.mamba import Mamba
from leyden.model.moe import MoE


class Layer(nn.Module):
    """One norm and one mixer: x + mixer(norm(x)). `before` is the pattern up to here: it counts the pool's layers."""

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

    def forward(self, delta: Tensor | None, residual: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """(what the mixer makes of the norm of delta + residual, the sum), all [T, H]; no delta: nothing to add."""
        if delta is None:
            return self.mixer(self.norm(residual), ctx), residual
        if isinstance(self.mixer, MoE) and ctx.pool is not None:
            return self.mixer.added(self.norm, delta, residual, ctx)
        hidden, total = self.norm.add(delta, residual)
        return self.mixer(hidden, ctx), total


class Backbone(nn.Module):
    """Everything between the token ids and lm_head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.embeddings = Weight(config.vocab_size, config.hidden_size, dtype=dtype)
        letters = enumerate(config.pattern)
        self.layers = nn.ModuleList(Layer(letter, config.pattern[:i], config, dtype) for i, letter in letters)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon, dtype)


class MTP(nn.Module):
    """Multi-token prediction: from a hidden state and the token after it, the hidden state of that token.

    The layers keep their keys in the pool after the backbone's attention layers (DeepSeek-V3, section 2.2, with
    Nemotron's `*E` in place of a transformer block).
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        hidden, eps, letters = config.hidden_size, config.layer_norm_epsilon, config.mtp_pattern
        self.layers = nn.ModuleList(
            Layer(letter, config.pattern + letters[:i], config, dtype) for i, letter in enumerate(letters)
        )
        first, last = self.layers[0], self.layers[-1]
        first.enorm = RMSNorm(hidden, eps, dtype)
        first.hnorm = RMSNorm(hidden, eps, dtype)
        first.eh_proj = Weight(hidden, 2 * hidden, dtype=dtype)
        last.final_layernorm = RMSNorm(hidden, eps, dtype)

    def forward(self, hidden: Tensor, embedded: Tensor, ctx: Context) -> Tensor:
        """[T, H] -> [T, H], which lm_head turns into logits and the next draft step takes as its `hidden`.

        Row i holds hidden[i], the backbone's output at a position (after norm_f), and embedded[i], the embedding of the
        token that follows it. ctx gives the position of hidden[i].
        """
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        joined = ops.join(first.enorm(embedded), first.hnorm(hidden))
        out, _ = _through(self.layers, last.final_layernorm, ops.linear(joined, first.eh_proj), ctx)
        return out


class Nemotron(nn.Module):
    """The backbone, lm_head and, with `mtp`, the multi-token-prediction module.

    Parameters are left uninitialised: a loader fills them. device="meta" builds the structure without memory.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", mtp: bool = False):
        super().__init__()
        if mtp and not config.num_nextn_predict_layers:
            raise ConfigError("the model has no MTP module: num_nextn_predict_layers must be 1 in config.json, got 0")
        self.config = config
        with torch.device(device):
            self.backbone = Backbone(config, dtype)
            self.lm_head = Weight(config.vocab_size, config.hidden_size, dtype=dtype)
            if config.tie_word_embeddings:
                self.lm_head = self.backbone.embeddings
            self.mtp = MTP(config, dtype) if mtp else None

    def forward(self, tokens: Tensor, ctx: Context, taps: Collection[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """tokens int [T] -> (hidden [T, H] after norm_f, the residual stream [T, H] after each layer of `taps`).

        The taps come in the order of the layers. The residual stream has the model's dtype: sums are rounded to it.
        """
        return _through(self.backbone.layers, self.backbone.norm_f, self.embed(tokens), ctx, taps)

    def commit(self, ctx: Context, slots: Tensor, counts: Tensor) -> None:
        """The first `counts` (int32 [R]) tokens of each row of ctx are right; `slots` int64 [R] are those of the rows.

        This is where sequences move on: states over guesses that were right, and the pool's count of tokens.
        """
        assert ctx.pool is not None
        self.replay(ctx, counts[: len(ctx.narrow.lens)])
        ctx.pool.commit(slots, counts)

    def replay(self, ctx: Context, counts: Tensor) -> None:
        """The part of commit() that is about states: those of the narrow rows, if they waited."""
        if ctx.guesses:
            for layer in cast(Iterable[Layer], self.backbone.layers):
                if isinstance(layer.mixer, Mamba):
                    layer.mixer.replay(ctx, counts)

    def fold(self, pool: Pool, slots: Tensor) -> None:
        """The tokens that wait beside the states of `slots` (int64 [R]) go into them. See Pool."""
        held, counts = pool.waiting(slots)
        for layer in cast(Iterable[Layer], self.backbone.layers):
            if isinstance(layer.mixer, Mamba):
                layer.mixer.fold(pool, slots, held, counts)

    def embed(self, tokens: Tensor) -> Tensor:
        """int [T] -> [T, H]"""
        return ops.embed(tokens, self.backbone.embeddings)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> fp32 [..., V]"""
        return ops.linear(hidden, self.lm_head, torch.float32)


def _through(
    stack: nn.ModuleList, last: RMSNorm, residual: Tensor, ctx: Context, taps: Collection[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """(norm of the stream after all layers, the stream after each layer of `taps`).

    Each layer's sum is taken together with the norm that reads it: the next layer's, `last` in the end.
    """
    delta, tapped = None, []
    for i, layer in enumerate(cast(Iterable[Layer], stack)):
        delta, residual = layer(delta, residual, ctx)
        if i - 1 in taps:
            tapped.append(residual)
    assert delta is not None
    hidden, residual = last.add(delta, residual)
    return hidden, [*tapped, residual] if len(stack) - 1 in taps else tapped
