import json
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden import cli
from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError, ConfigError
from leyden.model import checkpoint
from leyden.synthetic import generate
from leyden.testing.checkpoints import tiny
from leyden.train.batches import Corpus
from leyden.train.command import main
from leyden.train.data import write

QUICK = ["--steps", "2", "--batch-tokens", "1500", "--warmup", "1", "--mtp-depths", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint, and data.jsonl beside it."""
    made = tmp_path_factory.mktemp("start") / "checkpoint"
    tiny(made, "mtp")
    write(made.parent / "data.jsonl", generate(0, 6, families=["shift", "chat"]))
    return made


def flags(folder: Path, out: Path, **changes: Any) -> list[str]:
    given = {"--model": folder, "--data": folder.parent / "data.jsonl", "--out": out} | changes
    return [*QUICK, *(str(word) for name, value in given.items() for word in (name, value))]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = checkpoint.build(ModelConfig.from_folder(folder), torch.float32, mtp=True)
    checkpoint.load(model, folder, progress=False)
    return dict(model.named_parameters())


def test_pretrain_starts_from_nothing_and_sft_from_the_weights(folder: Path, tmp_path: Path) -> None:
    moved = {}
    for verb in ("pretrain", "sft"):
        out = tmp_path / verb
        assert main([verb, *flags(folder, out, **{"--heldout": folder.parent / "data.jsonl", "--lr": 1e-6})]) == 0
        records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2, 2] and "heldout" in records[2]
        for name in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
            assert (out / "model" / name).read_bytes() == (folder / name).read_bytes()
        before, after = weights(folder), weights(out / "model")
        moved[verb] = max(float((after[name] - before[name]).detach().abs().max()) for name in before if "proj" in name)
    assert 0 < moved["sft"] < 1e-5 and moved["pretrain"] > 0.1


def test_resume_needs_the_flag_and_only_then_goes_on(folder: Path, tmp_path: Path) -> None:
    words = ["sft", *flags(folder, tmp_path)]
    assert main([*words, "--time-limit", "0"]) == 130
    with pytest.raises(ConfigError, match="--resume goes on with it"):
        main(words)
    assert main([*words, "--resume"]) == 0


def test_rendered_examples_are_taken_as_they_are(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.safetensors"
    Corpus.collect([([10, 20, 30, 40], [False, False, True, True])]).save(file)
    assert main(["sft", *flags(folder, tmp_path / "out", **{"--data": file})]) == 0
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert records[-1]["tokens"] == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: each line must be a JSON object"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: messages must hold an assistant turn"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "line 2: .*role"),
    ],
)
def test_a_bad_line_is_named(folder: Path, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        main(["sft", *flags(folder, tmp_path / "out", **{"--data": file})])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--verb"], "unrecognized arguments: --verb"),
        (["--steps", "many"], "--steps: invalid int value: 'many'"),
        (["--dtype", "int8"], "--dtype: invalid choice"),
        (["--accumulate", "0"], "--accumulate must be at least 1, got 0"),
        (["--batch-tokens", "10"], "a batch must hold the longest example"),
        (["--mtp-dep", "2"], "unrecognized arguments: --mtp-dep"),
    ],
)
def test_bad_flags(folder: Path, tmp_path: Path, change: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["sft", *flags(folder, tmp_path / "out"), *change])
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="required: --data"):
        main(["sft", "--model", str(folder), "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="invalid choice: 'learn'"):
        main(["learn", *flags(folder, tmp_path)])
    with pytest.raises(ConfigError, match=r"nothing.jsonl cannot be read"):
        main(["sft", *flags(folder, tmp_path, **{"--data": tmp_path / "nothing.jsonl"})])
    with pytest.raises(CheckpointError):
        main(["sft", *flags(tmp_path, tmp_path / "out")])


def test_the_program_has_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "learn"]) == 2
    assert "invalid choice: 'learn'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--help"])
    assert "--mtp-depths" in capsys.readouterr().out
