"""What is accepted, what is refused, and what reaches the engine: tables of requests."""

import json
from typing import Any

import pytest

from tests.server.conftest import DATA, Server

ROWS = json.loads((DATA / "requests.json").read_text())["cases"]
D20 = json.loads((DATA / "D20_requests.json").read_text())

TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError"}
# Of the recorded sampling parameters: what is not ours to send, or is sent in another way.
ELSEWHERE = {"skip_special_tokens", "structured_outputs", "output_text_buffer_length", "stream_interval", "extra_args"}


def expand(value: Any) -> Any:
    """{"repeat": [x, n]} and {"prompt_repeat": [x, n]} stand for long values."""
    if isinstance(value, dict):
        if value.keys() == {"repeat"}:
            item, count = value["repeat"]
            return item * count if isinstance(item, str) else [item] * count
        if "prompt_repeat" in value:
            item, count = value.pop("prompt_repeat")
            value["prompt"] = [item] * count
        return {key: expand(item) for key, item in value.items()}
    return [expand(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_table(server: Server, row: dict[str, Any]):
    server.engine.received.clear()
    content = row["raw"] if "raw" in row else json.dumps(expand(row["body"])) if "body" in row else None
    headers = row.get("headers", {"content-type": "application/json"} if content else {})
    response = server.http.request(row["method"], row["path"], content=content, headers=headers)
    assert response.status_code == row["status"], response.text
    if row["status"] == 200:
        check_engine(server, row)
        return
    if row["method"] == "OPTIONS":
        return
    error = response.json()["error"]
    if row["path"].startswith("/v1/messages"):
        assert response.json().keys() == {"type", "error"} and response.json()["type"] == "error"
        assert error.keys() == {"type", "message"} and error["type"] == row["type"] and error["message"]
    else:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == row["status"] and error["message"]
        assert error["type"] == TYPES[row["status"]]
    if "param" in row:
        assert error["param"] == row["param"], error
    for word in row.get("must_contain", ()):
        assert word in error["message"]
    assert server.engine.received == []


def check_engine(server: Server, row: dict[str, Any]) -> None:
    """The sampling parameters that reached the engine; those that were not recorded have their neutral values."""
    if "engine" not in row:
        return
    assert len(server.engine.received) == row.get("engine_requests", 1)
    request = server.engine.received[0]
    # guided_json had lost its effect when these were recorded
    follows = "structured_outputs" in row["engine"] or row["id"] == "chat_unknown_field"
    assert (request.params.grammar is not None) == follows
    for name, wanted in row["engine"].items():
        if name in ELSEWHERE or (row["id"], name) == ("chat_echo", "prompt_logprobs"):  # asked for, but never shown
            continue
        found = getattr(request.params, name)
        if name == "stop_token_ids":
            found, wanted = set(found), set(wanted)
        elif name == "logit_bias":
            wanted = {int(key): value for key, value in wanted.items()}
        elif name == "max_tokens" and wanted == 2016:  # the rest of the context; the recorded prompt had 32 tokens
            wanted = 2048 - len(request.prompt)
        assert found == wanted, name


@pytest.mark.parametrize("row", D20["rows"], ids=lambda row: json.dumps(row.get("override", row.get("raw_body"))))
def test_D20_bad_numbers_never_hurt_the_engine(server: Server, row: dict[str, Any]):
    content = row.get("raw_body") or json.dumps({**D20["base"], **row["override"]})
    headers = {"content-type": "application/json"}
    response = server.http.post(D20["path"], content=content, headers=headers)
    assert response.status_code == row["status"]
    error = response.json()["error"]
    assert error["type"] == "BadRequestError" and error["code"] == 400
    assert error["param"] == row.get("param", error["param"])
    assert server.http.get("/health").status_code == 200
    assert server.http.post(D20["path"], json=D20["base"]).status_code == 200


def test_a_number_that_is_none_is_found_anywhere_in_a_body(server: Server):
    body = '{"messages": [{"role": "user", "content": "hi"}], "vllm_xargs": {"a": [1, -Infinity]}}'
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "vllm_xargs.a.1 must be a finite number"


@pytest.mark.parametrize(
    "body",
    ['{"messages": ' + "[" * 100_000, '{"a": ' + "[" * 5000 + "]" * 5000 + "}", '"\\ud800"'],
    ids=["open", "deep", "surrogate"],
)
def test_hostile_json_is_a_client_error(server: Server, body: str):
    response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400


def test_deeply_nested_tools_are_a_client_error(server: Server):
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    response = server.chat(tools=tools)
    assert response.status_code == 400 and "nested too deeply" in response.json()["error"]["message"]


def test_fields_without_effect_are_named_in_a_header(server: Server):
    response = server.chat(
        guided_decoding_backend="outlines",
        structured_outputs={"regex": "a", "whitespace_pattern": " "},
        nonsense=1,
    )
    assert response.status_code == 200
    names = "guided_decoding_backend, structured_outputs.whitespace_pattern"
    assert response.headers["warning"] == f'299 leyden "without effect: {names}"'
    assert "warning" not in server.chat(nonsense=1).headers


def test_seeds_of_copies_differ_and_their_ids_too(server: Server):
    server.engine.received.clear()
    assert server.chat(n=3, seed=7).status_code == 200
    assert [request.params.seed for request in server.engine.received] == [7, 8, 9]
    assert len({request.id for request in server.engine.received}) == 3
    assert all(request.params.n == 1 for request in server.engine.received)


def test_same_request_id_twice_at_once_is_no_collision(server: Server):
    server.engine.received.clear()
    ids = [server.chat(request_id="same").json()["id"] for _ in range(2)]
    assert ids == ["chatcmpl-same", "chatcmpl-same"]
    assert len({request.id for request in server.engine.received}) == 2
