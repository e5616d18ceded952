"""Who advances by how much: host only, no torch, never waits for the device.

There are no phases. A sequence is (known tokens, computed tokens) and scheduling gives it some of the difference: a
prompt chunk, the rest of a prompt and a generated token are the same thing. plan() may run ahead of commit() by one
step; what a launched step will bring is then counted in `pending`, and the token itself is read from the device.
"""

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from leyden.types import MAX_SEED, Admit, Delta, EngineStats, Plan, Request, Row, Sampled, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one step and the pool allow. Slot 0 and page 0 are padding and not counted in `slots` and `pages`."""

    slots: int  # sequences that run at once
    pages: int
    page: int  # tokens of a page
    max_model_len: int
    step_tokens: int
    row_tokens: int = 0  # most tokens of one row in a step; 0: no limit but step_tokens
    policy: str = "fcfs"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request under way; only the scheduler knows it."""

    request: Request
    seed: int
    limit: int  # tokens, prompt included, at which it ends for length
    stop_ids: frozenset[int]
    tokens: list[int]  # known ids: prompt, then what was generated
    order: tuple[int, float, int]  # (priority, arrival, number): lower runs first, higher is preempted first
    computed: int = 0  # tokens that launched steps cover
    pending: int = 0  # tokens that launched steps will have sampled
    slot: int = 0  # 0: not running
    pages: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # gathered over the prompt's chunks, then sent once

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def todo(self) -> int:
        """Tokens it could be given now; 0 once the launched steps bring its last token."""
        known = len(self.tokens) + self.pending
        return 0 if known >= self.limit else known - self.computed


class Scheduler:
    """Sequences, waiting and running, and the free lists of slots and pages."""

    def __init__(self, limits: Limits, eos_token_ids: Iterable[int] = (), quiet_eos: int | None = None, seed: int = 0):
        """`quiet_eos` is the end token of the tokenizer: the one that is not reported as a stop_reason."""
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.quiet_eos = quiet_eos
        self.waiting: list[tuple[tuple[int, float, int], Sequence]] = []  # heap
        self.running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._slots = list(range(limits.slots, 0, -1))
        self._pages = list(range(limits.pages, 0, -1))
        self._launched: dict[int, list[Sequence]] = {}  # id of a Plan under way -> the sequence of each of its rows
        self._out: list[Delta] = []  # for sequences that end outside commit
        self._numbers = 0
        self._seeds = random.Random(seed)
        self._stats = EngineStats(slots_total=limits.slots, pages_total=limits.pages)

    def add(self, request: Request) -> None:
        """Queue a request that the engine has checked against its limits."""
        params = request.params
        self._numbers += 1
        length = self.limits.max_model_len
        if params.max_tokens is not None:
            length = min(length, len(request.prompt) + params.max_tokens)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        sequence = Sequence(
            request=request,
            seed=self._seeds.randint(0, MAX_SEED) if params.seed is None else params.seed,
            limit=length,
            stop_ids=eos | frozenset(params.stop_token_ids),
            tokens=list(request.prompt),
            order=(request.priority if self.limits.policy == "priority" else 0, request.arrival, self._numbers),
            prompt_logprobs=None if params.prompt_logprobs is None else [],
        )
        self._by_id[request.id] = sequence
        heapq.heappush(self.waiting, (sequence.order, sequence))

    def abort(self, request_id: str) -> None:
        """Forget a request now; what a launched step brings for it is dropped. Unknown ids are ignored."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._out.append(self._finish(sequence, Delta(request_id=request_id, finish_reason="abort")))

    def has(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def unfinished(self) -> bool:
        return bool(self._by_id or self._out)

    # planning

    def plan(self) -> Plan | None:
        """The next step, or None if there is nothing to launch now."""
        plan = Plan()
        budget = self.limits.step_tokens
        rows: dict[Sequence, Row] = {}
        # Short rows first: a long prompt never makes the others wait for their next token.
        for sequence in sorted(self.running, key=lambda s: s.todo > 1):
            n = min(sequence.todo, budget, self.limits.row_tokens or budget)
            if n and sequence.slot and self._grow(sequence, n, plan, rows):
                rows[sequence] = self._row(sequence, n)
                budget -= n  # not given back if this row is preempted below: the next step will use it
        while budget and (entering := self._admissible()) is not None:
            self._admit(entering, plan)
            n = min(entering.todo, budget, self.limits.row_tokens or budget)
            if self._grow(entering, n, plan, rows):
                rows[entering] = self._row(entering, n)
                budget -= n
        if not rows:
            return None
        ordered = sorted(rows.items(), key=lambda item: item[1].n > 1)
        for sequence, row in ordered:
            sequence.computed += row.n
            sequence.pending += row.sample
        plan.rows = [row for _, row in ordered]
        self._launched[id(plan)] = [sequence for sequence, _ in ordered]
        return plan

    def _row(self, sequence: Sequence, n: int) -> Row:
        start, end = sequence.computed, sequence.computed + n
        row = Row(sequence.slot, start, n, sequence.tokens[start:end], end == len(sequence.tokens) + sequence.pending)
        assert len(row.tokens) in (0, n), "a row is either known to the host or on the device"
        if sequence.prompt_logprobs is not None:
            row.targets = sequence.request.prompt[start + 1 : end + 1]
        return row

    def _grow(self, sequence: Sequence, n: int, plan: Plan, rows: dict[Sequence, Row]) -> bool:
        """Map the pages that n more tokens need, taking them from later sequences if there are no free ones."""
        wanted = -(-(sequence.computed + n) // self.limits.page)
        while len(sequence.pages) + len(self._pages) < wanted:
            victim = max(self.running, key=lambda s: s.order)
            self._preempt(victim, plan)
            rows.pop(victim, None)
            if victim is sequence:
                return False
        for index in range(len(sequence.pages), wanted):
            sequence.pages.append(self._pages.pop())
            plan.pages.append((sequence.slot, index, sequence.pages[-1]))
        return True

    def _admissible(self) -> Sequence | None:
        """The next waiting sequence, if it can start: a free slot, pages for all it knows, nothing of it under way."""
        if not self.waiting or not self._slots:
            return None
        sequence = self.waiting[0][1]
        if sequence.pending:  # preempted while its last step runs: its tokens are not complete yet
            return None
        room = len(self._pages) * self.limits.page
        return sequence if not self.running or room > len(sequence.tokens) else None

    def _admit(self, sequence: Sequence, plan: Plan) -> None:
        heapq.heappop(self.waiting)
        sequence.slot = self._slots.pop()
        self.running.append(sequence)
        params = sequence.request.params
        plan.admits.append(
            Admit(
                slot=sequence.slot,
                params=params,
                seed=sequence.seed,
                prompt_len=sequence.prompt_len,
                stop_ids=tuple(sorted(sequence.stop_ids)),
                tokens=list(sequence.tokens) if params.penalized else [],
            )
        )

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        """Take everything back; the victim starts again from its known tokens when there is room."""
        plan.pages = [entry for entry in plan.pages if entry[0] != victim.slot]
        plan.admits = [admit for admit in plan.admits if admit.slot != victim.slot]
        self._release(victim)
        victim.computed = 0
        heapq.heappush(self.waiting, (victim.order, victim))
        self._stats.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._pages.extend(reversed(sequence.pages))
        sequence.pages = []
        if sequence.slot:
            self._slots.append(sequence.slot)
            self.running.remove(sequence)
            sequence.slot = 0

    # committing

    def commit(self, plan: Plan, results: list[Sampled]) -> list[Delta]:
        """Take in what a launched step brought: one Sampled per row of the plan. Steps are committed in order."""
        out, self._out = self._out, []
        self._stats.steps += 1
        for sequence, row, result in zip(self._launched.pop(id(plan)), plan.rows, results, strict=True):
            if self._by_id.get(sequence.request.id) is not sequence:
                continue  # it ended while this step ran
            sequence.pending -= row.sample
            if sequence.prompt_logprobs is not None:  # by position: a preempted prompt brings some of them twice
                sequence.prompt_logprobs[row.start : row.start + len(row.targets)] = result.prompt_logprobs
            if result.token is not None:
                out.append(self._append(sequence, result.token, result.logprobs))
        return out

    def fail(self, plan: Plan, message: str) -> list[Delta]:
        """A step could not be run: its sequences end with an error, the others go on."""
        out, self._out = self._out, []
        for sequence in self._launched.pop(id(plan)):
            request_id = sequence.request.id
            if self._by_id.get(request_id) is sequence:
                out.append(self._finish(sequence, Delta(request_id=request_id, finish_reason="error", error=message)))
        return out

    def drain(self) -> list[Delta]:
        """Ends that no step will report (aborts)."""
        out, self._out = self._out, []
        return out

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> Delta:
        request = sequence.request
        delta = Delta(request_id=request.id, token_ids=[token], logprobs=None if logprobs is None else [logprobs])
        if len(sequence.tokens) == sequence.prompt_len:
            self._stats.prompt_tokens += sequence.prompt_len
            if sequence.prompt_logprobs is not None:
                delta.prompt_logprobs = [None, *sequence.prompt_logprobs]
                sequence.prompt_logprobs = None
        sequence.tokens.append(token)
        self._stats.generated_tokens += 1
        generated = len(sequence.tokens) - sequence.prompt_len
        if token in sequence.stop_ids and generated > request.params.min_tokens:
            named = token != self.quiet_eos or token in request.params.stop_token_ids
            delta.finish_reason, delta.stop_reason = "stop", token if named else None
        elif len(sequence.tokens) >= sequence.limit:
            delta.finish_reason = "length"
        return self._finish(sequence, delta) if delta.finish_reason else delta

    def _finish(self, sequence: Sequence, delta: Delta) -> Delta:
        assert delta.finish_reason is not None
        del self._by_id[sequence.request.id]
        if sequence.slot:
            self._release(sequence)
        else:
            self.waiting = [entry for entry in self.waiting if entry[1] is not sequence]
            heapq.heapify(self.waiting)
        self._stats.finished[delta.finish_reason] = self._stats.finished.get(delta.finish_reason, 0) + 1
        return delta

    # looking in

    def stats(self) -> EngineStats:
        stats = self._stats
        stats.running, stats.waiting = len(self.running), len(self.waiting)
        stats.slots_free, stats.pages_free = len(self._slots), len(self._pages)
        return stats

    def check(self) -> None:
        """Every slot and page is either free or owned by exactly one running sequence."""
        slots = sorted(self._slots + [s.slot for s in self.running])
        assert slots == list(range(1, self.limits.slots + 1)), f"slots lost or doubled: {slots}"
        pages = sorted(self._pages + [page for s in self.running for page in s.pages])
        assert pages == list(range(1, self.limits.pages + 1)), f"pages lost or doubled: {pages}"
        owned = {id(s) for s in self.running} | {id(s) for _, s in self.waiting}
        assert owned == {id(s) for s in self._by_id.values()}, "a sequence is neither waiting nor running"
        assert all(not s.slot and not s.pages for _, s in self.waiting), "a waiting sequence holds a slot or pages"
