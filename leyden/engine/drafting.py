"""The drafters' turn in a step: they see what the target did, and one of them proposes what the next step will try.

A drafter that fails costs its drafts and nothing else: the next step has none, and the text is the same.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from leyden import log
from leyden.cache.pool import Pool
from leyden.engine.batch import Batch
from leyden.engine.sampler import Drawn, Sampler
from leyden.model.nemotron import Nemotron
from leyden.spec.drafter import Draft, Drafter, Heads, Seen
from leyden.types import Plan, Row

logger = log.get(__name__)


@dataclass(slots=True)
class Drafted:
    """Drafts on their way to the host."""

    tokens: Tensor  # int64 [S, width], -1 where there is nothing
    confidence: Tensor | None  # fp32 [S, count]: how likely each is kept if those before it are

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Waits for the device."""
        return self.tokens.tolist(), [] if self.confidence is None else self.confidence.tolist()


class Drafting:
    """Drafters with the target's pool and sampler around them."""

    def __init__(self, drafters: Sequence[Drafter], model: Nemotron, pool: Pool, sampler: Sampler, coupled: bool):
        self._drafters = drafters
        self._vocab_size = model.config.vocab_size
        self._pool, self._sampler, self._coupled = pool, sampler, coupled
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))
        self.failures = 0
        self.seconds = 0.0

    def run(self, plan: Plan, batch: Batch, hidden: Tensor, taps: list[Tensor], drawn: Drawn | None) -> Drafted:
        """What is proposed behind each row that sampled; the sampler's table has it, too.

        hidden and taps [T, ...] are the target's, and its step is committed.
        """
        started = time.perf_counter()
        slots = batch.slots[batch.sampling]
        drafts = self._sampler.drafts.new_full((len(slots), self._sampler.drafts.shape[1]), -1)
        confidence = None
        try:
            self._observe(plan.rows, batch, hidden, taps, drawn)
            if drawn is not None and plan.drafts:
                draft = self._propose(plan, batch, slots, drawn)
                known = (draft.tokens >= 0) & (draft.tokens < self._vocab_size)
                drafts[:, : plan.drafts] = torch.where(known, draft.tokens, -1)
                confidence = None if draft.confidence is None else draft.confidence.sigmoid()
        except torch.AcceleratorError:
            raise
        except Exception:
            if not self.failures:
                logger.exception("the drafter failed: the next step has no drafts; later failures are only counted")
            self.failures += 1
            drafts.fill_(-1)
        self._sampler.drafts[slots] = drafts
        self.seconds += time.perf_counter() - started
        return Drafted(drafts, confidence)

    def _observe(self, rows: list[Row], batch: Batch, hidden: Tensor, taps: list[Tensor], drawn: Drawn | None) -> None:
        following = batch.tokens.roll(-1)
        ends = accumulate(row.n for row in rows)
        known = [(end - 1, row.following) for end, row in zip(ends, rows, strict=True) if not row.sample]
        if known:
            at, tokens = torch.tensor(known, device=following.device).unbind(-1)
            following[at] = tokens
        if drawn is not None:
            following[batch.ends + drawn.accepted] = self._sampler.last[batch.slots[batch.sampling]]
        seen = Seen(batch.tokens, following, hidden, taps, batch.context)
        for drafter in self._drafters:
            drafter.observe(replace(seen, taps=[taps[self.taps.index(tap)] for tap in drafter.taps]))

    def _propose(self, plan: Plan, batch: Batch, slots: Tensor, drawn: Drawn) -> Draft:
        drafter = self._drafters[plan.drafter]
        positions = self._pool.committed[slots]
        page = self._pool.shape.page
        reach = max(row.start + row.n for row in plan.rows if row.sample) + drafter.lookahead
        heads = Heads(
            slots=slots,
            anchors=self._sampler.last[slots],
            positions=positions,
            ends=batch.ends + drawn.accepted,
            pages=self._pool.tables[slots, : -(-reach // page)],
        )
        pick = self._sampler.pick(slots, positions) if self._coupled else _likeliest
        return drafter.draft(heads, plan.drafts, pick)


def _likeliest(logits: Tensor, i: int) -> Tensor:
    return logits.argmax(-1)
