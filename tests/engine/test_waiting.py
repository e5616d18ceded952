"""States that single-token steps write now and then: nobody finds one that is behind, and the text is the same."""

import pytest
import torch

from leyden.cache.saved import NAME
from leyden.model.nemotron import Nemotron
from leyden.spec.mtp import MTP
from leyden.types import Request, SamplingParams
from tests.engine.conftest import engine, oracle, run, tiny
from tests.engine.device import tokens_of

N = 60


def lazy(model: Nemotron, period: int = 16, **options):
    made = engine(model, period=period, **options)
    assert made.runner.pool.recent.shape[2] == period - 1
    return made


def greedy(name: str, prompt: list[int], n: int = N, **more) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(temperature=0, max_tokens=n), **more)


def prompt_of(n: int, seed: int) -> list[int]:
    return [(13 * i + 29 * seed + i * i) % 500 for i in range(n)]


def count_folds(made, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots were folded early, call by call."""
    folded: list[int] = []
    before = made.runner.model.fold
    monkeypatch.setattr(made.runner.model, "fold", lambda pool, slots: folded.append(len(slots)) or before(pool, slots))
    return folded


@pytest.mark.parametrize("overlap", [False, True])
def test_the_text_is_the_same(model, overlap, monkeypatch):
    """Rows that begin and end at other steps, beside prompts in chunks."""
    arrivals = [(9 * i, greedy(f"r{i}", prompt_of(1 + 30 * i, i), 20 + 13 * i)) for i in range(4)]
    made = lazy(model, step_tokens=24, overlap=overlap)
    folded = count_folds(made, monkeypatch)
    out = run(made, arrivals)
    for _, one in arrivals:
        assert tokens_of(out[one.id]) == oracle(model, one.prompt, one.params.max_tokens)
    assert not folded  # nobody came back


@pytest.mark.parametrize("host", [(0, 0), (8, 100)])
def test_conversations_go_on_from_where_they_ended(model, host, monkeypatch):
    made = lazy(model, seqs=2, snapshots=3 if host[0] == 0 else 0, host=host)
    folded = count_folds(made, monkeypatch)
    prompts = {name: prompt_of(50, ord(name)) for name in "ab"}
    for turn in range(3):
        for name, prompt in prompts.items():
            deltas = run(made, [(0, greedy("x", prompt, 21))])["x"]
            assert tokens_of(deltas) == oracle(model, prompt, 21)
            assert deltas[0].cached_tokens == (len(prompt) - 4 if turn else 0)  # but for the last token and what is new
            prompts[name] = prompt + tokens_of(deltas) + prompt_of(3, turn)
    assert len(folded) >= 4


def test_a_snapshot_of_a_prompt_that_ends_with_a_single_token(model):
    """A mark behind one token: that token waits when the state is to be kept."""
    made = lazy(model, snapshots=4, step_tokens=33)
    prompt = prompt_of(60, 3)
    first = greedy("a", prompt, 10, marks=[34])
    assert tokens_of(run(made, [(0, first)])["a"]) == oracle(model, prompt, 10)
    other = prompt[:34] + prompt_of(20, 4)
    deltas = run(made, [(0, greedy("b", other, 10))])["b"]
    assert deltas[0].cached_tokens == 34 and tokens_of(deltas) == oracle(model, other, 10)


def test_slots_that_others_had_before(model):
    """What waits beside a state goes with it: neither a new sequence of one token nor a snapshot finds any of it."""
    made = lazy(model, seqs=1, snapshots=1)
    for n in (30, 20, 1):
        assert tokens_of(run(made, [(0, greedy("a", prompt_of(n, n), 9))])["a"]) == oracle(model, prompt_of(n, n), 9)
    prompt = prompt_of(60, 3)
    run(made, [(0, greedy("b", prompt, 10, marks=[34]))])  # the snapshot takes the slot in which "a" ended
    other = prompt[:34] + prompt_of(20, 4)
    deltas = run(made, [(0, greedy("c", other, 10))])["c"]
    assert deltas[0].cached_tokens == 34 and tokens_of(deltas) == oracle(model, other, 10)


def test_preempted_sequences(model):
    made = lazy(model, seqs=4, pages=14, page=8, max_model_len=96)
    arrivals = [(0, greedy(f"r{i}", prompt_of(9 + i, i), 50)) for i in range(4)]
    out = run(made, arrivals)
    assert made.stats().preemptions > 2
    for _, one in arrivals:
        assert tokens_of(out[one.id]) == oracle(model, one.prompt, 50)


def test_drafts_that_come_and_go(monkeypatch):
    """Steps with and without drafts in turn; tokens that wait are in the state before guesses are looked at."""
    model = tiny(mtp=True)
    made = lazy(model, drafter=MTP(model, 2))
    folded = count_folds(made, monkeypatch)
    step = 0

    def choose(rows: int) -> tuple[int, int]:
        nonlocal step
        step += 1
        return 0, 2 if step % 12 > 8 else 0

    monkeypatch.setattr(made.scheduler._schedule, "choose", choose)
    arrivals = [(0, greedy("a", prompt_of(30, 1))), (7, greedy("b", prompt_of(11, 2)))]
    out = run(made, arrivals)
    for _, one in arrivals:
        assert tokens_of(out[one.id]) == oracle(model, one.prompt, N)
    assert len(folded) > 3 and made.stats().drafted_tokens


def test_the_saved_cache(model, tmp_path):
    made = lazy(model, snapshots=4, cache_dir=str(tmp_path))
    prompt = prompt_of(40, 5)
    text = tokens_of(run(made, [(0, greedy("a", prompt, 21))])["a"])
    made.close()
    assert (tmp_path / NAME).exists()
    again = engine(model, snapshots=4, cache_dir=str(tmp_path))  # which writes each state: the file is the same
    longer = prompt + text + [7]
    deltas = run(again, [(0, greedy("b", longer, 21))])["b"]
    assert deltas[0].cached_tokens == len(longer) - 2 and tokens_of(deltas) == oracle(model, longer, 21)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_16_bits_do_not_depend_on_who_else_runs(model, dtype):
    """Nor on when they came, nor on slots: states are rounded at fixed positions, with dice of their own."""
    half = {"ssm_dtype": dtype, "rounds": 5}
    alone = run(lazy(model, **half), [(0, greedy("a", prompt_of(20, 1)))])["a"]
    others = [(i, greedy(f"o{i}", prompt_of(5 + 3 * i, i), 15)) for i in range(5)]
    beside = run(lazy(model, **half), [*others, (6, greedy("a", prompt_of(20, 1)))])["a"]
    assert tokens_of(alone) == tokens_of(beside) and len(tokens_of(alone)) == N
