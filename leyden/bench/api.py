"""leyden bench api: what the HTTP server itself costs, per request and per streamed token.

The server runs as it does in service, with the engine in a process of its own; but the engine replays a text, a token
of every request per step, so everything that takes time here is the server's doing. Processor time is that of the
server's process alone, engine and load generator not included. For comparison: a request that does nothing (/version),
which shows what the machine, the sockets and the frameworks cost.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CHAT = "/v1/chat/completions"
TEXT = "A sentence of ten words that the model would write. "


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times in microseconds. `cpu` is processor time of the server's process."""

    requests: int  # one after the other, one token each
    nothing_p50: float  # of a request that does nothing
    request_p50: float
    request_p99: float
    request_cpu: float
    streams: int  # at once
    tokens: int
    chunks: int  # fewer than tokens if the server could not keep up and sent several at once
    token_cpu: float
    load: float  # average number of programs that wanted a processor in the minute before
    processors: int


class Connection:
    """One HTTP connection that is kept: no more client than is needed, so that it is not what is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**20))

    async def ask(self, path: str, body: bytes = b"") -> tuple[int, int]:
        """(status, pieces of the body) of a POST, or of a GET without a body"""
        head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        status, pieces = int(head.split(" ", 2)[1]), 0
        if "content-length: " in head:
            await self._reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            return status, 1
        while size := int(await self._reader.readline(), 16):
            await self._reader.readexactly(size + 2)
            pieces += 1
        await self._reader.readline()
        return status, pieces

    def close(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def server(step_seconds: float) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server that replays TEXT."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        cases = {"cases": {"hi": {"text": "</think>" + TEXT * 500}}}
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps(cases))
        command = [sys.executable, "-m", "leyden.testing.scripted", str(file), "--port", str(port), "--own-process"]
        process = subprocess.Popen([*command, "--step-seconds", str(step_seconds)], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server did not start")
                time.sleep(0.05)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, all threads together."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _body(max_tokens: int, stream: bool) -> bytes:
    message = {"role": "user", "content": "hi"}
    return json.dumps({"messages": [message], "max_tokens": max_tokens, "stream": stream}).encode()


async def one_by_one(port: int, pid: int, requests: int, path: str, body: bytes = b"") -> tuple[list[float], float]:
    """(seconds of each request, processor seconds of all)"""
    connection = await Connection.open(port)
    for _ in range(50):
        await connection.ask(path, body)
    before, seconds = cpu_seconds(pid), []
    for _ in range(requests):
        started = time.perf_counter()
        status, _ = await connection.ask(path, body)
        seconds.append(time.perf_counter() - started)
        assert status == 200
    connection.close()
    return seconds, cpu_seconds(pid) - before


async def at_once(port: int, pid: int, streams: int, tokens: int) -> tuple[int, float]:
    """(chunks with tokens, processor seconds)"""
    connections = [await Connection.open(port) for _ in range(streams)]
    for connection in connections:
        await connection.ask(CHAT, _body(1, stream=True))
    before = cpu_seconds(pid)
    body = _body(tokens, stream=True)
    found = await asyncio.gather(*(connection.ask(CHAT, body) for connection in connections))
    used = cpu_seconds(pid) - before
    for connection in connections:
        connection.close()
    assert {status for status, _ in found} == {200}
    return sum(pieces for _, pieces in found), used


def measure(streams: int, tokens: int, requests: int, step_seconds: float) -> Result:
    load = os.getloadavg()[0]
    with server(0.0) as (port, pid):
        nothing, _ = asyncio.run(one_by_one(port, pid, requests, "/version"))
        seconds, request_cpu = asyncio.run(one_by_one(port, pid, requests, CHAT, _body(1, stream=False)))
    with server(step_seconds) as (port, pid):
        chunks, stream_cpu = asyncio.run(at_once(port, pid, streams, tokens))
    cuts = statistics.quantiles(seconds, n=100)
    return Result(
        requests=requests,
        nothing_p50=1e6 * statistics.median(nothing),
        request_p50=1e6 * statistics.median(seconds),
        request_p99=1e6 * cuts[98],
        request_cpu=1e6 * request_cpu / requests,
        streams=streams,
        tokens=streams * tokens,
        chunks=chunks,
        token_cpu=1e6 * stream_cpu / (streams * tokens),
        load=load,
        processors=os.cpu_count() or 1,
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("leyden bench api", description="What the HTTP server costs, engine aside.")
    parser.add_argument("--streams", type=int, default=64, help="answers streamed at once")
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--requests", type=int, default=1000, help="sent one after the other")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="time of an engine step while streaming")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    args = parser.parse_args(argv)
    result = measure(args.streams, args.tokens, args.requests, args.step_seconds)
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    print(
        f"load average before: {result.load:.2f} on {result.processors} processors; above 0.5 others are measured too"
    )
    print(f"one request after the other, one token each ({result.requests}):")
    print(f"  {result.request_p50:8.0f} µs p50, {result.request_p99:.0f} µs p99 from sending to answer")
    print(f"  {result.nothing_p50:8.0f} µs p50 for a request that does nothing")
    print(f"  {result.request_cpu:8.0f} µs of processor time each")
    print(f"{result.streams} streams at once, {result.tokens} tokens in {result.chunks} chunks:")
    print(f"  {result.token_cpu:8.1f} µs of processor time per token")
    return 0
