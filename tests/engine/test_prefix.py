"""The prefix cache in the engine: it may save work, it may never change an answer."""

import pytest

from leyden.types import SamplingParams
from tests.engine import drafters
from tests.engine.conftest import engine, oracle, run
from tests.engine.device import tokens_of
from tests.engine.drafters import Scripted
from tests.engine.test_engine import greedy, prompt_of

P = prompt_of(32, 9)
N = 12


def ask(made, name, prompt, max_tokens=N, **changes):
    """(answer, cached prompt tokens) of one request; the engine's sums are checked after every step."""
    request = greedy(name, prompt, max_tokens)
    for key, value in changes.items():
        setattr(request, key, value)
    deltas = run(made, [(0, request)])[name]
    return tokens_of(deltas), deltas[0].cached_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_d27_hits_are_exact_and_answers_are_those_without_a_cache(model, overlap):
    made = engine(model, snapshots=8, overlap=overlap)
    prompts = [P + prompt_of(n, 9 + n) for n in (1, 2, 40)]
    prompts.append(prompts[0])
    got = [ask(made, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    assert [answer for answer, _ in got] == [oracle(model, prompt, N) for prompt in prompts]
    assert [cached for _, cached in got] == [0, 32, 32, 32]


@pytest.mark.parametrize("host", [(0, 0), (4, 20)])
def test_d27_shared_pages_and_states_are_never_written_again(model, host):
    made = engine(model, snapshots=8, host=host)
    ask(made, "r1", P + prompt_of(1, 10))
    cache, pool = made.scheduler.cache, made.runner.pool

    def shared() -> list[tuple[tuple, float, float]]:
        """What of the first prompt is kept: tokens, and the bytes of its pages and states, as sums."""
        found = []
        nodes, snapshots = cache.contents()
        for node in nodes:
            if node.page and list(node.tokens) in (P[:16], P[16:]):
                found.append((node.tokens, pool.kv[:, :, node.page].double().sum().item(), 0.0))
        for snapshot in snapshots:
            if snapshot.length == 32:
                sums = [array[:, snapshot.slot].double().sum().item() for array in pool.states]
                found.append((("state",), *sums))
        return sorted(found, key=str)

    before = shared()
    assert len(before) == 3
    for i, n in enumerate((2, 40, 1)):
        ask(made, f"again {i}", P + prompt_of(n, 9 + n))
        assert shared() == before


@pytest.mark.parametrize("evict", ["snapshots", "pages"])
def test_d27_a_hit_needs_both_pages_and_state(model, evict):
    made = engine(model, snapshots=8)
    cache = made.scheduler.cache
    prompt = P + prompt_of(40, 11)
    ask(made, "a", P + [1])
    if evict == "snapshots":
        for snapshot in list(cache._snapshots):
            cache._drop(snapshot)
    else:
        cache.clear()
    answer, cached = ask(made, "b", prompt)
    assert answer == oracle(model, prompt, N)
    assert cached == 0


def test_the_third_sighting_finds_the_fork_of_the_first_two(model):
    made = engine(model, snapshots=8)
    tails = [prompt_of(40, 20 + i) for i in range(3)]
    cached = [ask(made, f"r{i}", P * 2 + tail)[1] for i, tail in enumerate(tails)]
    assert cached == [0, 0, 64]


@pytest.mark.parametrize("overlap", [False, True])
def test_d27_a_conversation_goes_on_where_its_answer_ended(model, overlap):
    made = engine(model, snapshots=8, overlap=overlap)
    prompt, known = prompt_of(40, 12), 0
    for turn in range(10):
        answer, cached = ask(made, f"t{turn}", prompt)
        assert answer == oracle(model, prompt, N)
        assert cached == known
        known = len(prompt) + N - 1  # the last token was never run
        prompt = prompt + answer + prompt_of(20, 30 + turn)


def test_a_stop_token_leaves_the_state_behind_it(model):
    prompt = prompt_of(40, 12)
    stop = oracle(model, prompt, 6)[-1]
    for overlap in (False, True):
        made = engine(model, snapshots=8, overlap=overlap)
        request = greedy("a", prompt, 30, stop_token_ids=[stop])
        answer = tokens_of(run(made, [(0, request)])["a"])
        again = prompt + answer + prompt_of(9, 13)
        got, cached = ask(made, "b", again)
        assert got == oracle(model, again, N)
        # with overlap the step behind the stop token has run already, and is not wasted
        assert cached == len(prompt) + len(answer) - (not overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_d27_interleaved_conversations_in_a_pool_too_small_for_them(model, overlap):
    made = engine(model, seqs=3, snapshots=4, pages=24, max_model_len=160, overlap=overlap)
    prompts = {i: prompt_of(20 + i, 40) for i in range(30)}
    for turn in range(2):
        arrivals = [(i // 3, greedy(f"{turn}.{i}", prompts[i], 6)) for i in prompts]
        out = run(made, arrivals)
        for i, prompt in prompts.items():
            answer = tokens_of(out[f"{turn}.{i}"])
            assert answer == oracle(model, prompt, 6)
            prompts[i] = prompt + answer + prompt_of(10, 50 + i)
    assert made.stats().snapshots <= 4 + 3


def test_marks_keep_the_state_where_prompts_part(model):
    made = engine(model, snapshots=8)
    system, user = prompt_of(100, 60), prompt_of(45, 61)
    ask(made, "a", system + user + [3, 4, 5], marks=[100, 145])
    assert ask(made, "b", system + prompt_of(33, 62))[1] == 100
    assert ask(made, "c", system + user + [9, 9])[1] == 145


def test_salts_and_prompt_logprobs_do_not_read_what_others_left(model):
    made = engine(model, snapshots=8)
    ask(made, "a", P + [1], cache_salt="x")
    assert ask(made, "b", P + [1, 2])[1] == 0
    assert ask(made, "c", P + [1, 2], cache_salt="x")[1] == 32
    request = greedy("d", P + [1, 2], 3, prompt_logprobs=1)
    request.cache_salt = "x"
    (first, *_) = run(made, [(0, request)])["d"]
    assert first.cached_tokens == 0 and len(first.prompt_logprobs) == 34


def test_sampled_answers_with_penalties_survive_a_hit(model):
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.3, seed=5, max_tokens=20)
    prompt = prompt_of(70, 70)
    request = greedy("a", prompt)
    request.params = params
    alone = tokens_of(run(engine(model), [(0, request)])["a"])
    made = engine(model, snapshots=8)
    ask(made, "first", prompt[:64] + [1])
    deltas = run(made, [(0, request)])["a"]
    assert deltas[0].cached_tokens == 64
    assert tokens_of(deltas) == alone


def test_a_preempted_request_finds_its_own_state_again(model):
    a, b = prompt_of(40, 1), prompt_of(50, 1)
    made = engine(model, seqs=2, snapshots=4, pages=-(-110 * 3 // 2 // 16), max_model_len=128)
    out = run(made, [(0, greedy("a", a, 60)), (0, greedy("b", b, 60))])
    assert made.stats().preemptions
    assert tokens_of(out["a"]) == oracle(model, a, 60)
    assert tokens_of(out["b"]) == oracle(model, b, 60)


def test_switched_off_nothing_is_kept(model):
    made = engine(model, snapshots=0, prefix_caching=False)
    ask(made, "a", P + [1])
    assert ask(made, "b", P + [1, 2])[1] == 0
    stats = made.stats()
    assert (stats.slots_free, stats.pages_free, stats.snapshots) == (stats.slots_total, stats.pages_total, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_left_the_device_comes_back_from_host_memory(model, overlap):
    # the device has room for one conversation at a time
    made = engine(model, seqs=2, snapshots=1, pages=16, max_model_len=160, host=(12, 80), overlap=overlap)
    prompts = {i: prompt_of(60 + i, 80) for i in range(4)}
    for turn in range(3):
        for i, prompt in prompts.items():
            answer, cached = ask(made, f"{turn}.{i}", prompt, 8)
            assert answer == oracle(model, prompt, 8)
            assert (cached == len(prompt) - 11) if turn else (cached == 0)
            prompts[i] = prompt + answer + prompt_of(10, 90 + i)
    stats, cache = made.stats(), made.scheduler.cache
    assert stats.host_slots_total - stats.host_slots_free == cache.far_snapshots > 0
    assert stats.host_pages_total == 80 and stats.host_pages_free < 80
    assert stats.moved["states_in"] == stats.hits["host"] > 0 and stats.moved["states_out"] >= cache.far_snapshots
    assert stats.moved["pages_out"] > stats.moved["pages_in"] > 0
    made.scheduler.cache.clear()
    made.check()
    assert made.scheduler.cache.far_snapshots == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_d27_interleaved_conversations_with_a_tier_too_small_for_them(model, overlap):
    made = engine(model, seqs=3, snapshots=2, pages=20, max_model_len=160, host=(20, 70), overlap=overlap, paced=False)
    prompts = {i: prompt_of(20 + i, 40) for i in range(16)}
    for turn in range(3):
        out = run(made, [(i // 3, greedy(f"{turn}.{i}", prompts[i], 6)) for i in prompts])
        for i, prompt in prompts.items():
            answer = tokens_of(out[f"{turn}.{i}"])
            assert answer == oracle(model, prompt, 6)
            prompts[i] = prompt + answer + prompt_of(10, 50 + i)
    assert made.stats().cached_tokens


@pytest.mark.parametrize("rule", ["perfect", "half", "wrong"])
@pytest.mark.parametrize("host", [(0, 0), (12, 90)])
def test_d27_with_three_drafts_a_step(model, host, rule, tmp_path):
    """Conversations in too little room, with drafts, with and without a tier, and in a second process."""
    prompts = {i: prompt_of(30 + 9 * i, 40) for i in range(4)}
    texts, turns = [], []
    for _ in range(3):
        answers = {i: oracle(model, prompt, 8) for i, prompt in prompts.items()}
        turns.append((prompts, answers))
        texts += [prompts[i] + answers[i] for i in prompts]
        prompts = {i: prompts[i] + answers[i] + prompt_of(10, 70 + i) for i in prompts}
    sizes = {"seqs": 2, "snapshots": 2, "pages": 26, "max_model_len": 160, "host": host, "cache_dir": str(tmp_path)}
    drafter = Scripted(3, texts, getattr(drafters, rule), 2)
    made = engine(model, drafter=drafter, overlap=True, **sizes)
    for number, (asked, answers) in enumerate(turns):
        if number == 2:
            made.close()
            made = engine(model, drafter=drafter, **sizes)
        out = run(made, [(0, greedy(f"{number}.{i}", prompt, 8)) for i, prompt in asked.items()])
        assert {i: tokens_of(out[f"{number}.{i}"]) for i in asked} == answers
    assert made.stats().cached_tokens or not host[0]
