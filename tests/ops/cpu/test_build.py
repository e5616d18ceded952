import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.ops.cpu import build
from leyden.ops.cpu.program import available

ROOT = Path(__file__).parents[3]
SMALL = "int64_t answer(void) { return 42; }\n"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One short source instead of the kernels, and a cache of its own."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.c").write_text("#include <stdint.h>\n" + SMALL)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return sources / "small.c"


def made(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "leyden").iterdir())


@pytest.mark.skipif(not available, reason="needs a C compiler")
def test_the_library_is_compiled_once_and_again_when_anything_changes(small, tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert build.library().answer() == 42
    (first,) = made(tmp_path)
    before = first.stat().st_mtime_ns
    assert build.library().answer() == 42
    assert made(tmp_path) == [first] and first.stat().st_mtime_ns == before
    assert len([r for r in caplog.records if "compiling" in r.message]) == 1
    small.write_text(small.read_text().replace("42", "43"))
    assert build.library().answer() == 43
    assert len(made(tmp_path)) == 2
    monkeypatch.setenv("CC", "cc -DOTHER")
    assert build.library().answer() == 43
    assert len(made(tmp_path)) == 3


def test_without_a_compiler_there_is_one_line_and_no_library(small, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert build.library() is None
    assert [r.message for r in caplog.records] == [
        "no C compiler found: the CPU runs the reference kernels, many times slower; install gcc or clang"
    ]


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails_leaves_nothing_behind(small, tmp_path, monkeypatch, caplog, compiler) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CC", compiler)
    assert build.library() is None
    assert "the reference kernels run" in caplog.records[-1].message
    assert not (tmp_path / "cache").exists() or made(tmp_path) == []


@pytest.mark.skipif(not available, reason="needs a C compiler")
def test_an_error_in_the_sources_is_reported(small, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    small.write_text("this is not C\n")
    assert build.library() is None
    assert "small.c" in caplog.records[-1].message
    assert made(tmp_path) == []


@pytest.mark.skipif(not available, reason="needs a C compiler")
def test_a_cache_that_cannot_be_written_is_replaced(small, tmp_path, monkeypatch) -> None:
    (tmp_path / "cache").write_text("a file stands in the way")
    assert build.library().answer() == 42


def test_ops_run_without_kernels() -> None:
    code = """
import torch
from leyden import ops
x, w = torch.randn(3, 8), torch.randn(8)
assert torch.equal(ops.rms_norm(x, w, 1e-5), ops.rms_norm.reference(x, w, 1e-5))
assert ops.rms_norm._kernels == {}
"""
    environment = os.environ | {"CC": "false", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.skipif(not available, reason="needs a C compiler")
@pytest.mark.parametrize("flags", ["-march=x86-64", "-march=x86-64-v4"])
def test_the_sources_compile_without_warnings(flags: str, tmp_path: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("levels of x86-64")
    command = ["cc", *build.FLAGS, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", flags]
    sources = sorted(str(path) for path in build.SOURCES.glob("*.c"))
    done = subprocess.run([*command, *sources], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
