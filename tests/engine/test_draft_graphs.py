"""Recorded steps with drafts: they are used, whatever shares them, and leave what steps by themselves leave."""

import pytest
import torch

from leyden import ops
from leyden.model import draft_checkpoint
from leyden.ops.cpu import program
from leyden.spec.dflash import DFlash
from leyden.spec.mtp import MTP
from leyden.spec.schedule import Schedule
from leyden.testing.drafters import tiny as tiny_drafter
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


class Uneven(Schedule):
    """Tries 0, 1, 2 ... of the drafts in turns, so that rows of a step have unlike many."""

    turn = 0

    def lengths(self, drafter, confidence):
        self.turn += 1
        return [(self.turn + i) % (len(chances) + 1) for i, chances in enumerate(confidence)]


KINDS = {
    "dflash": ("dflash", {}),
    "dflash with windows": ("dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}),
    "dspark": ("dspark", {}),
    "dspark with a head": ("dspark", {"enable_confidence_head": True, "confidence_head_with_markov": False}),
    "dspark with a Markov head": ("dspark", {"enable_confidence_head": True, "confidence_head_with_markov": True}),
}


@pytest.mark.parametrize(("kind", "overlap"), [(kind, i % 2 == 0) for i, kind in enumerate(KINDS)])
def test_a_drafter_network_is_recorded_with_its_confidence(tmp_path, kind, overlap):
    """Drafts, confidence and what is learned for it are those of steps that are not recorded.

    (Nobody stops at a token: steps that are launched behind it learn a little different things.)
    """
    model, (method, keys) = tiny(), KINDS[kind]
    config = tiny_drafter(tmp_path, model.config, method, **keys)
    layers = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    made = []
    for _ in range(2):
        drafter = DFlash(draft_checkpoint.load(tmp_path, model).requires_grad_(False), model, 3, confident=True)
        options = {"schedule": Uneven([3], [(1, 9, 3)]), "shorten": True, "coupled": True, "paced": False}
        made.append(engine(model, seqs=5, drafter=drafter, draft_layers=layers, overlap=overlap, **options))
    recorded, slow = made
    slow.runner.draft_graphs.records = False
    plain = run(engine(model, seqs=5), arrivals()[:-1])
    said = [watched(each) for each in made]
    outs = [run(each, arrivals()[:-1]) for each in made]
    for name, deltas in plain.items():
        assert [tokens_of(out[name]) for out in outs] == [tokens_of(deltas)] * 2
    graphs = recorded.runner.draft_graphs
    assert {key[0] for key in graphs._drafts} == {"whole", "after"} and graphs._drafts.keys() <= graphs._programs.keys()
    assert not slow.runner.draft_graphs._programs and not recorded.stats().failed_drafts
    assert len(said[0]) == len(said[1]) > 30
    for (drafts, confidence), (same, expected) in zip(*said, strict=True):
        assert drafts == same
        assert len(drafts) == 0 or len(confidence) == len(drafts)
        torch.testing.assert_close(torch.tensor(confidence), torch.tensor(expected), atol=1e-4, rtol=1e-4)
    one, other = (each.runner.drafting._drafters[0]._learned for each in made)
    assert (one is None) == ("head" in kind)
    if one is not None:
        known = one._memory[2]
        assert torch.equal(known, other._memory[2])
        torch.testing.assert_close(one._memory * known, other._memory * known, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(one.weights, other.weights, atol=1e-3, rtol=1e-3)
        assert int(one._at) == int(other._at) > 50 and known.sum() > 20 and one.weights[0] != 0.5


def watched(made):
    """What its drafters will bring: (drafts, confidence) of every step."""
    found, launch = [], made.runner.run

    def run(*arguments):
        output = launch(*arguments)
        if output.drafts is not None:
            found.append(output.drafts.read())
        return output

    made.runner.run = run
    return found


def test_a_first_step_of_one_token_spoils_no_recording(tmp_path):
    """What is learned needs its tables, which come with the first step."""
    model = tiny()
    config = tiny_drafter(tmp_path, model.config, "dflash")
    layers = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    drafter = DFlash(draft_checkpoint.load(tmp_path, model).requires_grad_(False), model, 3, confident=True)
    made = engine(model, drafter=drafter, draft_layers=layers)
    assert tokens_of(run(made, [(0, greedy("a", [7], 9))])["a"]) == oracle(model, [7], 9)
    assert made.runner.draft_graphs._drafts and not made.stats().failed_drafts


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
