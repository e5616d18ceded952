"""Triton's interpreter, which tests of kernels need, has no kernels to note: they are noted in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leyden.config.engine import EngineConfig
from leyden.config.model import ModelConfig
from leyden.engine.compiling import Nothing, Start

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """Of some starts: the kernels of a first answer, and the others."""
    folder = tmp_path_factory.mktemp("noted")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.engine.noted", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_first_answer_needs_a_prompt_and_a_token(noted):
    first, others = noted["lazy"]
    assert {"_embed", "_convolve", "_scan", "_prefill"} < set(first), "a prompt"
    assert {"_begin", "_copy", "_decode", "_pick", "_recall"} < set(first), "a token"
    assert "_advance" in others, "what was kept goes into the states"
    assert len(first) < len(others)


def test_what_steps_launch_is_noted(noted):
    (launched,) = noted["launched"]
    assert len(launched) > 8
    assert set(launched) <= {name for kernels in noted["lazy"] for name in kernels}


@pytest.mark.parametrize(
    ("start", "kernels"),
    [
        ("mtp", {"_begin_drafts", "_accept", "_advance", "_product"}),
        ("dspark", {"_begin_drafts", "_accept", "_block", "_gated"}),
    ],
)
def test_drafters_have_their_own(noted, start, kernels):
    assert kernels <= {name for stage in noted[start] for name in stage}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_nothing_can_be_compiled_a_start_goes_on(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: 1 / 0)
    start = Start(
        EngineConfig(model=""), Path(), ModelConfig(pattern="M"), torch.bfloat16, None, lambda model, split: None
    )
    compilation = start.compiled(torch.device(device))
    assert isinstance(compilation, Nothing)
    compilation.wait()
    compilation.close()
