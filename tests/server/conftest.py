"""A real server on a real socket over the scripted engine; every test of the API talks HTTP to it."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyden.config.server import ServerConfig
from leyden.server.app import build
from leyden.server.client import EngineClient, InThread
from leyden.testing import tokenizer as testing_tokenizer
from leyden.testing.scripted import Case, ScriptedEngine, running
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "api"


@dataclass
class Server:
    url: str
    engine: ScriptedEngine
    client: EngineClient
    http: httpx.Client

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, after checking its framing: data lines only, and [DONE] at the end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames.pop() == "" and frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until something that another thread does has happened."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    testing_tokenizer.write(folder, 512)
    return folder


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def start(folder: Path, tokenizer: Tokenizer) -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """A function that starts a server; `cases` are texts or Cases by user message, `config` fields of ServerConfig."""

    @contextlib.contextmanager
    def start(
        cases: Mapping[str, str | Case] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
        max_model_len: int = 2048,
        step_seconds: float = 0.0,
        **config: Any,
    ) -> Iterator[Server]:
        scripted = {key: case if isinstance(case, Case) else Case(case) for key, case in (cases or {}).items()}
        engine = ScriptedEngine(tokenizer, scripted, max_model_len=max_model_len, step_seconds=step_seconds)
        client = EngineClient(InThread(engine))
        template = ChatTemplate.from_folder(folder, tokenizer)
        app = build(ServerConfig(**config), client, tokenizer, template, model="tiny", defaults=defaults)
        with running(app) as url, httpx.Client(base_url=url, timeout=30) as http:
            yield Server(url, engine, client, http)

    return start


@pytest.fixture(scope="module")
def server(start: Callable[..., contextlib.AbstractContextManager[Server]]) -> Iterator[Server]:
    """One for tests that need nothing special: defaults as Nemotron checkpoints have them."""
    with start(CASES, defaults={"temperature": 1.0, "top_p": 0.95, "stop_token_ids": [2]}) as server:
        yield server


CASES: dict[str, str | Case] = {
    "hi": "Think.</think>Hello",
    "no thinking": "Hello",
    "D22": "</think>Hi there",
    "fails": Case("H", "error"),
    "cached": Case("</think>Hi", cached_tokens=16),
}
