"""`leyden serve`: the parts without a server, then the whole program with every published command."""

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from leyden.cli import serve
from leyden.config.engine import EngineConfig
from leyden.config.launch import Launch
from leyden.config.server import ServerConfig
from leyden.errors import ConfigError
from leyden.testing import drafters
from leyden.testing.checkpoints import tiny
from tests.config.test_launch import commands

FACTS = {
    "device": "cpu",
    "dtype": "float32",
    "parameters": 2_500_000,
    "weight_bytes": 10 << 20,
    "memory": "64 slots, 10 pages",
    "max_model_len": 8192,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "cache_tokens": 32768,
}


def test_banner_is_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]):
    serve.banner(Launch.from_argv(["some/[model]", "--served-model-name", "a", "b"]), FACTS, 1.234)
    out, err = capsys.readouterr()
    assert out == "" and "\x1b" not in err
    assert [line.strip() for line in err.splitlines()[1:]] == [
        "model     some/[model] as a, b",
        "device    cpu, float32: 2.5 million parameters in 10.0 MiB",
        "cache     64 slots, 10 pages",
        "requests  64 at once, 2,048 tokens per step; 4 of the longest context (8,192 tokens)",
        "url       http://127.0.0.1:8000/v1",
        "ready     after 1.2 s",
    ]


def test_url():
    assert serve.url(ServerConfig(host="::1", port=1, root_path="/p")) == "http://[::1]:1/p/v1"
    assert serve.url(ServerConfig(uds="/tmp/s")) == "unix:/tmp/s"
    assert serve.url(ServerConfig(ssl_keyfile="k", ssl_certfile="c")).startswith("https://")


def test_a_taken_address_is_found_before_loading():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: .*in use"):
            serve.check_address(ServerConfig(port=port))
    serve.check_address(ServerConfig(port=0))


def test_what_the_address_needs_is_checked_before_loading(tmp_path: Path):
    (tmp_path / "no.pem").write_text("no certificate")
    for name in ("no.pem", "missing.pem"):
        pem = str(tmp_path / name)
        with pytest.raises(ConfigError, match=f"--ssl-certfile {pem} --ssl-keyfile {pem}: expected certificates"):
            serve.check_address(ServerConfig(port=0, ssl_certfile=pem, ssl_keyfile=pem))
    with pytest.raises(ConfigError, match="--uds .*: no socket can be made there"):
        serve.check_address(ServerConfig(uds=str(tmp_path / "missing" / "socket")))
    serve.check_address(ServerConfig(uds=str(tmp_path / "socket")))


def test_files_that_flags_name_are_checked(tmp_path: Path):
    (tmp_path / "template").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="--chat-template .*: expected a text file in UTF-8"):
        serve._read(str(tmp_path / "template"))
    with pytest.raises(ConfigError, match="--generation-config nowhere: expected auto, vllm or a folder"):
        serve.sampling_defaults(EngineConfig(model="m", generation_config="nowhere"), tmp_path)


def test_sampling_defaults(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "max_new_tokens": 7, "eos_token_id": 2}')
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.9}')

    def defaults(**fields: object) -> dict[str, object]:
        return serve.sampling_defaults(EngineConfig(model="m", **fields), tmp_path)  # type: ignore[arg-type]

    assert defaults() == {"temperature": 0.5, "max_tokens": 7}
    assert defaults(generation_config="vllm", override_generation_config={"top_k": 3}) == {"top_k": 3}
    assert defaults(generation_config=str(other)) == {"top_p": 0.9}
    assert defaults(override_generation_config={"temperature": 0.1})["temperature"] == 0.1


class Program:
    """A running `leyden serve` and its log."""

    def __init__(self, *argv: str):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "leyden", "serve", *argv], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.log: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        while (line := self._lines.get(timeout=seconds)) is not None:
            self.log.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"it ended, and {pattern!r} was not in its log:\n" + "\n".join(self.log))

    def rest(self) -> list[str]:
        """The whole log, once it has ended."""
        self.log += iter(self._lines.get, None)
        return self.log

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        self._reader.join()
        return code


@contextlib.contextmanager
def program(*argv: str) -> Iterator[Program]:
    running = Program(*argv)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()
        running._reader.join()
        running.process.stderr.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with an MTP module; beside it the folders "dflash" and "dspark" with drafters for it."""
    folder = tmp_path_factory.mktemp("models")
    config = tiny(folder / "target", "mtp")
    for method in ("dflash", "dspark"):
        drafters.tiny(folder / method, config, method)
    return str(folder / "target")


def local(word: str, checkpoint: str) -> str:
    """`word` of a published command, or the folder here in the place of a model's name."""
    if not word.startswith("nvidia/"):
        return word
    drafter = next((name for name in ("DFlash", "DSpark") if word.endswith(name)), "")
    return str(Path(checkpoint).with_name(drafter.lower())) if drafter else checkpoint


@pytest.mark.parametrize("name", commands())
def test_published_command_serves(name: str, checkpoint: str):
    argv = [*(local(word, checkpoint) for word in commands()[name])]
    argv += ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--kv-cache-memory-bytes", "64m"]
    with program(*argv) as running:
        url = running.wait_for(r"running on (http://\S+)")[1]
        told = [line.split(": ", 1)[1] for line in running.log if " W leyden.cli.serve: " in line]
        assert [line for line in told if "more than once" not in line] == Launch.from_argv(argv).notes("cpu")
        body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] >= 1
        assert ("  drafts    " in "\n".join(running.log)) == (name in ("MTP", "DFlash") or "DSpark" in name)
        assert running.stop() == 0
        assert "secret" not in "\n".join(running.rest())


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--max-model-len", "1g", "--kv-cache-memory-bytes", "1m"], 2, "--max-model-len 1000000000 .* does not fit"),
        (["--tokenizer", "/no/such/folder"], 1, "model '/no/such/folder': no such folder"),
    ],
)
def test_errors_before_it_serves(argv: list[str], code: int, message: str, checkpoint: str):
    with program(checkpoint, *argv, "--port", "0") as running:
        running.wait_for(message)
        assert running.process.wait(timeout=30) == code
        assert not any("Traceback" in line for line in running.log)
