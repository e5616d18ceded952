"""One training step, and what it needs: the serving model itself, an optimizer and an endless supply of batches."""

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden import ops
from leyden.errors import ConfigError
from leyden.model import checkpoint
from leyden.model.nemotron import Nemotron
from leyden.train.batches import Batch, Corpus, Packing
from leyden.train.losses import scores
from leyden.train.optim import Optimizer, cosine
from leyden.train.router import Balance


def flag(default: Any, about: str) -> Any:
    return field(default=default, metadata={"help": about})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides the outcome of a run; each field is the flag of the same name."""

    steps: int = flag(0, "updates of the weights; 0: as many as --epochs takes")
    epochs: int = flag(1, "times that the data is seen, if --steps does not say otherwise")
    batch_tokens: int = flag(32768, "most tokens of one forward pass")
    accumulate: int = flag(1, "forward passes of one step")
    optimizer: str = flag("adamw", "adamw, or muon: projections by Muon, the rest by AdamW")
    lr: float = flag(2e-3, "highest learning rate")
    lr_floor: float = flag(0.05, "part of it that is left at the end of the cosine")
    warmup: int = flag(100, "steps in which the learning rate rises")
    weight_decay: float = flag(0.1, "of matrices")
    clip: float = flag(1.0, "highest norm of the gradient")
    mtp_depths: int = flag(3, "passes of the MTP module that are trained; 0 leaves it alone")
    mtp_weight: float = flag(0.3, "of the MTP passes' mean loss")
    prompt_weight: float = flag(0.0, "of tokens that the model is not to write itself, against 1 for those it is")
    bias_rate: float = flag(1e-3, "step of the experts' selection bias, which keeps them evenly busy")
    seed: int = flag(0, "of the initial weights and of the order of the data")

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_tokens", "accumulate"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("steps", "warmup", "weight_decay", "mtp_depths", "mtp_weight", "prompt_weight", "bias_rate"):
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("lr", "clip"):
            require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        require(self.optimizer in ("adamw", "muon"), "optimizer", "adamw or muon", self.optimizer)
        require(0 <= self.lr_floor <= 1, "lr_floor", "in [0, 1]", self.lr_floor)


def require(good: bool, name: str, wanted: str, found: object) -> None:
    if not good:
        raise ConfigError(f"--{name.replace('_', '-')} must be {wanted}, got {found}")


class Trainer:
    """`model` is trained in its own dtype, on its own device; `step_number` steps are done, of `steps`."""

    def __init__(self, model: Nemotron, corpus: Corpus, options: Options):
        if options.mtp_depths and model.mtp is None:
            raise ConfigError("the model has no MTP module to train: pass --mtp-depths 0, or one that has")
        if model.mtp is not None:
            model.mtp.requires_grad_(options.mtp_depths > 0)
        self.model = model.train()
        self.options = options
        self.packing = Packing(corpus, options.batch_tokens, options.seed, options.prompt_weight)
        passes = sum(len(self.packing.epoch(epoch)) for epoch in range(options.epochs))
        self.steps = options.steps or -(-passes // options.accumulate)
        self.step_number = 0
        self.tokens = 0  # seen so far
        self._balance = Balance(model if options.mtp_depths else model.backbone)
        self._biases = {n: b for n, b in model.named_parameters() if n.endswith("e_score_correction_bias")}
        self._optimizer = Optimizer(model.named_parameters(), options.weight_decay, options.optimizer == "muon")
        self._batches = self.packing.batches(0)

    def step(self) -> Tensor:
        """One update -> the measures named by `measures`, fp32 on the model's device; nothing waits for it."""
        options = self.options
        batches = list(islice(self._batches, options.accumulate))
        places = range(1, options.mtp_depths + 2)
        totals = [sum(float(batch.targets(ahead)[2].sum()) for batch in batches) for ahead in places]
        measured = torch.zeros(2, len(places), device=next(self.model.parameters()).device)
        for batch in batches:
            with ops.using("training"):
                found = scores(self.model, batch, options.mtp_depths)
                means = torch.stack([score.loss / max(total, 1e-9) for score, total in zip(found, totals, strict=True)])
                loss = means[0]
                if options.mtp_depths:
                    loss = loss + options.mtp_weight * means[1:].mean()
                loss.backward()
            self._optimizer.accumulate()
            right = [score.correct / max(total, 1e-9) for score, total in zip(found, totals, strict=True)]
            measured += torch.stack([means.detach(), torch.stack(right)])
        rate = self.rate()
        self.step_number += 1
        self.tokens += sum(len(batch.tokens) for batch in batches)
        norm = self._optimizer.step(self.step_number, rate, options.clip)
        entropy = self._balance.update(options.bias_rate)
        return torch.cat([measured.flatten(), torch.stack([norm, entropy.to(norm.device)])])

    @property
    def dtype(self) -> torch.dtype:
        return self.model.lm_head.dtype

    @property
    def measures(self) -> list[str]:
        return [*_names(self.options.mtp_depths), "grad_norm", "router_entropy"]

    def rate(self) -> float:
        """Learning rate of the next step."""
        options = self.options
        return options.lr * cosine(self.step_number, self.steps, options.warmup, options.lr_floor)

    def state(self) -> dict[str, Tensor]:
        """All that the coming steps depend on, with step_number."""
        return self._optimizer.state() | {f"bias.{name}": bias.detach() for name, bias in self._biases.items()}

    def evaluate(self, corpus: Corpus) -> dict[str, float]:
        """Loss and accuracy on held-out data."""
        return evaluate(self.model, corpus, self.options.batch_tokens, self.options.mtp_depths)

    def save(self, folder: Path, shard_bytes: int) -> None:
        """Write the checkpoint."""
        checkpoint.save(self.model, folder, shard_bytes)

    @torch.no_grad()
    def load(self, state: dict[str, Tensor], step_number: int, tokens: int) -> None:
        """Go on from `state` as if it had never been interrupted."""
        self._optimizer.load(state)
        for name, bias in self._biases.items():
            bias.copy_(state[f"bias.{name}"])
        self.step_number, self.tokens = step_number, tokens
        self._batches = self.packing.batches(step_number * self.options.accumulate)


@torch.no_grad()
def evaluate(model: Nemotron, corpus: Corpus, batch_tokens: int, depths: int) -> dict[str, float]:
    """Loss and accuracy on tokens to be learned, of the next token and `depths` tokens further ahead."""
    training = model.training
    model.eval()
    sums = torch.zeros(2, depths + 1)
    totals = torch.zeros(depths + 1)
    with ops.using("training"):
        for batch in _once(Packing(corpus, batch_tokens, seed=0)):
            found = scores(model, batch, depths)
            sums += torch.stack([torch.stack([s.loss for s in found]), torch.stack([s.correct for s in found])]).cpu()
            totals += torch.tensor([score.weight for score in found])
    model.train(training)
    return dict(zip(_names(depths), (sums / totals.clamp(min=1e-9)).flatten().tolist(), strict=True))


def _once(packing: Packing) -> list[Batch]:
    return [packing.corpus.batch(group) for group in packing.epoch(0)]


def _names(depths: int) -> list[str]:
    ahead = ["", *(f"mtp{depth}_" for depth in range(1, depths + 1))]
    return [f"{where}loss" for where in ahead] + [f"{where}accuracy" for where in ahead]
