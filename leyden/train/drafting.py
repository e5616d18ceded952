"""A drafter's blocks over what the target knows, the loss of their drafts, and how many of them are right.

Sources: DFlash (arXiv 2602.06036), equation 4; the DSpark paper, equations 9 to 12, and DeepSpec, its code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leyden import ops
from leyden.model.context import Context
from leyden.model.drafters import DraftAttention, DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.train.acceptance import Acceptance, Answer, count
from leyden.train.batches import Batch, Corpus
from leyden.train.blocks import ROW, Blocks

_PAIRS = 2**29  # query and key pairs of a drafter's attention at a time, where none are kept
_LOGITS = 2**28  # most logits that are kept for the backward pass; more are computed again, part by part


@dataclass(frozen=True)
class Objective:
    """Weights of the terms of the loss, and of the drafts: draft k counts exp(-(k - 1) / decay)."""

    cross_entropy: float
    distance: float
    confidence: float
    decay: float = 4.0


@dataclass(frozen=True)
class View:
    """One batch as the target sees it: tokens int64 [T], hidden [T, H] after norm_f, taps: residual streams [T, H]."""

    lens: tuple[int, ...]
    tokens: Tensor
    hidden: Tensor
    taps: list[Tensor]


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


@torch.no_grad()
def view(target: Nemotron, taps: Sequence[int], batch: Batch) -> View:
    device = next(target.parameters()).device
    tokens = upload(batch.tokens, device)
    return View(batch.lens, tokens, *target(tokens, Context.packed(list(batch.lens), device), taps))


def draft_hidden(network: DrafterNetwork, seen: View, blocks: Blocks, drafts: int) -> Tensor:
    """Hidden states [R * ROW, drafts, H] that lm_head turns into the drafts of every block, all blocks at once."""
    device = seen.tokens.device
    padded = torch.nn.utils.rnn.pad_sequence(torch.cat(seen.taps, dim=-1).split(seen.lens), batch_first=True)
    context = network.context([padded], torch.arange(padded.shape[1], device=device))
    anchors, sequences = upload(blocks.anchors, device), upload(blocks.sequences, device)

    def attend(layer: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = context[layer.index]
        mixed = []
        for rows, needed in blocks.spans():
            own = q[rows], k[rows], v[rows]
            before = keys[sequences[rows], :needed], values[sequences[rows], :needed]
            options = anchors[rows], layer.causal, layer.window, layer.attention_sink_bias
            mixed.append(ops.block_attention_packed(*own, *before, *options))
        return torch.cat(mixed)

    tokens = network.block(seen.tokens[upload(blocks.tokens, device)], drafts)
    positions = anchors[..., None] + torch.arange(tokens.shape[-1], device=device)
    return network.predicting(network(tokens, positions, attend)).flatten(0, 1)


def score(
    network: DrafterNetwork, target: Nemotron, seen: View, blocks: Blocks, objective: Objective, drafts: int
) -> tuple[Tensor, Tensor]:
    """(loss, right [drafts]): the mean of the loss over the drafts of all blocks, and how many are right by depth.

    Each term is sum(w * term) / sum(w) over the drafts that have a right answer, with w = exp(-(k - 1) / decay):

        cross entropy   -log p(text)
        distance        sum over the vocabulary of |p - q|
        confidence      cross-entropy of the confidence head with the probability of acceptance, 1 - distance / 2

    p: the drafter's distribution, its Markov head given the text's token before; q: the target's, given all the text
    before. A draft is right if p and q have the same first choice.
    """
    device = seen.tokens.device
    which, depths, places = (upload(array, device) for array in blocks.answers(drafts))
    hidden = draft_hidden(network, seen, blocks, drafts)[which, depths - 1]
    weights = torch.exp((1 - depths) / objective.decay)
    rows = (
        hidden,
        seen.hidden[places - 1],
        seen.tokens[places - 1],
        seen.tokens[places],
        weights / weights.sum().clamp(min=1e-9),
    )
    parts = max(1, -(-len(places) * target.config.vocab_size // _LOGITS))
    loss, matches = torch.zeros((), device=device), []
    for part in zip(*(t.chunk(parts) for t in rows), strict=True):
        if parts > 1 and torch.is_grad_enabled():
            one, match = checkpoint(_terms, network, target, objective, *part, use_reentrant=False)
        else:
            one, match = _terms(network, target, objective, *part)
        loss = loss + one
        matches.append(match)
    tried, right = torch.zeros(2, drafts, device=device)
    tried.index_add_(0, depths - 1, torch.ones_like(weights))
    right.index_add_(0, depths - 1, torch.cat(matches).float())
    return loss, right / tried.clamp(min=1)


def _terms(
    network: DrafterNetwork, target: Nemotron, objective: Objective,
    hidden: Tensor, target_hidden: Tensor, previous: Tensor, text: Tensor, weights: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(sum of weights * loss, match [n]) of n drafts."""
    logits, wanted = network.correct(target.logits(hidden), previous), target.logits(target_hidden)
    loss = objective.cross_entropy * F.cross_entropy(logits, text, reduction="none")
    if objective.distance or objective.confidence:
        distance = (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
        loss = loss + objective.distance * distance
    if objective.confidence:
        odds = network.confidence(hidden, previous)
        accepted = 1 - distance.detach() / 2
        loss = loss + objective.confidence * F.binary_cross_entropy_with_logits(odds, accepted, reduction="none")
    return loss @ weights, logits.argmax(-1) == wanted.argmax(-1)


@torch.no_grad()
def draft_acceptance(
    network: DrafterNetwork, target: Nemotron, corpus: Corpus, drafts: int, batch_tokens: int
) -> Acceptance:
    """Of `drafts` drafts per step. At most `batch_tokens` tokens are looked at together."""

    def accepted(batch: Batch, answers: list[Answer]) -> np.ndarray:
        found = np.zeros(len(batch.tokens), dtype=np.int64)
        seen = view(target, network.config.target_layer_ids, batch)
        for blocks in Blocks.all(batch).parts(_rows(network, batch, drafts)):
            used = np.flatnonzero(blocks.reach)
            places, reach = blocks.tokens.flatten()[used], blocks.reach.flatten()[used]
            hidden = draft_hidden(network, seen, blocks, drafts)[upload(used, seen.tokens.device)]
            anchors = seen.tokens[upload(places, seen.tokens.device)]
            part = max(1, _LOGITS // (drafts * target.config.vocab_size))
            pieces = zip(hidden.split(part), anchors.split(part), strict=True)
            proposed = [network.chain(target.logits(h), anchor, lambda z: z.argmax(-1))[0] for h, anchor in pieces]
            ahead = np.arange(1, drafts + 1)
            text = batch.tokens[np.minimum(places[:, None] + ahead, len(batch.tokens) - 1)]
            right = (torch.cat(proposed).cpu().numpy() == text) & (ahead <= reach[:, None])
            found[places] = np.logical_and.accumulate(right, axis=1).sum(1)
        return found

    with ops.using("training"):
        return count(corpus, drafts, batch_tokens, accepted)


def _rows(network: DrafterNetwork, batch: Batch, drafts: int) -> int:
    """Rows of blocks whose attention fits into memory together."""
    config = network.config
    pairs = ROW * config.drafts_to_rows(drafts) * config.num_attention_heads * max(batch.lens)
    return max(1, _PAIRS // pairs)
