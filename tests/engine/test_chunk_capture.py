"""Prompt chunks as the CUDA graphs do them: tokens and rows filled up, lengths on the device, everything again.

Where there is no GPU a capture is a step by itself: the trial on the padding slot, and then the step each time.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.engine import chunk_capture
from leyden.engine.chunk_capture import CapturedChunks
from leyden.engine.engine import Engine
from leyden.model.nemotron import Nemotron
from leyden.ops.cpu import program
from leyden.spec.drafter import Draft, Heads, Pick, Seen
from leyden.testing.again import Again
from leyden.types import Request, SamplingParams
from tests.engine.conftest import engine, oracle, run
from tests.engine.device import tokens_of

pytestmark = pytest.mark.skipif(not program.available, reason="the references want the lengths of rows on the host")


@pytest.fixture(autouse=True)
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_capture, "Captured", Again)


def captured(model: Nemotron, **options: Any) -> Engine:
    """An engine in whose memory nothing is that nobody wrote."""
    made = engine(model, **{"step_tokens": 256, "pages": 400, "paced": False, **options})
    runner = made.runner
    for array in (runner.pool.kv, runner.pool.conv, runner.pool.ssm):
        array.fill_(torch.nan)
    runner.chunks = chunks = CapturedChunks(model, runner.pool, runner._taps, None)
    forward = chunks._forward

    def checked(form: tuple[int, int]) -> Tensor:
        starts = chunks._starts[form[1]].tolist()
        assert starts == sorted(starts) and starts[0] == 0 and starts[-1] == form[1], "kernels believe what stands here"
        return forward(form)

    chunks._forward = checked  # type: ignore[method-assign]
    return made


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 13 * i + 31 * seed) % 500 for i in range(n)]


def request(name: str, prompt: list[int], max_tokens: int = 6, **params: Any) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(temperature=0, max_tokens=max_tokens, **params))


def right(model: Nemotron, made: Engine, asked: list[tuple[int, Request]]) -> None:
    out = run(made, asked)
    for _, one in asked:
        assert tokens_of(out[one.id]) == oracle(model, one.prompt, one.params.max_tokens or 0), one.id


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_of_any_length(model: Nemotron, overlap: bool) -> None:
    made = captured(model, overlap=overlap)
    lens = (2, 16, 17, 63, 64, 65, 130, 127, 9, 16, 40, 31, 64, 128, 256, 255, 300, 3, 2, 90, 3)
    right(model, made, [(12 * i, request(str(i), prompt_of(n, i))) for i, n in enumerate(lens)])
    assert {size for _, size in made.runner.chunks._graphs} >= {2, 3, 12, 16, 32, 48, 128, 256}
    assert int(made.runner.pool.committed[0]) == 0, "the padding slot has no length"


def test_a_length_that_comes_once_is_not_captured(model: Nemotron) -> None:
    made = captured(model, prefix_caching=False)
    run(made, [(0, request("a", prompt_of(40), 1)), (3, request("b", prompt_of(70, 1), 1))])
    assert not made.runner.chunks._graphs and len(made.runner.chunks._met) == 2
    before = made.stats().recorded_steps
    run(made, [(0, request("c", prompt_of(39, 2), 1))])
    assert set(made.runner.chunks._graphs) == {(0, 48)} and made.stats().recorded_steps == before + 1


def test_several_chunks_in_a_step(model: Nemotron) -> None:
    made = captured(model, prefix_caching=False)
    lens = (20, 3, 41, 30), (45, 20), (1, 7, 60), (31, 31, 31), (50, 44), (90, 2), (10, 10, 10, 10, 10)
    asked = [(9 * i, n, f"{i} {j}") for i, some in enumerate(lens) for j, n in enumerate(some)]
    right(model, made, [(at, request(name, prompt_of(n, at + n))) for at, n, name in asked])
    assert {(0, 96), (0, 64), (8, 96)} & set(made.runner.chunks._graphs)


def test_behind_what_is_cached(model: Nemotron) -> None:
    """Turns of a conversation: a long prefix, and something new behind it."""
    made = captured(model, snapshots=8)
    text = prompt_of(100)
    for turn in range(6):
        one = request(str(turn), text, 8)
        out = tokens_of(run(made, [(0, one)])[one.id])
        assert out == oracle(model, text, 8)
        text = text + out + prompt_of(20 + turn, turn)
    assert made.stats().cached_tokens > 300
    assert made.runner.chunks._graphs


def test_answers_go_on_beside_chunks(model: Nemotron) -> None:
    made = captured(model, seqs=12)
    asked = [(i, request(f"a{i}", prompt_of(3 + i, i), 40)) for i in range(11)]
    asked += [(20 + 4 * i, request(f"b{i}", prompt_of(50 - i, i), 2)) for i in range(4)]
    asked += [(99 + 4 * i, request(f"c{i}", prompt_of(50 - i, i), 2)) for i in range(3)]
    right(model, made, asked)
    assert {beside for beside, _ in made.runner.chunks._graphs} == {0, 8, 32}


@pytest.mark.parametrize("period", [1, 4])
def test_states_that_are_written_now_and_then(model: Nemotron, period: int) -> None:
    made = captured(model, period=period)
    asked = [(4 * i, request(str(i), prompt_of(20 + i, i), 1 + 3 * (i % 5))) for i in range(3, 18)]
    right(model, made, asked)
    assert {beside for beside, _ in made.runner.chunks._graphs} == {8}


class Witness:
    """A drafter that remembers what it sees."""

    taps, width, lookahead, steady = (1, 4), 2, 0, True

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def observe(self, seen: Seen) -> None:
        self.seen.append([t.clone() for t in (seen.tokens, seen.following, seen.hidden, *seen.taps)])

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        return Draft(torch.zeros(len(heads.slots), count, dtype=torch.int64))


def test_drafters_see_the_chunk(model: Nemotron) -> None:
    asked = [(9 * i, request(str(i), prompt_of(50 + i % 2, i), 3)) for i in range(5)]
    one, other = Witness(), Witness()
    made, plain = captured(model, drafter=one), engine(model, drafter=other, step_tokens=256, pages=400, paced=False)
    right(model, made, asked)
    run(plain, asked)
    assert {size for _, size in made.runner.chunks._graphs} == {2, 3, 48}, "short ends of prompts, too"
    assert not made.stats().failed_drafts
    for found, wanted in zip(one.seen, other.seen, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True))


def test_what_no_graph_is_for(model: Nemotron) -> None:
    made = captured(model, seqs=5)
    scored = [(4 * i, request(f"s{i}", prompt_of(30, i), 1, prompt_logprobs=1)) for i in range(3)]
    five = [(20 + 9 * (i // 5), request(f"p{i}", prompt_of(40, i), 1)) for i in range(10)]
    run(made, scored + five)
    with ops.using("reference"):
        run(made, [(4 * i, request(f"r{i}", prompt_of(20, i), 1)) for i in range(3)])
    assert not made.runner.chunks._graphs


def test_without_memory_for_graphs_all_runs_without(model: Nemotron, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(step: Callable[[], Tensor], memory: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(chunk_capture, "Captured", full)
    made = captured(model)
    right(model, made, [(8 * i, request(str(i), prompt_of(30, i))) for i in range(3)])
    assert not made.runner.chunks._sizes


def test_graphs_are_for_contexts_that_hold_them(model: Nemotron) -> None:
    made = captured(model, max_model_len=96, page=16, prefix_caching=False)
    right(model, made, [(8 * i, request(str(i), prompt_of(n, i), 3)) for i, n in enumerate((91, 92, 80, 2, 3))])
    assert made.runner.chunks._sizes[-1] == 96 and set(made.runner.chunks._graphs) == {(0, 96)}
