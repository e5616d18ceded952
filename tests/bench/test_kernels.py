"""Ops by themselves: every one is measured, and its bytes are those of the call."""

import json
from pathlib import Path

import pytest

from leyden.bench import kernels
from leyden.cli import bench as command
from leyden.errors import ConfigError
from leyden.testing.checkpoints import tiny

OPS = ["embed", "add_rms_norm", "in_proj", "mamba_step", "mamba_verify, 4 tokens", "mamba_replay, 4 tokens", "out_proj",
       "qkv_write", "attention", "o_proj", "add_norm_route", "moe", "head", "sample"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny(made)
    return made


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Roof, "measured", lambda device, dtype: kernels.Roof(1e10, 1e11))
    monkeypatch.setattr(kernels, "seconds", lambda calls, device: [call() for call in calls] and 1e-3)
    monkeypatch.setitem(kernels._COLD, "cpu", 2**18)


def test_every_op_has_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["kernels", "--device", "cpu", "--model", str(folder), "--batch", "1,3", "--context", "40"]
    assert command.main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(line["op"], line["batch"]) for line in found["ops"]] == [(op, batch) for batch in (1, 3) for op in OPS]
    assert all(line["us"] == 1000 and 0 < line["share"] < 1 for line in found["ops"])
    assert command.main([*given, "--ops", "moe,add_norm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("moe", "add_norm_route")) for line in lines) == 4 and not any(
        "sample" in line for line in lines
    )
    assert lines[-1].startswith("all calls of a step") and " 4000 " in lines[-1]  # two layers, two ops each
    with pytest.raises(ConfigError, match="no op begins with 'tea'; there are embed, "):
        command.main([*given, "--ops", "tea"])
    with pytest.raises(ConfigError, match="--batch: expected whole numbers from 1 on"):
        command.main(["kernels", "--batch", "none"])


def test_bytes_are_those_of_the_call(folder: Path) -> None:
    whole = kernels.bench("cpu", False, False, 40, folder=folder)
    found = {batch: {case.name: case for case in whole.at(batch).cases()} for batch in (1, 2)}
    wide = whole.dtype.itemsize
    (size, k), hidden = whole.mixers("M")[0].in_proj.shape, whole.config.hidden_size
    assert found[1]["in_proj"].bytes == (size * k + size + k) * wide and found[1]["in_proj"].flops == 2 * size * k
    state = whole.at(1).pool.ssm[0, 0].nbytes
    grown = found[2]["mamba_step"].bytes - found[1]["mamba_step"].bytes
    assert grown == found[1]["mamba_step"].bytes > 2 * state
    experts = found[1]["moe"].bytes - 2 * hidden * wide
    config = whole.config
    inner = config.num_experts_per_tok * config.moe_intermediate_size + config.shared_expert_width
    assert experts == 2 * inner * hidden * wide
    assert found[1]["head"].each == 1 and found[1]["mamba_step"].each == 4


def test_in_the_formats_of_a_release(folder: Path) -> None:
    whole = kernels.bench("cpu", False, True, 40, folder=folder)
    formats = [whole.model.lm_head.format.name, whole.mixers("M")[0].in_proj.format.name]
    formats += [whole.mixers("*")[0].q_proj.format.name, whole.mixers("E")[0].experts.up_proj.format.name]
    assert formats == ["nvfp4", "fp8", "dense", "nvfp4"]
    for case in whole.at(2).cases():
        case.calls[0]()
        assert case.bytes > 0


def test_time_is_that_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now, calls = [0.0], [0, 0]
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: now[0])

    def call(which: int) -> None:
        now[0] += (0.003, 0.005)[which]
        calls[which] += 1

    assert kernels.seconds([lambda: call(0), lambda: call(1)], "cpu") == pytest.approx(0.004)
    assert calls[0] == calls[1] == 1 + 5 * 3
