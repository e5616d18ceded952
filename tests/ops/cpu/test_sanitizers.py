"""A fifth of the kernels' tests once more, with the kernels under the address and undefined-behaviour sanitizers.

Twice, side by side: with the narrowest vectors, where every access is a plain one that the sanitizers see, and as this
machine would have it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.ops.cpu.program import available

ROOT = Path(__file__).parents[3]
TESTS = [f"tests/ops/cpu/test_{name}.py" for name in ("kernels", "formats", "draft", "drafter")]
FLAGS = "-g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
NARROW = "-O1 -march=x86-64" if os.uname().machine == "x86_64" else "-O1"  # at -O0 GCC 12 is minutes on the vectors
AS_HERE = "-O0"
# One float too many, behind the end of a tensor
OVERRUN = """
import torch
from leyden.ops.cpu import program
x, out = torch.ones(3, 5), torch.empty(3, 5)
program.run(program.Kernel("widen", "ttiiii")(x, out, 3, 5, 5, 0))
assert torch.equal(x, out)
program.run(program.Kernel("widen", "ttiiii")(x, out, 1, 16, 5, 0))
"""


def environment(flags: str) -> dict[str, str]:
    compiler = os.environ.get("CC") or shutil.which("cc") or "cc"
    runtime = ""
    if shutil.which(compiler):
        asked = [compiler, "-print-file-name=libasan.so"]
        runtime = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    if not available or not Path(runtime).is_absolute():
        pytest.skip("no C compiler with an address sanitizer (GCC's libasan)")
    return os.environ | {
        "CC": f"{compiler} {FLAGS} {flags}",
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def test_kernels_under_sanitizers() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.ops.cpu.thinned",
    ]
    running = [
        subprocess.Popen(
            [*command, *TESTS],
            cwd=ROOT,
            env=environment(flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for flags in (NARROW, AS_HERE)
    ]
    for child in running:
        said, _ = child.communicate()
        assert child.returncode == 0, said[-4000:]
        assert " passed" in said and "skipped" not in said


def test_the_sanitizer_sees_what_it_should() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OVERRUN], cwd=ROOT, env=environment(NARROW), capture_output=True, text=True
    )
    assert done.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in done.stderr
