"""Recorded steps with drafts: they are used, whatever shares them, and leave what steps by themselves leave."""

import pytest
import torch

from leyden import ops
from leyden.ops.cpu import program
from leyden.spec.mtp import MTP
from leyden.types import Request, SamplingParams
from tests.engine import drafters
from tests.engine.conftest import engine, oracle, run, tiny
from tests.engine.device import tokens_of
from tests.engine.test_drafts import SAMPLED, drafter_keys
from tests.engine.test_engine import greedy, prompt_of

pytestmark = pytest.mark.skipif(not program.available, reason="the kernels need a C compiler")


@pytest.fixture(scope="module")
def model():
    return tiny(mtp=True)


def arrivals():
    """Alone at first, then with others of all kinds, which end at different times."""
    wishes = [{"temperature": 0}, *SAMPLED.values(), {"stop_token_ids": list(range(0, 512, 9))}]
    return [
        (
            9 * i if i < 3 else 30 + i % 4,
            Request(
                id=f"r{i}",
                prompt=prompt_of(3 + 5 * i, 8),
                params=SamplingParams(**({"seed": i, "max_tokens": 11 + 3 * i} | wish)),
            ),
        )
        for i, wish in enumerate(wishes)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_recorded_or_not_the_answer_is_the_same(model, width, overlap, monkeypatch):
    plain = run(engine(model, seqs=5), arrivals())
    made, slow = (engine(model, seqs=5, drafter=MTP(model, width), overlap=overlap) for _ in range(2))
    slow.runner.draft_graphs.records = False
    outs = [run(e, arrivals()) for e in (made, slow)]
    for name, deltas in plain.items():
        assert [tokens_of(out[name]) for out in outs] == [tokens_of(deltas)] * 2
    kinds = {(key[0], key[1]) for key in made.runner.draft_graphs._programs}
    assert kinds >= {("whole", 1), ("forward", 4), ("after", 4)} and not slow.runner.draft_graphs._programs
    assert not made.stats().failed_drafts and sum(made.stats().accepted_tokens) == sum(slow.stats().accepted_tokens)
    # the same twice: then nothing but the prompt is run by the model itself
    run(made, [(0, greedy("first", prompt_of(31), 30))])
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda tokens, *more: calls.append(len(tokens)) or forward(tokens, *more))
    again = run(made, [(0, greedy("again", prompt_of(31, 1), 30))])["again"]
    monkeypatch.undo()
    assert tokens_of(again) == oracle(model, prompt_of(31, 1), 30)
    assert calls == [31]


@pytest.mark.parametrize("overlap", [False, True])
def test_p14_the_keys_of_the_drafter_are_those_of_the_text(model, overlap):
    prompt = prompt_of(37, 2)
    made = engine(model, drafter=MTP(model, 3), overlap=overlap)
    made.submit(greedy("other", prompt_of(11, 2), 60))
    made.submit(greedy("a", prompt, 60))
    got = []
    while len(got) < 40:
        got += [t for delta in made.step() if delta.request_id == "a" for t in delta.token_ids]
    assert any(key[0] == "whole" and key[1] == 2 for key in made.runner.draft_graphs._programs)
    (slot,) = [s.slot for s in made.scheduler.running if s.request.id == "a"]
    keys = drafter_keys(made, slot)
    text = (prompt + oracle(model, prompt, 60))[: keys.shape[1] + 1]
    scratch = engine(model, step_tokens=512, drafter=MTP(model, 3), prefix_caching=False)
    scratch.submit(greedy("b", text, 2))
    scratch.step()
    want = drafter_keys(scratch, scratch.scheduler.running[0].slot)[:, : keys.shape[1]]
    torch.testing.assert_close(keys, want, atol=1e-4, rtol=1e-4)


def test_a_drafter_that_is_not_all_kernels_drafts_by_itself(model):
    answer = oracle(model, prompt_of(17), 30)
    made = engine(model, drafter=drafters.Scripted(4, [prompt_of(17) + answer], drafters.half))
    assert tokens_of(run(made, [(0, greedy("a", prompt_of(17), 30))])["a"]) == answer
    graphs = made.runner.draft_graphs
    assert graphs._programs and not graphs._drafts and graphs.records
    assert sum(made.stats().accepted_tokens) > 10 and not made.stats().failed_drafts


def test_who_cannot_record_the_end_of_a_step_does_not_sample_twice(model, monkeypatch):
    """Penalties and banned words are tables of the sampler, which move on with every token it draws."""
    wish = {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "banned": [[7, 8], [9]]}
    asked = [(0, Request(id="a", prompt=prompt_of(9), params=SamplingParams(max_tokens=30, **wish)))]
    texts = []
    for records in (True, False):
        made = engine(model, drafter=MTP(model, 3))
        graphs, reach = made.runner.draft_graphs, made.runner.pool.reach
        graphs.records = records
        monkeypatch.setattr(made.runner.pool, "reach", lambda slots, at, reach=reach: reach(slots, at.tolist()))
        texts.append(tokens_of(run(made, asked)["a"]))
        assert not graphs.records and [key[0] for key in graphs._programs] == ["forward"] * records
    assert texts[0] == texts[1] and len(texts[0]) == 30


def test_the_end_of_the_context_is_not_recorded(model):
    """Rows would reach beyond the page tables."""
    prompt = prompt_of(17)
    for longest in range(30, 35):
        made = engine(model, max_model_len=longest, pages=3, drafter=MTP(model, 3))
        assert tokens_of(run(made, [(0, greedy("a", prompt, 40))])["a"]) == oracle(model, prompt, longest - 17)


def test_the_reference_is_not_recorded(model):
    made = engine(model, drafter=MTP(model, 3))
    with ops.using("reference"):
        run(made, [(0, greedy("a", prompt_of(5), 9))])
    assert not made.runner.draft_graphs._programs and made.stats().drafts
