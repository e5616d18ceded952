"""Runs one step on the device: apply the plan's diff, forward, sample, commit, draft. Returns before it is done."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.cache.pool import Pool
from leyden.cache.store import Store
from leyden.config.engine import CAPTURE_SIZES
from leyden.engine.batch import Batch, build
from leyden.engine.capture import graphs
from leyden.engine.chunk_capture import CapturedChunks
from leyden.engine.draft_capture import draft_graphs
from leyden.engine.drafting import Drafted, Drafting
from leyden.engine.grammar import Allowed
from leyden.engine.sampler import Drawn, Sampler
from leyden.engine.transfer import upload
from leyden.engine.waiting import Waiting
from leyden.model.nemotron import Nemotron
from leyden.spec.drafter import Drafter
from leyden.types import Plan, Row, Sampled, TokenLogprobs


class Runner:
    """The model, its pool, its sampler and its drafters, if there are any, all on one device."""

    def __init__(
        self,
        model: Nemotron,
        pool: Pool,
        sampler: Sampler,
        drafters: Sequence[Drafter] = (),
        coupled: bool = False,
        store: Store | None = None,
        capture_sizes: tuple[int, ...] = CAPTURE_SIZES,
    ):
        """`coupled`: drafts are drawn with the noise of the tokens that they guess, not the most likely ones. `store`
        is the tier of host memory."""
        self.model = model
        self.pool = pool
        self.store = store
        self.sampler = sampler
        self.drafting = Drafting(drafters, model, pool, sampler, coupled) if drafters else None
        self.waiting = Waiting(model, pool)
        self.recorded_steps = 0
        self.verify_seconds = 0.0  # of steps with drafts, on the host
        self.graphs = graphs(model, pool, sampler, capture_sizes)
        self.draft_graphs = draft_graphs(model, pool, sampler, self.drafting, capture_sizes) if self.drafting else None
        self.chunks: CapturedChunks | None = None
        if pool.committed.device.type == "cuda" and capture_sizes:
            self.chunks = CapturedChunks(model, pool, self._taps, (self.draft_graphs or self.graphs).memory)

    @torch.inference_mode()
    def run(self, plan: Plan, allowed: Callable[[list[Row]], Allowed | None] = lambda rows: None) -> "StepOutput":
        """`allowed` tells what the rows that sample may go on with; it is asked when the forward pass is under way."""
        self.apply(plan)
        rows = plan.rows
        self.waiting.begin(rows)
        sampling = [i for i, row in enumerate(rows) if row.sample]
        output = StepOutput(len(rows), sampling, None, {}, None)
        started = time.perf_counter()
        if self.draft_graphs is None:
            output.drawn = self._recorded(rows, allowed)
        elif (done := self.draft_graphs.run(plan, allowed)) is not None:
            output.drawn, output.drafts = done
        self.recorded_steps += output.drawn is not None
        if output.drawn is None:
            batch = build(rows, self.pool, self.sampler.last, self.sampler.drafts)
            hidden, taps = self._forward(rows, batch)
            output.prompt = self._prompt_logprobs(plan, hidden)
            counts = batch.lens
            if sampling:
                positions = batch.context.positions[batch.places].long() + 1
                logits = self.model.logits(hidden[batch.places])
                sampled = [rows[i] for i in sampling]
                slots = batch.slots[batch.sampling]
                output.drawn = self.sampler.sample(sampled, slots, positions, logits, allowed(sampled))
                if any(row.drafts for row in rows):
                    counts = counts.index_add(0, batch.sampling, (output.drawn.accepted - batch.drafts).int())
            self.model.commit(batch.context, batch.slots, counts)
            if self.drafting is not None:
                output.drafts = self.drafting.run(plan, batch, hidden, taps, output.drawn)
        if any(row.drafts for row in rows):
            self.verify_seconds += time.perf_counter() - started
        if plan.snapshots:
            self.waiting.fold(slot for slot, _ in plan.snapshots)
            self.pool.copy_states(*self._columns(plan.snapshots))
        return output

    def _forward(self, rows: list[Row], batch: Batch) -> tuple[Tensor, list[Tensor]]:
        if self.chunks is not None and (done := self.chunks.run(rows, batch)) is not None:
            self.recorded_steps += 1
            return done
        made: tuple[Tensor, list[Tensor]] = self.model(batch.tokens, batch.context, self._taps)
        return made

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafting.taps if self.drafting else ()

    def _recorded(self, rows: list[Row], allowed: Callable[[list[Row]], Allowed | None]) -> Drawn | None:
        """A step of single tokens by its recording, commit included, if there is one."""
        slots = self.graphs.load(rows)
        if slots is None:
            return None
        constraints = allowed(rows)
        drawn = None
        if constraints is None and self.sampler.plain(rows):
            if (tokens := self.graphs.tokens(len(rows))) is not None:
                drawn = Drawn(tokens[:, None], torch.zeros_like(tokens))
        elif (found := self.graphs.logits(len(rows))) is not None:
            logits, positions = found
            drawn = self.sampler.sample(rows, slots.long(), positions, logits, constraints)
        if drawn is not None:
            self.pool.commit(slots.long(), torch.ones_like(slots))
        return drawn

    def _prompt_logprobs(self, plan: Plan, hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """Of the rows that ask for them."""
        wanted = {}
        for i, (row, end) in enumerate(zip(plan.rows, _ends(plan), strict=True)):
            if row.targets:
                first = end - row.n
                logits = self.model.logits(hidden[first : first + len(row.targets)])
                wanted[i] = self.sampler.prompt_logprobs(row, logits)
        return wanted

    @torch.inference_mode()
    def apply(self, plan: Plan) -> None:
        """Carry out the plan's diff, without its rows."""
        pool = self.pool
        self.waiting.settle(plan)
        arriving = self.store.read(plan.moves) if self.store is not None and plan.moves is not None else None
        if plan.admits:
            slots, computed = self._columns([(admit.slot, admit.computed) for admit in plan.admits])
            pool.admit(slots, computed.int())
            self.sampler.admit(plan.admits)
        if restored := [(admit.source, admit.slot) for admit in plan.admits if admit.source]:
            pool.copy_states(*self._columns(restored))
        if plan.copies:
            pool.copy_pages(*self._columns(plan.copies))
        if self.store is not None and arriving is not None:
            self.store.write(arriving)
        if plan.pages:
            pool.map(*self._columns(plan.pages))

    def _columns(self, entries: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
        return upload(entries, self.sampler.last.device).unbind(-1)


def _ends(plan: Plan) -> list[int]:
    ends, total = [], 0
    for row in plan.rows:
        total += row.n
        ends.append(total)
    return ends


@dataclass(slots=True)
class StepOutput:
    """A launched step: what it samples is still on the device."""

    rows: int
    sampling: list[int]  # rows that sample
    drawn: Drawn | None
    prompt: dict[int, list[TokenLogprobs]]  # row -> prompt log-probabilities
    drafts: Drafted | None  # behind the rows that sample

    def read(self) -> list[Sampled]:
        """One Sampled per row of the plan. Waits for the device."""
        results = [Sampled() for _ in range(self.rows)]
        if self.drawn is not None:
            for i, sampled in zip(self.sampling, self.drawn.read(), strict=True):
                results[i] = sampled
        if self.drafts is not None:
            drafts, confidence = self.drafts.read()
            for n, i in enumerate(self.sampling):
                results[i].drafts = drafts[n]
                results[i].confidence = confidence[n] if confidence else []
        for i, entries in self.prompt.items():
            results[i].prompt_logprobs = entries
        return results
