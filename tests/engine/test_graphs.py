"""Recorded steps: they are used, they notice what changes, and they give way where they cannot be."""

import subprocess
import sys

import pytest
import torch

from leyden import ops
from leyden.engine.graphs import Graphs
from leyden.ops.cpu import program
from leyden.types import Request, SamplingParams
from tests.engine.conftest import engine, oracle, run, tiny
from tests.engine.device import tokens_of

needs_kernels = pytest.mark.skipif(not program.available, reason="the kernels need a C compiler")


def request(name: str, n: int, max_tokens: int = 20, **params) -> Request:
    prompt = [(7 * i + n) % 500 for i in range(n)]
    return Request(id=name, prompt=prompt, params=SamplingParams(temperature=0, max_tokens=max_tokens, **params))


@needs_kernels
def test_steps_of_single_tokens_run_recorded(model, monkeypatch) -> None:
    made = engine(model, seqs=4, paced=False)  # no probes of a few tokens
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda tokens, ctx, *rest: calls.append(len(tokens)) or forward(tokens, ctx))
    arrivals = [(i * 3, request(f"r{i}", 5 + 11 * i, max_tokens=12 + 3 * i)) for i in range(4)]
    out = run(made, arrivals)
    recorded = sorted(count for _, count in made.runner.graphs._programs)
    assert set(recorded) >= {1, 2, 3}
    # the model itself saw prompts, and each number of single tokens once
    assert sorted(n for n in calls if n <= 4) == recorded
    for _, one in arrivals:
        assert tokens_of(out[one.id]) == oracle(model, one.prompt, one.params.max_tokens)


@needs_kernels
def test_weights_may_change_in_place(model) -> None:
    changed = tiny()
    made = engine(changed)
    before = tokens_of(run(made, [(0, request("a", 9))])["a"])
    with torch.no_grad():
        changed.lm_head.weight.copy_(tiny(seed=1).lm_head.weight)
    after = tokens_of(run(made, [(0, request("b", 9))])["b"])
    assert before == oracle(tiny(), request("a", 9).prompt, 20)
    assert after == oracle(changed, request("a", 9).prompt, 20) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_recorded_or_not_the_answer_is_the_same(dtype) -> None:
    model = tiny(dtype=dtype)
    plain = engine(model)
    plain.runner.graphs._records = False
    arrivals = [(0, request("a", 30, logprobs=2)), (2, request("b", 7)), (4, request("c", 1))]
    outs = [run(made, arrivals) for made in (engine(model), plain)]
    assert [tokens_of(outs[0][name]) for name in "abc"] == [tokens_of(outs[1][name]) for name in "abc"]


def test_the_reference_is_not_recorded(model) -> None:
    made = engine(model)
    with ops.using("reference"):
        run(made, [(0, request("a", 5))])
    assert not made.runner.graphs._programs


def test_a_model_that_is_not_all_kernels_runs_step_by_step() -> None:
    made = engine(tiny(dtype=torch.float16))  # products of fp16 are the reference's
    out = run(made, [(0, request("a", 5))])
    assert len(tokens_of(out["a"])) == 20
    assert not made.runner.graphs._programs


def test_inputs_are_those_of_the_step(model) -> None:
    """Page tables longer than those of the step before, slots in another order."""
    made = engine(model, seqs=3)
    assert isinstance(made.runner.graphs, Graphs)
    arrivals = [(0, request("a", 40, 60)), (10, request("b", 3, 10)), (25, request("c", 90, 30))]
    out = run(made, arrivals)
    for _, one in arrivals:
        assert tokens_of(out[one.id]) == oracle(model, one.prompt, one.params.max_tokens)


def test_who_has_a_gpu_never_compiles_the_kernels_of_the_cpu():
    """They are compiled when leyden.ops.cpu is imported, which an engine on another device does not do."""
    code = "import sys, leyden.engine.engine, leyden.bench.ladder; print([m for m in sys.modules if 'ops.cpu' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
