"""The drafter's turn in a step: it sees what the target did, and proposes what the next step will try.

A drafter that fails costs its drafts and nothing else: the next step has none, and the text is the same.
"""

import time
from itertools import accumulate

import torch
from torch import Tensor

from leyden import log
from leyden.cache.pool import Pool
from leyden.engine.batch import Batch
from leyden.engine.sampler import Drawn, Sampler
from leyden.model.nemotron import Nemotron
from leyden.spec.drafter import Drafter, Heads, Seen
from leyden.types import Row

logger = log.get(__name__)


class Drafting:
    """A drafter with the target's pool and sampler around it."""

    def __init__(self, drafter: Drafter, model: Nemotron, pool: Pool, sampler: Sampler, coupled: bool):
        self._drafter = drafter
        self._vocab_size = model.config.vocab_size
        self._pool, self._sampler, self._coupled = pool, sampler, coupled
        self.taps = drafter.taps
        self.failures = 0
        self.seconds = 0.0

    def run(self, rows: list[Row], batch: Batch, hidden: Tensor, taps: list[Tensor], drawn: Drawn | None) -> Tensor:
        """What is proposed behind each row that sampled, int64 [S, width], -1 where nothing is; the table has it, too.

        hidden and taps [T, ...] are the target's, and its step is committed.
        """
        started = time.perf_counter()
        slots = batch.slots[batch.sampling]
        drafts = self._sampler.drafts.new_full((len(slots), self._sampler.drafts.shape[1]), -1)
        try:
            self._observe(rows, batch, hidden, taps, drawn)
            if drawn is not None:
                tokens = self._propose(rows, batch, slots, drawn)
                drafts[:, : tokens.shape[1]] = torch.where((tokens >= 0) & (tokens < self._vocab_size), tokens, -1)
        except torch.AcceleratorError:
            raise
        except Exception:
            if not self.failures:
                logger.exception("the drafter failed: the next step has no drafts; later failures are only counted")
            self.failures += 1
            drafts.fill_(-1)
        self._sampler.drafts[slots] = drafts
        self.seconds += time.perf_counter() - started
        return drafts

    def _observe(self, rows: list[Row], batch: Batch, hidden: Tensor, taps: list[Tensor], drawn: Drawn | None) -> None:
        following = batch.tokens.roll(-1)
        ends = accumulate(row.n for row in rows)
        known = [(end - 1, row.following) for end, row in zip(ends, rows, strict=True) if not row.sample]
        if known:
            at, tokens = torch.tensor(known, device=following.device).unbind(-1)
            following[at] = tokens
        if drawn is not None:
            following[batch.ends + drawn.accepted] = self._sampler.last[batch.slots[batch.sampling]]
        self._drafter.observe(Seen(batch.tokens, following, hidden, taps, batch.context))

    def _propose(self, rows: list[Row], batch: Batch, slots: Tensor, drawn: Drawn) -> Tensor:
        positions = self._pool.committed[slots]
        page = self._pool.shape.page
        reach = max(row.start + row.n for row in rows if row.sample) + self._drafter.lookahead
        heads = Heads(
            slots=slots,
            anchors=self._sampler.last[slots],
            positions=positions,
            ends=batch.ends + drawn.accepted,
            pages=self._pool.tables[slots, : -(-reach // page)],
        )
        pick = self._sampler.pick(slots, positions) if self._coupled else _likeliest
        return self._drafter.draft(heads, self._sampler.drafts.shape[1], pick).tokens


def _likeliest(logits: Tensor, i: int) -> Tensor:
    return logits.argmax(-1)
