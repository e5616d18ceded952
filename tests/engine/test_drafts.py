"""Drafts in the engine: they may make a step longer, they may never change an answer."""

import random

import pytest
import torch

from leyden.model.context import Context
from leyden.types import Repetition, Request, SamplingParams
from tests.engine import drafters
from tests.engine import test_thinking as thinking
from tests.engine.conftest import engine, oracle, run, tiny
from tests.engine.device import tokens_of
from tests.engine.drafters import Scripted
from tests.engine.test_engine import greedy, prompt_of

RULES = {name: getattr(drafters, name) for name in ("perfect", "wrong", "nothing", "half", "odd", "garbage", "raising")}
LENGTHS = [1, 3, 13, 14, 15, 16, 17, 40]
N = 30


@pytest.fixture(scope="module")
def answers(model):
    return {n: oracle(model, prompt_of(n), N) for n in LENGTHS}


@pytest.fixture(scope="module")
def texts(answers):
    return [prompt_of(n) + answer for n, answer in answers.items()]


def everyone(**changes):
    return [(0, greedy(f"{n}", prompt_of(n), N, **changes)) for n in LENGTHS]


def failures(made):
    return made.stats().failed_drafts


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_d28_a_drafter_never_changes_the_answer(model, answers, texts, rule, overlap):
    made = engine(model, seqs=9, drafter=Scripted(4, texts, RULES[rule]), overlap=overlap)
    out = run(made, everyone())
    assert {n: tokens_of(out[f"{n}"]) for n in LENGTHS} == answers
    assert (failures(made) > 0) == (rule == "raising")
    stats = made.stats()
    assert stats.generated_tokens == N * len(LENGTHS)
    if rule in ("wrong", "nothing"):  # what is no proposal does not count as a draft
        assert bool(stats.drafted_tokens) == (rule == "wrong") and not sum(stats.accepted_tokens)


@pytest.mark.parametrize(("budget", "overlap"), [(1, False), (3, True), (7, False), (16, True), (64, False)])
def test_d28_any_budget(model, answers, texts, budget, overlap):
    made = engine(model, seqs=9, step_tokens=budget, drafter=Scripted(3, texts, drafters.half, 2), overlap=overlap)
    out = run(made, everyone())
    assert {n: tokens_of(out[f"{n}"]) for n in LENGTHS} == answers
    assert not failures(made)


@pytest.mark.parametrize("width", range(1, 8))
def test_p13_every_width_and_p15_every_number_accepted(model, answers, texts, width):
    """Pitfall 13: corruption at one depth only; 15: the state is that of what was accepted, for every number of it."""
    for j in range(width + 1):
        made = engine(model, drafter=Scripted(width, texts, drafters.right_for(j)))
        out = run(made, [(0, greedy(f"{n}", prompt_of(n), N)) for n in (13, 16)])
        assert [tokens_of(out["13"]), tokens_of(out["16"])] == [answers[13], answers[16]], j
        stats = made.stats()
        assert not failures(made) and all(stats.accepted_tokens[:j]) and not any(stats.accepted_tokens[j:])


def test_d28_accepted_tokens_are_counted_as_planned(model, answers, texts):
    made = engine(model, drafter=Scripted(3, texts, drafters.perfect))
    deltas = run(made, [(0, greedy("a", prompt_of(17), 30))])["a"]
    # one token from the prompt, then 4 in each step, and 1 with no draft because no more are wanted
    assert [len(delta.token_ids) for delta in deltas] == [1, *[4] * 7, 1]
    stats = made.stats()
    assert (stats.drafts, stats.drafted_tokens, stats.accepted_tokens) == (7, 21, [7, 7, 7])
    assert [(delta.drafted, delta.accepted) for delta in deltas] == [(0, 0), *[(3, 3)] * 7, (0, 0)]


@pytest.mark.parametrize("overlap", [False, True])
def test_p18_preemption_and_slots_used_again(model, overlap):
    a, b = prompt_of(40, 1), prompt_of(50, 1)
    answers = {"a": oracle(model, a, 60), "b": oracle(model, b, 60)}
    drafter = Scripted(4, [a + answers["a"], b + answers["b"]], drafters.half, 3)
    made = engine(model, seqs=2, pages=-(-110 * 3 // 2 // 16), max_model_len=128, overlap=overlap, drafter=drafter)
    out = run(made, [(0, greedy("a", a, 60)), (0, greedy("b", b, 60))])
    assert made.stats().preemptions >= 1 and not failures(made)
    assert {name: tokens_of(deltas) for name, deltas in out.items()} == answers
    assert made.stats().generated_tokens == 120


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n", [31, 32, 33])
def test_p17_a_prefix_hit_and_drafts(model, n, overlap):
    """Hits at page borders; the hit leaves a single token, or a few that look like drafts."""
    prompt = prompt_of(n, 3)
    answer = oracle(model, prompt, 24)
    again = prompt + answer[:9]
    texts = [prompt + answer]
    made = engine(model, snapshots=8, overlap=overlap, drafter=Scripted(4, texts, drafters.half))
    assert tokens_of(run(made, [(0, greedy("a", prompt, 24))])["a"]) == answer
    second = run(made, [(0, greedy("b", prompt, 24))])["b"]
    assert tokens_of(second) == answer
    third = run(made, [(0, greedy("c", prompt + answer, 5))])["c"]
    assert tokens_of(third) == oracle(model, prompt + answer, 5)
    assert third[0].cached_tokens == n + 23, "the state at the end of an answer is exact, and found again"
    fourth = run(made, [(0, greedy("d", again, 15))])["d"]
    assert tokens_of(fourth) == answer[9:]
    assert not failures(made)


SAMPLED = {
    "plain": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: 4.0, 6: 4.0, 300: 3.0}},
    "allowed": {"allowed_token_ids": list(range(20))},
    "logprobs": {"logprobs": 3},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("what", SAMPLED)
def test_sampled_answers_are_those_without_drafts(model, what, overlap):
    def arrivals():
        return [
            (i, Request(id=f"{n}", prompt=prompt_of(n), params=SamplingParams(seed=n, max_tokens=N, **SAMPLED[what])))
            for i, n in enumerate(LENGTHS)
        ]

    plain = run(engine(model, seqs=9), arrivals())
    texts = [prompt_of(n) + tokens_of(plain[f"{n}"]) for n in LENGTHS]
    made = engine(model, seqs=9, drafter=Scripted(4, texts, drafters.half), overlap=overlap)
    out = run(made, arrivals())
    assert sum(made.stats().accepted_tokens) > N and not failures(made)
    for n in LENGTHS:
        assert tokens_of(out[f"{n}"]) == tokens_of(plain[f"{n}"])
        if what == "logprobs":
            got, want = ([e for d in deltas for e in d.logprobs] for deltas in (out[f"{n}"], plain[f"{n}"]))
            assert [e.token_id for e in got] == tokens_of(plain[f"{n}"])
            for one, other in zip(got, want, strict=True):
                assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def answer_of(deltas):
    return tokens_of(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason


def compare(model, arrivals, rule=drafters.half, width=4, **options):
    """Everybody's answer with drafts, checked to be what it is without any. Gives the engine."""
    overlap = options.pop("overlap", False)
    plain = run(engine(model, **options), arrivals)
    texts = [request.prompt + tokens_of(plain[request.id]) for _, request in arrivals]
    made = engine(model, drafter=Scripted(width, texts, rule, lookahead=1), overlap=overlap, **options)
    drafted = run(made, arrivals)
    assert {name: answer_of(deltas) for name, deltas in drafted.items()} == {
        name: answer_of(deltas) for name, deltas in plain.items()
    }
    assert not failures(made)
    return made


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", range(1, 10))
def test_p30_a_stop_token_inside_a_block(model, answers, texts, place, overlap):
    """Whatever draft it is: nothing comes behind it, and the state that is kept is that of the answer."""
    answer = answers[17]
    stop = answer[place]
    made = engine(model, snapshots=8, drafter=Scripted(4, texts, drafters.perfect), overlap=overlap)
    deltas = run(made, [(0, greedy("a", prompt_of(17), N, stop_token_ids=[stop]))])["a"]
    got = answer[: answer.index(stop) + 1]
    assert answer_of(deltas) == (got, "stop", stop)
    assert made.stats().generated_tokens == len(got)
    prompt = prompt_of(17) + got + [7]
    longer = run(made, [(0, greedy("b", prompt, 5))])["b"]
    assert tokens_of(longer) == oracle(model, prompt, 5)
    # with async scheduling the next step had begun, and took the stop token in
    assert longer[0].cached_tokens == len(prompt) - 2 + overlap


@pytest.mark.parametrize("overlap", [False, True])
def test_p30_min_tokens_and_a_stop_token_that_is_drafted(model, answers, overlap):
    for n in (13, 17):
        stops = answers[n][2:6]
        for least in (0, 3, 5, 9):
            request = greedy("a", prompt_of(n), N, stop_token_ids=stops, min_tokens=least)
            compare(model, [(0, request)], drafters.perfect, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_p30_max_tokens_and_the_context_end_inside_a_block(model, answers, texts, overlap):
    made = engine(model, drafter=Scripted(4, texts, drafters.perfect), overlap=overlap)
    for most in range(1, 12):
        deltas = run(made, [(0, greedy("a", prompt_of(17), most))])["a"]
        assert answer_of(deltas) == (answers[17][:most], "length", None)
    for longest in range(20, 26):
        short = engine(
            model, max_model_len=longest, pages=2, drafter=Scripted(4, texts, drafters.perfect, 3), overlap=overlap
        )
        deltas = run(short, [(0, greedy("a", prompt_of(17), N))])["a"]
        assert answer_of(deltas) == (answers[17][: longest - 17], "length", None)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [1, 3, 4, 7])
def test_p30_a_repetition_ends_inside_a_block(model, overlap, width):
    """There, with its log-probabilities, and what is found in the cache later is not what the drafts brought."""
    for count, least in ((2, 0), (3, 0), (5, 0), (2, 9)):
        rule = Repetition(max_pattern_size=2, min_count=count)
        params = SamplingParams(
            temperature=0, allowed_token_ids=[7, 9], max_tokens=40, min_tokens=least, logprobs=1,
            repetition_detection=rule,
        )  # fmt: skip
        prompt = prompt_of(17)
        plain = run(engine(model), [(0, Request(id="a", prompt=prompt, params=params))])["a"]
        assert plain[-1].finish_reason == "repetition"
        text = prompt + tokens_of(plain) + tokens_of(plain)[-2:] * 10
        made = engine(model, snapshots=8, drafter=Scripted(width, [text], drafters.perfect), overlap=overlap)
        deltas = run(made, [(0, Request(id="a", prompt=prompt, params=params))])["a"]
        assert answer_of(deltas) == answer_of(plain) and not failures(made)
        assert [len(delta.token_ids) for delta in deltas] == [len(delta.logprobs) for delta in deltas]
        again = prompt + tokens_of(plain) + prompt_of(3, 5)
        assert tokens_of(run(made, [(0, greedy("b", again, 9))])["b"]) == oracle(model, again, 9)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_with_drafts_under_way(model, answers, texts, overlap):
    """Nobody knows how far its state is, so only its pages are kept: the same prompt gets the same answer again."""
    made = engine(model, snapshots=8, drafter=Scripted(4, texts, drafters.half), overlap=overlap)
    for steps in range(1, 8):
        made.submit(greedy("a", prompt_of(17), N))
        for _ in range(steps):
            made.step()
        made.abort("a")
        while made.busy:
            made.step()
        made.check()
        out = run(made, [(0, greedy("b", prompt_of(17) + answers[17][:6], N - 6))])["b"]
        assert tokens_of(out) == answers[17][6:]


@pytest.mark.parametrize("overlap", [False, True])
def test_thinking_budgets_inside_a_block(model, overlap):
    draw = random.Random(5)
    arrivals = []
    for n in range(8):
        prompt = [draw.randrange(20, 500) for _ in range(draw.randrange(1, 40))] + [thinking.OPEN, thinking.LINE]
        markers = draw.choice((thinking.MARKERS, thinking.WORDY))
        budget, grace = draw.choice((0, 3, 9, 20)), draw.choice((0, 6))
        params = thinking.params(budget, grace, markers, temperature=0.8, seed=n, max_tokens=30)
        params.logit_bias = {thinking.LINE: 3.0}
        arrivals.append((n, Request(id=f"r{n}", prompt=prompt, params=params)))
    made = compare(model, arrivals, drafters.half, overlap=overlap, step_tokens=24)
    assert sum(made.stats().accepted_tokens) > 30


@pytest.mark.parametrize("overlap", [False, True])
def test_all_kinds_of_requests_in_too_little_room(model, overlap):
    wishes = [*SAMPLED.values(), {"stop_token_ids": list(range(0, 512, 9))}, {"temperature": 0}]
    arrivals = [
        (
            i % 5,
            Request(
                id=f"r{i}",
                prompt=prompt_of(3 + 5 * i, 8),
                params=SamplingParams(**({"seed": i, "max_tokens": 25} | wish)),
            ),
        )
        for i, wish in enumerate(wishes)
    ]
    options = {"seqs": 5, "snapshots": 3, "pages": 14, "page": 8, "step_tokens": 20, "max_model_len": 100}
    made = compare(model, arrivals, drafters.half, overlap=overlap, **options)
    assert made.stats().preemptions


def test_coupled_drafts_of_a_twin_are_all_right(model):
    """Drawn with the noise of their places from the target's own logits, they are what the target draws."""

    def logits(text):
        with torch.inference_mode():
            hidden, _ = model(torch.tensor(text), Context.packed([len(text)]))
            return model.logits(hidden[-1])

    request = Request(id="a", prompt=prompt_of(9), params=SamplingParams(top_p=0.9, seed=3, max_tokens=25))
    shares = []
    for coupled in (True, False):
        made = engine(model, drafter=drafters.Twin(3, logits), coupled=coupled)
        run(made, [(0, request)])
        stats = made.stats()
        assert not stats.failed_drafts
        shares.append(sum(stats.accepted_tokens) / stats.drafted_tokens)
    assert shares[0] == 1 > shares[1] + 0.3


def drafter_keys(made, slot):
    """Keys and values of the last attention layer of what a slot has committed: [2, tokens, heads, dim]."""
    pool = made.runner.pool
    flat = pool.kv[-1][:, pool.tables[slot].long()].flatten(1, 2)
    return flat[:, : int(pool.committed[slot])]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_p14_the_keys_of_a_drafter_are_those_of_the_text(width, overlap):
    """Chunks, rejected drafts and the drafter's own steps leave what one pass over the whole text leaves."""
    model = tiny(mtp=True)
    prompt = prompt_of(37, 2)
    answer = oracle(model, prompt, 60)
    made = engine(model, step_tokens=9, drafter=drafters.Recurrent(width, model), overlap=overlap)
    made.submit(greedy("other", prompt_of(11, 2), 60))
    made.submit(greedy("a", prompt, 60))
    got = []
    while len(got) < 40:
        got += [t for delta in made.step() if delta.request_id == "a" for t in delta.token_ids]
    assert got == answer[: len(got)] and not failures(made) and made.stats().drafts > 10
    (slot,) = [s.slot for s in made.scheduler.running if s.request.id == "a"]
    keys = drafter_keys(made, slot)

    text = (prompt + answer)[: keys.shape[1] + 1]
    scratch = engine(model, step_tokens=512, drafter=drafters.Recurrent(width, model), prefix_caching=False)
    scratch.submit(greedy("b", text, 2))
    scratch.step()
    want = drafter_keys(scratch, scratch.scheduler.running[0].slot)[:, : keys.shape[1]]
    torch.testing.assert_close(keys, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_D17_a_thinking_budget_binds_with_a_drafter(model, overlap, width):
    """A target that says x for ever; a drafter that proposes x, and one that proposes anything."""
    x, prompt = thinking.X, thinking.PROMPT
    ids = random.Random(width)
    for rule in (lambda *at: x, lambda *at: ids.randrange(512)):
        for budget in (0, 1, 10, 39, None):
            made = engine(model, drafter=Scripted(width, [], rule), overlap=overlap)
            params = thinking.params(budget, **thinking.FOREVER)
            got = tokens_of(run(made, [(0, Request(id="a", prompt=prompt, params=params))])["a"])
            assert got == ([x] * (40 if budget is None else budget) + [thinking.END] + [x] * 40)[:40]
            assert not failures(made)


@pytest.mark.parametrize("overlap", [False, True])
def test_d29_cancel_storm_with_drafts_leaves_nothing_behind(model, overlap):
    """Most of the drafts are wrong: many steps are under way for sequences that are gone."""
    draw = random.Random(0)
    made = engine(
        model, seqs=4, snapshots=6, pages=40, page=8, drafter=Scripted(3, [], drafters.wrong), overlap=overlap
    )
    loops = [[3, 4, 5] * draw.randrange(2, 9) + prompt_of(draw.randrange(1, 20), i) for i in range(60)]
    leaving = {}
    for step in range(90):
        if step < 60:
            name = f"r{step}"
            made.submit(greedy(name, loops[step], draw.randrange(2, 30)))
            leaving.setdefault(step + draw.randrange(12), []).append(name)
        for name in leaving.get(step, ()):
            made.abort(name)
        made.step()
        made.check()
    run(made, [])
    assert not made.scheduler.running and not failures(made) and made.stats().drafts > 20
    last = tokens_of(run(made, [(0, greedy("last", loops[0], 20))])["last"])
    assert last == oracle(model, loops[0], 20)
