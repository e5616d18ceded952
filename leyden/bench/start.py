"""How long `leyden serve` takes from its command to the first token of the first request.

    imports      Python and its modules, in the server's process and then in the engine's; tokenizer and template
    engine       weights, drafter and cache; CUDA graphs as far as they are recorded before the first request
    server       until the server answers
    first token  of one short prompt: the first steps load kernels

Each turn is the whole program, started anew; medians count. From the second turn on the weights are in the system's
page cache, which the first turn shows: it is printed like the others.

    leyden bench start MODEL                        three times
    leyden bench start MODEL --quantization int8    with any flags of leyden serve
"""

import argparse
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

from tqdm import tqdm

from leyden.bench.offline import keep, whole
from leyden.config.launch import Launch
from leyden.errors import ConfigError

STAGES = ("imports", "engine", "server", "first token")
_MOST = 600.0  # seconds that a start or an answer may take
_ASKED = {"prompt": "Lightning is", "max_tokens": 1, "ignore_eos": True}


def turn(flags: Sequence[str], key: str = "") -> dict[str, float]:
    """Seconds of each stage, and "all". Raises ConfigError with the server's last words if it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ("--host", "127.0.0.1", "--port", str(port), "--log-format", "json", "--log-level", "info")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "leyden", "serve", *flags, *where], stdout=subprocess.DEVNULL, stderr=said
        )
        try:
            while not _listens(port):
                if process.poll() is not None or time.time() > began + _MOST:
                    said.seek(0)
                    raise ConfigError(f"the server did not come up: {said.read()[-500:].strip()}")
                time.sleep(0.005)
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=_MOST)
            _ask(client, "GET", "/health")
            ready = time.time()
            _ask(client, "POST", "/v1/completions", json.dumps(_ASKED), key)
            first = time.time()
            client.close()
        finally:
            process.terminate()
            process.wait()
        said.seek(0)
        loaded, seconds = _engine(said.read())
    taken = (loaded - seconds - began, seconds, ready - loaded, first - ready)
    return dict(zip(STAGES, taken, strict=True)) | {"all": first - began}


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _ask(client: http.client.HTTPConnection, method: str, path: str, body: str | None = None, key: str = "") -> None:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    client.request(method, path, body, headers)
    answer = client.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise ConfigError(f"{path}: status {answer.status}: {text[:500].decode(errors='replace')}")


def _engine(said: str) -> tuple[float, float]:
    """(when the engine was ready, in seconds since 1970; how long it took), of what the server wrote."""
    for line in said.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record["logger"] == "leyden.engine.engine":
                return datetime.fromisoformat(record["time"]).timestamp(), float(record["seconds"])
    raise ConfigError(f"the engine did not say how long it took to load: {said[-500:].strip()}")


def main(argv: Sequence[str]) -> int:
    """`leyden bench start`: print the seconds of each turn and their medians."""
    parser = argparse.ArgumentParser(
        "leyden bench start",
        usage="leyden bench start MODEL [flags below] [FLAGS of leyden serve]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--num-iters", type=whole(1), metavar="N", default=3, help="turns (default 3)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the numbers into a JSON file too")
    given, flags = parser.parse_known_args(argv)
    server = Launch.from_argv(flags).server
    if server.uds or server.ssl_certfile:
        raise ConfigError("leyden bench start talks to a TCP port without TLS: leave out --uds and --ssl-certfile")
    key = server.api_key[0] if server.api_key else ""
    turns = [turn(flags, key) for _ in tqdm(range(given.num_iters), unit="start")]
    print(f"{'seconds':<8}" + "".join(f"{name:>13}" for name in turns[0]))
    medians = {name: median(taken[name] for taken in turns) for name in turns[0]}
    for name, row in [*((str(number), taken) for number, taken in enumerate(turns, 1)), ("median", medians)]:
        print(f"{name:<8}" + "".join(f"{seconds:>13.2f}" for seconds in row.values()))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors: above 0.5 others are measured too")
    keep(given.output_json, {"median": medians, "turns": turns})
    return 0
