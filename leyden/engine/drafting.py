"""The drafters' turn in a step: they see what the target did, and one of them proposes what the next step will try.

A drafter that fails costs its drafts and nothing else: the next step has none, and the text is the same.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from leyden import log, ops
from leyden.cache.pool import Pool
from leyden.engine.batch import Batch
from leyden.engine.sampler import Drawn, Sampler
from leyden.engine.transfer import Readback, upload
from leyden.model.nemotron import Nemotron
from leyden.spec.drafter import Draft, Drafter, Heads, Seen
from leyden.types import Plan, Row

logger = log.get(__name__)


@dataclass(slots=True)
class Drafted:
    """Drafts on their way to the host."""

    tokens: Tensor  # int64 [S, width], -1 where there is nothing
    confidence: Tensor | None  # fp32 [S, count]: how likely each is kept if those before it are
    _copies: list[Readback] = field(init=False)

    def __post_init__(self) -> None:
        self._copies = [Readback(tensor) for tensor in (self.tokens, self.confidence) if tensor is not None]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Waits for the device."""
        tokens, *confidence = (copy.tolist() for copy in self._copies)
        return tokens, confidence[0] if confidence else []


class Drafting:
    """Drafters with the target's pool and sampler around them."""

    def __init__(self, drafters: Sequence[Drafter], model: Nemotron, pool: Pool, sampler: Sampler, coupled: bool):
        self._drafters = drafters
        self._vocab_size = model.config.vocab_size
        self._pool, self._sampler, self._coupled = pool, sampler, coupled
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))
        self.steady = all(drafter.steady for drafter in drafters)
        self.failures = 0
        self.seconds = 0.0

    def run(self, plan: Plan, batch: Batch, hidden: Tensor, taps: list[Tensor], drawn: Drawn | None) -> Drafted:
        """What is proposed behind each row that sampled; the sampler's table has it, too.

        hidden and taps [T, ...] are the target's, and its step is committed.
        """
        seen = Seen(batch.tokens, self._following(plan.rows, batch, drawn), hidden, taps, batch.context)
        slots = batch.slots[batch.sampling]
        return self.guarded(slots, lambda: self._after(plan, seen, batch, slots, drawn))

    def guarded(self, slots: Tensor, drafted: Callable[[], Draft | None], rows: int | None = None) -> Drafted:
        """Drafts for the rows that sampled, in `slots` int64 [S], if drafted() brings any; of those, the first `rows`
        are of interest."""
        started = time.perf_counter()
        drafts = self._sampler.drafts.new_full((len(slots), self._sampler.drafts.shape[1]), -1)
        confidence = None
        try:
            if (draft := drafted()) is not None:
                known = (draft.tokens >= 0) & (draft.tokens < self._vocab_size)
                drafts[:, : draft.tokens.shape[1]] = torch.where(known, draft.tokens, -1)
                confidence = None if draft.confidence is None else draft.confidence.sigmoid()
                if draft.settle is not None:
                    draft.settle()
        except torch.AcceleratorError:
            raise
        except Exception:
            if not self.failures:
                logger.exception("the drafter failed: the next step has no drafts; later failures are only counted")
            self.failures += 1
            drafts.fill_(-1)
        self._sampler.drafts[slots] = drafts
        self.seconds += time.perf_counter() - started
        return Drafted(drafts[:rows], None if confidence is None else confidence[:rows])

    def step(self, seen: Seen, heads: Heads | None, drafter: int, count: int) -> Draft | None:
        """The drafters' own part: all of them see the step, one proposes `count` tokens behind each of `heads`."""
        for each in self._drafters:
            each.observe(replace(seen, taps=[seen.taps[self.taps.index(tap)] for tap in each.taps]))
        if heads is None or not count:
            return None
        pick = self._sampler.pick(heads.slots, heads.positions) if self._coupled else _likeliest
        return self._drafters[drafter].draft(heads, count, pick)

    def _after(self, plan: Plan, seen: Seen, batch: Batch, slots: Tensor, drawn: Drawn | None) -> Draft | None:
        heads = None
        if drawn is not None:
            lookahead = self._drafters[plan.drafter].lookahead
            reach = max(row.start + row.n for row in plan.rows if row.sample) + lookahead
            heads = Heads(
                slots=slots,
                anchors=self._sampler.last[slots],
                positions=self._pool.committed[slots],
                ends=batch.ends + drawn.accepted,
                pages=self._pool.tables[slots, : -(-reach // self._pool.shape.page)],
                starts=torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
            )
        return self.step(seen, heads, plan.drafter, plan.drafts)

    def _following(self, rows: list[Row], batch: Batch, drawn: Drawn | None) -> Tensor:
        following = batch.tokens.roll(-1)
        ends = accumulate(row.n for row in rows)
        known = [(end - 1, row.following) for end, row in zip(ends, rows, strict=True) if not row.sample]
        if known:
            at, tokens = upload(known, following.device).unbind(-1)
            following[at] = tokens
        if drawn is not None:
            following[batch.ends + drawn.accepted] = self._sampler.last[batch.slots[batch.sampling]]
        return following


def _likeliest(logits: Tensor, i: int) -> Tensor:
    return ops.likeliest(logits)
