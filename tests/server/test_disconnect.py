"""A client that goes away, and how many steps the real engine still takes for it."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyden.config.server import ServerConfig
from leyden.engine.engine import Engine
from leyden.server.app import build
from leyden.server.client import EngineClient, InThread
from leyden.testing.scripted import running
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from leyden.types import Delta
from tests.engine.conftest import engine, tiny
from tests.server.conftest import eventually

STEP = 0.05  # seconds: far more than it takes until a closed connection is noticed


class Watched:
    """Notes of every step when it began and how many requests it was for."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.steps: list[tuple[float, int]] = []
        self._step = engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Delta]:
        stats = self.engine.stats()
        self.steps.append((time.monotonic(), stats.running + stats.waiting))
        time.sleep(STEP)
        return self._step()

    def taken_for_nobody(self, since: float) -> int:
        return sum(requests > 0 for begun, requests in self.steps if begun > since)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def served(request: Any, folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[Watched, str]]:
    """With three slots, so that a fourth answer has to wait."""
    watched = Watched(engine(tiny(), seqs=3, overlap=request.param))
    template = ChatTemplate.from_folder(folder, tokenizer)
    app = build(ServerConfig(), EngineClient(InThread(watched.engine)), tokenizer, template, model="tiny")
    with running(app) as url:
        yield watched, url


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("answers", [1, 4])
def test_whoever_leaves_is_forgotten_within_two_steps(served: tuple[Watched, str], stream: bool, answers: int):
    watched, url = served
    body = {"messages": [{"role": "user", "content": "hi"}], "n": answers, "stream": stream, "ignore_eos": True}
    before = len(watched.steps)
    with (
        httpx.Client(base_url=url, timeout=4 * STEP) as client,
        contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        for _ in response.iter_lines():
            if len(watched.steps) > before + 3:
                break
    left = time.monotonic()
    eventually(lambda: not watched.engine.busy)
    assert len(watched.steps) > before + 2, "the answer had not begun"
    assert watched.taken_for_nobody(left) <= 2
    watched.engine.check()
    stats = watched.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.slots_free + stats.snapshots == stats.slots_total
