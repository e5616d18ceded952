"""How many drafts are right on given texts, drafting greedily after every token of every answer: MTP, or any drafter.

The MTP module drafts here as in the engine: rows of known tokens hold the backbone's hidden states, only the step's own
drafts hold the module's. On a model's own greedy answers the result is that of speculative decoding; on reference
answers it is that of a model which would write them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leyden import ops
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.train.batches import Batch, Corpus, Packing

Answer = tuple[int, int, int]  # start of the example, first token, end; places in the batch


@dataclass(frozen=True)
class Acceptance:
    """Over all answers of a corpus: runs of tokens to be learned, whose first token comes from the prompt."""

    steps: int  # target passes that the other tokens take
    tokens: int  # that they bring: accepted drafts, and one more per step
    accepted: tuple[float, ...]  # share of all places after which drafts 1, 1 and 2, ... are right

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)


@torch.no_grad()
def acceptance(model: Nemotron, corpus: Corpus, drafts: int, batch_tokens: int) -> Acceptance:
    """Of `drafts` drafts of the MTP module per step. At most `batch_tokens` tokens are looked at together."""
    training = model.training
    model.eval()
    with ops.using("training"):
        found = count(
            corpus, drafts, batch_tokens, lambda batch, answers: _accepted(model, batch, answers, drafts, batch_tokens)
        )
    model.train(training)
    return found


def count(
    corpus: Corpus, drafts: int, batch_tokens: int, accepted: Callable[[Batch, list[Answer]], np.ndarray]
) -> Acceptance:
    """`accepted`: a batch and its answers -> int [T], drafts in a row that are right after each token of an answer."""
    steps = tokens = places = 0
    hits = np.zeros(drafts, dtype=np.int64)
    for group in Packing(corpus, batch_tokens, seed=0).epoch(0):
        batch = corpus.batch(group)
        answers = _answers(batch)
        right = accepted(batch, answers)
        for _, first, end in answers:
            hits += (right[first : end - 1, None] > np.arange(drafts)).sum(0)
            places += end - 1 - first
            at = first
            while at < end - 1:
                steps, at = steps + 1, at + 1 + int(right[at])
            tokens += end - 1 - first
    return Acceptance(steps, tokens, tuple(float(n) / max(1, places) for n in hits))


def _answers(batch: Batch) -> list[Answer]:
    """Every answer of a batch; at least one token stands before it."""
    found, start = [], 0
    for n in batch.lens:
        learn = np.concatenate([[False], batch.weights[start + 1 : start + n] > 0, [False]])
        borders = np.flatnonzero(np.diff(learn)) + start + 1
        found += [(start, int(a), int(b)) for a, b in borders.reshape(-1, 2)]
        start += n
    return found


def _accepted(model: Nemotron, batch: Batch, answers: list[Answer], drafts: int, batch_tokens: int) -> np.ndarray:
    """int [T]: how many drafts in a row are right after each token of an answer but its last (0 elsewhere)."""
    assert model.mtp is not None
    device = next(model.parameters()).device
    ids = torch.from_numpy(batch.tokens).to(device)
    ctx = Context.packed(list(batch.lens), device)
    hidden, _ = model(ids, ctx)
    drafting = model.mtp(hidden, model.embed(ids.roll(-1)), ctx)

    accepted = np.zeros(len(batch.tokens), dtype=np.int64)
    # [3, n]: start of the example, known token after which drafts are made, end of the answer
    places = np.array([(s, p, b) for s, a, b in answers for p in range(a, b - 1)], dtype=np.int64).reshape(-1, 3).T
    own = [drafting[torch.from_numpy(places[1] - 1).to(device)]]
    for depth in range(1, drafts + 1):
        wanted = places[1] + depth
        drafted = torch.cat([model.logits(part).argmax(-1) for part in own[-1].split(batch_tokens)]).cpu().numpy()
        right = (wanted < places[2]) & (drafted == batch.tokens[np.minimum(wanted, len(batch.tokens) - 1)])
        accepted[places[1, right]] = depth
        places = places[:, right]
        if depth == drafts or not right.any():
            break
        keep = torch.from_numpy(np.flatnonzero(right)).to(device)
        own = [states[keep] for states in own]
        own.append(_next(model, ids, hidden, own, places, batch_tokens))
    return accepted


def _next(
    model: Nemotron, ids: Tensor, hidden: Tensor, own: list[Tensor], places: np.ndarray, batch_tokens: int
) -> Tensor:
    """The module's state [n, H] one draft further: a row per place, with all pairs up to it and the step's own ones.

    Drafts that are still in the race are right, so the ids of their pairs are those of the text.
    """
    assert model.mtp is not None
    states = torch.cat([hidden, *own])
    lens = places[1] - places[0] + len(own)
    chunks = np.cumsum(lens) // batch_tokens
    outputs = []
    for chunk in np.unique(chunks):
        members = np.flatnonzero(chunks == chunk)
        rows = [
            np.concatenate([np.arange(s, p), len(hidden) + i + np.arange(len(own)) * places.shape[1]])
            for i, (s, p) in zip(members, places[:2, members].T, strict=True)
        ]
        following = [np.arange(s + 1, p + 1 + len(own)) for s, p in places[:2, members].T]
        of, after = (torch.from_numpy(np.concatenate(index)).to(ids.device) for index in (rows, following))
        ctx = Context.packed(lens[members].tolist(), ids.device)
        out = model.mtp(states[of], model.embed(ids[after]), ctx)
        outputs.append(out[ctx.wide.starts[1:].long() - 1])
    return torch.cat(outputs)
