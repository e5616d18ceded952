"""Trains a drafter network, DFlash or DSpark, for a target that stays as it is.

The target reads whole examples; at random tokens of their answers (anchors) the drafter proposes a block, and is pulled
towards what comes next: DFlash by cross-entropy with the text, DSpark by that, the distance of its distribution from
the target's, and the error of its confidence head. Embeddings are the target's and frozen, except for the mask token's.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leyden import ops
from leyden.config.drafter import METHODS, DrafterConfig, Rope
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.model.draft_checkpoint import load, save
from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.train.acceptance import Acceptance
from leyden.train.batches import Corpus, Packing
from leyden.train.blocks import Blocks
from leyden.train.drafting import Objective, draft_acceptance, score, view
from leyden.train.optim import Optimizer, cosine
from leyden.train.trainer import flag, require


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What decides the outcome of a run; each field is the flag of the same name."""

    method: str = flag("dspark", "dflash: all drafts at once; dspark: each also sees the one before it")
    mask_token_id: int = flag(-1, "a token that no text contains; -1: <SPECIAL_990>, or the last reserved one")
    layers: int = flag(2, "of the drafter")
    taps: int = flag(4, "layers of the target that it reads")
    intermediate_size: int = flag(0, "of the drafter's MLPs; 0: twice the target's hidden size")
    block_size: int = flag(8, "the newest token and the drafts after it")
    window: int = flag(1024, "tokens that the drafter sees behind it; 0: all (dspark)")
    markov_rank: int = flag(64, "of the Markov head (dspark)")
    distance: float = flag(0.9, "weight of the distance from the target's distribution in the end (dspark)")
    confidence: float = flag(1.0, "weight of the confidence head's loss; 0: no such head (dspark)")
    decay: float = flag(4.0, "draft k counts exp(-(k - 1) / decay)")
    steps: int = flag(2000, "updates of the weights")
    batch_tokens: int = flag(32768, "most tokens of one forward pass")
    anchors: int = flag(32, "blocks per example and step")
    optimizer: str = flag("adamw", "adamw, or muon: projections by Muon, the rest by AdamW")
    lr: float = flag(2e-3, "highest learning rate")
    lr_floor: float = flag(0.02, "part of it that is left at the end of the cosine")
    warmup: int = flag(80, "steps in which the learning rate rises")
    clip: float = flag(1.0, "highest norm of the gradient")
    seed: int = flag(0, "of the initial weights, of the order of the data and of the anchors")

    def __post_init__(self) -> None:
        require(self.method in METHODS.values(), "method", "dflash or dspark", self.method)
        for name in ("layers", "taps", "steps", "batch_tokens", "anchors"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("intermediate_size", "window", "markov_rank", "confidence", "warmup"):
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("lr", "clip", "decay"):
            require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        require(self.block_size >= 2, "block_size", "at least 2", self.block_size)
        require(self.optimizer in ("adamw", "muon"), "optimizer", "adamw or muon", self.optimizer)
        for name in ("lr_floor", "distance"):
            require(0 <= getattr(self, name) <= 1, name, "in [0, 1]", getattr(self, name))


def design(options: DrafterOptions, target: ModelConfig) -> DrafterConfig:
    """The drafter that `options` ask for, of the kind that NVIDIA released for Lightning.

    DFlash sees all of its block and all of the context; DSpark has a causal block, a window, sinks and the two heads.
    Its attention has the shape of the target's, and the taps lie evenly between the target's second and last layer.
    """
    dspark = options.method == "dspark"
    last = target.num_hidden_layers - 1
    taps = [round(t) for t in np.linspace(min(1, last), last, options.taps)]
    require(len(set(taps)) == options.taps, "taps", f"at most the target's {last} layers after the first", options.taps)
    return DrafterConfig(
        method="dspark" if dspark else "dflash",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or 2 * target.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        target_layer_ids=tuple(taps),
        mask_token_id=options.mask_token_id,
        causal=(dspark,) * options.layers,
        windows=((options.window or None) if dspark else None,) * options.layers,
        attention_sinks=dspark,
        block_size=options.block_size,
        markov_rank=options.markov_rank if dspark else 0,
        confidence="markov" if dspark and options.confidence and options.markov_rank else None,
        rope=Rope(),
        max_position_embeddings=target.max_position_embeddings,
    )


@torch.no_grad()
def initialize(network: DrafterNetwork, target: Nemotron, seed: int) -> None:
    """Matrices normal with standard deviation 0.02, norms 1, sinks and biases 0; embeddings are the target's.

    W2 of the Markov head starts at 0: the first steps are those of the backbone. The mask token's row starts as the
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
    embeddings = target.backbone.embeddings.dense()
    table = network.embed_tokens.get_parameter("weight")
    table.copy_(embeddings)
    table[network.config.mask_token_id] = embeddings.float().mean(0)


class DrafterTrainer:
    """Trains the drafter that `options` ask for; a Trainee of leyden.train.run. The target is only read."""

    def __init__(self, target: Nemotron, corpus: Corpus, options: DrafterOptions):
        mask = options.mask_token_id
        if (corpus.tokens == mask).any():
            raise ConfigError(f"--mask-token-id must be a token that no text contains; {mask} occurs in the data")
        self.options, self.target = options, target.requires_grad_(False).eval()
        embeddings = target.backbone.embeddings
        device = embeddings.get_parameter("weight").device
        self.network = DrafterNetwork(design(options, target.config), embeddings.dtype, device)
        initialize(self.network, target, options.seed)
        self.network.embed_tokens.get_parameter("weight").register_hook(lambda gradient: _only_row(gradient, mask))
        self.packing = Packing(corpus, options.batch_tokens, options.seed)
        self.steps, self.step_number, self.tokens = options.steps, 0, 0
        self._optimizer = Optimizer(self.network.named_parameters(), 0.0, options.optimizer == "muon")
        self._batches = self.packing.batches(0)

    @property
    def dtype(self) -> torch.dtype:
        return self.network.embed_tokens.dtype

    @property
    def drafts(self) -> int:
        return self.network.config.rows_to_drafts(self.options.block_size)

    @property
    def measures(self) -> list[str]:
        return ["loss", *(f"draft{depth}_accuracy" for depth in range(1, self.drafts + 1)), "grad_norm"]

    @property
    def objective(self) -> Objective:
        """Of the next step. DSpark begins with the cross-entropy alone, and ends with the weights of the options.

        The distance hardly pulls at a distribution that is far from the target's, and what the confidence head learns
        then is soon wrong. The paper trains an order of magnitude longer and does without such a start.
        """
        options, done = self.options, (self.step_number + 1) / self.steps
        if options.method == "dflash":
            return Objective(1.0, 0.0, 0.0, options.decay)
        confidence = options.confidence * done if self.network.config.confidence else 0.0
        return Objective(1.0 - options.distance * done, options.distance * done, confidence, options.decay)

    def rate(self) -> float:
        """Learning rate of the next step."""
        options = self.options
        return options.lr * cosine(self.step_number, self.steps, options.warmup, options.lr_floor)

    def step(self) -> Tensor:
        """One update -> the measures named by `measures`, fp32 on the device; nothing waits for it."""
        batch, random = next(self._batches), np.random.default_rng([self.options.seed, self.step_number])
        with ops.using("training"):
            seen = view(self.target, self.network.config.target_layer_ids, batch)
            blocks = Blocks.draw(batch, self.options.anchors, random)
            loss, right = score(self.network, self.target, seen, blocks, self.objective, self.drafts)
            loss.backward()
        self._optimizer.accumulate()
        rate = self.rate()
        self.step_number += 1
        self.tokens += len(batch.tokens)
        norm = self._optimizer.step(self.step_number, rate, self.options.clip)
        return torch.cat([loss.detach()[None], right, norm[None]])

    @torch.no_grad()
    def evaluate(self, corpus: Corpus) -> dict[str, float]:
        """Loss and accuracies at one draw of anchors, and tokens per step of decoding the answers of `corpus`."""
        sums, packing = torch.zeros(self.drafts + 1), Packing(corpus, self.options.batch_tokens, seed=0)
        groups = packing.epoch(0)
        for i, group in enumerate(groups):
            batch = corpus.batch(group)
            with ops.using("training"):
                seen = view(self.target, self.network.config.target_layer_ids, batch)
                blocks = Blocks.draw(batch, self.options.anchors, np.random.default_rng(i))
                loss, right = score(self.network, self.target, seen, blocks, self.objective, self.drafts)
            sums += torch.cat([loss[None], right]).cpu() / len(groups)
        found = dict(zip(self.measures, sums.tolist(), strict=False))
        accepted = draft_acceptance(self.network, self.target, corpus, self.drafts, self.options.batch_tokens)
        return found | {"tokens_per_step": accepted.tokens_per_step}

    def save(self, folder: Path, shard_bytes: int) -> None:
        """Write the drafter; it is one file, however large."""
        save(self.network, folder)

    def state(self) -> dict[str, Tensor]:
        """All that the coming steps depend on, with step_number."""
        return self._optimizer.state()

    def load(self, state: dict[str, Tensor], step_number: int, tokens: int) -> None:
        """Go on from `state` as if it had never been interrupted."""
        self._optimizer.load(state)
        self.step_number, self.tokens = step_number, tokens
        self._batches = self.packing.batches(step_number)


def judge(folder: Path, target: Nemotron, corpus: Corpus, batch_tokens: int) -> dict[int, Acceptance]:
    """Number of drafts per step -> how many are accepted, of the drafter in `folder`, up to as many as it was made for.

    Each number is measured by itself: in a block that is not causal, what is drafted depends on how long the block is.
    """
    network = load(folder, target)
    most = network.config.width
    assert most is not None
    wanted = [*range(1, most, 2), most]
    return {n: draft_acceptance(network, target, corpus, n, batch_tokens) for n in wanted}


def table(found: dict[int, Acceptance]) -> str:
    """Tokens per step by number of drafts, and how often at least so many are accepted."""
    most = max(found)
    lines = ["drafts  tokens/step  accepted: " + "  ".join(f"{depth:4}" for depth in range(1, most + 1))]
    for drafts, each in found.items():
        shares = "  ".join(f"{share:4.2f}" for share in each.accepted)
        lines.append(f"{drafts:6}  {each.tokens_per_step:11.3f}            {shares}")
    return "\n".join(lines)


def _only_row(gradient: Tensor, row: int) -> Tensor:
    kept = torch.zeros_like(gradient)
    kept[row] = gradient[row]
    return kept
