"""Keys and values as 8-bit floats: nearly the same answers, and everything that the cache promises."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leyden.cache.pool import PoolShape
from leyden.config.engine import EngineConfig
from leyden.engine.engine import Engine
from leyden.engine.memory import Split
from leyden.formats.fp8 import E4M3, E4M3_MAX
from leyden.model import checkpoint
from leyden.model.attention import Attention
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.testing import checkpoints
from leyden.train.trainer import Options, Trainer
from leyden.types import Request, SamplingParams
from tests.engine.conftest import run, tiny
from tests.engine.device import tokens_of
from tests.engine.test_engine import greedy, prompt_of
from tests.train.examples import corpus
from tests.train.examples import model as model_to_train

PROMPTS = {f"r{i}": prompt_of(20 + 9 * i, 3 + i) for i in range(4)}
N = 12


def scaled(model: Nemotron) -> Nemotron:
    """Scales from what the keys and values of the prompts reach."""
    reached: dict[Attention, list[float]] = {}
    for prompt in PROMPTS.values():
        for layer in model.backbone.layers:
            if isinstance(layer.mixer, Attention):
                layer.mixer.register_forward_pre_hook(
                    lambda mixer, given: reached.setdefault(mixer, []).append(_largest(mixer, given[0]))
                )
        model(torch.tensor(prompt), Context.packed([len(prompt)]))
    for mixer, largest in reached.items():
        mixer._forward_pre_hooks.clear()
        mixer.k_scale, mixer.v_scale = (max(pair) / E4M3_MAX for pair in zip(*largest, strict=True))
    return model


def _largest(mixer: Attention, x: torch.Tensor) -> tuple[float, float]:
    return tuple((x @ weight.dense().T).abs().max().item() for weight in (mixer.k_proj, mixer.v_proj))


@pytest.fixture(scope="module")
def model() -> Nemotron:
    return scaled(tiny())


def engine(model: Nemotron, kv_dtype: torch.dtype = E4M3, snapshots: int = 8, host=(0, 0), **options) -> Engine:
    floats = {"conv_dtype": torch.float32, "ssm_dtype": torch.float32}
    shape = PoolShape(slots=5 + snapshots, pages=61, page=16, max_model_len=128, kv_dtype=kv_dtype, **floats)
    return Engine(model, Split(shape, 4, 64, 0, 0, host_slots=host[0], host_pages=host[1]), **options)


def answers(made: Engine, prompts: dict[str, list[int]] = PROMPTS) -> dict[str, list[int]]:
    return {name: tokens_of(run(made, [(0, greedy(name, prompt, N))])[name]) for name, prompt in prompts.items()}


def test_a_model_that_has_learned_says_nearly_the_same() -> None:
    """Greedy answers to the beginnings of its texts, up to their ends, and log-probabilities of all of their tokens."""
    data = corpus(8, longest=30)
    trainer = Trainer(model_to_train(), data, Options(steps=60, batch_tokens=200, lr=1e-2, warmup=5, optimizer="muon"))
    for _ in range(60):
        trainer.step()
    learned = trainer.model.eval().requires_grad_(False)
    texts = [data.tokens[a:b].tolist() for a, b in zip(data.starts, data.starts[1:], strict=False)]
    ends = {f"{i}": len(text) - 8 for i, text in enumerate(texts)}
    said, known = [], []
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for kv_dtype in (torch.float32, E4M3):
        made = engine(learned, kv_dtype)
        begun = {f"{i}": text[:8] for i, text in enumerate(texts)}
        said.append([token for name, answer in answers(made, begun).items() for token in answer[: ends[name]]])
        out = run(made, [(0, Request(id=f"known {i}", prompt=text, params=ask)) for i, text in enumerate(texts)])
        entries = [entry for deltas in out.values() for delta in deltas for entry in delta.prompt_logprobs or []]
        known.append(torch.tensor([entry.logprob for entry in entries if entry is not None]))
    same = sum(a == b for a, b in zip(*said, strict=True)) / len(said[0])
    difference = (known[0] - known[1]).abs()
    assert same > 0.9 and 0 < difference.mean() < 0.05, (same, difference.mean(), difference.median())


@pytest.mark.parametrize("host", [(0, 0), (8, 60)])
@pytest.mark.parametrize("overlap", [False, True])
def test_hits_and_copies_change_no_answer(model: Nemotron, host, overlap) -> None:
    """Prefixes of prefixes, ends in the middle of a page, pages and states that leave the device and come back."""
    expected = answers(engine(model, snapshots=0, prefix_caching=False))
    made = engine(model, snapshots=1 if host[0] else 8, host=host, overlap=overlap)
    assert answers(made) == expected
    assert answers(made) == expected
    longer = {name: prompt + expected[name] + prompt_of(5, 8) for name, prompt in PROMPTS.items()}
    wanted = answers(engine(model, snapshots=0, prefix_caching=False), longer)
    deltas = {name: run(made, [(0, greedy(name, prompt, N))])[name] for name, prompt in longer.items()}
    assert {name: tokens_of(found) for name, found in deltas.items()} == wanted
    assert sum(found[0].cached_tokens > 0 for found in deltas.values()) >= 3


def test_a_saved_cache_fits_the_same_dtype_and_scales_only(tmp_path: Path, caplog) -> None:
    model = scaled(tiny())
    made = engine(model, cache_dir=str(tmp_path))
    expected = answers(made)
    made.close()
    again = engine(model, cache_dir=str(tmp_path))
    assert again.scheduler.cache.snapshots and answers(again) == expected
    other = next(mixer for mixer in model.modules() if isinstance(mixer, Attention))
    other.k_scale *= 2
    for kv_dtype in (E4M3, torch.float32):
        caplog.clear()
        assert not engine(model, kv_dtype, cache_dir=str(tmp_path)).scheduler.cache.snapshots
        assert "made with another model, or with other settings" in caplog.text


def test_a_checkpoint_brings_its_scales(tmp_path: Path, caplog) -> None:
    checkpoints.tiny(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), kv_cache_dtype="fp8", device="cpu", kv_cache_memory_bytes=2**22, max_num_seqs=2
    )
    with caplog.at_level(logging.WARNING):
        made = Engine.load(config)
    assert made.split.shape.kv_dtype == E4M3 and made.runner.pool.kv.dtype == E4M3
    assert "no scales for an FP8 cache" in caplog.text
    without = answers(made)
    scaled(made.runner.model)
    folder = tmp_path / "scaled"
    checkpoint.save(made.runner.model, folder)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = Engine.load(replace(config, model=str(folder)))
    assert "no scales" not in caplog.text and "no kernels on the CPU" in caplog.text
    scales = [(m.k_scale, m.v_scale) for m in again.runner.model.modules() if isinstance(m, Attention)]
    assert all(0 < one < 1 for pair in scales for one in pair)
    assert set(answers(again)) == set(without)
