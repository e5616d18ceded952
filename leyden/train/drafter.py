"""Trains a drafter network, DFlash or DSpark, for a target that stays as it is.

The target reads whole examples; at random tokens of their answers (anchors) the drafter proposes a block, and is pulled
towards what comes next: DFlash by cross-entropy with the text, DSpark by that, the distance of its distribution from
the target's, and the error of its confidence head. Embeddings are the target's and frozen, except for the mask token's.
Sources: DFlash (arXiv 2602.06036), equation 4; the DSpark paper, equations 9 to 12, and DeepSpec, its code.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from leyden.config.drafter import DrafterConfig, Rope
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.train.batches import Corpus, Packing
from leyden.train.blocks import Blocks
from leyden.train.drafting import Objective, score, view
from leyden.train.optim import Optimizer, cosine


@dataclass(frozen=True)
class Settings:
    """How long and how fast to train."""

    steps: int = 2000
    batch_tokens: int = 32768
    anchors: int = 32  # blocks per example
    rate: float = 1e-3
    warmup: float = 0.04  # part of the steps
    floor: float = 0.02  # the last learning rate, as a part of the highest
    clip: float = 1.0
    muon: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """One step: `loss`, `norm` of the gradient, and `right`, by depth: drafts that are the target's first choice."""

    step: int
    loss: float
    norm: float
    right: list[float]


def taps_of(layers: int, count: int) -> tuple[int, ...]:
    """`count` layers of a target of `layers`, evenly from its second to its last."""
    return tuple(dict.fromkeys(round(t) for t in np.linspace(min(1, layers - 1), layers - 1, count)))


def design(
    method: Literal["dflash", "dspark"], target: ModelConfig, mask_token_id: int, **changes: object
) -> DrafterConfig:
    """A drafter for `target`, of the kind that NVIDIA released for Lightning; `changes` are fields of its config."""
    layers = int(changes.get("num_hidden_layers", 2))
    fields = {
        "method": method,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "target_layer_ids": taps_of(target.num_hidden_layers, 4),
        "mask_token_id": mask_token_id,
        "causal": (method == "dspark",) * layers,
        "windows": ((1024 if method == "dspark" else None),) * layers,
        "block_size": 8,
        "attention_sinks": method == "dspark",
        "markov_rank": min(512, target.hidden_size // 4) if method == "dspark" else 0,
        "confidence": "markov" if method == "dspark" else None,
        "rope": Rope(),
        "max_position_embeddings": target.max_position_embeddings,
    }
    return DrafterConfig(**(fields | changes))


@torch.no_grad()
def initialize(network: DrafterNetwork, embeddings: Tensor, seed: int) -> None:
    """Matrices normal with standard deviation 0.02, norms 1, sinks and biases 0; embeddings are the target's.

    W2 of the Markov head starts at 0: the first steps are those of the backbone. The mask token's row starts from the
    mean of the table, so that it looks like no token in particular.
    """
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        elif name.endswith(("bias", "markov_w2.weight")):
            parameter.zero_()
        else:
            parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.02, generator=draw))
    table = network.embed_tokens.weight
    table.copy_(embeddings)
    table[network.config.mask_token_id] = embeddings.float().mean(0)


class DrafterTrainer:
    """`steps()` trains `network` and says how it goes. The target is only read."""

    def __init__(
        self, network: DrafterNetwork, target: Nemotron, corpus: Corpus, settings: Settings, objective: Objective
    ):
        mask = network.config.mask_token_id
        if (corpus.tokens == mask).any():
            raise ConfigError(f"--mask-token-id must be a token that no text contains; {mask} occurs in the data")
        self.network, self.target, self.settings, self.objective = network, target, settings, objective
        self.drafts = network.config.width or 0
        self.packing = Packing(corpus, settings.batch_tokens, settings.seed)
        target.requires_grad_(False)
        network.requires_grad_(True)
        network.embed_tokens.weight.register_hook(lambda gradient: _only_row(gradient, mask))
        self.optimizer = Optimizer(network.named_parameters(), decay=0.0, muon=settings.muon)

    def steps(self) -> Iterator[Progress]:
        settings = self.settings
        warmup = round(settings.warmup * settings.steps)
        for step, batch in zip(range(settings.steps), self.packing.batches(0), strict=False):
            blocks = Blocks.draw(batch, settings.anchors, np.random.default_rng([settings.seed, step]))
            seen = view(self.target, self.network.config.target_layer_ids, batch)
            loss, right = score(self.network, self.target, seen, blocks, self.objective, self.drafts)
            loss.backward()
            self.optimizer.accumulate()
            rate = settings.rate * cosine(step, settings.steps, warmup, settings.floor)
            norm = self.optimizer.step(step + 1, rate, settings.clip)
            yield Progress(step + 1, loss.item(), norm.item(), right.tolist())


def _only_row(gradient: Tensor, row: int) -> Tensor:
    kept = torch.zeros_like(gradient)
    kept[row] = gradient[row]
    return kept
