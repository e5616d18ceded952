"""What is minimised: cross-entropy of the next token, and of the tokens after it through the MTP module."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.train.batches import Batch

_LOGITS = 2**28  # most logits that are kept for the backward pass; more are computed again, part by part


@dataclass(frozen=True)
class Score:
    """Sums over the tokens that were to be predicted, each times its weight. Scalars on the model's device."""

    loss: Tensor  # -log p
    correct: Tensor  # was it the most likely token?
    weight: float


def scores(model: Nemotron, batch: Batch, depths: int) -> list[Score]:
    """How well the backbone predicts the next token, and `depths` passes of the MTP module the tokens after it."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(batch.tokens).to(device, non_blocking=True)
    ctx = Context.packed(list(batch.lens), device)
    return [
        _score(model, hidden, batch.targets(ahead))
        for ahead, hidden in enumerate(_hidden(model, tokens, ctx, depths), 1)
    ]


def _hidden(model: Nemotron, tokens: Tensor, ctx: Context, depths: int) -> Iterator[Tensor]:
    """Hidden states [T, H] that lm_head turns into predictions of the token 1, 2, ... depths + 1 places ahead.

    One MTP module serves all depths: each takes the hidden state of the depth before it, as drafting does. What a row
    reads past its sequence's end belongs to its neighbour, but nothing that is scored reads that row.
    """
    hidden, _ = model(tokens, ctx)
    yield hidden
    for depth in range(1, depths + 1):
        assert model.mtp is not None
        hidden = model.mtp(hidden, model.embed(tokens.roll(-depth)), ctx)
        yield hidden


def _score(model: Nemotron, hidden: Tensor, targets: tuple[np.ndarray, ...]) -> Score:
    places, ids, weights = (torch.from_numpy(array).to(hidden.device, non_blocking=True) for array in targets)
    hidden = hidden.index_select(0, places)
    parts = max(1, -(-len(ids) * model.config.vocab_size // _LOGITS))
    loss, correct = torch.zeros(2, device=hidden.device)
    for part in zip(hidden.chunk(parts), ids.chunk(parts), weights.chunk(parts), strict=True):
        if parts > 1 and torch.is_grad_enabled():
            one, right = checkpoint(_cross_entropy, model, *part, use_reentrant=False)
        else:
            one, right = _cross_entropy(model, *part)
        loss, correct = loss + one, correct + right
    return Score(loss, correct, float(targets[2].sum()))


def _cross_entropy(model: Nemotron, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.logits(hidden)
    correct = (logits.detach().argmax(-1) == ids).float() @ weights
    return F.cross_entropy(logits, ids, reduction="none") @ weights, correct
