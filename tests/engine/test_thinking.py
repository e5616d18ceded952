"""Thinking budgets: the table against the rule in plain words, and whole engines (D17)."""

import random

import pytest
import torch

from leyden.engine.thinking import Budgets
from leyden.errors import RequestError
from leyden.types import Admit, Markers, Request, Row, SamplingParams, Thinking
from tests.engine.conftest import engine, run

X, LINE, OPEN, END, CALL = 40, 41, 12, 13, 14
MARKERS = Markers(opens=OPEN, ends=(END,), forced=(END,))
WORDY = Markers(opens=OPEN, ends=(END, CALL), forced=(LINE, 50, END), line_ends=(LINE, 42))


def params(budget=None, grace=0, markers=MARKERS, open=True, spent=0, **more):
    thinking = Thinking(markers=markers, open=open, spent=spent)
    budgets = {"thinking_token_budget": budget, "thinking_token_grace": grace, "thinking": thinking}
    return SamplingParams(**({"temperature": 0, "max_tokens": 40} | budgets | more))


def expected(prompt: list[int], params: SamplingParams, sampled: list[int]) -> list[int]:
    """What becomes of the sampled tokens, told token by token."""
    budget, grace = params.thinking_token_budget, params.thinking_token_grace if params.thinking_token_budget else 0
    markers = params.thinking.markers
    open, spent, over, forced, out = params.thinking.open, params.thinking.spent, 0, [], []
    for token in sampled:
        before = out[-1] if out else prompt[-1]
        if open and not forced and spent >= budget and (before in markers.line_ends or over >= grace):
            forced = list(markers.forced)
        out.append(forced.pop(0) if forced else token)
        if out[-1] in markers.ends:
            open, forced = False, []
        elif out[-1] == markers.opens and not open:
            open, spent, over = True, 0, 0
            continue
        if open:
            over = over + 1 if spent >= budget else 0
            spent += 1
    return out


class Table:
    """Budgets with slots, driven a token at a time."""

    def __init__(self):
        self.budgets = Budgets(4, 64, "cpu")
        self.last = torch.zeros(4, dtype=torch.int64)

    def admit(self, slot, prompt, params, generated=()):
        tokens = [*prompt, *generated]
        self.last[slot] = tokens[-1]
        self.budgets.admit([Admit(slot, "r", params, 0, len(prompt), (), tokens)])

    def step(self, tokens: dict[int, int], positions: dict[int, int]) -> list[int]:
        slots = torch.tensor(list(tokens))
        rows = [Row(slot, positions[slot], 1, [], True) for slot in tokens]
        at = torch.tensor([positions[slot] for slot in tokens])
        out = self.budgets.apply(rows, slots, at, self.last[slots], torch.tensor(list(tokens.values())))
        self.last[slots] = out
        return out.tolist()


# budget, grace, spent, open
CASES = [
    *((budget, grace, spent, open) for budget in (0, 1, 2, 7) for grace in (0, 1, 5) for spent, open in [(0, True)]),
    *[(5, 0, 3, True), (5, 2, 5, True), (5, 4, 9, True), (3, 2, 0, False), (0, 0, 0, False), (10**30, 0, 0, True)],
]


@pytest.mark.parametrize("markers", [MARKERS, WORDY], ids=["plain", "wordy"])
@pytest.mark.parametrize(("budget", "grace", "spent", "open"), CASES)
def test_table_is_the_rule_wherever_it_is_interrupted(budget, grace, spent, open, markers):
    draw = random.Random(f"{budget} {grace} {spent}")
    for _ in range(20):
        p = params(budget, grace, markers, open, spent)
        prompt = [draw.choice((X, LINE)) for _ in range(10)]
        sampled = [draw.choice((X, X, X, X, LINE, 50, END, OPEN, CALL)) for _ in range(25)]
        wanted = expected(prompt, p, sampled)
        table = Table()
        table.admit(1, prompt, p)
        table.admit(2, prompt, params(None, open=open))
        for n, token in enumerate(sampled):
            if draw.random() < 0.2:  # it leaves its slot, which another one gets, and comes back into a third
                table.admit(1, [X], params(3, 0, MARKERS))
                table.admit(1, [X], SamplingParams())
                table.admit(3, prompt, p, wanted[:n])
                place = 3
            else:
                place = 1 if n == 0 or place == 1 else place
            free = 2
            got = table.step({place: token, free: token}, {place: len(prompt) + n, free: len(prompt) + n})
            assert got == [wanted[n], token]


def test_a_step_without_budgets_is_left_alone():
    table = Table()
    table.admit(1, [X], params(0))
    tokens = torch.tensor([OPEN])
    row = Row(2, 1, 1, [], True)
    assert table.budgets.apply([row], torch.tensor([2]), torch.tensor([1]), tokens, tokens) is tokens


def test_a_neighbour_of_a_budget_is_left_alone():
    table = Table()
    table.admit(1, [X], params(0))
    assert table.step({1: X, 2: OPEN}, {1: 1, 2: 1}) == [END, OPEN]
    assert table.step({1: X, 2: X}, {1: 2, 2: 2}) == [X, X]


# whole engines

PROMPT = [10, 60, OPEN, LINE]
FOREVER = {"logit_bias": {X: 100.0}}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 2, 10, 39, 40, 100, None])
def test_D17_budget_binds(model, overlap, budget):
    request = Request(id="a", prompt=PROMPT, params=params(budget, **FOREVER))
    tokens = [t for d in run(engine(model, overlap=overlap), [(0, request)])["a"] for t in d.token_ids]
    thought = 40 if budget is None else budget
    assert tokens == ([X] * thought + [END] + [X] * 40)[:40]


def reply(model, arrivals, **options):
    return {
        name: [t for d in deltas for t in d.token_ids]
        for name, deltas in run(engine(model, **options), arrivals).items()
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_budgets_live_through_preemption_batches_and_the_prefix_cache(model, overlap):
    """Many at once in too little room, with all kinds of budgets: the same as each of them alone."""
    draw = random.Random(5)
    requests = []
    for n in range(10):
        prompt = [draw.randrange(20, 500) for _ in range(draw.randrange(1, 40))] + [OPEN, LINE]
        markers = draw.choice((MARKERS, WORDY))
        p = params(draw.choice((0, 3, 9, 20)), draw.choice((0, 6)), markers, temperature=0.8, seed=n, max_tokens=30)
        p.logit_bias = {LINE: 3.0}
        requests.append(Request(id=f"r{n}", prompt=prompt, params=p))
    alone = {r.id: reply(model, [(0, r)])[r.id] for r in requests}
    assert any(tokens.count(END) for tokens in alone.values())
    small = {"seqs": 4, "snapshots": 6, "pages": 12, "page": 8, "step_tokens": 24, "overlap": overlap}
    worker = engine(model, **small)
    together = run(worker, [(n, r) for n, r in enumerate(requests)])
    assert worker.stats().preemptions
    assert {name: [t for d in deltas for t in d.token_ids] for name, deltas in together.items()} == alone


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 20, "stop_token_ids": [END]},
        {"logit_bias": {END: -100.0, X: 100.0}},
        {"allowed_token_ids": [X]},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {X: 100.0}},
        {"temperature": 1.5, "top_k": 1, "logit_bias": {X: 100.0}},
    ],
    ids=["min_tokens", "logit_bias", "allowed_token_ids", "penalties", "sampling"],
)
def test_nothing_else_keeps_the_end_away(model, more):
    request = Request(id="a", prompt=PROMPT, params=params(5, max_tokens=20, **more))
    assert reply(model, [(0, request)])["a"][5] == END


def test_forced_tokens_have_logprobs_of_their_own(model):
    request = Request(id="a", prompt=PROMPT, params=params(2, logprobs=1, max_tokens=4, **FOREVER))
    entries = [entry for delta in run(engine(model), [(0, request)])["a"] for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == [X, X, END, X]


def test_marker_outside_the_vocabulary_is_refused(model):
    with pytest.raises(RequestError, match="thinking: token ids"):
        engine(model).submit(
            Request(id="a", prompt=[1], params=params(1, markers=Markers(opens=None, ends=(9999,), forced=(9999,))))
        )
