"""A device made of dictionaries: checks what a plan asks for and "generates" by a rule that sees the whole sequence."""

from dataclasses import dataclass, field

from leyden.engine.scheduler import Limits, Scheduler
from leyden.types import Delta, Moves, Plan, Request, Sampled, SamplingParams


def rule(tokens: list[int]) -> int:
    """The token after `tokens`: depends on all of them, so a lost, doubled or foreign token shows."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
    return value % 50


def expected(request: Request) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.params.max_tokens or 0):
        tokens.append(rule(tokens))
        if tokens[-1] in request.params.stop_token_ids:
            break
    return tokens[len(request.prompt) :]


@dataclass
class Device:
    """Keeps what every KV page holds, token by token, as the page tables map them.

    Its drafts are right for 0, 1, 2 ... tokens, as the length of the sequence has it.
    """

    limits: Limits
    pages: dict[int, dict[int, int]] = field(default_factory=dict)  # page -> offset -> token
    tables: dict[int, dict[int, int]] = field(default_factory=dict)  # slot -> index -> page
    state: dict[int, list[int]] = field(default_factory=dict)  # slot -> tokens its recurrent state has seen
    last: dict[int, int] = field(default_factory=dict)
    far_pages: dict[int, dict[int, int]] = field(default_factory=dict)  # the same in host memory
    far_state: dict[int, list[int]] = field(default_factory=dict)
    moved: int = 0
    drafts: dict[int, list[int]] = field(default_factory=dict)
    stops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    following: dict[int, int] = field(default_factory=dict)

    def run(self, plan: Plan) -> list[Sampled]:
        page = self.limits.page
        assert sum(row.n for row in plan.rows) <= self.limits.step_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot appears twice in a step"
        long = [row.n > 1 + self.limits.drafts for row in plan.rows]
        assert long == sorted(long), "short rows come first"
        moves = plan.moves or Moves()
        pages_in = [(target, dict(self.far_pages[far])) for far, target in moves.pages_in]
        states_in = {slot: list(self.far_state[far]) for far, slot in moves.states_in}
        pages_out = {far: dict(self.pages[source]) for source, far in moves.pages_out}
        states_out = {far: list(self.state[slot]) for slot, far in moves.states_out}
        self.moved += len(pages_in) + len(states_in) + len(pages_out) + len(states_out)
        states = [list(self.state[admit.source]) if admit.source else [] for admit in plan.admits]
        contents = [dict(self.pages[source]) for source, _ in plan.copies]
        assert len({target for _, target in plan.copies}) == len(plan.copies), "two copies into one page"
        self.far_pages |= pages_out
        self.far_state |= states_out
        assert not set(dict(pages_in)) & {target for _, target in plan.copies}, "a page is written twice"
        assert len(dict(pages_in)) == len(pages_in)
        self.pages |= dict(pages_in)
        for admit, state in zip(plan.admits, states, strict=True):
            assert not (admit.source and admit.slot in states_in), "a state is written twice"
            state = states_in.pop(admit.slot, state)
            assert len(state) == admit.computed, "the state is not the one the plan speaks of"
            self.state[admit.slot], self.tables[admit.slot] = state, {}
            self.stops[admit.slot] = admit.stop_ids
            self.drafts.pop(admit.slot, None)
            self.following.pop(admit.slot, None)
        assert not states_in, "a state came for nobody"
        for (_, target), content in zip(plan.copies, contents, strict=True):
            self.pages[target] = content
        for slot, index, number in plan.pages:
            assert number, "the padding page was handed out"
            self.tables[slot][index] = number
        results = []
        for row in plan.rows:
            slot, seen, table = row.slot, self.state[row.slot], self.tables[row.slot]
            tokens = row.tokens or [self.last[slot], *self.drafts.get(slot, [])[: row.drafts]]
            assert len(tokens) == row.n
            assert row.start >= len(seen) if self.limits.drafts and not row.tokens else row.start == len(seen)
            assert self.following.pop(slot, tokens[0]) == tokens[0], "another token follows than was said"
            if not row.sample:
                self.following[slot] = row.following
            whole = seen + tokens
            for at in range(len(seen), len(whole)):
                self.pages.setdefault(table[at // page], {})[at % page] = whole[at]
            # what the target draws behind the token before the drafts, and behind each of them that is right
            places = range(row.n - row.drafts, row.n + 1) if row.sample else ()
            drawn = [rule(seen + tokens[:n]) for n in places]
            right = 0
            if tokens[0] not in self.stops[slot] or not row.drafts:
                while right < row.drafts and drawn[right] == tokens[1 + right] and drawn[right] not in self.stops[slot]:
                    right += 1
            seen += tokens[: row.n - row.drafts + right]
            cached = [self.pages[table[i // page]][i % page] for i in range(len(seen))]
            assert cached == seen, "another sequence wrote into this one's pages"
            if row.sample:
                self.last[slot] = drawn[right]
                self._propose(slot, table)
            results.append(Sampled(drawn[: right + 1], drafts=self.drafts[slot] if row.sample else []))
        for slot, target in plan.snapshots:
            self.state[target] = list(self.state[slot])
        return results

    def _propose(self, slot: int, table: dict[int, int]) -> None:
        """Drafts for the next row; the drafter writes keys of its own behind the newest token."""
        seen, page = self.state[slot], self.limits.page
        guess = [*seen, self.last[slot]]
        for _ in range(self.limits.drafts):
            guess.append(rule(guess))
        drafts = guess[len(seen) + 1 :]
        for i in range(len(seen) % (self.limits.drafts + 1), self.limits.drafts):
            drafts[i] = (drafts[i] + 1) % 50
        self.drafts[slot] = drafts
        for at in range(len(seen), len(seen) + self.limits.lookahead):
            self.pages.setdefault(table[at // page], {})[at % page] = -1


def drive(
    limits: Limits, arrivals: list[tuple[int, Request]], aborts: dict[int, list[str]], overlap: bool
) -> tuple[Scheduler, dict[str, list[Delta]]]:
    """Run to the end: arrivals are (step, request), aborts step -> ids. check() after every step."""
    scheduler, device = Scheduler(limits), Device(limits)
    out: dict[str, list[Delta]] = {request.id: [] for _, request in arrivals}
    launched = None
    step, idle = 0, 0
    queue = sorted(arrivals, key=lambda item: item[0])
    while queue or scheduler.unfinished or launched:
        while queue and queue[0][0] <= step:
            scheduler.add(queue.pop(0)[1])
        for request_id in aborts.get(step, []):
            scheduler.abort(request_id)
        plan = scheduler.plan()
        scheduler.check()
        now = (plan, device.run(plan)) if plan else None
        finished, launched = (launched, now) if overlap else (now, None)
        deltas = scheduler.drain() + (scheduler.commit(*finished) if finished else [])
        scheduler.check()
        for delta in deltas:
            out[delta.request_id].append(delta)
        idle = 0 if plan or finished or deltas or queue else idle + 1
        assert idle < 3, "the scheduler makes no progress"
        step += 1
    return scheduler, out


def request(name: str, prompt: list[int], max_tokens: int, **changes: object) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(id=name, prompt=prompt, params=params, **changes)  # type: ignore[arg-type]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
