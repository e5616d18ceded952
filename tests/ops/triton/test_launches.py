"""What a step launches on a GPU, counted without one: that many and no more, and none that reads from the device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

ROOT = Path(__file__).parents[3]


def test_launches_of_a_step():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "runs/h200/launches.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(.*): (\d+) launches", done.stdout, re.MULTILINE)
    most = {
        "1 rows of one token, bf16": 200,
        "8 rows of one token, bf16": 292,
        "6 tokens of a prompt beside 0 rows of one, bf16": 306,
        "512 tokens of a prompt beside 0 rows of one, bf16": 508,
        "1024 tokens of a prompt beside 8 rows of one, bf16": 780,
        "1 rows with 3 drafts of mtp, bf16": 405,
        "1 rows with 7 drafts of dspark, bf16": 510,
        "1 rows of one token, nvfp4": 200,
        "8 rows of one token, nvfp4": 269,
        "6 tokens of a prompt beside 0 rows of one, nvfp4": 283,
        "512 tokens of a prompt beside 0 rows of one, nvfp4": 623,
        "1024 tokens of a prompt beside 8 rows of one, nvfp4": 872,
        "1 rows with 3 drafts of mtp, nvfp4": 382,
        "1 rows with 7 drafts of dspark, nvfp4": 486,
    }
    assert [name for name, _ in found] == list(most)
    assert all(int(count) <= most[name] for name, count in found), found
    assert "packed._product" in done.stdout
    steps = "\n".join(part for part in re.split(r"\n(?=\d)", done.stdout) if " of a prompt " not in part)
    assert not re.findall(r"nvfp4\._decode|linear\._widen|torch (?:embedding|linear)", steps), "some is decoded"
