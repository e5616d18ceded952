"""Steps with drafts as one launch: see graphs.py. Rows of the newest token and drafts behind it, or none.

A step has three parts: the forward pass up to the logits; what is drawn from them and kept; what follows from that,
which is states over what was kept, and the drafters. Where sampling is plain all are one recording. Otherwise the
sampler does the middle part by itself. A drafter that cannot be recorded does its part by itself, too. What is written
here is how the CPU does it; draft_capture.py says what is different on CUDA.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leyden import log, ops
from leyden.cache.pool import Pool
from leyden.engine.drafting import Drafted, Drafting
from leyden.engine.grammar import Allowed
from leyden.engine.graphs import recorder
from leyden.engine.sampler import Drawn, Sampler
from leyden.engine.transfer import upload
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.ops.registry import NotRecordable
from leyden.ops.rows import Rows
from leyden.spec.drafter import Draft, Heads, Seen
from leyden.types import Plan, Row

logger = log.get(__name__)


@dataclass(slots=True)
class _Pass:
    """What a forward pass leaves: tensors that its recording fills."""

    tokens: Tensor  # int64 [T]
    ctx: Context
    places: Tensor  # int64 [T]: of what is sampled behind each token
    hidden: Tensor  # [T, H]
    taps: list[Tensor]
    logits: Tensor  # fp32 [T, V]


@dataclass(slots=True)
class _Outcome:
    """What is sampled, and kept of it: see ops.accept."""

    drawn: Tensor  # int64 [R, n + 1]
    kept: Tensor
    counts: Tensor
    newest: Tensor
    ends: Tensor
    at: Tensor

    @classmethod
    def empty(cls, rows: int, drafts: int, device: torch.device) -> "_Outcome":
        grid = torch.zeros(rows, drafts + 1, dtype=torch.int64, device=device)
        row = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(grid, grid, row, row.long(), row.clone(), row.clone())


class DraftGraphs:
    """The recordings of one model with its pool, sampler and drafters, made when a form of step first comes up.

    A row with fewer drafts than the others has guesses of no token.
    """

    memory: Any = None  # of CUDA graphs
    any_op = False  # whether a recording may hold operations that are no kernels of ours

    def __init__(self, model: Nemotron, pool: Pool, sampler: Sampler, drafting: Drafting):
        slots, width, device = pool.shape.slots, sampler.drafts.shape[1], sampler.drafts.device
        self._model, self._pool, self._sampler, self._drafting = model, pool, sampler, drafting
        self._recorder = recorder(pool.committed.device)
        self.records = self._recorder is not None
        self._begun = False
        self._drafters_record = True
        self._programs: dict[tuple[object, ...], Callable[[], object]] = {}
        self._passes: dict[tuple[object, ...], _Pass] = {}  # by program, like the rest
        self._outcomes: dict[tuple[object, ...], _Outcome] = {}
        self._drafts: dict[tuple[object, ...], Draft] = {}  # where drafters are recorded
        self._slots = torch.zeros(slots, dtype=torch.int32, device=device)
        self._starts = [torch.arange(slots + 1, dtype=torch.int32, device=device) * (n + 1) for n in range(width + 1)]
        self._nothing = torch.full((slots, max(width, 1)), -1, device=device)
        if self.records:
            self._owners = torch.zeros(slots * (width + 1), dtype=torch.int32)  # the slot of each token
            self._pages = torch.zeros(slots, pool.shape.pages_per_slot, dtype=torch.int32)
            shared = self._slots, self._owners, self._pages, sampler.last, sampler.drafts, pool.tables
            self._arrays = [tensor.numpy() for tensor in shared]
        self._given: dict[tuple[int, ...], _Outcome] = {}  # where the sampler's own outcomes are put

    def run(self, plan: Plan, allowed: Callable[[list[Row]], Allowed | None]) -> tuple[Drawn, Drafted] | None:
        """The whole step, if there is a recording for it; None: run the model yourself."""
        begun, self._begun = self._begun, True  # what drafters set up in their first step is in no recording
        form = self._load(plan) if begun else None
        if form is None:
            return None
        rows = plan.rows
        constraints = allowed(rows)
        decided = self._sampler.decree is None or self.any_op
        plain = constraints is None and self._sampler.plain(rows) and decided
        if plain:
            key = self._whole(plan, form)
            if key is None:
                return None
            outcome = self._outcomes[key]
            drawn = Drawn(outcome.kept[: len(rows)].clone(), outcome.counts[: len(rows)].long() - 1)
        else:
            forward, key = ("forward", *form), ("after", *form, plan.drafter, plan.drafts)
            if form not in self._given:
                self._given[form] = _Outcome.empty(form[0], form[1], self._slots.device)
            outcome = self._given[form]
            if not self._record(forward, lambda: self._forward(forward, form).logits):
                return None
            self._programs[forward]()  # what it does may be done again; what the sampler does, may not
            if not self._record(key, lambda: self._after(key, form, self._passes[forward], outcome, plan)):
                return None
            self._passes[key] = self._passes[forward]
            drawn = self._judge(rows, form, self._passes[forward], outcome, constraints)
            self._programs[key]()
        return drawn, self._drafted(key, form, outcome, plan)

    def _load(self, plan: Plan) -> tuple[int, ...] | None:
        """Take the rows as the input of what runs next -> (rows, drafts of each, whatever else tells forms apart)."""
        rows = plan.rows
        if not self.records or ops.forced() or not all(row.sample and row.n == 1 + row.drafts for row in rows):
            return None
        count, most, page = len(rows), max(row.drafts for row in rows), self._pool.shape.page
        if max(row.start for row in rows) + 1 + most > page * self._pool.shape.pages_per_slot:
            return None
        own_slots, owners, pages, last, drafts, tables = self._arrays  # whose indexing costs a fraction of a tensor's
        slots = [row.slot for row in rows]
        own_slots[:count] = slots
        owners[: count * (most + 1)].reshape(count, -1).T[:] = slots
        used = (max(row.start for row in rows) + most + self._pool.shape.draft.lookahead) // page + 1
        for i, row in enumerate(rows):
            pages[i, :used] = tables[row.slot, :used]
            if row.tokens:
                last[row.slot] = row.tokens[0]
            if row.drafts < most:  # what it has less than the others is no guess, and has no pages
                drafts[row.slot, row.drafts :] = -1
                pages[i, -(-(row.start + row.n + self._pool.shape.draft.lookahead) // page) : used] = 0
        return count, most

    def _tokens_slots(self, form: tuple[int, ...]) -> Tensor:
        """The slot of each token, int32 [T]."""
        return self._owners[: form[0] * (form[1] + 1)]

    def _tables(self, form: tuple[int, ...]) -> Tensor:
        """Page tables of the rows, int32 [R, P]; 0 where a row has nothing."""
        return self._pages[: form[0]]

    def _guesses(self, form: tuple[int, ...]) -> Tensor:
        """The drafts of the rows, int64 [R, n]; -1 where a row has none."""
        return ops.take(self._sampler.drafts, self._slots[: form[0]])[:, : form[1]]

    def _whole(self, plan: Plan, form: tuple[int, ...]) -> tuple[object, ...] | None:
        """Run all of a plain step -> the key of what it leaves."""
        key = ("whole", *form, self._sampler.stops.shape[1], plan.drafter, plan.drafts)

        def step() -> Tensor:
            made = self._forward(key, form)
            count, drafts = form[:2]
            slots, guesses = self._slots[:count], self._guesses(form)
            drawn = self._sampler.draw(self._tokens_slots(form), made.places, made.logits).view(count, drafts + 1)
            before, first = ops.take(self._sampler.last, slots), made.places.view(count, drafts + 1)[:, 0]
            drawn = self._sampler.decided(slots, drawn, guesses, first)
            outcome = _Outcome(drawn, *self._sampler.accept(slots, drawn, guesses, before, first))
            ops.put(outcome.newest, self._sampler.last, slots)
            self._outcomes[key] = outcome
            return self._after(key, form, made, outcome, plan)

        if not self._record(key, step):
            return None
        self._programs[key]()
        return key

    def _forward(self, key: tuple[object, ...], form: tuple[int, ...]) -> _Pass:
        count, drafts = form[:2]
        slots, pages = self._slots[:count], self._tables(form)
        tables = self._sampler.last, self._sampler.drafts, self._pool.committed
        tokens, past, positions, places = ops.begin_drafts(slots, *tables, drafts)
        narrow = Rows((drafts + 1,) * count, self._starts[drafts][: count + 1], past, slots, pages)
        wide = Rows((), self._starts[0][:1], past[:0], slots[:0], pages[:0])
        ctx = Context(narrow, wide, positions, self._pool)
        hidden, taps = self._model(tokens, ctx, self._drafting.taps)
        self._passes[key] = _Pass(tokens, ctx, places, hidden, taps, self._model.logits(hidden))
        return self._passes[key]

    def _judge(
        self, rows: list[Row], form: tuple[int, ...], made: _Pass, outcome: _Outcome, allowed: Allowed | None
    ) -> Drawn:
        """The sampler's way from the logits to the outcome, which is put where the rest of the step reads it."""
        drafts, here, device = form[1], len(rows), made.logits.device
        slots = self._slots[:here].long()
        at = np.concatenate([np.arange(row.drafts + 1) + i * (drafts + 1) for i, row in enumerate(rows)])
        places = slice(None) if len(at) == len(made.logits) else upload(at.tolist(), device)
        drawn = self._sampler.sample(rows, slots, made.places[places], made.logits[places], allowed)
        first = torch.arange(0, here * (drafts + 1), drafts + 1, device=device)
        outcome.drawn[:here, : drawn.tokens.shape[1]] = drawn.tokens.clamp(min=0)
        outcome.counts[:here] = (drawn.accepted + 1).int()
        outcome.newest[:here] = self._sampler.last[slots]
        outcome.ends[:here] = (drawn.accepted + first).int()
        outcome.at[:here] = (made.places[first] + drawn.accepted).int()
        return drawn

    def _after(
        self, key: tuple[object, ...], form: tuple[int, ...], made: _Pass, outcome: _Outcome, plan: Plan
    ) -> Tensor:
        slots = self._slots[: form[0]]
        self._model.replay(made.ctx, outcome.counts)
        self._pool.reach(slots, outcome.at)
        if self._drafters_record:
            seen, heads = self._given_to_drafters(form, made, outcome)
            draft = self._drafting.step(seen, heads, plan.drafter, plan.drafts)
            tokens = self._nothing[: form[0]] if draft is None else draft.tokens
            if (missing := self._nothing.shape[1] - tokens.shape[1]) > 0:
                tokens = ops.join(tokens, self._nothing[: form[0], :missing])
            ops.put(tokens, self._sampler.drafts, slots)
            self._drafts[key] = Draft(tokens) if draft is None else replace(draft, tokens=tokens)
        return outcome.newest

    def _given_to_drafters(self, form: tuple[int, ...], made: _Pass, outcome: _Outcome) -> tuple[Seen, Heads]:
        count, drafts, tokens = form[0], form[1], made.tokens
        if drafts and not self._drafting.steady:  # somebody may learn from what was tried, and from nothing else
            tokens = ops.join(tokens.view(count, drafts + 1)[:, :1], self._guesses(form)).flatten()
        seen = Seen(tokens, outcome.drawn.flatten(), made.hidden, made.taps, made.ctx)
        slots, pages, starts = self._slots[:count], made.ctx.narrow.pages, self._starts[0][: count + 1]
        assert pages is not None
        return seen, Heads(slots, outcome.newest, outcome.at, outcome.ends, pages, starts)

    def _drafted(self, key: tuple[object, ...], form: tuple[int, ...], outcome: _Outcome, plan: Plan) -> Drafted:
        found, here = self._drafts.get(key), len(plan.rows)
        if found is not None:
            if found.settle is not None:
                found.settle()
            confidence = None if found.confidence is None else found.confidence[:here].sigmoid()
            return Drafted(found.tokens[:here].clone(), confidence)
        slots = self._slots[: form[0]].long()
        seen, heads = self._given_to_drafters(form, self._passes[key], outcome)
        return self._drafting.guarded(slots, lambda: self._drafting.step(seen, heads, plan.drafter, plan.drafts), here)

    def _record(self, key: tuple[object, ...], step: Callable[[], Tensor]) -> bool:
        """Make a recording if it is not there, which runs nothing; False: it cannot be."""
        if key not in self._programs:
            try:
                self._programs[key] = self._made(step)
            except NotRecordable as reason:
                logger.info("steps with drafts are not recorded: %s", reason)
                self.records = False
                return False
        return True

    def _made(self, step: Callable[[], Tensor]) -> Callable[[], object]:
        if self._drafters_record:
            try:
                return self._program(step)
            except torch.AcceleratorError:
                raise
            except Exception as reason:  # whatever it is: a drafter must not end more than its own drafts
                logger.info("the drafters' part of steps is not recorded: %s", reason)
                self._drafters_record = False  # from now on; what is recorded already stays right
        return self._program(step)

    def _program(self, step: Callable[[], Tensor]) -> Callable[[], object]:
        made: Callable[[], object] = self._recorder(step)
        return made
