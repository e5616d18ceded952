"""A whole server with --cache-dir, ended by signals: what it was told survives the one it can hear."""

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from leyden.cache.saved import NAME
from leyden.testing.checkpoints import tiny

PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen " * 4


class Server:
    def __init__(self, folder, cache, port, *more):
        flags = ["--cache-dir", str(cache), "--port", str(port), "--device", "cpu", "--max-num-seqs", "2"]
        flags += ["--kv-cache-memory-bytes", "4M", "--max-model-len", "512", "--kv-offloading-size", "0.01"]
        command = [sys.executable, "-m", "leyden", "serve", str(folder), *flags, *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        deadline = time.monotonic() + 60
        while not self._up():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)

    def _up(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def cached(self) -> int:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        usage = self.http.post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def end(self, how: int) -> None:
        self.http.close()
        self.process.send_signal(how)
        self.process.wait(30)


@pytest.fixture
def port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_sigterm_saves_and_sigkill_leaves_what_was_saved(tmp_path, port):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny(folder)
    server = Server(folder, cache, port)
    assert server.cached() == 0
    server.end(signal.SIGTERM)
    assert server.process.returncode == 0
    saved = (cache / NAME).read_bytes()
    server = Server(folder, cache, port)
    assert server.cached() > 50
    server.end(signal.SIGKILL)
    assert (cache / NAME).read_bytes() == saved and os.listdir(cache) == [NAME]


def test_a_server_that_nobody_asks_saves_what_it_was_told(tmp_path, port):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    tiny(folder)
    server = Server(folder, cache, port, "--cache-save-interval", "0.5")
    server.cached()
    deadline = time.monotonic() + 20
    while not (cache / NAME).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.end(signal.SIGKILL)
    server = Server(folder, cache, port)
    assert server.cached() > 50
    server.end(signal.SIGTERM)
