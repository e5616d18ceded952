"""The engine in its own process: start, work, every way of ending, and the exit code of the whole program."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyden.errors import CheckpointError, EngineDead
from leyden.server.client import EngineClient
from leyden.server.process import OwnProcess
from leyden.text.tokenizer import Tokenizer
from leyden.types import Request, SamplingParams
from tests.server.conftest import eventually

ENGINE = "leyden.testing.scripted:engine"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def config(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "cases": {"hi": {"text": "Hello"}, "crash": {"finish_reason": "crash"}}, **more}


def with_process(link: OwnProcess, test: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        client = EngineClient(link)
        client.open()
        try:
            await test(client)
        finally:
            await client.close()

    asyncio.run(main())
    assert not alive(link.pid)


async def ask(client: EngineClient, tokenizer: Tokenizer, text: str, id: str = "a", max_tokens: int = 1000) -> str:
    params = SamplingParams(max_tokens=max_tokens, logit_bias={3: 0.5})
    request = Request(id=id, prompt=tokenizer.encode(text), params=params)
    ids: list[int] = []
    with await client.generate(request) as stream:
        async for delta in stream:
            ids += delta.token_ids
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_work_and_clean_end(folder: Path, tokenizer: Tokenizer):
    link = OwnProcess(ENGINE, config(folder))
    assert link.facts["max_model_len"] == 2048

    async def test(client: EngineClient) -> None:
        texts = await asyncio.gather(*(ask(client, tokenizer, "hi", str(index)) for index in range(20)))
        assert texts == ["Hello"] * 20
        stats = await client.stats()
        assert stats.finished == {"stop": 20} and stats.running == 0
        waiting = asyncio.ensure_future(ask(client, tokenizer, "some long text " * 50))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await client.stats()).running == 0

    with_process(link, test)
    assert not Path(link._folder).exists()


@pytest.mark.parametrize(
    ("factory", "fields", "error", "message"),
    [
        (ENGINE, {"folder": "/nowhere", "cases": {}}, CheckpointError, "tokenizer.json"),
        ("leyden.testing.scripted:nothing", {}, EngineDead, "nothing"),
        ("os:_exit", {"status": 3}, EngineDead, "exit code 3"),
    ],
)
def test_what_stops_the_start_is_raised(factory: str, fields: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        OwnProcess(factory, fields)


@pytest.mark.parametrize("how", ["kill", "crash"])
def test_death_is_told_to_everyone(folder: Path, tokenizer: Tokenizer, how: str):
    async def test(client: EngineClient) -> None:
        waiting = asyncio.ensure_future(ask(client, tokenizer, "some long text " * 50))
        await asyncio.sleep(0.05)
        if how == "kill":
            os.kill(link.pid, signal.SIGKILL)
            reason = "SIGKILL"
        else:
            with pytest.raises(EngineDead):
                await ask(client, tokenizer, "crash", "b")
            reason = "scripted crash"
        with pytest.raises(EngineDead, match=reason):
            await waiting
        assert reason in await asyncio.wait_for(client.died(), 10)
        assert not client.alive
        with pytest.raises(EngineDead):
            await client.stats()

    link = OwnProcess(ENGINE, config(folder, step_seconds=0.005))
    with_process(link, test)


def test_respawn(folder: Path, tokenizer: Tokenizer):
    async def test(client: EngineClient) -> None:
        first = link.pid
        waiting = asyncio.ensure_future(ask(client, tokenizer, "some long text " * 50))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await waiting
        assert not client.alive
        while not client.alive:
            await asyncio.sleep(0.01)
        assert link.pid != first and not alive(first)
        assert await ask(client, tokenizer, "hi") == "Hello"

    link = OwnProcess(ENGINE, config(folder, step_seconds=0.005), respawn=True)
    with_process(link, test)


# The whole program: an HTTP server process and its engine process.

PROGRAM = """
import sys, json
from leyden import log
from leyden.config.server import ServerConfig
from leyden.server.app import build, serve
from leyden.server.client import EngineClient
from leyden.server.process import OwnProcess
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer

folder, port = sys.argv[1], int(sys.argv[2])
log.setup()
link = OwnProcess("leyden.testing.scripted:engine", {"folder": folder, "cases": {}, "step_seconds": 0.005})
print(link.pid, flush=True)
assert "torch" not in sys.modules
client, config = EngineClient(link), ServerConfig(port=port, shutdown_timeout=int(sys.argv[3]))
tokenizer = Tokenizer.from_folder(folder)
app = build(config, client, tokenizer, ChatTemplate.from_folder(folder, tokenizer), model="tiny")
sys.exit(serve(app, config, client))
"""


@pytest.fixture
def program(
    folder: Path, unused_port: int, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], int, httpx.Client]]:
    """Parametrised with the shutdown timeout -> (process, pid of its engine, client)"""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(unused_port), str(getattr(request, "param", 0))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        engine = int(process.stdout.readline())
        with httpx.Client(base_url=f"http://127.0.0.1:{unused_port}", timeout=30) as http:

            def up() -> bool:
                try:
                    return http.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            eventually(up, 20)
            yield process, engine, http
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


LONG = {"prompt": "a long text " * 60, "max_tokens": 500}


def begun(lines: Iterator[str]) -> str:
    return next(line for line in lines if line)


def test_killed_engine_gives_503_events_and_a_non_zero_exit(program: tuple[subprocess.Popen[str], int, httpx.Client]):
    process, engine, http = program
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        begun(lines)
        os.kill(engine, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 503
    assert process.wait(10) == 1
    assert "Traceback" not in process.communicate()[1]


def test_killed_engine_gives_503_to_a_whole_answer(program: tuple[subprocess.Popen[str], int, httpx.Client]):
    process, engine, http = program
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {engine}"])
    response = http.post("/v1/completions", json=LONG)
    assert response.status_code == 503 and response.json()["error"]["type"] == "ServiceUnavailableError"
    assert killer.wait() == 0 and process.wait(10) == 1


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_both_processes_cleanly(program: tuple[subprocess.Popen[str], int, httpx.Client], sig: int):
    process, engine, _ = program
    process.send_signal(sig)
    assert process.wait(10) == 0
    eventually(lambda: not alive(engine))
    assert "Traceback" not in process.communicate()[1]


@pytest.mark.parametrize(("program", "signals"), [(0, 1), (60, 2)], indirect=["program"])
def test_requests_under_way_are_told_that_the_server_stops(
    program: tuple[subprocess.Popen[str], int, httpx.Client], signals: int
):
    process, _, http = program
    whole: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: whole.append(http.post("/v1/completions", json=LONG)))
    asking.start()
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        begun(lines)
        eventually(lambda: re.search(r"vllm:num_requests_running{.*} 2.0", http.get("/metrics").text))
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        rest = [line for line in lines if line]
    asking.join()
    assert rest[-1] == "data: [DONE]" and whole[0].status_code == 503
    for error in (json.loads(rest[-2].removeprefix("data: "))["error"], whole[0].json()["error"]):
        assert (error["code"], error["message"]) == (503, "the server is shutting down")
    assert process.wait(10) == 0
    assert "Traceback" not in process.communicate()[1]


def test_the_engine_does_not_outlive_a_killed_server(program: tuple[subprocess.Popen[str], int, httpx.Client]):
    process, engine, _ = program
    process.kill()
    process.wait()
    start = time.monotonic()
    eventually(lambda: not alive(engine))
    assert time.monotonic() - start < 3
