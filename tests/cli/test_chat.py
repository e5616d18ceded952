"""chat and complete against a server that is a function."""

import json
from functools import partial
from typing import Any

import httpx
import pytest

from leyden import cli
from leyden.cli import remote


class Fake:
    """Answers every request with the next of `answers`: a list of stream chunks, or a (status, body)."""

    def __init__(self, *answers: Any):
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("authorization"))
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}, {"id": "n"}]})
        self.bodies.append({"path": request.url.path} | json.loads(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            return httpx.Response(answer[0], text=answer[1])
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in answer]
        return httpx.Response(200, text=": ping\n\n" + "".join(lines) + "data: [DONE]\n\n")


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 5}}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(fake: Fake, *argv: str, typed: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr("leyden.cli.remote.Server", partial(remote.Server, transport=httpx.MockTransport(fake)))
        waiting = list(typed)

        def read(*_: object, **__: object) -> str:
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("rich.console.Console.input", read)
        code = cli.main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_quick_message_shows_reasoning_and_content(run):
    fake = Fake(
        [delta(role="assistant"), delta(reasoning="think"), delta(content="[b]an"), delta(content="swer :x:"), USAGE]
    )
    code, out, _ = run(fake, "chat", "-q", "hi", "--system-prompt", "be", "--api-key", "k")
    assert (code, out) == (0, "think\n\n[b]answer :x:\n")
    assert fake.keys == ["Bearer k", "Bearer k"]
    (body,) = fake.bodies
    assert body["path"] == "/v1/chat/completions" and body["model"] == "m" and body["stream"]
    assert body["messages"] == [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]


def test_a_conversation_remembers_until_new(run):
    fake = Fake(
        [delta(content="one")],
        (400, '{"error": {"message": "too long"}}'),
        [delta(content="two")],
        [delta(content="x")],
    )
    code, out, _ = run(fake, "chat", typed=("a", "lost", "b", "/new", "c"))
    assert code == 0 and "one\n" in out and "status 400: too long\n" in out
    said = [[message["content"] for message in body["messages"]] for body in fake.bodies]
    assert said == [["a"], ["a", "one", "lost"], ["a", "one", "b"], ["c"]]


def test_complete(run):
    fake = Fake([{"choices": [{"index": 0, "text": " a"}]}, {"choices": [{"index": 0, "text": "\x1b[2J"}]}, USAGE])
    code, out, _ = run(fake, "complete", "-q", "once", "--max-tokens", "5", "--stats", "--model-name", "n")
    text, report = out.splitlines()
    assert code == 0 and text == " a␛[2J" and report.startswith("5 tokens, the first after 0.0")
    (body,) = fake.bodies
    assert (body["path"], body["prompt"], body["max_tokens"], body["model"]) == ("/v1/completions", "once", 5, "n")


def test_errors_of_the_server(run):
    assert run(Fake((401, "no")), "chat", "-q", "x")[2] == "leyden chat: http://localhost:8000/v1: status 401: no\n"
    broken = Fake([delta(content="a"), {"error": {"message": "engine gone"}}])
    assert run(broken, "chat", "-q", "x")[::2] == (1, "leyden chat: engine gone\n")

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    code, _, err = run(refuse, "complete", "--url", "http://h/v1/", "-q", "x")
    assert (
        code == 1
        and err == "leyden complete: no server answers at http://h/v1 (refused); start one with leyden serve\n"
    )


def test_help_and_wrong_flags(run):
    code, out, _ = run(Fake(), "chat", "--help")
    assert code == 0 and all(name in out for name in ("--url", "--system-prompt", "--quick"))
    assert run(Fake(), "chat", "--nope")[0] == 2
