"""--threads and --cpu-affinity, in a process of their own: what is given away does not come back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.testing.checkpoints import tiny

PROGRAM = """
import os, sys, torch
from leyden.config.engine import EngineConfig
from leyden.engine.engine import Engine
options = {"device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 2**24, "load_format": "dummy"}
for settings in ({"threads": 3}, {"cpu_affinity": sys.argv[2]}, {"cpu_affinity": sys.argv[2], "threads": 2}):
    Engine.load(EngineConfig(model=sys.argv[1], **options, **settings))
    print(torch.get_num_threads(), len(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_threads_and_processors_of_an_engine(tmp_path: Path) -> None:
    tiny(tmp_path)
    there, one = len(os.sched_getaffinity(0)), str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), one]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:3] == [f"3 {there}", "1 1", "2 1"]
