"""The program: commands, exit codes, messages without tracebacks."""

import subprocess
import sys

import pytest

from leyden import __version__, cli
from leyden.errors import CheckpointError, ConfigError, EngineDead


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_version_and_usage(capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")
    for argv in ((), ("--help",), ("help",)):
        code, out, err = run(capsys, *argv)
        assert code == 0 and err == "" and all(f"leyden {name} " in out for name in cli.COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "sreve")
    assert code == 2 and out == "" and err.startswith("leyden: unknown command 'sreve'\n")


def test_wrong_flags_end_with_2(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "serve", "model", "--dtype", "int4")
    assert code == 2 and out == ""
    assert err.splitlines()[0].startswith("leyden serve: --dtype: expected one of auto, bfloat16")
    assert run(capsys, "serve", "model", "--help=nothing-like-it")[0] == 2


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("a"), 2, "leyden serve: a\nleyden serve --help tells more\n"),
        (CheckpointError("b"), 1, "leyden serve: b\n"),
        (EngineDead("c"), 1, "leyden serve: c\n"),
        (FileNotFoundError(2, "No such file", "x/y"), 1, "leyden serve: x/y cannot be read or written: No such file\n"),
        (
            ModuleNotFoundError("x", name="uvicorn.main"),
            1,
            "needs the Python package 'uvicorn', which is not installed\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_become_exit_codes(error, code, message, capsys, monkeypatch: pytest.MonkeyPatch):
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("leyden.cli.serve.main", fail)
    assert run(capsys, "serve", "m")[0] == code
    cli.main(["serve", "m"])
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize("fault", [ModuleNotFoundError("x", name="leyden.nothing"), OSError("of no file")])
def test_our_own_faults_keep_their_traceback(fault: Exception, monkeypatch: pytest.MonkeyPatch):
    def fail(argv: list[str]) -> int:
        raise fault

    monkeypatch.setattr("leyden.cli.serve.main", fail)
    with pytest.raises(type(fault)):
        cli.main(["serve", "m"])


def test_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "leyden", "serve", "/no/such/folder"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("leyden serve: model '/no/such/folder': no such folder")
