"""Key sets and nulls of answers and chunks, against recorded ones."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from leyden.testing.scripted import Case
from tests.server.conftest import DATA, Server, events

SHAPES = {shape["id"]: shape for shape in json.loads((DATA / "shapes.json").read_text())["shapes"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = (
    '<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n<parameter=s>\na "b"\n</parameter>\n</function>\n'
    "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
)
# What the model wrote in each recording; the rest of a shape's request is in the file.
TEXTS: dict[str, str | Case] = {
    "chat_tools": f"Think.</think>Sure.\n{CALLS}",
    "chat_tools_only": f"Think.</think>{CALLS[: CALLS.index('</tool_call>')]}</tool_call>",
    "chat_stream_tools": f"Ok.</think>{CALLS}",
    "chat_text": "Think.</think>Hello",
    "chat_no_thinking": "Hello",
    "chat_length": "Thinking",
    "chat_stop_string": "Hello",
    "chat_stop_token": Case(steps=[[50], [51], [30], [52]]),
    "chat_logprobs": "Hé",
    "chat_logprobs_ids": "Hi",
    "chat_prompt_logprobs": "Hello",
    "chat_n2": "Hi",
    "chat_hidden_reasoning": "Think.</think>Hello",
    "chat_stream": "Ok.</think>Hi.",
    "chat_stream_usage": "Hi",
    "chat_stream_continuous": "Hi",
    "chat_stream_logprobs": "Hi",
    "chat_stream_n2": "Hi",
    "chat_stream_length": "abc",
    "chat_named_tool": f"Think.</think>{CALLS[: CALLS.index('</tool_call>')]}</tool_call>",
    "chat_stream_call_cut": CALLS,
    "err_engine": Case("H", "error"),
    "err_engine_stream": Case("H", "error"),
    "details_chat": Case("Ok.</think>Hi", cached_tokens=16),
    "details_chat_stream": Case("Ok.</think>Hi", cached_tokens=16),
    "comp_text": "Hello</s>",
    "comp_logprobs": "Hi</s>",
    "comp_echo_logprobs": "Hi",
    "comp_echo_score": "Hi",
    "comp_two_prompts": "Hi</s>",
    "comp_return_ids": "Hi</s>",
    "comp_prompt_logprobs": "Hi",
    "comp_stream": "Hi</s>",
    "comp_stream_echo_logprobs": "Hi</s>",
    "comp_stream_plain": "Hi</s>",
    "err_engine_comp_stream": Case("H", "error"),
    "details_comp_stream": Case("Ok", cached_tokens=16),
}
# Additions of ours, what we always fill, and the bytes of tokens, which we always know.
OURS = {"reasoning_content", "completion_tokens_details", "prompt_tokens_details", "bytes"}


def body_of(id: str) -> dict[str, Any]:
    shape = SHAPES[id]
    body = dict(shape.get("request") or {})
    if id.startswith("details"):
        body = {"prompt": "ab"} if "comp" in id else {"messages": []}
        body["stream"] = "stream" in id
    if "messages" in body or "comp" not in id:
        body["messages"] = [{"role": "user", "content": id}]
    else:
        body["prompt"] = [id] * len(body["prompt"]) if isinstance(body["prompt"], list) else id
        body["add_special_tokens"] = False
    if "tools" in body:
        body["tools"] = TOOLS
    return body


@pytest.fixture(scope="module")
def shaped(start: Any) -> Iterator[Server]:
    """End-of-sequence tokens as recorded: 2 is a stop token, 11 the tokenizer's own. Each step gets its own chunk."""
    with start(TEXTS, defaults={"stop_token_ids": [2]}, step_seconds=0.02) as server:
        yield server


@pytest.fixture(scope="module")
def forced(start: Any) -> Iterator[Server]:
    with start(TEXTS, enable_force_include_usage=True, step_seconds=0.02) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(start: Any) -> Iterator[Server]:
    with start({}, api_key=("a", "b")) as server:
        yield server


def kind(value: Any) -> Any:
    """The shape of a value: key sets, nulls and types; a list has the shapes of its items, without repetitions."""
    if isinstance(value, dict):
        if "decoded_token" in str(value) and all(key.isdigit() for key in value):
            return kind(list(value.values()))  # a map by token id
        if value and all(isinstance(item, float) for item in value.values()):
            return "numbers by token"
        return {key: kind(item) for key, item in sorted(value.items()) if key not in OURS}
    if isinstance(value, list):
        shapes = [kind(item) for item in value]
        return [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return type(value)
    return "number" if isinstance(value, int) or value == "<int>" else "text"


def path_of(id: str) -> str:
    return SHAPES[id].get("path") or ("/v1/completions" if "comp" in id else "/v1/chat/completions")


@pytest.mark.parametrize("id", [id for id in TEXTS if "body" in SHAPES[id]])
def test_whole(shaped: Server, forced: Server, id: str):
    server = forced if id.startswith("details") else shaped
    response = server.http.post(path_of(id), json=body_of(id))
    assert response.status_code == SHAPES[id]["status"]
    assert response.headers["content-type"] == "application/json"
    found, wanted = response.json(), SHAPES[id]["body"]
    if id == "chat_named_tool":  # as OpenAI documents it, there is no content then
        assert wanted["choices"][0]["message"]["content"] == ""
        wanted["choices"][0]["message"]["content"] = None
    assert kind(found) == kind(wanted)
    for choice, recorded in zip(found.get("choices", ()), wanted.get("choices", ()), strict=True):
        assert choice["finish_reason"] == recorded["finish_reason"]
        assert choice["stop_reason"] == recorded["stop_reason"]
        if "message" in choice and id not in ("chat_stop_token", "chat_prompt_logprobs"):  # other tokens, other text
            assert choice["message"]["content"] == recorded["message"]["content"]
            assert choice["message"]["reasoning"] == recorded["message"]["reasoning"] or id == "chat_length"


def kinds(chunks: list[dict[str, Any]]) -> list[Any]:
    """The different chunks of a stream in order of appearance. The last one of a choice may or may not have text."""
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            if choice["finish_reason"] is not None:
                choice["delta"], choice["text"] = {}, ""
    return kind(chunks)


@pytest.mark.parametrize("id", [id for id in TEXTS if "events" in SHAPES[id]])
def test_stream(shaped: Server, forced: Server, id: str):
    server = forced if id.startswith("details") else shaped
    found = events(server.http.post(path_of(id), json=body_of(id)))
    wanted = [event["data"] for event in SHAPES[id]["events"]][:-1]
    if id == "comp_stream_echo_logprobs":  # recorded with the prompt's ids, although nobody had asked for them
        wanted[0]["choices"][0]["prompt_token_ids"] = None
    if id in ("chat_stream_tools", "chat_stream_call_cut"):  # recorded without the empty arguments clients want first
        for chunk in wanted:
            for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
                call["function"].setdefault("arguments", "")
    if id == "chat_stream_call_cut":  # vLLM says tool_calls: clients ran a call that was cut
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        assert wanted[-1]["choices"][0]["finish_reason"] == "tool_calls"
    if any("usage" in chunk for chunk in wanted[:-1]):  # with continuous usage the recorded chunks have no token_ids
        for chunk in (*found, *wanted):
            for choice in chunk["choices"]:
                assert choice.pop("token_ids", None) is None
    assert kinds(found) == kinds(wanted)


# What is sent, unless the recording says it, and what comes back: as recorded, or as documented where it differs.
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ERRORS = {
    "err_validation": (400, "BadRequestError", "temperature"),
    "err_schema": (400, "BadRequestError", "temperature"),
    "err_model": (404, "NotFoundError", "model"),
    "err_overflow": (400, "BadRequestError", "messages"),
    "err_overflow_stream": (400, "BadRequestError", "messages"),
    "err_so_regex": (400, "BadRequestError", "structured_outputs"),
    "err_so_json": (400, "BadRequestError", "structured_outputs"),
    "err_so_grammar": (400, "BadRequestError", "structured_outputs"),
}


@pytest.mark.parametrize("id", ERRORS)
def test_errors(shaped: Server, id: str):
    body = dict(SHAPES[id]["request"])
    if "overflow" in id:
        body["messages"] = [{"role": "user", "content": "x" * 4000}]
    response = shaped.http.post(CHAT, json=body)
    error = response.json()["error"]
    assert response.headers["content-type"] == "application/json"
    assert kind(error) == kind(SHAPES[id]["body"]["error"] | {"param": ""})
    assert (response.status_code, error["type"], error["param"]) == ERRORS[id] and error["code"] == ERRORS[id][0]


def test_an_error_on_the_messages_route_is_anthropics(shaped: Server):
    response = shaped.http.post("/v1/messages", json=SHAPES["err_msg_validation"]["request"])
    error = response.json()["error"]
    assert response.status_code == SHAPES["err_msg_validation"]["status"] == 400
    assert error["type"] == "invalid_request_error" and "max_tokens" in error["message"]


@pytest.mark.parametrize("id", ["tokenize_plain", "detokenize"])
def test_tokens(shaped: Server, id: str):
    response = shaped.http.post(SHAPES[id]["path"], json=SHAPES[id]["request"])
    assert response.status_code == 200 and kind(response.json()) == kind(SHAPES[id]["body"])


def test_health_and_a_route_that_is_none(shaped: Server):
    health, nowhere = shaped.http.get("/health"), shaped.http.get(SHAPES["not_found"]["path"])
    assert (health.status_code, health.content, health.headers.get("content-type")) == (200, b"", None)
    assert nowhere.status_code == SHAPES["not_found"]["status"] and nowhere.json()["error"]["code"] == 404


# method, path, headers, and the status if it is not the recorded one
KEYS: dict[str, tuple[str, str, dict[str, str], int | None]] = {
    "auth_no_key": ("GET", "/v1/models", {}, None),
    "auth_bad_key": ("GET", "/v1/models", {"authorization": "Bearer c"}, None),
    "auth_good_key": ("GET", "/v1/models", {"authorization": "Bearer b"}, None),
    "auth_x_api_key": ("GET", "/v1/models", {"x-api-key": "b"}, 200),
    "auth_tokenize_no_key": ("POST", "/tokenize", {}, 401),
    "auth_health_no_key": ("GET", "/health", {}, None),
    "auth_metrics_no_key": ("GET", "/metrics", {}, None),
    "auth_options_no_key": ("OPTIONS", "/v1/models", {}, None),
    "auth_invocations_no_key": ("POST", "/invocations", {}, 401),
    "auth_double_slash": ("GET", "//v1/models", {}, 401),
    "auth_basic_scheme": ("GET", "/v1/models", {"authorization": "Basic b"}, None),
    "auth_lower_bearer": ("GET", "/v1/models", {"authorization": "bearer b"}, None),
}


@pytest.mark.parametrize("id", KEYS)
def test_keys(keyed: Server, id: str):
    method, path, headers, ours = KEYS[id]
    content = json.dumps(HI) if method == "POST" else None
    kind = {"content-type": "application/json"} if content else {}
    response = keyed.http.request(method, keyed.url + path, content=content, headers=headers | kind)
    assert response.status_code == (ours or SHAPES[id]["status"])
    if response.status_code == 401:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
