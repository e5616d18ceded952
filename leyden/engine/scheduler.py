"""Who advances by how much: host only, no torch, never waits for the device.

There are no phases. A sequence is (known tokens, computed tokens) and scheduling gives it some of the difference: a
prompt chunk, the rest of a prompt and a generated token are the same thing. plan() may run ahead of commit() by one
step; what a launched step will bring is then counted in `pending`, and the token itself is read from the device.

With a drafter, a row that goes on from a sampled token takes the drafts behind it along. How many of them are right is
known to the device, and to the host at commit(): until then `computed` and `pending` say what they may at most be.
"""

import bisect
import heapq
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from leyden.cache.prefix import Chain, Hit, Node, PrefixCache
from leyden.cache.tier import Tier
from leyden.engine.pace import Pace
from leyden.engine.repetition import repeats
from leyden.spec.schedule import NONE, Choice, Schedule
from leyden.types import MAX_SEED, STEP_SIZES, Admit, Delta, EngineStats, Plan, Request, Row, Sampled, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one step and the pool allow. Slot 0 and page 0 are padding and not counted."""

    seqs: int  # sequences that run at once
    snapshots: int = 0  # state slots beyond those
    pages: int
    page: int  # tokens of a page
    max_model_len: int
    step_tokens: int
    row_tokens: int = 0  # most tokens of one row in a step; 0: no limit but step_tokens
    partial_prefills: int = 0  # prompts that are under way at once; 0: as many as run
    long_partial_prefills: int = 0  # of these, long ones; shorter prompts overtake those that wait; 0: no limit
    paced: bool = True  # a long prompt may not make the others wait much longer for their next tokens
    policy: str = "fcfs"
    prefix_caching: bool = True
    host_slots: int = 0  # states and pages that host memory has room for; 0: there is no tier
    host_pages: int = 0
    snapshot_every: int = 8192  # tokens of a long prompt between two snapshots
    drafts: int = 0  # most drafts of a row
    lookahead: int = 0  # positions behind a row for which a drafter needs pages

    @property
    def long(self) -> int:
        """A prompt with more tokens to compute is a long one; without --long-prefill-token-threshold as in vLLM."""
        return self.row_tokens or max(1, self.max_model_len // 25)


# A snapshot ends a step early and takes a slot: not for fewer tokens than this since the one before.
_WORTH = 32


@dataclass(slots=True, eq=False)
class Sequence:
    """One request under way; only the scheduler knows it."""

    request: Request
    seed: int
    limit: int  # tokens, prompt included, at which it ends for length
    stop_ids: frozenset[int]
    tokens: list[int]  # known ids: prompt, then what was generated
    order: tuple[int, float, int]  # (priority, arrival, number): lower runs first, higher is preempted first
    computed: int = 0  # tokens that launched steps cover, if all drafts in them are right
    pending: int = 0  # tokens that launched steps will have sampled, if all drafts in them are right
    guesses: int = 0  # of these, tokens that may not become part of it: the drafts in those steps
    drafts: int = 0  # drafts that wait on the device for its next row
    proposed: list[int] = field(default_factory=list)  # the drafts that the last committed step brought
    confidence: list[float] = field(default_factory=list)  # in them
    slot: int = 0  # 0: not running
    chain: Chain | None = None  # its pages, while it runs
    marks: tuple[int, ...] = ()  # lengths at which its state is to be kept, longest first
    cached: int = 0  # prompt tokens that its first admission found in the cache
    queued: float | None = None  # seconds from arrival to its first admission
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # gathered over the prompt's chunks, then sent once

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def todo(self) -> int:
        """Tokens it could be given now, drafts included; 0 once the launched steps may bring its last token."""
        known = len(self.tokens) + self.pending
        return 0 if known >= self.limit else known - self.computed + min(self.drafts, self.limit - known - 1)

    @property
    def prefilling(self) -> bool:
        """Whether it has more to compute than the newest token and the drafts behind it."""
        return self.todo > 1 + self.drafts


class Scheduler:
    """Sequences, waiting and running, and the free lists of slots and pages."""

    def __init__(
        self,
        limits: Limits,
        eos_token_ids: Iterable[int] = (),
        quiet_eos: int | None = None,
        seed: int = 0,
        schedule: Schedule | None = None,
        shorten: bool = False,
    ):
        """`quiet_eos` is the end token of the tokenizer: the one that is not reported as a stop_reason.

        `schedule` says how many drafts to make, as many as there can be without it, and with `shorten` how many of them
        to try.
        """
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.quiet_eos = quiet_eos
        self.waiting: list[tuple[tuple[int, float, int], Sequence]] = []  # heap
        self.running: list[Sequence] = []
        tier = Tier(limits.host_slots, limits.host_pages) if limits.host_slots and limits.prefix_caching else None
        slots = limits.seqs + limits.snapshots
        self.cache = PrefixCache(slots, limits.pages, limits.page, keep=limits.prefix_caching, tier=tier)
        self._by_id: dict[str, Sequence] = {}
        self._launched: dict[int, list[_Launch]] = {}  # id of a Plan under way
        self._pace = Pace(limits.step_tokens, probe=2 + limits.drafts)
        self._started: dict[int, tuple[float, int, int, int]] = {}  # id of a Plan under way -> see plan()
        self._moved: list[tuple[Sequence, int]] = []  # page table entries that publishing changed
        self._out: list[Delta] = []  # for sequences that end outside commit
        self._numbers = 0
        self._seeds = random.Random(seed)
        self._schedule = schedule or Schedule([limits.drafts], [(1, limits.seqs, limits.drafts)])
        self._shorten = shorten
        self._choice: Choice = NONE  # of the step that was planned last
        self._stats = EngineStats(
            slots_total=self.cache.slots, pages_total=limits.pages, accepted_tokens=[0] * limits.drafts
        )

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

    def abort(self, request_id: str, error: str | None = None) -> None:
        """Forget a request now, because of an error if there is one. What a launched step brings for it is dropped.

        Unknown ids are ignored.
        """
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            delta = Delta(request_id=request_id, finish_reason="error" if error else "abort", error=error)
            self._out.append(self._finish(sequence, delta))

    def abort_all(self) -> None:
        """Forget all requests. Nothing may be under way."""
        for request_id in list(self._by_id):
            self.abort(request_id)

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
        for sequence, index in self._moved:
            if sequence.chain is not None and index < len(sequence.chain.pages):
                plan.pages.append((sequence.slot, index, sequence.chain.pages[index]))
        if self._shorten:
            self._cut()
        # Whoever somebody waits for goes first: a long prompt never keeps the next token of others out of a step.
        for sequence in [s for s in self.running if not s.prefilling]:
            budget -= self._give(sequence, budget, plan, rows)  # not given back if the row is preempted below
        self._prefill(self._room(budget, len(rows)), plan, rows)
        if not rows:
            return None
        self._moved = []
        ordered = sorted(rows.items(), key=lambda item: item[1].n)
        tried_by = self._choice[0]
        if self.limits.drafts:
            self._choice = self._schedule.choose(sum(row.sample for row in rows.values()) or 1)
            plan.drafter, plan.drafts = self._choice
        chunk = sum(row.n for sequence, row in ordered if sequence.prefilling)
        streams = len(ordered) - sum(s.prefilling for s in rows)
        self._started[id(plan)] = self._pace.now(), streams, chunk, tried_by
        self._launched[id(plan)] = [self._launch(sequence, row, plan) for sequence, row in ordered]
        plan.moves, arriving = self.cache.moves()
        plan.copies += arriving
        return plan

    def _cut(self) -> None:
        """Fewer drafts to try, where the newest that is known of them makes it worth while."""
        drafted = [sequence for sequence in self.running if sequence.drafts]
        confidence = [(s.confidence or [1.0] * s.drafts)[: s.drafts] for s in drafted]
        lengths = self._schedule.lengths(self._choice[0], confidence)
        for sequence, length in zip(drafted, lengths, strict=True):
            sequence.drafts = length

    def _room(self, budget: int, streams: int) -> int:
        """What prompts may take of the budget: as much as holds up nobody, unless more wait for their first token than
        for their next one. Those who wait for a slot do not count.
        """
        prompts = sum(s.prefilling for s in self.running) + min(len(self.waiting), self.limits.seqs - len(self.running))
        return min(budget, self._pace.room()) if self.limits.paced and streams >= prompts else budget

    def _prefill(self, room: int, plan: Plan, rows: dict[Sequence, Row]) -> None:
        """Share `room` tokens among the prompts: at least half for the first in line, the rest for whoever needs least.

        So equal prompts come one after the other, a short one does not wait behind a long one, and a long one gets on
        however many short ones come.
        """
        first = min((s for s in self.running if s.prefilling), key=lambda s: s.order, default=None)
        kept = room - room // 2
        if first is not None and kept < room and (short := self._next(rows)) is not None and short.todo < first.todo:
            self._admit(plan, rows)
        for sequence in sorted([s for s in self.running if s not in rows], key=lambda s: s.todo):
            kept = 0 if sequence is first or first is None else min(kept, first.todo)
            room -= self._give(sequence, room - kept, plan, rows)
        while room > 0 and (entering := self._admit(plan, rows)) is not None:
            room -= self._give(entering, room, plan, rows)

    def _give(self, sequence: Sequence, budget: int, plan: Plan, rows: dict[Sequence, Row]) -> int:
        """A row for a sequence, of at most `budget` tokens -> its tokens; 0: none now."""
        n = self._share(sequence, budget)
        if n <= 0 or not sequence.slot or not self._grow(sequence, n, plan, rows):
            return 0
        rows[sequence] = self._row(sequence, n)
        return n

    def _share(self, sequence: Sequence, budget: int) -> int:
        """Tokens for a sequence in this step; it stops where its state is to be kept."""
        n = min(sequence.todo, budget, self.limits.row_tokens or budget)
        while sequence.marks and sequence.marks[-1] <= sequence.computed:
            sequence.marks = sequence.marks[:-1]
        return min(n, sequence.marks[-1] - sequence.computed) if sequence.marks else n

    def _row(self, sequence: Sequence, n: int) -> Row:
        drafts = n - 1 if sequence.drafts else 0  # then a single token is known, or waits on the device
        start, end = sequence.computed, sequence.computed + n
        tokens = [] if drafts else sequence.tokens[start:end]
        assert len(tokens) in (0, n), "a row is either known to the host or on the device"
        row = Row(sequence.slot, start, n, tokens, end - drafts == len(sequence.tokens) + sequence.pending)
        row.drafts = drafts
        if not row.sample:
            row.following = sequence.tokens[end]
        if sequence.prompt_logprobs is not None:
            row.targets = sequence.request.prompt[start + 1 : end + 1]
        return row

    def _launch(self, sequence: Sequence, row: Row, plan: Plan) -> "_Launch":
        assert sequence.chain is not None
        plan.rows.append(row)
        sequence.computed += row.n
        sequence.guesses += row.drafts
        if row.sample:
            sequence.pending += 1 + row.drafts
            sequence.drafts = plan.drafts
        snapshot = 0
        if sequence.marks and sequence.marks[-1] == sequence.computed:
            snapshot = self.cache.take_slot()
            if snapshot:
                plan.snapshots.append((sequence.slot, snapshot))
        return _Launch(sequence, sequence.chain, row, snapshot)

    def _grow(self, sequence: Sequence, n: int, plan: Plan, rows: dict[Sequence, Row]) -> bool:
        """Map the pages that n more tokens need, taking them from others if there are no free ones."""
        assert sequence.chain is not None
        end = sequence.computed + n + self.limits.lookahead
        for index in range(len(sequence.chain.pages), -(-end // self.limits.page)):
            while not self.cache.grow(sequence.chain):
                victim = self._victim()
                self._preempt(victim, plan)
                rows.pop(victim, None)
                if victim is sequence:
                    return False
            plan.pages.append((sequence.slot, index, sequence.chain.pages[index]))
        return True

    def _victim(self) -> Sequence:
        """Never the first in line, so that somebody always gets on; of the least urgent, the cheapest to run again."""
        first = min(self.running, key=lambda s: s.order)
        others = [s for s in self.running if s is not first] or [first]
        return max(others, key=lambda s: (s.order[0], -s.computed, s.order))

    def _next(self, rows: dict[Sequence, Row]) -> Sequence | None:
        """The first in the queue that the limits on prompts under way let in, given the rows of this step."""
        limits = self.limits
        if not self.waiting or len(self.running) == limits.seqs:
            return None
        if limits.partial_prefills or limits.long_partial_prefills:
            left = [s.todo - (rows[s].n if s in rows else 0) for s in self.running if s.prefilling]
            if limits.partial_prefills and sum(n > 0 for n in left) >= limits.partial_prefills:
                return None
            if limits.long_partial_prefills and sum(n > limits.long for n in left) >= limits.long_partial_prefills:
                return min((entry for entry in self.waiting if entry[1].todo <= limits.long), default=(None, None))[1]
        return self.waiting[0][1]

    def _admit(self, plan: Plan, rows: dict[Sequence, Row]) -> Sequence | None:
        """Start the next waiting sequence, if there is a slot, there are pages for it, and nothing of it is under way.

        One that was preempted while its last step runs waits for what that step brings.
        """
        sequence = self._next(rows)
        if sequence is None or sequence.pending:
            return None
        request, params = sequence.request, sequence.request.params
        # prompt log-probabilities need every logit of the prompt
        hit = Hit() if sequence.prompt_logprobs is not None else self.cache.match(sequence.tokens, request.cache_salt)
        if self.running and not self.cache.room(hit, len(sequence.tokens) + 1 + self.limits.lookahead):
            return None
        chain = self.cache.start(hit, request.cache_salt)
        slot = self.cache.take_slot() if chain is not None else 0
        if chain is None or not slot:
            if chain is not None:
                self.cache.leave(chain)
            return None
        self._unqueue(sequence)
        self.running.append(sequence)
        sequence.slot, sequence.chain, sequence.computed = slot, chain, hit.length
        sequence.marks = self._marks(sequence, hit)
        if sequence.queued is None:
            sequence.queued = time.monotonic() - request.arrival
            kind = "none" if not hit.length else "host" if hit.far_slot else "device"
            self._stats.hits[kind] = self._stats.hits.get(kind, 0) + 1
        if len(sequence.tokens) == sequence.prompt_len:
            sequence.cached = hit.length
        plan.admits.append(
            Admit(
                slot=slot,
                request_id=request.id,
                params=params,
                seed=sequence.seed,
                prompt_len=sequence.prompt_len,
                stop_ids=tuple(sorted(sequence.stop_ids)),
                tokens=list(sequence.tokens) if params.looks_back else [],
                computed=hit.length,
                source=self.cache.restore(hit, slot),
            )
        )
        if hit.page:
            plan.copies.append((hit.page, chain.pages[-1]))
        plan.pages += [(slot, index, page) for index, page in enumerate(chain.pages)]
        return sequence

    def _unqueue(self, sequence: Sequence) -> None:
        if self.waiting[0][1] is sequence:
            heapq.heappop(self.waiting)
        else:
            self.waiting = [entry for entry in self.waiting if entry[1] is not sequence]
            heapq.heapify(self.waiting)

    def _marks(self, sequence: Sequence, hit: Hit) -> tuple[int, ...]:
        """Where the prompt's state is worth keeping, longest first."""
        if not self.limits.prefix_caching:
            return ()
        prompt = sequence.prompt_len
        every = range(self.limits.snapshot_every, prompt, self.limits.snapshot_every)
        borders = sequence.request.marks or [(prompt - 1) // self.limits.page * self.limits.page]
        marks: list[int] = []
        for mark in sorted({hit.branch, *borders, *every}):
            if (marks[-1] if marks else hit.length) + _WORTH <= mark < prompt:
                marks.append(mark)
        return tuple(reversed(marks))

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        """Make room: the victim waits, and starts again from what the cache still has of it then."""
        assert victim.chain is not None
        entered = [admit for admit in plan.admits if admit.slot == victim.slot]
        if entered:  # in this very plan: it has no state yet, and gets none
            plan.admits.remove(entered[0])
            plan.copies = [copy for copy in plan.copies if copy[1] not in victim.chain.pages]
            self.cache.withdraw(victim.chain, victim.slot)
        plan.pages = [entry for entry in plan.pages if entry[0] != victim.slot]
        self._release(victim, keep=not entered)
        heapq.heappush(self.waiting, (victim.order, victim))
        self._stats.preemptions += 1

    def _release(self, sequence: Sequence, keep: bool, ended: bool = False) -> None:
        """A sequence stops running. `keep`: its state and pages are right, and may be found again.

        `ended`: with a stop token, behind which the device accepts nothing. Otherwise, with drafts under way, nobody
        knows yet how far the state will be.
        """
        chain, certain = sequence.chain, sequence.computed - sequence.guesses
        assert chain is not None
        if keep and (ended or not sequence.guesses):
            self.cache.park(chain, sequence.tokens, certain, sequence.slot)
        else:
            if keep:
                self.cache.publish(chain, sequence.tokens, certain)
            self.cache.leave(chain)
            self.cache.free_slot(sequence.slot)
        self.running.remove(sequence)
        sequence.slot, sequence.chain = 0, None
        sequence.computed = sequence.guesses = sequence.drafts = 0
        sequence.proposed, sequence.confidence = [], []

    # committing

    def commit(self, plan: Plan, results: list[Sampled]) -> list[Delta]:
        """Take in what a launched step brought: one Sampled per row of the plan. Steps are committed in order."""
        out, self._out = self._out, []
        started, streams, chunk, tried_by = self._started.pop(id(plan))
        seconds = self._pace.took(started, streams, chunk)
        if self.limits.drafts and all(row.sample and row.n == 1 + row.drafts for row in plan.rows):
            kept = [len(result.tokens) - 1 for result in results]
            self._schedule.told(tried_by, [row.drafts for row in plan.rows], (plan.drafter, plan.drafts), seconds, kept)
        self._stats.steps += 1
        tokens = sum(row.n for row in plan.rows)
        self._stats.step_tokens += tokens
        self._stats.step_sizes[bisect.bisect_left(STEP_SIZES, tokens)] += 1
        for launch, result in zip(self._launched.pop(id(plan)), results, strict=True):
            sequence, row = launch.sequence, launch.row
            runs = sequence.chain is launch.chain
            if launch.snapshot and not runs:
                self.cache.free_slot(launch.snapshot)
            if self._by_id.get(sequence.request.id) is not sequence:
                continue  # it ended while this step ran
            drafted = self._count(sequence, row, result)
            if sequence.prompt_logprobs is not None:  # by position: a preempted prompt brings some of them twice
                sequence.prompt_logprobs[row.start : row.start + len(row.targets)] = result.prompt_logprobs
            computed = row.start + row.n
            if row.sample:
                sequence.pending -= 1 + row.drafts
                sampled = len(result.tokens)
                self._extend(sequence, result)
                computed = len(sequence.tokens) - 1
            if runs:
                sequence.guesses -= row.drafts
                if row.sample:
                    sequence.proposed, sequence.confidence = result.drafts, result.confidence
                    sequence.computed -= 1 + row.drafts - sampled
                    sequence.guesses += sampled - len(result.tokens)  # the state is ahead of the text by those
                self._share_pages(sequence, computed, launch.snapshot)
            if row.sample:
                out.append(self._report(sequence, result, drafted, sampled - 1 if drafted else 0))
        return out

    def _extend(self, sequence: Sequence, result: Sampled) -> None:
        """Append what was sampled. What stands behind the end of a repetition goes: only drafts brought it."""
        if sequence.request.params.repetition_detection is None:
            sequence.tokens += result.tokens
            return
        for n, token in enumerate(result.tokens, start=1):
            sequence.tokens.append(token)
            if self._repeats(sequence):
                result.tokens = result.tokens[:n]
                result.logprobs = result.logprobs and result.logprobs[:n]
                return

    def _repeats(self, sequence: Sequence) -> bool:
        params, start = sequence.request.params, sequence.prompt_len
        enough = len(sequence.tokens) - start >= params.min_tokens
        return enough and repeats(sequence.tokens, start, params.repetition_detection)

    def _count(self, sequence: Sequence, row: Row, result: Sampled) -> int:
        """-> drafts that a row had: proposals of nothing are none, nor are those that a grammar refuses."""
        stats = self._stats
        drafted = len([*takewhile(lambda token: token >= 0, sequence.proposed[: row.drafts])])
        if drafted:
            stats.drafts += 1
            stats.drafted_tokens += drafted
            for place in range(len(result.tokens) - 1):
                stats.accepted_tokens[place] += 1
        return drafted

    def _share_pages(self, sequence: Sequence, computed: int, snapshot: int) -> None:
        chain = sequence.chain
        assert chain is not None
        if computed // self.limits.page > len(chain.nodes):
            moved = self.cache.publish(chain, sequence.tokens, computed)
            self._moved += [(sequence, index) for index in moved]
        if snapshot and not self.cache.add(chain, sequence.tokens, computed, snapshot):
            self.cache.free_slot(snapshot)

    def fail(self, plan: Plan, message: str) -> list[Delta]:
        """A step could not be run: its sequences end with an error, the others go on.

        What it moved or copied may not be where the index thinks it is: nothing that rests is trusted any more.
        """
        out, self._out = self._out, []
        del self._started[id(plan)]
        for launch in self._launched.pop(id(plan)):
            if launch.snapshot:
                self.cache.free_slot(launch.snapshot)
            request_id = launch.sequence.request.id
            if self._by_id.get(request_id) is launch.sequence:
                delta = Delta(request_id=request_id, finish_reason="error", error=message)
                out.append(self._finish(launch.sequence, delta))
        if plan.moves is not None:
            self.cache.clear()
        return out

    def drain(self) -> list[Delta]:
        """Ends that no step will report (aborts)."""
        out, self._out = self._out, []
        return out

    def _report(self, sequence: Sequence, result: Sampled, drafted: int, accepted: int) -> Delta:
        """What a sequence tells of its newest tokens, and its end if they bring it: only the last one can."""
        request, token = sequence.request, result.tokens[-1]
        delta = Delta(request_id=request.id, token_ids=result.tokens, logprobs=result.logprobs)
        delta.drafted, delta.accepted = drafted, accepted
        generated = len(sequence.tokens) - sequence.prompt_len
        if generated == len(result.tokens):
            delta.cached_tokens, delta.queued = sequence.cached, sequence.queued or 0.0
            self._stats.prompt_tokens += sequence.prompt_len
            self._stats.cached_tokens += sequence.cached
            if sequence.prompt_logprobs is not None:
                delta.prompt_logprobs = [None, *sequence.prompt_logprobs]
                sequence.prompt_logprobs = None
        self._stats.generated_tokens += len(result.tokens)
        # a grammar that is through lets nothing but the end follow, however short the answer is
        enough = generated > request.params.min_tokens or request.params.grammar is not None
        if token in sequence.stop_ids and enough:
            named = token != self.quiet_eos or token in request.params.stop_token_ids
            delta.finish_reason, delta.stop_reason = "stop", token if named else None
        elif len(sequence.tokens) >= sequence.limit:
            delta.finish_reason = "length"
        elif self._repeats(sequence):
            delta.finish_reason = "repetition"
        return self._finish(sequence, delta) if delta.finish_reason else delta

    def _finish(self, sequence: Sequence, delta: Delta) -> Delta:
        assert delta.finish_reason is not None
        del self._by_id[sequence.request.id]
        if sequence.slot:
            self._release(sequence, keep=delta.finish_reason != "error", ended=delta.finish_reason == "stop")
        else:
            self._unqueue(sequence)
        self._stats.finished[delta.finish_reason] = self._stats.finished.get(delta.finish_reason, 0) + 1
        return delta

    # looking in

    @property
    def steps(self) -> int:
        """How many were committed."""
        return self._stats.steps

    def stats(self) -> EngineStats:
        stats, cache = self._stats, self.cache
        stats.running, stats.waiting = len(self.running), len(self.waiting)
        stats.slots_free, stats.pages_free = cache.free_slots, cache.free_pages
        stats.pages_cached, stats.snapshots = cache.cached_pages, cache.snapshots
        if (tier := cache.tier) is not None:
            stats.host_slots_total, stats.host_slots_free = tier.slots, len(tier.free_slots)
            stats.host_pages_total, stats.host_pages_free = tier.pages, len(tier.free_pages)
            stats.moved = dict(tier.moved)
        return stats

    def check(self) -> None:
        """Every slot and page is free, kept by the cache, or held by running sequences and steps under way."""
        held = [(s.slot, s.chain) for s in self.running if s.chain is not None]
        held += [(launch.snapshot, Chain(Node(None, (), 0))) for step in self._launched.values() for launch in step]
        self.cache.check([entry for entry in held if entry[0]])
        owned = {id(s) for s in self.running} | {id(s) for _, s in self.waiting}
        assert owned == {id(s) for s in self._by_id.values()}, "a sequence is neither waiting nor running"
        assert all(s.chain is None for _, s in self.waiting), "a waiting sequence holds pages"


@dataclass(slots=True)
class _Launch:
    """A row under way. The chain tells whether the sequence still is what it was when the row was launched."""

    sequence: Sequence
    chain: Chain
    row: Row
    snapshot: int  # slot that receives its state; 0: none
