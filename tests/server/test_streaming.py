"""Clients that go away, connections that are silent, and errors in mid-stream."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from leyden.errors import EngineDead
from leyden.server.client import Stream
from leyden.server.streaming import DONE, PING, EventStream, unless_disconnected
from tests.server.conftest import Server, eventually

LONG = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 300}]}


def idle(server: Server) -> bool:
    return not server.engine.busy


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_at_once(start: Any, stream: bool):
    with start({}, step_seconds=0.005) as server:
        with httpx.Client(base_url=server.url) as leaving:
            if stream:
                with leaving.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    leaving.post("/v1/chat/completions", json=LONG, timeout=0.1)
        eventually(lambda: idle(server), 0.5)
        assert len(server.engine.aborted) == 1
        assert server.chat("hi").status_code == 200


def test_all_copies_of_a_leaving_client_are_aborted(start: Any):
    with start({}, step_seconds=0.005) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/chat/completions", json={**LONG, "n": 3}, timeout=0.1)
        eventually(lambda: idle(server), 0.5)
        assert len(server.engine.aborted) == 3


def test_D29c_cancel_storm_over_http(start: Any):
    async def leave(client: httpx.AsyncClient, index: int, seconds: float) -> None:
        body = {**LONG, "stream": index % 2 == 0}
        task = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def storm(url: str) -> None:
        rng = random.Random(0)
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(leave(client, index, rng.uniform(0, 0.05)) for index in range(200)))

    with start({"hi": "</think>Hello"}, step_seconds=0.002) as server:
        asyncio.run(storm(server.url))
        eventually(lambda: idle(server), 1.0)
        assert server.engine.stats().running == 0 and server.client._streams == {}
        assert server.chat().json()["choices"][0]["message"]["content"] == "Hello"


def test_silence_is_broken_by_comments(start: Any):
    with start({"hi": "</think>Hello"}, step_seconds=0.3, ping_interval=0.05) as server:
        text = server.chat(stream=True, max_tokens=1).text
        assert text.count(": ping\n\n") >= 2
        assert text.endswith("data: [DONE]\n\n")


# EventStream and unless_disconnected by themselves.


async def collected(frames: AsyncGenerator[bytes, None], ping_interval: float = 0) -> list[bytes]:
    bodies: list[bytes] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])

    await EventStream(nullcontext(), frames, ping_interval, {})({"type": "http"}, receive, send)
    return bodies


def test_errors_become_a_last_event():
    async def failing(error: Exception) -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise error

    first, error, done = asyncio.run(collected(failing(EngineDead("the engine process ended (signal SIGKILL)"))))
    assert (first, done) == (b"data: 1\n\n", DONE)
    assert b'"code":503' in error and b"SIGKILL" not in error
    _, error, _ = asyncio.run(collected(failing(ZeroDivisionError("in our /code/path.py"))))
    assert b'"code":500' in error and b"path" not in error


def test_a_client_that_left_before_the_first_frame_leaves_nothing_running():
    left: list[str] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        raise AssertionError
        yield b""

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def main() -> None:
        stream = Stream(["a"], left.extend)
        await EventStream(stream, frames(), 15, {})({"type": "http"}, gone, send)

    asyncio.run(main())
    assert left == ["a"]


def test_pings_only_in_silence():
    async def slow() -> AsyncGenerator[bytes, None]:
        for _ in range(3):
            await asyncio.sleep(0.03)
            yield b"x"

    assert PING in asyncio.run(collected(slow(), 0.01))
    assert PING not in asyncio.run(collected(slow(), 0.2))


def test_work_is_cancelled_when_the_client_goes():
    async def main() -> None:
        stopped = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                stopped.set()

        async def gone() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientDisconnect):
            await unless_disconnected(gone, work())
        assert stopped.is_set()

        async def quick() -> int:
            return 7

        async def staying() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

        assert await unless_disconnected(staying, quick()) == 7

    asyncio.run(main())
