import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError, ConfigError
from leyden.model import checkpoint
from leyden.train.run import Run
from leyden.train.trainer import Options, Trainer
from tests.train.examples import corpus, model

OPTIONS = Options(steps=7, batch_tokens=60, accumulate=2, optimizer="muon", warmup=3, lr=3e-3, mtp_depths=2)


def run(out: Path, options: Options = OPTIONS, dtype: torch.dtype = torch.float32, **settings: Any) -> Run:
    settings = {"heldout": corpus(3, seed=9), "eval_every": 3, "log_every": 2, "save_every": 4} | settings
    return Run(trainer=Trainer(model(dtype=dtype), corpus(12), options), out=out, source=out, **settings)


def curve(out: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "tokens_per_s"} for record in records]


def interrupt_after(job: Run, step: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal while `step` is computed."""
    ordinary = job.trainer.step

    def step_and_signal() -> torch.Tensor:
        if job.trainer.step_number == step - 1:
            os.kill(os.getpid(), number)
        return ordinary()

    job.trainer.step = step_and_signal  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption."""
    out = tmp_path_factory.mktemp("whole")
    assert run(out).go()
    return out


@pytest.mark.parametrize("step", [1, 5])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(whole: Path, tmp_path: Path, step: int) -> None:
    interrupted(tmp_path, step, torch.float32)
    same(tmp_path, whole)


def test_so_does_one_in_bf16(tmp_path: Path) -> None:
    run(tmp_path / "whole", dtype=torch.bfloat16).go()
    interrupted(tmp_path / "parts", 3, torch.bfloat16)
    same(tmp_path / "parts", tmp_path / "whole")


def interrupted(out: Path, step: int, dtype: torch.dtype) -> None:
    first = run(out, dtype=dtype)
    interrupt_after(first, step)
    assert not first.go()
    assert curve(out)[-1]["step"] == step
    second = run(out, dtype=dtype)
    second.resume()
    assert second.go()


def same(out: Path, wanted: Path) -> None:
    """Curves and weights are equal, bit for bit."""
    assert curve(out) == curve(wanted)
    for file in ("state.safetensors", "model/model.safetensors", "model/config.json"):
        assert (out / file).read_bytes() == (wanted / file).read_bytes(), file


def test_steps_after_the_last_save_are_made_again(whole: Path, tmp_path: Path) -> None:
    parts = tmp_path
    job = run(parts)
    job.save = lambda: Run.save(job) if job.trainer.step_number <= 4 else None  # type: ignore[method-assign]
    job.go()  # as if killed at step 7, before it could save: the last state is that of step 4
    again = run(parts)
    again.resume()
    assert again.trainer.step_number == 4
    again.go()
    same(parts, whole)


def test_the_model_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    job = run(tmp_path)
    job.go()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("curves.png", "log.jsonl", "model", "state.safetensors", "tokenizer.json")
    ]
    assert (tmp_path / "model" / "tokenizer.json").exists()
    config = ModelConfig.from_folder(tmp_path / "model")
    loaded = checkpoint.build(config, torch.float32, mtp=True)
    checkpoint.load(loaded, tmp_path / "model", progress=False)
    for (name, a), b in zip(loaded.named_parameters(), job.trainer.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    job = run(tmp_path)
    interrupt_after(job, 3, signal.SIGINT)
    inner = job.trainer.step

    def step_and_interrupt_again() -> torch.Tensor:
        measured = inner()
        if job.trainer.step_number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return measured

    job.trainer.step = step_and_interrupt_again  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        job.go()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_time_limit_saves_and_stops(tmp_path: Path) -> None:
    job = run(tmp_path, time_limit=0.0)
    assert not job.go()
    assert job.trainer.step_number == 1 and (tmp_path / "state.safetensors").exists()


def test_a_run_that_changed_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no state.safetensors"):
        run(tmp_path).resume()
    run(tmp_path, time_limit=0.0).go()
    with pytest.raises(ConfigError, match=r"lr was 0.003 before and is 0.1 now"):
        run(tmp_path, replace(OPTIONS, lr=0.1)).resume()
    with pytest.raises(ConfigError, match="dtype was torch.float32 before and is torch.bfloat16"):
        run(tmp_path, dtype=torch.bfloat16).resume()
    other = Run(trainer=Trainer(model(), corpus(13), OPTIONS), out=tmp_path, source=tmp_path)
    with pytest.raises(ConfigError, match="data was"):
        other.resume()
    (tmp_path / "state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="damaged"):
        run(tmp_path).resume()


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    job = run(tmp_path)
    job.trainer.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="not a number at step 1"):
        job.go()
    assert not (tmp_path / "state.safetensors").exists()
