import random

import pytest
import torch

from leyden.errors import RequestError
from leyden.types import Request, SamplingParams
from tests.engine.conftest import TINY, engine, oracle, run
from tests.engine.device import tokens_of

LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 23, 50, 160]
N = 64


def prompt_of(n: int, seed: int = 0) -> list[int]:
    made = random.Random(seed * 1000 + n)
    return [made.randrange(TINY.vocab_size) for _ in range(n)]


def greedy(name: str, prompt: list[int], max_tokens: int = N, **changes) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(temperature=0, max_tokens=max_tokens, **changes))


@pytest.fixture(scope="module")
def answers(model):
    return {n: oracle(model, prompt_of(n), N) for n in LENGTHS}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 7, 16, 17, 64])
def test_d26_any_budget_gives_what_the_model_alone_gives(model, answers, budget, overlap):
    arrivals = [(0, greedy(f"{n}", prompt_of(n))) for n in LENGTHS]
    made = engine(model, seqs=11, step_tokens=budget, overlap=overlap)
    out = run(made, arrivals)
    for n in LENGTHS:
        assert tokens_of(out[f"{n}"]) == answers[n], f"prompt of {n} tokens"


def test_d26_alone_equals_together_and_first_logits_agree(model, answers):
    with_logprobs = {n: greedy(f"{n}", prompt_of(n), logprobs=20) for n in LENGTHS}
    together = run(engine(model, seqs=11), [(0, request) for request in with_logprobs.values()])
    for n, request in with_logprobs.items():
        alone = run(engine(model, step_tokens=512), [(0, request)])[request.id]
        assert tokens_of(alone) == tokens_of(together[request.id]) == answers[n]
        first, other = alone[0].logprobs[0], together[request.id][0].logprobs[0]
        assert first.top_ids == other.top_ids
        assert first.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 17, 64])
def test_d26_first_logits_are_those_of_one_chunk_at_any_budget(model, budget):
    for n in (5, 17, 160):
        request = greedy(f"{n}", prompt_of(n), 1, logprobs=20)
        (whole,) = run(engine(model, step_tokens=512), [(0, request)])[request.id]
        (split,) = run(engine(model, step_tokens=budget), [(0, request)])[request.id]
        assert split.logprobs[0].top_ids == whole.logprobs[0].top_ids
        assert split.logprobs[0].top_logprobs == pytest.approx(whole.logprobs[0].top_logprobs, abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_d26_prompts_beside_one_long_decode(model, answers, overlap):
    long = greedy("long", prompt_of(33, 8), 200)
    arrivals = [(0, long), *((20 + 9 * i, greedy(f"{n}", prompt_of(n))) for i, n in enumerate(LENGTHS))]
    out = run(engine(model, seqs=4, step_tokens=24, overlap=overlap), arrivals)
    assert {n: tokens_of(out[f"{n}"]) for n in LENGTHS} == answers
    assert tokens_of(out["long"]) == oracle(model, prompt_of(33, 8), 200)


def test_d26_a_prompt_by_decode_steps_only(model, answers):
    out = run(engine(model, seqs=11, row_tokens=1), [(0, greedy(f"{n}", prompt_of(n))) for n in LENGTHS])
    assert {n: tokens_of(out[f"{n}"]) for n in LENGTHS} == answers


@pytest.mark.parametrize("seed", range(4))
def test_d26_any_arrivals_slots_and_row_limits(model, answers, seed):
    made = random.Random(seed)
    arrivals = [(made.randrange(40), greedy(f"{n}", prompt_of(n))) for n in LENGTHS]
    options = {"seqs": made.choice([1, 2, 5]), "row_tokens": made.choice([0, 1, 5]), "page": made.choice([1, 7, 16])}
    out = run(engine(model, pages=1000, step_tokens=20, overlap=bool(seed % 2), **options), arrivals)
    assert {n: tokens_of(out[f"{n}"]) for n in LENGTHS} == answers


@pytest.mark.parametrize("overlap", [False, True])
def test_d29_preempted_requests_continue_without_gap_or_repeat(model, overlap):
    a, b = prompt_of(40, 1), prompt_of(50, 1)
    # pages for 1.5 of the longer request: the second has to make room
    made = engine(model, seqs=2, pages=-(-110 * 3 // 2 // 16), max_model_len=128, overlap=overlap)
    out = run(made, [(0, greedy("a", a, 60)), (0, greedy("b", b, 60))])
    assert made.stats().preemptions >= 1
    assert tokens_of(out["a"]) == oracle(model, a, 60)
    assert tokens_of(out["b"]) == oracle(model, b, 60)
    assert made.stats().generated_tokens == 120


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", [1, 8, 31])
def test_d29_forced_preemption_changes_nothing(model, after, overlap):
    from leyden.types import Plan

    prompt = prompt_of(40, 1)
    made = engine(model, overlap=overlap)
    made.submit(greedy("a", prompt, 60, presence_penalty=0.5, repetition_penalty=1.2, logprobs=1))
    plain = run(engine(model), [(0, greedy("a", prompt, 60, presence_penalty=0.5, repetition_penalty=1.2))])["a"]
    deltas = []
    while made.busy:
        if len(tokens_of(deltas)) == after and made.scheduler.running and not made.stats().preemptions:
            made.scheduler._preempt(made.scheduler.running[0], Plan())
        deltas += made.step()
    made.check()
    assert made.stats().preemptions == 1
    assert tokens_of(deltas) == tokens_of(plain)


def test_d29_more_requests_than_slots(model):
    prompts = {f"r{i}": prompt_of(5 + i, 2) for i in range(20)}
    made = engine(model, seqs=2)
    for name, prompt in prompts.items():
        made.submit(greedy(name, prompt, 8))
    out = {name: [] for name in prompts}
    while made.busy:
        for delta in made.step():
            out[delta.request_id].append(delta)
        assert made.stats().running <= 2
    assert all(deltas[-1].finish_reason == "length" for deltas in out.values())
    for name in ("r0", "r7", "r19"):
        assert tokens_of(out[name]) == oracle(model, prompts[name], 8)


@pytest.mark.parametrize("overlap", [False, True])
def test_d29_cancel_storm_leaves_nothing_behind(model, overlap):
    made = random.Random(0)
    used = engine(model, seqs=4, pages=40, max_model_len=256, overlap=overlap)
    start = used.stats().slots_total, used.stats().pages_total
    alive: dict[str, int] = {}
    for i in range(200):
        used.submit(greedy(f"r{i}", prompt_of(1 + i % 60, i), 30))
        alive[f"r{i}"] = made.randrange(6)
        for name in [name for name, left in alive.items() if left == 0]:
            used.abort(name)
            del alive[name]
        alive = {name: left - 1 for name, left in alive.items()}
        used.step()
        used.check()
    for name in alive:
        used.abort(name)
    while used.busy:
        used.step()
    stats = used.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.slots_free + stats.snapshots, stats.pages_free + stats.pages_cached) == start
    used.scheduler.cache.clear()
    used.check()
    assert (used.stats().slots_free, used.stats().pages_free) == start
    prompt = prompt_of(33, 5)
    assert tokens_of(run(used, [(0, greedy("x", prompt))])["x"]) == oracle(model, prompt, N)


@pytest.mark.parametrize("overlap", [False, True])
def test_d29_the_fiftieth_request_is_answered_as_the_first(model, overlap):
    request = greedy("x", prompt_of(50), 40)
    fresh = run(engine(model, snapshots=4, overlap=overlap), [(0, request)])["x"]
    used = engine(model, seqs=3, snapshots=4, pages=60, max_model_len=128, overlap=overlap)
    run(used, [(i // 2, greedy(f"r{i}", prompt_of(3 + i, i), 9)) for i in range(49)])
    again = run(used, [(0, request)])["x"]
    assert tokens_of(again) == tokens_of(fresh) == oracle(model, prompt_of(50), 40)
    assert len(tokens_of(again)) == 40


def test_a_seed_gives_its_tokens_whatever_else_is_in_the_batch(model):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1234, max_tokens=30)
    prompt = prompt_of(20, 3)
    alone = tokens_of(run(engine(model), [(0, Request(id="x", prompt=prompt, params=params))])["x"])
    others = [(i, Request(id=f"o{i}", prompt=prompt_of(9 + i), params=SamplingParams(max_tokens=25))) for i in range(6)]
    mixed = run(
        engine(model, step_tokens=11, overlap=True), [*others, (3, Request(id="x", prompt=prompt, params=params))]
    )
    assert tokens_of(mixed["x"]) == alone
    other = SamplingParams(temperature=1.0, top_p=0.9, seed=1235, max_tokens=30)
    assert tokens_of(run(engine(model), [(0, Request(id="x", prompt=prompt, params=other))])["x"]) != alone


def test_logit_bias_allowed_tokens_and_min_tokens(model):
    prompt = prompt_of(10, 4)
    out = run(engine(model), [(0, greedy("x", prompt, 5, logit_bias={77: 1000.0}))])["x"]
    assert tokens_of(out) == [77] * 5
    out = run(engine(model), [(0, greedy("x", prompt, 20, allowed_token_ids=[5, 9, 300]))])["x"]
    assert set(tokens_of(out)) <= {5, 9, 300}
    stop = oracle(model, prompt, 1)[0]
    early = run(engine(model), [(0, greedy("x", prompt, 20, stop_token_ids=[stop]))])["x"]
    assert tokens_of(early) == [stop] and early[-1].finish_reason == "stop"
    late = run(engine(model), [(0, greedy("x", prompt, 20, stop_token_ids=[stop], min_tokens=6))])["x"]
    assert stop not in tokens_of(late)[:6] and len(tokens_of(late)) >= 6


def test_repetition_penalty_reaches_prompt_and_output(model):
    prompt = prompt_of(10, 4)
    out = tokens_of(run(engine(model), [(0, greedy("x", prompt, 40, repetition_penalty=1e6))])["x"])
    # a huge factor closes every token with a positive logit once it was seen, in the prompt or since
    assert len(set(out)) == len(out)
    assert not set(out) & set(prompt)


def test_logprobs_belong_to_the_raw_distribution(model):
    prompt = prompt_of(12, 6)
    request = greedy("x", prompt, 6, logprobs=3, logit_bias={7: 3.0})
    out = run(engine(model), [(0, request)])["x"]
    tokens = list(prompt)
    for delta in out:
        (entry,) = delta.logprobs
        with torch.inference_mode():
            from leyden.model.context import Context

            hidden, _ = model(torch.tensor(tokens), Context.packed([len(tokens)]))
            want = model.logits(hidden[-1]).log_softmax(-1)
        assert entry.token_id == delta.token_ids[0]
        assert entry.logprob == pytest.approx(float(want[entry.token_id]), abs=1e-4)
        assert entry.top_ids == want.topk(3).indices.tolist()
        assert entry.rank == int((want > want[entry.token_id]).sum()) + 1
        tokens += delta.token_ids


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs_cover_the_prompt_once(model, budget):
    from leyden.model.context import Context

    prompt = prompt_of(37, 7)
    out = run(engine(model, step_tokens=budget), [(0, greedy("x", prompt, 3, prompt_logprobs=2))])["x"]
    assert [delta.prompt_logprobs is not None for delta in out] == [True, False, False]
    got = out[0].prompt_logprobs
    with torch.inference_mode():
        hidden, _ = model(torch.tensor(prompt), Context.packed([len(prompt)]))
        want = model.logits(hidden).log_softmax(-1)
    assert got[0] is None and len(got) == len(prompt)
    for position in range(1, len(prompt)):
        entry = got[position]
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(want[position - 1, prompt[position]]), abs=1e-4)
        assert len(entry.top_ids) == 2


def test_requests_that_cannot_be_served_are_refused_and_hurt_nobody(model):
    made = engine(model, max_model_len=64)
    bad = [
        (greedy("x", prompt_of(64)), "prompt"),
        (greedy("x", []), "prompt"),
        (greedy("x", [TINY.vocab_size]), "prompt"),
        (greedy("x", [1], logit_bias={TINY.vocab_size: 1.0}), "logit_bias"),
        (greedy("x", [1], stop_token_ids=[-1]), "stop_token_ids"),
        (greedy("x", [1], logprobs=21), "logprobs"),
    ]
    for request, param in bad:
        with pytest.raises(RequestError) as error:
            made.submit(request)
        assert error.value.param == param
    with pytest.raises(RequestError, match="maximum context length is 64 tokens"):
        made.submit(bad[0][0])
    assert not made.busy
    out = run(made, [(0, greedy("y", prompt_of(60)))])["y"]
    assert len(tokens_of(out)) == 4 and out[-1].finish_reason == "length"


def test_a_step_that_raises_ends_its_requests_and_no_others(model, monkeypatch):
    made = engine(model)
    made.submit(greedy("a", prompt_of(5), 4))
    good = made.runner.run
    monkeypatch.setattr(made.runner, "run", lambda plan: (_ for _ in ()).throw(RuntimeError("no memory")))
    (delta,) = made.step()
    assert (delta.finish_reason, delta.request_id) == ("error", "a")
    monkeypatch.setattr(made.runner, "run", good)
    out = run(made, [(0, greedy("b", prompt_of(5), 4))])["b"]
    assert tokens_of(out) == oracle(model, prompt_of(5), 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_log_probabilities_of_chosen_tokens_take_the_place_of_the_top(model, overlap: bool):
    made = engine(model, overlap=overlap)
    every = SamplingParams(temperature=0, max_tokens=3, logprobs=512)
    some = SamplingParams(temperature=0, max_tokens=3, logprobs=0, logprob_token_ids=[9, 500, 3])
    made.max_logprobs = -1
    requests = [Request(id=id, prompt=[5, 6, 7], params=p) for id, p in (("every", every), ("some", some))]
    out = run(made, [(0, request) for request in requests])
    for full, few in zip(out["every"], out["some"], strict=True):
        whole, part = full.logprobs[0], few.logprobs[0]
        assert part.token_id == whole.token_id and part.top_ids == [9, 500, 3]
        table = dict(zip(whole.top_ids, whole.top_logprobs, strict=True))
        assert part.top_logprobs == pytest.approx([table[id] for id in part.top_ids], abs=1e-5)
