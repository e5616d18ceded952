"""How many drafts a target would accept, without generating anything: greedy, over texts that are there already.

A draft is right if it is the target's most likely token given the text before it. A block's count ends at its first
wrong draft, and where the text itself leaves the target's choice: what would follow there, the text does not tell.
Over answers that the target gave greedily, decoding() is therefore what a server would measure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.train.batches import Batch
from leyden.train.blocks import Blocks
from leyden.train.drafting import draft_hidden, view

_LOGITS = 2**28  # logits at a time


@dataclass(frozen=True)
class Acceptance:
    """Counts over all anchors of some texts, and over the steps of decoding these texts."""

    tried: np.ndarray  # int64 [drafts]: blocks whose drafts before this one were accepted and that have a right answer
    accepted: np.ndarray  # int64 [drafts]: those of them where this one was accepted too
    steps: int  # verification steps that it takes to decode the texts
    tokens: int  # tokens that these steps bring

    def __add__(self, other: "Acceptance") -> "Acceptance":
        steps, tokens = self.steps + other.steps, self.tokens + other.tokens
        return Acceptance(self.tried + other.tried, self.accepted + other.accepted, steps, tokens)

    @property
    def rates(self) -> list[float]:
        """Of each draft, given that all drafts before it were accepted."""
        return (self.accepted / np.maximum(self.tried, 1)).tolist()

    @property
    def expected(self) -> float:
        """Tokens per step, bonus included, from a random token of the texts: 1 + sum of the products of the rates."""
        return float(1 + np.cumprod(self.rates).sum())

    @property
    def decoding(self) -> float:
        """Tokens per step, bonus included, when each step starts where the one before it ended."""
        return self.tokens / max(self.steps, 1)


@torch.no_grad()
def measure(target: Nemotron, network: DrafterNetwork, batches: Iterable[Batch], drafts: int) -> Acceptance:
    """Of `drafts` drafts per step, over the learned tokens of all batches."""
    total = Acceptance(np.zeros(drafts, dtype=np.int64), np.zeros(drafts, dtype=np.int64), 0, 0)
    for batch in batches:
        total = total + _measure(target, network, batch, drafts)
    return total


def _measure(target: Nemotron, network: DrafterNetwork, batch: Batch, drafts: int) -> Acceptance:
    seen = view(target, network.config.target_layer_ids, batch)
    blocks = Blocks.all(batch)
    used = np.flatnonzero(blocks.reach)
    anchors, reach = blocks.tokens.flatten()[used], blocks.reach.flatten()[used]
    hidden = draft_hidden(network, seen, blocks, drafts)[torch.from_numpy(used).to(seen.tokens.device)]
    first = seen.tokens[torch.from_numpy(anchors).to(seen.tokens.device)]

    part = max(1, _LOGITS // target.config.vocab_size)
    pieces = zip(hidden.split(max(1, part // drafts)), first.split(max(1, part // drafts)), strict=True)
    proposed = _host([network.chain(target.logits(h), anchor, _best)[0] for h, anchor in pieces])
    # The token at a place is chosen by the row before it; no draft is for place 0.
    choice = np.roll(_host([_best(target.logits(h)) for h in seen.hidden.split(part)]), 1)

    depths = np.arange(drafts)
    possible = depths < reach[:, None]
    places = np.minimum(anchors[:, None] + depths + 1, len(choice) - 1)
    right = possible & (proposed == choice[places])
    on_track = right & (batch.tokens[places] == choice[places])
    reached = possible & np.concatenate([np.ones_like(right[:, :1]), np.logical_and.accumulate(on_track, 1)[:, :-1]], 1)
    accepted = reached & right
    steps = tokens = free = 0
    for anchor, gain in zip(anchors.tolist(), np.minimum(accepted.sum(1) + 1, reach).tolist(), strict=True):
        if anchor >= free:  # an answer's first anchor, or where the step before it ended
            steps, tokens, free = steps + 1, tokens + gain, anchor + gain
    return Acceptance(reached.sum(0), accepted.sum(0), steps, tokens)


def _best(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _host(parts: list[Tensor]) -> np.ndarray:
    return torch.cat(parts).cpu().numpy()
