"""The drafters in the engine: the same answers, in as many steps as drafting on the finished answers says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leyden.cache.pool import PoolShape
from leyden.config.engine import EngineConfig
from leyden.config.speculative import SpeculativeConfig
from leyden.engine.engine import Engine, _speculation
from leyden.engine.memory import Split
from leyden.model.nemotron import Nemotron
from leyden.spec.load import load, room
from leyden.testing import checkpoints, drafters
from leyden.train.acceptance import Acceptance, acceptance
from leyden.train.batches import Corpus
from leyden.train.drafter import DrafterOptions, DrafterTrainer
from leyden.train.drafting import draft_acceptance
from leyden.train.trainer import Options, Trainer
from leyden.types import Request, SamplingParams
from tests.engine.conftest import run
from tests.engine.device import tokens_of
from tests.train.examples import CONFIG, corpus, model

DATA = corpus(8, longest=30)
DATA = replace(DATA, tokens=np.minimum(DATA.tokens, CONFIG.vocab_size - 2))  # without the token that stands for masks
METHODS = ["mtp", "dflash", "dspark", "ngram"]
WIDTH, LENGTH, PAGE = 3, 24, 4


@pytest.fixture(scope="module")
def target() -> Nemotron:
    """Half learned: some drafts are right, some are not."""
    trainer = Trainer(model(), DATA, Options(steps=60, batch_tokens=200, lr=1e-2, warmup=5, optimizer="muon"))
    for _ in range(25):
        trainer.step()
    return trainer.model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folders(target: Nemotron, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters that were trained for a moment."""
    found = {}
    for method in ("dflash", "dspark"):
        options: dict[str, Any] = {"block_size": WIDTH + 1, "taps": 2, "markov_rank": 8, "window": 12, "lr": 1e-2}
        options |= {"batch_tokens": 200, "warmup": 2, "steps": 60, "mask_token_id": CONFIG.vocab_size - 1}
        trainer = DrafterTrainer(target, DATA, DrafterOptions(method=method, **options))
        for _ in range(40):
            trainer.step()
        found[method] = tmp_path_factory.mktemp(method)
        trainer.save(found[method], 2**30)
    return found


def configured(method: str, folders: dict[str, Path], **keys: Any) -> SpeculativeConfig:
    keys |= {"model": str(folders[method])} if method in folders else {}
    keys |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
    raw = {"method": method, "num_speculative_tokens": WIDTH} | keys
    return SpeculativeConfig.from_dict(raw).settle(CONFIG, "target")


def engine(
    target: Nemotron,
    config: SpeculativeConfig | None = None,
    step_tokens: int = 16,
    kv_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Engine:
    shape = PoolShape(
        slots=9,
        pages=150,
        page=PAGE,
        max_model_len=96,
        kv_dtype=kv_dtype,
        conv_dtype=torch.float32,
        ssm_dtype=torch.float32,
    )
    if config is not None:
        drafters = load(config, target)
        shape = replace(shape, draft=room(config, target.config))
        options |= {"drafters": drafters} | _speculation(config, drafters)
    return Engine(target, Split(shape, 8, step_tokens, slot_bytes=0, page_bytes=0), **options)


def request(name: str, prompt: list[int], **params: Any) -> Request:
    settings = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True} | params
    return Request(id=name, prompt=prompt, params=SamplingParams(**settings))


def requests(**params: Any) -> list[tuple[int, Request]]:
    """The beginnings of the texts that were learned, arriving one after the other."""
    spans = [DATA.tokens[a:b][:8].tolist() for a, b in zip(DATA.starts, DATA.starts[1:], strict=False)]
    return [(2 * i, request(f"{i}", prompt[: 4 + i % 5], seed=i, **params)) for i, prompt in enumerate(spans)]


def answers(made: Engine, **params: Any) -> dict[str, list[int]]:
    return {name: tokens_of(deltas) for name, deltas in run(made, requests(**params)).items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_are_the_same_with_every_drafter(
    target: Nemotron, folders: dict[str, Path], method: str, temperature: float
):
    expected = answers(engine(target), temperature=temperature)
    for sampling, overlap in (("greedy", False), ("probabilistic", True)):
        made = engine(target, configured(method, folders, draft_sample_method=sampling), overlap=overlap)
        assert answers(made, temperature=temperature) == expected
        stats = made.stats()
        assert not stats.failed_drafts and 0 < sum(stats.accepted_tokens) < stats.drafted_tokens


def test_the_number_of_drafts_follows_the_load(target: Nemotron, folders: dict[str, Path]):
    """By ranges, by what is learned with one drafter and with several, by confidence: the text is the same."""
    expected = answers(engine(target))
    ways: list[tuple[str, dict[str, Any]]] = [
        ("mtp", {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 5, 1], [6, 9, 0]]}),
        ("dspark", {"enable_adaptive_verification": True}),
        ("auto", {"model": str(folders["dspark"]), "enable_adaptive_verification": True}),
    ]
    for method, keys in ways:
        for overlap in (False, True):
            made = engine(target, configured(method, folders, **keys), overlap=overlap)
            choices = watched(made)
            assert answers(made) == expected and not made.stats().failed_drafts
            stats = made.stats()
            assert 0 < sum(stats.accepted_tokens) <= stats.drafted_tokens
            which, counts = {which for which, n in choices if n}, {n for _, n in choices}
            assert which == ({0, 1} if method == "auto" else {0})
            assert counts >= ({0, 1, 3} if method == "mtp" else {0, 3})


def watched(made: Engine) -> list[tuple[int, int]]:
    """What the schedule will choose."""
    schedule, choices = made.scheduler._schedule, []
    choose = schedule.choose
    schedule.choose = lambda running: choices.append(choose(running)) or choices[-1]  # type: ignore[method-assign,func-returns-value]
    return choices


@pytest.mark.parametrize("overlap", [False, True])
def test_acceptance_by_decree(target: Nemotron, folders: dict[str, Path], overlap: bool):
    """Rates are met whatever the target says, and every number says that they are not its own."""
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5, 0.1]}
    made = engine(target, configured("mtp", folders, **rates), overlap=overlap)
    got = run(made, [(0, request(f"{i}", [i, 3, 5], max_tokens=80)) for i in range(8)])
    assert all(len(tokens_of(deltas)) == 80 for deltas in got.values())
    stats = made.stats()
    assert stats.synthetic and "SYNTHETIC" in made.describe()["drafting"]
    for kept, rate in zip(stats.accepted_tokens, [0.8, 0.5, 0.1], strict=True):
        assert kept / stats.drafts == pytest.approx(rate, abs=4 * 0.5 / stats.drafts**0.5)


@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_an_fp8_cache_holds_the_drafter_s_keys_too(target: Nemotron, folders: dict[str, Path], method: str):
    expected = answers(engine(target, kv_dtype=torch.float8_e4m3fn))
    dtypes = torch.float32, torch.float8_e4m3fn
    plain, made = (engine(target, configured(method, folders), kv_dtype=dtype) for dtype in dtypes)
    assert answers(made) == expected
    answers(plain)
    assert {array.dtype for array in made.runner.pool.paged} == {torch.float8_e4m3fn}
    kept, wanted = (sum(one.stats().accepted_tokens) for one in (made, plain))
    assert not made.stats().failed_drafts and kept > 0.8 * wanted


@pytest.mark.parametrize("method", ["mtp", "dflash", "dspark"])
def test_as_many_steps_as_on_the_finished_answers(target: Nemotron, folders: dict[str, Path], method: str):
    """Alone and together, with prompts in pieces: what the drafter has seen is what training shows it."""
    found = answers(engine(target))
    prompts = {request.id: request.prompt for _, request in requests()}
    texts = [(prompts[i] + found[i], [False] * len(prompts[i]) + [True] * len(found[i])) for i in found]
    told = judged(target, folders, method, Corpus.collect(texts))
    for row_tokens in (WIDTH + 1, 0):
        made = engine(target, configured(method, folders), 40, row_tokens=row_tokens)
        assert answers(made) == found
        stats = made.stats()
        assert stats.generated_tokens - len(found) == told.tokens
        # the last token of an answer may be asked for without drafts
        assert stats.drafts <= told.steps <= stats.drafts + len(found)
        assert sum(stats.accepted_tokens) == told.tokens - told.steps


def judged(target: Nemotron, folders: dict[str, Path], method: str, data: Corpus) -> Acceptance:
    if method == "mtp":
        return acceptance(target, data, WIDTH, 500)
    (drafter,) = load(configured(method, folders), target)
    return draft_acceptance(drafter.network, target, data, WIDTH, 500)  # type: ignore[attr-defined]


def test_coupled_drafts_are_kept_more_often_than_the_likeliest(target: Nemotron, folders: dict[str, Path]):
    """Where target and draft are unsure, sharing the noise is what makes them agree."""
    kept = {}
    for sampling in ("greedy", "probabilistic"):
        made = engine(target, configured("dspark", folders, draft_sample_method=sampling))
        answers(made, temperature=1.5)
        kept[sampling] = sum(made.stats().accepted_tokens)
    assert kept["probabilistic"] > kept["greedy"]


@pytest.mark.parametrize("method", METHODS)
def test_a_cached_prefix_is_drafted_from_too(target: Nemotron, folders: dict[str, Path], method: str):
    """Pitfall 17: the same conversation again, at page borders and beside them."""
    made = engine(target, configured(method, folders))
    for length in (7, 8, 9, 12, 16):
        prompt = DATA.tokens[:length].tolist()
        expected = tokens_of(run(engine(target), [(0, request("x", prompt))])["x"])
        for name in (f"a{length}", f"b{length}"):
            assert tokens_of(run(made, [(0, request(name, prompt))])[name]) == expected
    assert not made.stats().failed_drafts


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_is_loaded_with_what_the_configuration_says(tmp_path: Path, method: str):
    config = checkpoints.tiny(tmp_path / "target", "mtp", tokenizer=False)
    keys: dict[str, Any] = {"num_speculative_tokens": WIDTH}
    if method in ("dflash", "dspark"):
        drafters.tiny(tmp_path / "drafter", config, method)
        keys["model"] = str(tmp_path / "drafter")
    elif method == "ngram":
        keys |= {"method": "ngram", "prompt_lookup_min": 1}
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory_bytes": 2**24, "device": "cpu"}
    told = {"draft_sample_method": "probabilistic", **keys}
    plain, drafting = (
        Engine.load(EngineConfig(model=str(tmp_path / "target"), speculative_config=spec, **sizes))
        for spec in ({}, told)
    )
    asked = [(0, request("a", [5, 6, 7, 5, 6], temperature=1.0, seed=3))]
    expected = tokens_of(run(plain, asked)["a"])
    assert tokens_of(run(drafting, asked)["a"]) == expected and drafting.stats().drafts and not plain.stats().drafts
