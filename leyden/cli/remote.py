"""What `leyden chat` and `leyden complete` share: flags, the screen, and a server spoken to over HTTP."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from rich.console import Console

from leyden.cli import help as pages
from leyden.config.arguments import parse
from leyden.config.flags import Flag
from leyden.errors import LeydenError


def flag(name: str, help: str, *short: str, type: str = "text", default: Any = None) -> Flag:
    dest = name.lstrip("-").replace("-", "_")
    return Flag(names=(name, *short), dest=dest, type=type, group="", help=help, default=default, common=True)


FLAGS = (
    flag("--url", "address of the server's API", default="http://localhost:8000/v1"),
    flag("--model-name", "model to ask; otherwise the first one of the server"),
    flag("--api-key", "key of the server (also: VLLM_API_KEY, OPENAI_API_KEY)"),
    flag("--stats", "tell after each answer how fast it came", type="switch", default=False),
)


def values(title: str, about: str, argv: Sequence[str], flags: Sequence[Flag]) -> dict[str, Any] | None:
    """The values of the command line; None if it asks for help, which is then printed."""
    topic = pages.wanted(argv)
    if topic is not None:
        print(pages.page(title, about, topic, (), flags))
        return None
    return parse(argv, flags).values


def say(text: str, style: str = "") -> None:
    """Print as it is, without a line end. A model cannot steer the terminal: escape characters are shown."""
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    console.print(text.replace("\x1b", "␛"), end="", style=style, markup=False)


def lines() -> Iterator[str]:
    """What the user types, until the end of the input; empty lines are left out."""
    console = Console()
    while True:
        try:
            line = console.input("[bold]> [/]").strip()
        except EOFError:
            return
        if line:
            yield line


class Server:
    """A server's API. Raises LeydenError with the server's own words when it refuses."""

    def __init__(self, values: dict[str, Any], transport: httpx.BaseTransport | None = None):
        self.url = str(values.get("url", FLAGS[0].default)).rstrip("/")
        key = values.get("api_key") or os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=10)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport)
        self._stats = bool(values.get("stats"))
        self._tokens = 0
        self._times: list[float] = []
        self.model = str(values.get("model_name") or self._first_model())

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of an answer, piece by piece."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}} | body
        self._tokens, self._times = 0, [time.monotonic()]
        try:
            with self._http.stream("POST", path, json=body) as response:
                self._check(response)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise LeydenError(chunk["error"]["message"])
                    self._tokens = (chunk.get("usage") or {}).get("completion_tokens", self._tokens)
                    self._times.append(time.monotonic())
                    yield from chunk["choices"]
        except httpx.HTTPError as error:
            raise LeydenError(f"{self.url}: {error}") from None

    def report(self) -> str:
        """With --stats: a line with tokens and times of the last answer; else nothing."""
        if not (self._stats and self._tokens and len(self._times) > 1):
            return ""
        first, rest = self._times[1] - self._times[0], self._times[-1] - self._times[1]
        rate = f", then {(self._tokens - 1) / rest:.1f} per second" if rest else ""
        return f"{self._tokens} tokens, the first after {first:.2f} s{rate}\n"

    def _first_model(self) -> str:
        try:
            response = self._http.get("/models")
        except httpx.HTTPError as error:
            raise LeydenError(f"no server answers at {self.url} ({error}); start one with leyden serve") from None
        self._check(response)
        return str(response.json()["data"][0]["id"])

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        response.read()
        try:
            message = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = response.text[:500]
        raise LeydenError(f"{self.url}: status {response.status_code}: {message}")
