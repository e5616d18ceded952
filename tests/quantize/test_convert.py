"""Whole conversions of small checkpoints, and what they leave behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from leyden.cli import COMMANDS
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats import Dense
from leyden.formats.fp8 import FP8
from leyden.formats.gguf import Blocks
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4
from leyden.model.checkpoint import build, load, matrices
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.quantize import convert
from leyden.quantize.command import main
from leyden.quantize.recipe import NAMES
from leyden.testing.checkpoints import tiny
from leyden.text.tokenizer import Tokenizer

WIDE = {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}  # for groups of 64
TEXTS = [[(i * j * 7 + j) % 512 for i in range(40)] for j in range(1, 9)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny(tmp_path / "model", "mtp", **WIDE)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in TEXTS))
    return tmp_path


def quantise(folder: Path, recipe: str, out: str = "out", *flags: str) -> Path:
    assert main([str(folder / "model"), "--recipe", recipe, "--out", str(folder / out), "--no-progress", *flags]) == 0
    return folder / out


def calibrated(folder: Path, recipe: str, out: str = "out", *flags: str) -> Path:
    return quantise(folder, recipe, out, "--calibration", str(folder / "texts.jsonl"), *flags)


def loaded(path: Path) -> Nemotron:
    folder = resolve(path)
    config = ModelConfig.from_folder(folder)
    model = build(config, torch.float32, mtp=True)
    load(model, folder, progress=False)
    return model


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(tensor.flatten().view(torch.uint8), second[name].flatten().view(torch.uint8))
        for name, tensor in first.items()
    )


def log_probabilities(model: Nemotron) -> Tensor:
    with torch.no_grad():
        hidden, _ = model(torch.tensor(sum(TEXTS, [])), Context.packed([40] * len(TEXTS)))
        return model.logits(hidden).unflatten(0, (len(TEXTS), 40))[:, :-1].log_softmax(-1)


@pytest.mark.parametrize("recipe", NAMES)
def test_every_recipe(recipe: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = calibrated(folder, recipe, "out", "--group", "32")  # one of 64 would be a whole row here
    original, model = loaded(folder / "model"), loaded(out)
    formats = {name: weight.format for name, weight in matrices(model)}
    packed = {"nvfp4": NVFP4(), "lightning-nvfp4": NVFP4(), "fp8": FP8(input_scale=True), "w4a16": Int4(32)}[recipe]
    assert formats["backbone.layers.3.mixer.experts.up_proj"] == packed
    assert formats["lm_head"] == (NVFP4() if recipe == "lightning-nvfp4" else Dense())
    mamba = FP8(input_scale=True) if recipe == "lightning-nvfp4" else packed
    assert formats["backbone.layers.2.mixer.in_proj"] == mamba
    assert formats["backbone.layers.0.mixer.in_proj"] == (mamba if recipe == "lightning-nvfp4" else Dense())
    assert {formats[name] for name in formats if "q_proj" in name or "mtp" in name} == {Dense()}
    assert "not stored as config.json says" not in capsys.readouterr().err
    assert sum(t.nbytes for t in tensors(out).values()) < 0.75 * sum(
        t.nbytes for t in tensors(folder / "model").values()
    )
    for name, weight in matrices(model):
        before = dict(original.named_modules())[name].dense()
        assert (weight.dense() - before).norm() <= 0.13 * before.norm()

    report = json.loads((out / "quantization.json").read_text())
    p, q = log_probabilities(original), log_probabilities(model)
    assert report["quality"]["kl_divergence"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)
    assert report["quality"]["same_top_token"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    targets = torch.tensor(TEXTS)[:, 1:, None]
    assert report["quality"]["loss_quantised"] == pytest.approx(-q.gather(-1, targets).mean().item(), rel=1e-4)
    assert report["quality"]["tokens"] == len(TEXTS) * 39
    assert report["bytes"] == sum(tensor.nbytes for tensor in tensors(out).values())
    assert len(report["layers"]) == 8 and all(found["accumulated"] < 0.5 for found in report["layers"].values())
    assert (report["layers"]["backbone.layers.1"]["own"] == 0) and report["layers"]["backbone.layers.3"]["own"] > 0

    assert {path.name for path in out.iterdir()} >= {
        "README.md", "sensitivity.png", "quantization.json", "tokenizer.json", "chat_template.jinja", "config.json",
    }  # fmt: skip
    assert (out / "sensitivity.png").read_bytes()[:4] == b"\x89PNG"
    assert Tokenizer.from_folder(out).vocab_size == 512
    card = (out / "README.md").read_text()
    assert f"leyden quantize {folder / 'model'} --recipe {recipe}" in card and "| experts |" in card
    assert "8 texts, 320 tokens" in card and "same most likely token" in card


def test_scales_of_inputs_and_of_the_cache(folder: Path) -> None:
    out = calibrated(folder, "lightning-nvfp4")
    stored = tensors(out)
    model = loaded(folder / "model")
    with torch.no_grad():
        _, taps = model(torch.tensor(sum(TEXTS, [])), Context.packed([40] * len(TEXTS)), taps=range(8))
        first, attention = model.backbone.layers[0], model.backbone.layers[1]
        inputs = first.norm(model.embed(torch.tensor(sum(TEXTS, []))))
        keys = attention.norm(taps[0]) @ attention.mixer.k_proj.weight.T
    assert stored["backbone.layers.0.mixer.in_proj.input_scale"].item() == pytest.approx(
        inputs.abs().max().item() / 448
    )
    assert stored["backbone.layers.1.mixer.k_proj.k_scale"].item() == pytest.approx(keys.abs().max().item() / 448)
    assert stored["backbone.layers.1.mixer.k_proj.k_scale"].shape == (1,)
    assert loaded(out).backbone.layers[5].mixer.v_scale == pytest.approx(
        stored["backbone.layers.5.mixer.v_proj.v_scale"].item()
    )
    described = json.loads((out / "hf_quant_config.json").read_text())
    assert described["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert described["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert described["quantization"]["quantized_layers"]["lm_head"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    assert loaded(out).lm_head.format == NVFP4()  # by its neighbour alone


def test_without_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = quantise(folder, "lightning-nvfp4")
    printed, told = capsys.readouterr()
    assert "no --calibration: FP8 matrices get no scale for their inputs" in told
    assert "| experts | nvfp4 | 32 | -2" in printed and f"GB in {out}" in printed
    assert loaded(out).backbone.layers[0].mixer.in_proj.format == FP8()
    assert not [name for name in tensors(out) if name.endswith(("k_scale", "input_scale"))]
    report = json.loads((out / "quantization.json").read_text())
    assert "quality" not in report and report["layers"] == {} and len(report["matrices"]) == 8 + 32 + 4 + 1
    assert "effect on answers is not known" in (out / "README.md").read_text()
    same = calibrated(folder, "nvfp4", "other"), quantise(folder, "nvfp4", "third")
    without = {n: t for n, t in tensors(same[0]).items() if not n.endswith(("k_scale", "v_scale"))}
    assert same_bits(without, tensors(same[1]))  # rounding to nearest does not look at texts


def test_error_compensation_helps(folder: Path) -> None:
    plain, better = calibrated(folder, "w4a16", "plain"), calibrated(folder, "w4a16", "better", "--gptq")
    divergences = [json.loads((out / "quantization.json").read_text())["quality"] for out in (plain, better)]
    assert divergences[1]["kl_divergence"] < 0.9 * divergences[0]["kl_divergence"]
    scales = [{n: t for n, t in tensors(out).items() if n.endswith("scale")} for out in (plain, better)]
    assert same_bits(*scales)


def test_four_over_six_can_be_turned_off(folder: Path) -> None:
    stored = tensors(quantise(folder, "nvfp4", "out", "--no-four-over-six"))
    values = load_file(folder / "model" / "model.safetensors")["backbone.layers.3.mixer.experts.0.up_proj.weight"]
    for leaf, tensor in NVFP4().quantize(values).items():
        found = stored[f"backbone.layers.3.mixer.experts.0.up_proj.{leaf}"]
        assert torch.equal(found.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


@pytest.mark.parametrize("texts", [True, False])
def test_a_run_that_was_cut_off_goes_on(texts: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = calibrated if texts else quantise
    flags = ("--shard-bytes", "60000")
    whole = run(folder, "lightning-nvfp4", "whole", *flags)
    written = []

    def failing(tensors: dict[str, Tensor], path: Path) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        real(tensors, path)

    real = convert.save_file
    monkeypatch.setattr(convert, "save_file", failing)
    with pytest.raises(KeyboardInterrupt):
        run(folder, "lightning-nvfp4", "cut", *flags)
    monkeypatch.undo()
    cut = folder / "cut"
    assert len(list(cut.glob("*.safetensors"))) == 3 and not (cut / "config.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in cut.glob("*.safetensors")}
    run(folder, "lightning-nvfp4", "cut", *flags)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert same_bits(tensors(cut), tensors(whole))
    reports = [json.loads((out / "quantization.json").read_text()) for out in (cut, whole)]
    assert reports[0] == reports[1]
    assert (cut / "model.safetensors.index.json").read_text() == (whole / "model.safetensors.index.json").read_text()
    run(folder, "lightning-nvfp4", "cut", *flags)  # all done: nothing changes
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_one_layer_in_memory_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    stages = convert.Conversion._stages

    def watched(self: convert.Conversion, finished: set[str]) -> Any:
        nonlocal most
        for made in stages(self, finished):
            most = max(most, sum(self.sizes[name] for name in made))
            yield made

    monkeypatch.setattr(convert.Conversion, "_stages", watched)
    out = quantise(folder, "nvfp4", "out", "--shard-bytes", "30000")
    total = sum(tensor.nbytes for tensor in tensors(out).values())
    assert most < total / 3
    assert max(path.stat().st_size for path in out.glob("*.safetensors")) < most + 30_000


def test_an_already_quantised_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = quantise(folder, "nvfp4", "first")
    assert main([str(first), "--recipe", "lightning-nvfp4", "--out", str(folder / "second"), "--no-progress"]) == 0
    assert "is quantised already" in capsys.readouterr().err
    before, after = tensors(first), tensors(folder / "second")
    expert = {name for name in before if ".experts." in name and name.startswith("backbone")}
    assert same_bits({n: before[n] for n in expert}, {n: after[n] for n in expert})  # copied
    assert loaded(folder / "second").backbone.layers[2].mixer.in_proj.format == FP8()


def test_gguf(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    quantise(folder, "gguf-q8_0", "files")
    assert capsys.readouterr().out == f"{folder / 'files' / 'model-Q8_0.gguf'}\n"
    assert loaded(folder / "files" / "model-Q8_0.gguf").lm_head.format == Blocks("Q8_0")
    first = quantise(folder, "nvfp4", "first")
    assert main([str(first), "--recipe", "gguf-nvfp4", "--out", str(folder / "a.gguf"), "--no-progress"]) == 0
    again = loaded(folder / "a.gguf")
    expected = loaded(first)
    assert torch.equal(
        again.backbone.layers[3].mixer.experts.up_proj.dense(),
        expected.backbone.layers[3].mixer.experts.up_proj.dense(),
    )
    assert main([str(folder / "a.gguf"), "--recipe", "fp8", "--out", str(folder / "back"), "--no-progress"]) == 0
    assert loaded(folder / "back").backbone.layers[3].mixer.experts.up_proj.format == FP8()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipe", "int3"], "invalid choice: 'int3'"),
        (["--recipe", "nvfp4", "--gptq"], "--gptq needs --calibration FILE.jsonl"),
        (["--recipe", "gguf-q8_0", "--gptq"], "--calibration and --gptq have no use with --recipe gguf-q8_0"),
        (["--recipe", "nvfp4", "--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_command_lines_that_cannot_be_meant(flags: list[str], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        main([str(folder / "model"), "--out", str(folder / "out"), *flags])
    assert COMMANDS["quantize"][0] == "leyden.quantize.command"


def test_folders_that_hold_something_else(folder: Path) -> None:
    quantise(folder, "nvfp4")
    with pytest.raises(ConfigError, match="out holds another conversion .*'nvfp4'.*; choose another --out"):
        quantise(folder, "fp8")
    with pytest.raises(ConfigError, match="--out must be another folder than the model's"):
        quantise(folder, "nvfp4", "model")
    tiny(folder / "taken")
    with pytest.raises(ConfigError, match="taken holds a checkpoint already"):
        quantise(folder, "nvfp4", "taken")
