"""What is refused because it is too much: too long, too many, too late."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from leyden.config.server import ServerConfig
from leyden.errors import ConfigError, RequestError
from leyden.text import template as templates
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from tests.server.conftest import Server, events, eventually

LONG = {"long": "</think>" + "word " * 400}


def test_a_text_that_cannot_fit_is_not_encoded(server: Server, monkeypatch: pytest.MonkeyPatch):
    encoded: list[int] = []
    real = Tokenizer.encode

    def encode(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> list[int]:
        encoded.append(len(text))
        return real(self, text, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "word " * 200_000
    for response in (
        server.complete(text),
        server.chat(text),
        server.http.post("/v1/responses", json={"input": text}),
        server.http.post(
            "/v1/messages", json={"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": text}]}
        ),
    ):
        assert response.status_code == 400 and "maximum context length" in response.json()["error"]["message"]
    assert encoded == []
    assert server.complete(text, truncate_prompt_tokens=5, max_tokens=1).status_code == 200  # asked for, so done


def test_a_template_has_limits(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    endless = ChatTemplate("{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}", tokenizer)
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="more than 1000 characters.*maximum context length"):
        endless.encode(messages, most=1000)
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.05)
    started = time.monotonic()
    with pytest.raises(RequestError, match="took longer"):
        endless.render(messages)
    assert time.monotonic() - started < 5


@pytest.fixture
def busy(start: Any) -> Iterator[Server]:
    """Two requests run at once, one may wait, and three are there."""
    with start(LONG, step_seconds=0.005, max_queued_requests=1) as server:
        server.client.facts["max_num_seqs"] = 2
        stop = threading.Event()

        def occupy() -> None:
            body = {"messages": [{"role": "user", "content": "long"}], "stream": True}
            with (
                httpx.Client(base_url=server.url, timeout=30) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                for _ in response.iter_raw():
                    if stop.is_set():
                        return

        threads = [threading.Thread(target=occupy) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: server.client.requests == 3)
        yield server
        stop.set()
        for thread in threads:
            thread.join()


def test_a_full_queue_takes_no_more(busy: Server):
    for response in (busy.chat("hi"), busy.complete("hi"), busy.chat("hi", stream=True)):
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "TooManyRequestsError"
    response = busy.http.post(
        "/v1/messages", json={"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    )
    assert response.status_code == 429 and response.json()["error"]["type"] == "rate_limit_error"
    assert busy.http.get("/health").status_code == 200
    assert "leyden:queue_rejected_total" in busy.http.get("/metrics").text


def test_an_answer_has_its_time(start: Any):
    with start(LONG, step_seconds=0.01, request_timeout=0.1) as server:
        response = server.chat("long")
        assert response.status_code == 504 and "--request-timeout" in response.json()["error"]["message"]
        text = server.chat("long", stream=True).text
        assert '"code":504' in text.split("\n\n")[-3] and text.endswith("data: [DONE]\n\n")
        eventually(lambda: not server.engine.busy)
        assert len(events(server.chat("hi", stream=True))) > 1
        assert len(server.engine.aborted) == 2


def test_health_with_a_token(start: Any):
    with start({}) as server:
        assert server.http.get("/health?generate=1").status_code == 200
        assert server.engine.received[-1].params.max_tokens == 1
        server.engine.submit = lambda request: (_ for _ in ()).throw(RequestError("no"))  # type: ignore[method-assign]
        assert server.http.get("/health?generate=1").status_code == 503
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/health?generate=maybe").status_code == 400


def test_config():
    with pytest.raises(ConfigError, match="--cache-salt-per-key needs --api-key"):
        ServerConfig(cache_salt_per_key=True)
