"""The recipe of pocket from end to end, with a toy: every stage runs, and what is made is not made again."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def make(out: Path, script: str = "run.py", *flags: str) -> str:
    flags = flags or ("--steps", "2")
    command = [sys.executable, str(ROOT / "runs/pocket" / script), "--out", str(out), "--tiny", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_makes_a_model_and_measures_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out)
    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == 2
    assert results["accuracy"].keys() >= {"all", "answers", "tool calls"}
    assert len(results["drafts_on_own_answers"]["accepted"]) == 3
    assert len((out / "answers.jsonl").read_text().splitlines()) == 8
    names = {file.name for file in (out / "model").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}

    said = make(out)
    assert said.count("is there") == 7
    assert "--resume" in said

    make(out, "drafters.py")
    rates = json.loads((out / "drafters.json").read_text())
    assert rates.keys() == {"dflash", "dspark"} and rates["dflash"].keys() == {"1", "3", "5", "7"}

    said = make(out, "quantised.py", "--recipes", "nvfp4", "gguf-q8_0", "--answers", "0")
    found = json.loads((out / "quantised.json").read_text())
    assert found.keys() == {"bf16", "nvfp4", "gguf-q8_0"} and f"| nvfp4 | {found['nvfp4']['bytes'] / 1e6:.1f} |" in said
    assert 0 < found["gguf-q8_0"]["divergence"] < found["nvfp4"]["divergence"] < 0.1
    assert found["nvfp4"]["bytes"] < found["bf16"]["bytes"] and found["nvfp4"]["largest_file"] < 15_000_000
