"""The kernels on ARM: compiled for it, and run by an emulator against the references."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.ops.cpu import build
from tests.ops.cpu.on_arm import start

ROOT = Path(__file__).parents[3]
COMPILER, LISTER, EMULATOR = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-nm", "qemu-aarch64"
TESTS = [f"tests/ops/cpu/test_{name}.py" for name in ("kernels", "formats", "draft", "drafter")]
# What processors have: all the products that the kernels know; only those of bytes; none.
MACHINES = {"max": "armv8.6-a", "cortex-a76": "armv8.2-a+dotprod", "cortex-a53": "armv8-a"}
STUB = """#!/bin/sh
[ "$1" = --version ] && exec cat {stub}
while [ "$1" != -o ]; do shift; done
exec cc -shared -o "$2" {stub}
"""


def compiled(folder: Path, architecture: str) -> tuple[list[str], dict[str, str]]:
    """(the command that runs arm.c with the kernels for an architecture; what nm says of each name)"""
    flags = [*build.FLAGS, "-O1", f"-march={architecture}", "-Wall", "-Wextra", "-Werror"]
    made = {str(path): folder / f"{path.stem}.o" for path in build.SOURCES.glob("*.c")}
    running = [subprocess.Popen([COMPILER, *flags, "-c", source, "-o", object]) for source, object in made.items()]
    assert not any([child.wait() for child in running])
    library, arm = folder / "kernels.so", folder / "arm"
    subprocess.run([COMPILER, "-shared", *made.values(), "-o", library, "-lm"], check=True)
    subprocess.run([COMPILER, Path(__file__).parent / "arm.c", "-o", arm, "-ldl"], check=True)
    listed = subprocess.run(
        [LISTER, "-D", "--defined-only", library], check=True, capture_output=True, text=True
    ).stdout
    kinds = {line.split()[2]: line.split()[1] for line in listed.splitlines()}
    return [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(arm), str(library)], kinds


@pytest.mark.parametrize("machine", MACHINES)
def test_kernels_on(machine: str, tmp_path: Path) -> None:
    missing = [name for name in (COMPILER, LISTER, EMULATOR, "cc") if not shutil.which(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    (emulator, *command), kinds = compiled(tmp_path, MACHINES[machine])
    command = [emulator, "-cpu", machine, *command]
    child, values = start(command, list(kinds))
    child.communicate()
    stands_for = {
        name: "void %s(void) {}" if kind == "T" else f"int64_t %s = {values[name]};" for name, kind in kinds.items()
    }
    stub, compiler = tmp_path / "stub.c", tmp_path / "cc"
    stub.write_text("\n".join(["#include <stdint.h>", *(text % name for name, text in stands_for.items()), ""]))
    compiler.write_text(STUB.format(stub=stub))
    compiler.chmod(0o755)
    plugins = [word for name in ("on_arm", "thinned") for word in ("-p", f"tests.ops.cpu.{name}")]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            *plugins,
            "-p",
            "no:cacheprovider",
            "--emulated",
            " ".join([*command, *kinds]),
            *TESTS,
        ],
        cwd=ROOT,
        env=os.environ | {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
