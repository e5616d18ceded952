"""DFlash and DSpark: small networks that propose a block of tokens at once from the target's residual stream.

Both are one backbone. Context: the residual stream after a few layers of the target is joined and projected to
features, and every drafter layer makes keys and values of them, one per position. Block: the newest token (the anchor)
and mask tokens pass through the layers, see the context and each other, and come out as the hidden states that the
target's lm_head turns into drafts. DSpark adds a Markov head, which makes a draft depend on the one before it, and
possibly a confidence head, which estimates whether a draft will be accepted.

Parameters are named as in the published checkpoints. Sources: DFlash (arXiv 2602.06036); DeepSpec, for DSpark.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log, pi
from typing import cast

import torch
from torch import Tensor, nn

from leyden import ops
from leyden.config.drafter import DrafterConfig, Rope
from leyden.formats import Weight
from leyden.model.layers import RMSNorm

Angles = tuple[Tensor, Tensor]  # cos and sin of positions [...], fp32 [..., head dim / 2]


class DraftAttention(nn.Module):
    """Grouped queries; every head's query and key is normalised and rotated; sinks where the config has them."""

    def __init__(self, config: DrafterConfig, index: int, dtype: torch.dtype):
        super().__init__()
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.index, self.head_dim = index, dim
        self.causal, self.window = config.causal[index], config.windows[index]
        self.q_proj = Weight(config.num_attention_heads * dim, hidden, dtype=dtype)
        self.k_proj = Weight(config.num_key_value_heads * dim, hidden, dtype=dtype)
        self.v_proj = Weight(config.num_key_value_heads * dim, hidden, dtype=dtype)
        self.o_proj = Weight(hidden, config.num_attention_heads * dim, dtype=dtype)
        self.q_norm = RMSNorm(dim, eps, dtype)
        self.k_norm = RMSNorm(dim, eps, dtype)
        sinks = nn.Parameter(torch.empty(config.num_attention_heads, dtype=dtype)) if config.attention_sinks else None
        self.attention_sink_bias = sinks

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """x [..., H] -> k, v [..., kv heads, dim]: of the context's features and of the block's rows alike."""
        return ops.rotate(self.k_norm(self._heads(x, self.k_proj)), *angles), self._heads(x, self.v_proj)

    def forward(self, x: Tensor, angles: Angles, attend: "Attend") -> Tensor:
        q = ops.rotate(self.q_norm(self._heads(x, self.q_proj)), *angles)
        return ops.linear(attend(self, q, *self.keys_values(x, angles)).flatten(-2), self.o_proj)

    def _heads(self, x: Tensor, weight: Weight) -> Tensor:
        return ops.linear(x, weight).unflatten(-1, (-1, self.head_dim))


# (layer; q, k, v [..., heads, dim] of the block's rows) -> [..., heads, dim]: an attention op over the context that the
# caller keeps, with the layer's causal, window and attention_sink_bias
Attend = Callable[[DraftAttention, Tensor, Tensor, Tensor], Tensor]


class GatedMLP(nn.Module):
    def __init__(self, size: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.gate_proj = Weight(width, size, dtype=dtype)
        self.up_proj = Weight(width, size, dtype=dtype)
        self.down_proj = Weight(size, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.swiglu(x, self.gate_proj, self.up_proj, self.down_proj)


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig, index: int, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = DraftAttention(config, index, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype)

    def forward(self, x: Tensor, residual: Tensor, angles: Angles, attend: Attend) -> tuple[Tensor, Tensor]:
        """(input_layernorm of the stream, the stream) -> (what the MLP adds to it, the stream without that)."""
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, angles, attend), residual)
        return self.mlp(x), residual


class MarkovHead(nn.Module):
    """Adds W2 W1[previous token] to the logits of a draft: a bigram of rank r."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype):
        super().__init__()
        self.markov_w1 = Weight(config.vocab_size, config.markov_rank, dtype=dtype)
        self.markov_w2 = Weight(config.vocab_size, config.markov_rank, dtype=dtype)

    def forward(self, previous: Tensor, logits: Tensor) -> Tensor:
        """int [...], fp32 [..., V] -> fp32 [..., V]"""
        return ops.add_linear(ops.embed(previous, self.markov_w1), self.markov_w2, logits)


class ConfidenceHead(nn.Module):
    """A logistic regression on a draft's hidden state, and on the W1 row of the token before it if `config` says so."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence == "markov" else 0)
        self.proj = nn.Linear(width, 1, dtype=torch.float32)


class DrafterNetwork(nn.Module):
    """One class for both methods: a DFlash drafter has no Markov head. Parameters are left uninitialised."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype, device: torch.device | str = "cpu"):
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        with torch.device(device):
            self.embed_tokens = Weight(config.vocab_size, hidden, dtype=dtype)
            self.fc = Weight(hidden, hidden * len(config.target_layer_ids), dtype=dtype)
            self.hidden_norm = RMSNorm(hidden, eps, dtype)
            self.layers = nn.ModuleList(DraftLayer(config, i, dtype) for i in range(config.num_hidden_layers))
            self.norm = RMSNorm(hidden, eps, dtype)
            self.markov_head = MarkovHead(config, dtype) if config.markov_rank else None
            self.confidence_head = ConfidenceHead(config) if config.confidence else None
            self.register_buffer("frequencies", frequencies(config.rope, config.head_dim, device), persistent=False)

    def context(self, taps: Sequence[Tensor], positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, [..., kv heads, dim], that `taps` [..., H] at `positions` [...] turn into.

        taps: the residual stream of the target after each of config.target_layer_ids, before norm_f. Keys and values at
        a position depend on nothing else, so they may be computed piece by piece.
        """
        features = self.hidden_norm(ops.linear(ops.join(*taps), self.fc))
        angles = self._angles(positions)
        return [layer.self_attn.keys_values(features, angles) for layer in self._layers()]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Rows of blocks (tokens and positions int [...]) -> hidden [..., H], which the target's lm_head reads."""
        residual, angles, layers = ops.embed(tokens, self.embed_tokens), self._angles(positions), list(self._layers())
        x = layers[0].input_layernorm(residual)
        for layer, norm in zip(layers, [*(layer.input_layernorm for layer in layers[1:]), self.norm], strict=True):
            x, residual = norm.add(*layer(x, residual, angles, attend))
        return x

    def block(self, anchors: Tensor, drafts: int) -> Tensor:
        """Anchor tokens int [...] -> the tokens of the blocks that propose `drafts` after them, int64 [..., rows]."""
        rows = self.config.drafts_to_rows(drafts)
        masks = anchors.new_full((*anchors.shape, rows - 1), self.config.mask_token_id)
        return torch.cat([anchors[..., None], masks], dim=-1)

    def predicting(self, hidden: Tensor) -> Tensor:
        """hidden [..., rows, H] of blocks -> [..., drafts, H]: the rows whose logits are those of the drafts."""
        if self.config.sample_from_anchor:
            return hidden
        return ops.join(hidden[..., 1:, :].flatten(-2)).unflatten(-1, (-1, hidden.shape[-1]))

    def correct(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Logits fp32 [..., V] of drafts, given the tokens int [...] before them."""
        return logits if self.markov_head is None else self.markov_head(previous, logits)

    def chain(self, logits: Tensor, anchors: Tensor, pick: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """logits fp32 [R, drafts, V] -> (drafts int64 [R, drafts], the logits [R, V] that each was picked from).

        One draft after the other, each picked by `pick` (logits [R, V] -> tokens [R]) given the one before it.
        """
        tokens, picked_from, previous = [], [], anchors
        for step in logits.unbind(1):
            picked_from.append(self.correct(step, previous))
            previous = pick(picked_from[-1])
            tokens.append(previous)
        return ops.join(*(each[:, None] for each in tokens)), picked_from

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Log-odds, fp32 [...], that a draft is accepted if all before it were; hidden [..., H] of its row."""
        assert self.confidence_head is not None
        also, proj = None, self.confidence_head.proj
        if self.config.confidence == "markov":
            assert self.markov_head is not None
            also = ops.embed(previous, self.markov_head.markov_w1)
        return ops.confidence(hidden, also, proj.weight, proj.bias)

    def _layers(self) -> Iterable[DraftLayer]:
        return cast(Iterable[DraftLayer], self.layers)

    def _angles(self, positions: Tensor) -> Angles:
        return ops.angles(positions, self.frequencies, self.config.rope.scale)


def frequencies(rope: Rope, dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each of the dim / 2 pairs, fp32.

    YaRN keeps pairs that turn more than beta_fast times within `original` positions, slows those that turn less than
    beta_slow times down by `factor`, and goes from one to the other in a straight line. (Peng et al., 2023, 3.2.)
    """
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    plain = rope.theta ** (-2 * pairs / dim)
    if rope.factor == 1.0:
        return plain

    def turning(turns: float) -> float:
        """The pair that turns so often: the solution of original * frequency = 2 pi turns."""
        return dim * log(rope.original / (turns * 2 * pi)) / (2 * log(rope.theta))

    low, high = max(floor(turning(rope.beta_fast)), 0), min(ceil(turning(rope.beta_slow)), dim - 1)
    slow = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - slow) + plain / rope.factor * slow
