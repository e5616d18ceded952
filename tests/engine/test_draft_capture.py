"""Steps with drafts as the CUDA graphs do them: rows and drafts filled up, tables on the device, everything again.

Where there is no GPU a capture is a step by itself: the trial on the padding slot, and then the step each time.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.engine import capture, draft_capture
from leyden.engine.draft_capture import CapturedDraftGraphs
from leyden.engine.engine import Engine
from leyden.model import draft_checkpoint
from leyden.model.nemotron import Nemotron
from leyden.spec.dflash import DFlash
from leyden.spec.mtp import MTP
from leyden.spec.ngram import NGram
from leyden.spec.synthetic import Synthetic
from leyden.testing import drafters as testing
from leyden.testing.again import Again
from leyden.types import Request, SamplingParams
from tests.engine import drafters
from tests.engine.conftest import engine, run, tiny
from tests.engine.device import tokens_of
from tests.engine.test_draft_graphs import arrivals
from tests.engine.test_engine import greedy, prompt_of


@pytest.fixture(scope="module")
def model() -> Nemotron:
    return tiny(mtp=True)


@pytest.fixture(autouse=True)
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_capture, "Captured", Again)


def drafter(method: str, model: Nemotron, folder: Path) -> Any:
    if method == "mtp":
        return MTP(model, 3)
    if method == "ngram":
        return NGram(3, 1, 3)
    kind, _, more = method.partition(" ")
    testing.tiny(folder, model.config, kind, layout="nvfp4" if more == "nvfp4" else "bf16")
    return DFlash(draft_checkpoint.load(folder, model), model, 3, confident=more == "confident")


def captured(model: Nemotron, drafter: Any, sizes: tuple[int, ...] = (2, 4, 8), **options: Any) -> Engine:
    draft = options.pop("draft", None)
    made = engine(model, drafter=drafter, **options) if draft is None else shaped(model, drafter, draft, **options)
    runner = made.runner
    assert runner.drafting is not None
    runner.draft_graphs = CapturedDraftGraphs(model, runner.pool, runner.sampler, runner.drafting, sizes)
    return made


def shaped(model: Nemotron, drafter: Any, layers: tuple[int, int, int], **options: Any) -> Engine:
    """An engine with pages for the keys of a drafter network."""
    made = engine(model, drafter=drafter, **options)
    pool = made.runner.pool
    pool.draft = torch.full((layers[0], 2, pool.shape.pages, pool.shape.page, *layers[1:]), 1e3)
    return made


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["mtp", "ngram", "dflash", "dspark", "dspark nvfp4", "dspark confident"])
def test_the_answers_are_those_without_drafts(model, method, overlap, tmp_path):
    plain = run(engine(model, seqs=5), arrivals())
    of = drafter(method, model, tmp_path)
    made = captured(model, of, seqs=5, overlap=overlap, draft=(2, 2, 16) if isinstance(of, DFlash) else None)
    out = run(made, arrivals())
    assert {name: tokens_of(deltas) for name, deltas in out.items()} == {n: tokens_of(d) for n, d in plain.items()}
    graphs, stats = made.runner.draft_graphs, made.stats()
    assert not stats.failed_drafts and stats.drafted_tokens
    assert bool(graphs._drafts) == of.steady == (method != "dspark confident")
    kinds = {(key[0], key[1]) for key in graphs._programs}
    assert kinds >= {("whole", 2), ("forward", 4), ("after", 4)} and {size for _, size in kinds} <= {2, 4, 8}
    assert int(made.runner.pool.committed[0]) == 0, "the padding slot has no length"


def test_drafts_are_kept_as_often_as_without_graphs(model):
    asked = [(0, greedy(f"{n}", prompt_of(n), 40)) for n in (5, 17, 32)]
    made, eager = captured(model, MTP(model, 3)), engine(model, drafter=MTP(model, 3))
    eager.runner.draft_graphs.records = False
    run(made, asked), run(eager, asked)
    assert made.stats().accepted_tokens == eager.stats().accepted_tokens
    # prompts aside, one form of step: what ends of answers cut off is filled up
    assert {key[:3] for key in made.runner.draft_graphs._programs} <= {("whole", n, d) for n in (2, 4) for d in (0, 3)}


def test_what_fills_a_step_up_is_written_nowhere(model):
    """Page tables hold what a slot had before: pages that are another's now."""
    made = captured(model, MTP(model, 3), sizes=(8,), seqs=3, pages=24, max_model_len=128)
    asked = [(3 * i, greedy(f"{i}", prompt_of(3 + 7 * (i % 5), i), 30 - 3 * (i % 4))) for i in range(12)]
    plain = run(engine(model, seqs=3, pages=24, max_model_len=128), asked)
    out = run(made, asked)
    assert {name: tokens_of(deltas) for name, deltas in out.items()} == {n: tokens_of(d) for n, d in plain.items()}


def test_acceptance_by_decree_is_part_of_the_graph(model):
    made = captured(model, MTP(model, 3))
    made.runner.sampler.decree = Synthetic((1.0, 1.0, 0.0), 0, "cpu")
    deltas = run(made, [(0, greedy("a", prompt_of(17), 31))])["a"]
    assert {key[0] for key in made.runner.draft_graphs._programs} == {"whole"}
    assert [len(delta.token_ids) for delta in deltas] == [1, *[3] * 10]


def test_a_drafter_that_fails_costs_its_drafts(model):
    texts = [[0]]
    made = captured(model, drafters.Scripted(4, texts, lambda *_: 1 // 0))
    made.runner.draft_graphs._drafters_record = True  # as if it had said that it is steady
    plain = run(engine(model), [(0, greedy("a", prompt_of(17), 20))])
    assert tokens_of(run(made, [(0, greedy("a", prompt_of(17), 20))])["a"]) == tokens_of(plain["a"])
    assert made.stats().failed_drafts and not made.runner.draft_graphs._drafters_record


def test_more_rows_than_the_largest_graph_run_one_by_one(model):
    made = captured(model, MTP(model, 1), sizes=(1, 2))
    asked = [(0, Request(id=f"{i}", prompt=prompt_of(5 + i), params=SamplingParams(temperature=0, max_tokens=9)))
             for i in range(4)]  # fmt: skip
    plain = run(engine(model), asked)
    out = run(made, asked)
    assert {name: tokens_of(deltas) for name, deltas in out.items()} == {n: tokens_of(d) for n, d in plain.items()}


def test_tensors_are_as_before_behind_a_trial():
    a, b = torch.arange(3), torch.ones(2)
    with capture.padded(a, b[:1]):
        assert not a.any() and b.tolist() == [0, 1]
    assert a.tolist() == [0, 1, 2] and b.tolist() == [1, 1]
