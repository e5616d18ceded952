"""Anthropic's Messages: what a stream says and what it adds up to, blocks as prompts, and the anthropic package."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from leyden.testing.scripted import Case
from leyden.text.tokenizer import Tokenizer
from tests.server.conftest import DATA, Server
from tests.server.test_shapes import CALLS, kind

SHAPES = {shape["id"]: shape for shape in json.loads((DATA / "shapes.json").read_text())["shapes"]}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "f",
        "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
    },
    {"name": "g", "input_schema": {"type": "object", "properties": {}}},
]
ONE_CALL = CALLS[: CALLS.index("</tool_call>")] + "</tool_call>"
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
CASES: dict[str, str | Case] = {
    "msg_text": "Think.</think>Hello",
    "msg_tools": f"Think.</think>Sure.\n{CALLS}",
    "msg_stop_sequence": "Think.</think>Hello",
    "msg_length": "Thinking",
    "msg_call_cut": ONE_CALL,
    "msg_empty": "Think.</think>",
    "msg_stream_text": "Ok.</think>Hi",
    "msg_stream_tools": f"Ok.</think>Do\n{ONE_CALL}",
    "msg_stream_length": "abc",
    "msg_stream_empty": "Ok.</think>",
    "details_msg": Case("Ok.</think>Hi", cached_tokens=16),
    "err_engine_msg": Case("H", "error"),
    "err_engine_msg_stream": Case("H", "error"),
    "hi": "Think.</think>Hello",
}
# Recorded without, or with less than the protocol has.
OURS = {"stop_sequence", "signature", "cache_read_input_tokens", "cache_creation_input_tokens"}


@pytest.fixture(scope="module")
def server(start: Any) -> Iterator[Server]:
    with start(CASES, defaults={"stop_token_ids": [2]}, step_seconds=0.003) as server:
        yield server


def ask(server: Server, text: str = "hi", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 150, **fields}
    return server.http.post("/v1/messages", json=body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def message_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to, after checking that blocks never overlap and count up."""
    message = dict(found[0]["message"], content=[])
    block: dict[str, Any] | None = None
    text = ""
    for event in found[1:]:
        match event["type"]:
            case "content_block_start":
                assert block is None and event["index"] == len(message["content"])
                block, text = event["content_block"], ""
            case "content_block_delta":
                assert block is not None and event["index"] == len(message["content"])
                delta = event["delta"]
                text += delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
                block |= {"signature": delta["signature"]} if "signature" in delta else {}
            case "content_block_stop":
                assert block is not None
                block["input" if block["type"] == "tool_use" else block["type"]] = text
                message["content"].append(block)
                block = None
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert found[-1]["type"] == "message_stop" and block is None
    for block in message["content"]:
        if block["type"] == "tool_use" and message["stop_reason"] != "max_tokens":
            block["input"] = json.loads(block["input"])
    return message


def plain(value: Any, left_out: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: plain(item, left_out) for key, item in value.items() if key not in left_out}
    return [plain(item, left_out) for item in value] if isinstance(value, list) else value


def body_of(id: str) -> dict[str, Any]:
    body = dict(SHAPES[id].get("request") or {"max_tokens": 50})
    body["messages"] = [{"role": "user", "content": id}]
    body.setdefault("model", "tiny")
    return body | ({"tools": TOOLS} if "tools" in body else {})


WHOLE = ["msg_text", "msg_tools", "msg_stop_sequence", "msg_length", "msg_empty", "details_msg", "count_tokens"]


@pytest.mark.parametrize("id", [*WHOLE, "err_msg_model", "err_engine_msg"])
def test_whole(server: Server, id: str):
    response = server.http.post(SHAPES[id].get("path", "/v1/messages"), json=body_of(id))
    assert response.status_code == SHAPES[id]["status"]
    found, wanted = response.json(), SHAPES[id]["body"]
    if id in ("msg_length", "msg_empty"):  # recorded without the text block that a message must have
        assert found["content"].pop() == {"type": "text", "text": ""}
    assert kind(plain(found, OURS)) == kind(plain(wanted, OURS))
    if "stop_reason" in wanted and id != "msg_stop_sequence":
        assert found["stop_reason"] == wanted["stop_reason"]


STREAMS = ["msg_stream_text", "msg_stream_tools", "msg_stream_length", "msg_stream_empty", "err_engine_msg_stream"]


@pytest.mark.parametrize("id", STREAMS)
def test_stream(server: Server, id: str):
    found = events(server.http.post("/v1/messages", json=body_of(id)))
    wanted = [event["data"] for event in SHAPES[id]["events"]]

    def kinds(found: list[dict[str, Any]]) -> list[Any]:
        shapes = [(event["type"], kind(plain(event, OURS))) for event in found]
        return [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]

    if id in ("msg_stream_length", "msg_stream_empty"):
        found = [event for event in found if event.get("content_block") != {"type": "text", "text": ""}]
    assert kinds(found) == kinds(wanted)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("hi", {}),
        ("msg_tools", {"tools": TOOLS}),
        ("msg_tools", {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        ("msg_tools", {"tools": TOOLS, "tool_choice": {"type": "none"}}),
        ("hi", {"max_tokens": 3}),
        ("msg_empty", {}),
        ("hi", {"stop_sequences": ["lo"]}),
        ("hi", {"thinking": {"type": "disabled"}}),
    ],
    ids=str,
)
def test_stream_adds_up_to_the_whole(server: Server, text: str, fields: dict[str, Any]):
    whole = ask(server, text, **fields).json()
    found = message_of(events(ask(server, text, stream=True, **fields)))
    assert plain(found, {"id"}) == plain(whole, {"id"})
    assert found["id"].startswith("msg_") and whole["id"].startswith("msg_")
    assert whole["type"] == "message" and whole["role"] == "assistant"


def test_stop_reasons(server: Server):
    for text, fields, reason, sequence in (
        ("hi", {}, "end_turn", None),
        ("hi", {"stop_sequences": ["lo", "x"]}, "stop_sequence", "lo"),
        ("hi", {"max_tokens": 3}, "max_tokens", None),
        ("msg_tools", {"tools": TOOLS}, "tool_use", None),
        ("msg_tools", {"tools": TOOLS, "stop_sequences": ["</tool_call>"]}, "tool_use", None),
    ):
        found = ask(server, text, **fields).json()
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_call_cut_by_the_limit(server: Server):
    fields = {"tools": TOOLS, "max_tokens": 20, **OFF}
    whole = ask(server, "msg_call_cut", **fields).json()
    assert whole["stop_reason"] == "max_tokens" and whole["content"] == [{"type": "text", "text": ""}]
    streamed = message_of(events(ask(server, "msg_call_cut", stream=True, **fields)))
    assert streamed["stop_reason"] == "max_tokens" and streamed["content"][0]["type"] == "tool_use"
    with pytest.raises(ValueError):
        json.loads(streamed["content"][0]["input"])


def test_usage_tells_cached_from_computed_tokens(server: Server):
    usage = ask(server, "details_msg").json()["usage"]
    assert usage["cache_read_input_tokens"] == 16 and usage["cache_creation_input_tokens"] == 0
    counted = server.http.post("/v1/messages/count_tokens", json=body_of("details_msg")).json()
    assert usage["input_tokens"] + 16 == counted["input_tokens"]
    found = events(ask(server, "details_msg", stream=True))
    assert found[0]["message"]["usage"] == usage | {"output_tokens": 0}
    assert found[-2]["usage"] == usage


def test_engine_failure_in_a_stream(server: Server):
    last = events(ask(server, "err_engine_msg_stream", stream=True))[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "scripted" not in last["error"]["message"]


def test_errors_of_the_layers_around(start: Any, server: Server):
    with start({}, api_key=("k",), max_body_bytes=1000) as locked:
        assert ask(locked).json()["error"]["type"] == "authentication_error"
        locked.http.headers["x-api-key"] = "k"
        assert ask(locked, "x" * 2000).json()["error"]["type"] == "request_too_large"
    assert server.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"


# Blocks to a prompt.


def prompt_of(server: Server, tokenizer: Tokenizer, messages: Any, **fields: Any) -> str:
    server.engine.received.clear()
    body = {"model": "tiny", "messages": messages, "max_tokens": 1, **fields}
    response = server.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    return tokenizer.decode(server.engine.received[0].prompt)


def test_a_tool_turn(server: Server, tokenizer: Tokenizer):
    blocks = [
        {"type": "thinking", "thinking": "T", "signature": "s"},
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "5"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no"}], "is_error": True},
        {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": blocks}]
    text = prompt_of(server, tokenizer, [*messages, {"role": "user", "content": results}], tools=TOOLS)
    assert "secret" not in text and text.count("<|im_start|>assistant") == 2
    assert "<tool_response>\n5\n</tool_response>" in text and "<tool_response>\nError: no\n</tool_response>" in text
    assert text.index("Error: no") < text.index("go on")
    text = prompt_of(server, tokenizer, [*messages, {"role": "user", "content": results[:2]}], tools=TOOLS)
    assert "<think>\nT" in text  # the turn goes on, so its thinking is still there


def test_system_texts_stay_where_they_are_and_the_changing_line_goes(server: Server, tokenizer: Tokenizer):
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "system", "content": "note"},
        {"role": "user", "content": [{"type": "text", "text": "r"}]},
    ]
    text = prompt_of(server, tokenizer, messages, system=system)
    assert text.startswith("<|im_start|>system\na\nb<|im_end|>\n<|im_start|>user\nq<|im_end|>\n")
    assert "<|im_start|>system\nnote<|im_end|>\n<|im_start|>user\nr<|im_end|>\n" in text


def test_thinking_is_switched(server: Server, tokenizer: Tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    assert prompt_of(server, tokenizer, messages).endswith("<think>\n")
    assert prompt_of(server, tokenizer, messages, thinking={"type": "disabled"}).endswith("<think></think>")
    assert prompt_of(server, tokenizer, messages, thinking={"type": "adaptive"}).endswith("<think>\n")


def test_tools_of_anthropics_servers_are_left_out(server: Server, tokenizer: Tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert prompt_of(server, tokenizer, messages, tools=[search]) == prompt_of(server, tokenizer, messages)
    text = prompt_of(server, tokenizer, messages, tools=[search, {"name": "h", "input_schema": {"properties": {}}}])
    assert "h" in text and "web_search" not in text


def test_counting_needs_no_room_and_counts_everything(server: Server):
    def count(**fields: Any) -> int:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return int(server.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    assert count() == ask(server).json()["usage"]["input_tokens"]
    assert count() < count(system="be brief") < count(system="be brief", tools=TOOLS)
    assert count(messages=[{"role": "user", "content": "7!" * 3000}]) > 6000


def test_a_name_for_every_model(start: Any):
    with start({"hi": "</think>Hello"}, served_model_name=("mine", "*")) as server:
        assert ask(server, model="claude-any").json()["model"] == "claude-any"
        assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["mine"]
    with start({"hi": "</think>Hello"}, served_model_name=("*",)) as server:
        assert server.http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == "tiny"


def test_anthropic_package(server: Server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(model="tiny", max_tokens=50, messages=[{"role": "user", "content": "hi"}])
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.stop_reason == "end_turn" and message.usage.output_tokens > 0
        with client.messages.stream(
            model="tiny",
            max_tokens=150,
            tools=TOOLS,
            messages=[{"role": "user", "content": "msg_tools"}],  # type: ignore[arg-type]
        ) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "Sure." and final.stop_reason == "tool_use"
        assert [block.input for block in final.content if block.type == "tool_use"] == [{"x": 5, "s": 'a "b"'}, {}]
        counted = client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert counted.input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "7!" * 3000}])


def test_template_variables_of_the_server_hold_on_every_route(start: Any, tokenizer: Tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    with start({"hi": "Hello"}, default_chat_template_kwargs={"enable_thinking": False}) as server:
        bodies = {
            "/v1/chat/completions": {"messages": messages},
            "/v1/messages": {"model": "tiny", "max_tokens": 20, "messages": messages},
            "/v1/responses": {"input": "hi"},
        }
        for path, body in bodies.items():
            for more, end in (
                ({}, "<think></think>"),
                ({"chat_template_kwargs": {"enable_thinking": True}}, "<think>\n"),
            ):
                assert server.http.post(path, json={**body, **more}).status_code == 200
                assert tokenizer.decode(server.engine.received[-1].prompt).endswith(end)
