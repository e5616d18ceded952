"""Under the interpreter, which the tests beside this one need, nothing is compiled: so in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def started(what: str, folder: Path, **options: Any) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.ops.triton.compiled", what, str(folder)],
        cwd=ROOT, env=environment, text=True, **options,
    )  # fmt: skip


def test_what_is_noted_and_compiled_beside_is_what_a_launch_looks_for(tmp_path):
    process = started("same", tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    kinds = {file.suffix for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    assert kinds >= {".cubin", ".json"}


def test_nobody_compiles_for_a_process_that_is_gone(tmp_path):
    process = started("endless", tmp_path)
    until(lambda: len(running(tmp_path)) == 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not running(tmp_path))


def running(folder: Path) -> list[int]:
    """The processes that are files in `folder`, and still there."""
    return [int(file.name) for file in folder.iterdir() if file.name.isdigit() and alive(int(file.name))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(true: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
