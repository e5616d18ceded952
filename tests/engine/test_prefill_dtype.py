"""Activations of 8 bits for prompts: where they begin, and that whoever cannot have them is told at the start."""

import logging
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from leyden.cache import saved
from leyden.cache.pool import DraftShape, Pool, PoolShape
from leyden.config.engine import EngineConfig
from leyden.engine.engine import Engine, _round_prompts
from leyden.engine.memory import Split
from leyden.errors import ConfigError
from leyden.formats.fp8 import FP8
from leyden.model.checkpoint import matrices
from leyden.model.nemotron import Nemotron
from leyden.testing import checkpoints
from tests.engine.conftest import TINY, tiny

SHAPE = PoolShape(
    slots=3, pages=9, page=16, max_model_len=64, kv_dtype=torch.bfloat16, conv_dtype=torch.bfloat16,
    ssm_dtype=torch.float32,
)  # fmt: skip


def model() -> Nemotron:
    made = tiny(dtype=torch.bfloat16)
    for layer in made.backbone.layers:
        if hasattr(layer.mixer, "out_proj"):
            values = layer.mixer.out_proj.dense()
            layer.mixer.out_proj.allot(FP8())
            for name, tensor in FP8().quantize(values).items():
                layer.mixer.out_proj.parts[name].copy_(tensor)
    return made


def begins(seqs: int, drafts: int, step_tokens: int = 8192, **options) -> float:
    one, split = model(), Split(replace(SHAPE, draft=DraftShape(drafts, drafts)), seqs, step_tokens, 0, 0)
    _round_prompts(EngineConfig(model="m", prefill_dtype="fp8", **options), one, split)
    limits = {weight.eight_above for _, weight in matrices(one)} - {inf}
    assert len(limits) == 1
    return limits.pop()


def test_wider_than_any_step_of_tokens_and_guesses(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        assert begins(64, 0) == 512
    assert "steps of more than 512 tokens round activations to 8 bits before 4 matrices" in caplog.text
    assert begins(256, 3) == 1024
    assert begins(257, 3) == 288 * 4  # a graph of 288 rows, some of them padding
    assert begins(257, 3, enforce_eager=True) == begins(257, 3, cudagraph_capture_sizes=(8,)) == 257 * 4
    with pytest.raises(ConfigError, match="for steps of more than 1,024 tokens.*--max-num-batched-tokens is 1,024"):
        begins(256, 3, 1024)


def test_not_on_a_cpu(tmp_path: Path):
    checkpoints.tiny(tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match="--prefill-dtype fp8 needs a GPU .* the device is cpu"):
        Engine.load(EngineConfig(model=str(tmp_path), prefill_dtype="fp8", device="cpu"))


def test_a_saved_cache_knows_of_it():
    one, pool = model(), Pool(TINY, SHAPE, "cpu")
    without = saved.identity(one, pool)
    assert saved.identity(one, pool) == without
    for _, weight in matrices(one):
        weight.eight_above = 512
    assert saved.identity(one, pool) != without
