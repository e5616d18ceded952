"""Drafts in the engine: they may make a step longer, they may never change an answer."""

import pytest

from leyden.types import Request, SamplingParams
from tests.engine import drafters
from tests.engine.conftest import engine, oracle, run
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
    if rule in ("wrong", "nothing"):
        assert stats.drafts and not sum(stats.accepted_tokens)


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
