import json
import time
from pathlib import Path

import pytest
import torch

from leyden.bench import ladder, middling, peers
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats import Dense
from leyden.formats.nvfp4 import NVFP4
from leyden.model import draft_checkpoint
from leyden.model.checkpoint import build, matrices
from leyden.testing.checkpoints import tiny

TOY = {"hidden_size": 64, "vocab_size": 512, "n_routed_experts": 8, "moe_intermediate_size": 64}
TOY |= {"moe_shared_expert_intermediate_size": 64}


def test_the_grid_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path)
    sizes = ["--batches", "1,3", "--contexts", "20", "--prefill", "33", "--repeats", "1", "--threads", "1"]
    assert ladder.main([str(tmp_path), *sizes, "--json", "--quantization", "int8"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["batch"], cell["context"]) for cell in found["decode"]] == [(1, 20), (3, 20)]
    assert all(cell["tokens_per_s"] > 0 for cell in found["decode"]) and found["prefill"]["33"] > 0
    assert ladder.main([str(tmp_path), *sizes, "--reference"]) == 0
    assert "prompt of 33" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        ladder.main([str(tmp_path), "--batches", "one"])
    assert "argument --batches: expected whole numbers with commas, got 'one'" in capsys.readouterr().err


def test_the_floor_counts_what_a_step_reads(tmp_path: Path) -> None:
    tiny(tmp_path)
    made = ladder.Ladder(tmp_path, None, "auto", [4], 64)
    weights = {
        name: p.nbytes for name, p in made.model.named_parameters() if not name.startswith("backbone.embeddings")
    }
    experts = sum(size for name, size in weights.items() if ".experts." in name)
    pool = made.engine.runner.pool
    states = 2 * (pool.conv[:, 0].nbytes + pool.ssm[:, 0].nbytes)
    keys = 10 * pool.kv[:, :, 0, 0].nbytes
    one = ladder.floor_bytes(made.model, made.engine, 1, 10)
    assert one == pytest.approx(sum(weights.values()) - experts * (1 - 2 / 8) + states + keys)
    two = ladder.floor_bytes(made.model, made.engine, 2, 10)
    assert two - one == pytest.approx(experts * (2 / 8) * (6 / 8) + states + keys)


def test_the_random_model_has_the_size_it_says() -> None:
    model = build(ModelConfig.from_dict(middling.CONFIG, {}), torch.bfloat16, "meta")
    assert 1.55e9 < sum(p.numel() for p in model.parameters()) < 1.65e9


def test_peers_side_by_side(tmp_path: Path) -> None:
    figures = {
        "leyden": {"decode, 1 x 128": 30.0, "prompt, 512": 400.0, "load, s": 2.0},
        "llama.cpp": {"decode, 1 x 128": 20.0, "prompt, 512": 500.0},
    }
    lines = peers.table(figures).splitlines()
    assert "x 1.50" in lines[1] and "x 0.80" in lines[2] and lines[3].split() == ["load,", "s", "2"]
    peers.draw(figures, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_what_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(10.0, 3.0), (12.0, 6.0), (13.0, 6.0), (14.0, 6.5), (15.0, 6.55)])
    monkeypatch.setattr(peers.Others, "_now", staticmethod(lambda: next(readings)))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    others = peers.Others()
    assert others.used() == 1.5
    others.wait_for_quiet(60)  # half a processor, then a twentieth
    assert next(readings, None) is None


def test_the_readings_of_what_others_use() -> None:
    (then, busy), (now, busier) = peers.Others._now(), peers.Others._now()
    assert then <= now and abs(busier - busy) < 1


def test_llama_needs_its_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs both --llama .* and --gguf"):
        peers.main([str(tmp_path), "--llama", "/bin"])
    with pytest.raises(ConfigError, match="failed"):
        peers._child(["false"])


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_random_drafters_are_stored_as_the_releases_are(method: str, tmp_path: Path) -> None:
    """NVFP4 without a scale of activations: fc, the MLPs, W2 of the Markov head. The MTP module is BF16 in both."""
    target = ModelConfig.from_folder(middling.describe(tmp_path, "nvfp4", **TOY, num_nextn_predict_layers=1))
    model = build(target, torch.bfloat16, "meta", mtp=True)
    formats = {name: weight.format for name, weight in matrices(model)}
    assert {format for name, format in formats.items() if name.startswith("mtp.")} == {Dense()}
    assert formats["lm_head"] == NVFP4()
    for layout in middling.LAYOUTS:
        middling.drafter(tmp_path / layout, target, method, layout)
        network = draft_checkpoint.load(tmp_path / layout, model.to_empty(device="cpu"))
        coded = {name for name, weight in matrices(network) if weight.format == NVFP4()}
        mlps = {f"layers.{i}.mlp.{part}_proj" for i in range(6) for part in ("gate", "up", "down")}
        more = {"fc", "markov_head.markov_w2"} if method == "dspark" else {"fc"}
        assert coded == (mlps | more if layout == "nvfp4" else set())
        assert all(weight.format in (NVFP4(), Dense()) for _, weight in matrices(network))
    described = json.loads((tmp_path / "nvfp4" / "config.json").read_text())["quantization_config"]
    assert described["quant_algo"] == "W4A16_NVFP4" and described["group_size"] == 16


@pytest.mark.parametrize("method", ["mtp", "dspark"])
def test_steps_with_drafts_kept_by_decree(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path, "mtp")
    layout = {"quantization": "nvfp4"} if method == "dspark" else {}
    drafts = json.dumps({"method": method, "num_speculative_tokens": 3} | layout)
    sizes = ["--batches", "2", "--contexts", "20", "--prefill", "", "--repeats", "1", "--threads", "1"]
    decree = ["--speculative-config", drafts, "--synthetic-acceptance", "3"]
    if method == "mtp":
        assert ladder.main([str(tmp_path), *sizes, *decree, "--json"]) == 0
        (cell,) = json.loads(capsys.readouterr().out.splitlines()[-1])["decode"]
        assert cell["tokens_per_step"] == pytest.approx(3, abs=0.3) and cell["floor_share"] is None
    else:
        assert ladder.main([str(tmp_path), *sizes, *decree]) == 0
        assert "SYNTHETIC" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="quantization of random weights must be one of bf16, nvfp4; got 'int8'"):
        ladder.main(["--speculative-config", '{"method": "dspark", "quantization": "int8"}'])
    with pytest.raises(ConfigError, match=r"expected a JSON object, got \[1\]"):
        ladder.main(["--speculative-config", "[1]"])
    with pytest.raises(ConfigError, match="--synthetic-acceptance needs --speculative-config"):
        ladder.main([str(tmp_path), *sizes, *decree[2:]])
