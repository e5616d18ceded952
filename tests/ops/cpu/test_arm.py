"""The kernels on ARM: compiled for several processors, and run by an emulator against the references.

A fifth of the kernels' tests, as under the sanitizers. All of them pass as well, at -O3: see docs/numbers.md.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.ops.cpu import build
from leyden.ops.cpu.program import available

ROOT = Path(__file__).parents[3]
TOOLS = COMPILER, SYMBOLS, EMULATOR = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-nm", "qemu-aarch64"
TESTS = [f"tests/ops/cpu/test_{name}.py" for name in ("kernels", "formats", "draft", "drafter")]
# What the processors have: every product that the kernels know; only those of bytes; none.
MACHINES = {"max": "armv8.6-a", "cortex-a76": "armv8.2-a+dotprod", "cortex-a53": "armv8-a"}
# In place of a compiler: whatever is asked of it, it compiles the stub.
STUB_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec cat {stub}
while [ "$1" != -o ]; do shift; done
exec cc -shared -o "$2" {stub}
"""


def compiled(folder: Path, architecture: str, level: str = "-O1") -> tuple[Path, Path]:
    """(arm.c, the kernels' library)"""
    folder.mkdir()
    flags = [*build.FLAGS, level, f"-march={architecture}", "-Wall", "-Wextra", "-Werror"]
    objects = {source: folder / f"{source.stem}.o" for source in build.SOURCES.glob("*.c")}
    running = [subprocess.Popen([COMPILER, *flags, "-c", source, "-o", to]) for source, to in objects.items()]
    assert not any([child.wait() for child in running])
    program, library = folder / "arm", folder / "kernels.so"
    subprocess.run([COMPILER, "-shared", *objects.values(), "-o", library, "-lm"], check=True)
    subprocess.run([COMPILER, Path(__file__).parent / "arm.c", "-o", program, "-ldl"], check=True)
    return program, library


def begin(machine: str, program: Path, library: Path, tests: list[str]) -> subprocess.Popen[str]:
    """Tests whose kernels run on an emulated machine."""
    folder = library.parent
    listed = subprocess.run([SYMBOLS, "-D", "--defined-only", library], check=True, capture_output=True, text=True)
    kinds = {name: kind for _, kind, name in map(str.split, listed.stdout.splitlines())}
    command = [EMULATOR, "-cpu", machine, "-L", "/usr/aarch64-linux-gnu", str(program), str(library), *kinds]
    values = memoryview(subprocess.run(command, stdin=subprocess.DEVNULL, check=True, capture_output=True).stdout).cast(
        "q"
    )
    lines = (
        f"void {name}(void) {{}}" if kind == "T" else f"long long {name} = {value};"
        for (name, kind), value in zip(kinds.items(), values, strict=True)
    )
    stub, compiler = folder / "stub.c", folder / "cc"
    stub.write_text("\n".join([*lines, ""]))
    compiler.write_text(STUB_COMPILER.format(stub=stub))
    compiler.chmod(0o755)
    plugins = ["-p", "tests.ops.cpu.on_arm", "-p", "no:cacheprovider", "--emulated", " ".join(command)]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", *plugins, *tests],
        cwd=ROOT,
        env=os.environ | {"CC": str(compiler), "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_kernels_on_emulated_processors(tmp_path: Path) -> None:
    missing = [name for name in TOOLS if not shutil.which(name)]
    if missing or not available:
        pytest.skip(f"needs a C compiler and {', '.join(missing)} (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    running = []
    for machine, architecture in MACHINES.items():
        made = compiled(tmp_path / machine, architecture)
        running.append(begin(machine, *made, ["-p", "tests.ops.cpu.thinned", *TESTS]))
    for child in running:
        said, _ = child.communicate()
        assert child.returncode == 0, said[-4000:]
        assert " passed" in said and "skipped" not in said
