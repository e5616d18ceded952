"""The Responses API: what a stream says and what it adds up to, items as prompts, and the openai package."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from leyden.testing.scripted import Case
from leyden.text.tokenizer import Tokenizer
from tests.server.conftest import DATA, Server
from tests.server.test_shapes import CALLS, kind

SHAPES = {shape["id"]: shape for shape in json.loads((DATA / "shapes.json").read_text())["shapes"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
    },
    {"type": "function", "name": "g", "parameters": {"type": "object", "properties": {}}},
]


def call(function: str, key: str, value: str) -> str:
    arguments = f"<parameter={key}>\n{value}\n</parameter>\n"
    return f"</think><tool_call>\n<function={function}>\n{arguments}</function>\n</tool_call>"


# Of the recorded objects: what belongs to the library they were made with, or to a kind of serving that is not ours.
THEIRS = {"phase", "async", "caller", "allowed_callers", "defer_loading", "output_schema", "description", "strict"} | {
    "input_tokens_per_turn", "cached_tokens_per_turn", "output_tokens_per_turn", "tool_output_tokens_per_turn",
    "tool_output_tokens", "kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages",
}  # fmt: skip
OURS = {"error"}
CASES: dict[str, str | Case] = {
    "resp_text": "Think.</think>Hello",
    "resp_tools": f"Think.</think>Sure.\n{CALLS}",
    "resp_length": "Thinking",
    "resp_stream_text": "Ok.</think>Hi",
    "resp_stream_tools": f"Ok.</think>Do\n{CALLS[: CALLS.index('</tool_call>')]}</tool_call>",
    "resp_stream_length": "abc",
    "err_engine_resp_stream": Case("H", "error"),
    "err_engine_resp": Case("H", "error"),
    "details_resp": Case("Ok.</think>Hi", cached_tokens=16),
    "hi": "Think.</think>Hello",
    "cut": f"Ok.</think>Sure.\n{CALLS}",
    "empty": "Think.</think>",
    "é": Case("Thé.</think>Hé", chunks=[100]),
    "custom": call("patch", "input", '*** "a"'),
    "space": call("files__read", "path", "x"),
}


@pytest.fixture(scope="module")
def server(start: Any) -> Iterator[Server]:
    defaults = {"temperature": 1.0, "top_p": 0.95, "stop_token_ids": [2]}
    with start(CASES, defaults=defaults, step_seconds=0.003) as server:
        yield server


def ask(server: Server, text: Any = "hi", **fields: Any) -> httpx.Response:
    return server.http.post("/v1/responses", json={"model": "tiny", "input": text, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, after checking its framing and its numbers."""
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        found.append(event)
    return found


def without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: without(item, keys) for key, item in value.items() if key not in keys}
    return [without(item, keys) for item in value] if isinstance(value, list) else value


def body_of(id: str) -> dict[str, Any]:
    body = dict(SHAPES[id].get("request") or {"stream": "stream" in id}) | {"input": id}
    return body | ({"tools": TOOLS} if "tools" in body else {})


@pytest.mark.parametrize(
    "id", ["resp_text", "resp_tools", "resp_length", "details_resp", "err_resp_model", "err_engine_resp"]
)
def test_whole(server: Server, id: str):
    response = server.http.post("/v1/responses", json=body_of(id))
    assert response.status_code == SHAPES[id]["status"]
    found, wanted = response.json(), SHAPES[id]["body"]
    if response.status_code != 200:
        assert kind(found) == kind(wanted)
        return
    for item in wanted["output"]:
        if item["type"] == "reasoning":
            item["status"] = "completed"  # recorded null; the item of the stream has it
    assert kind(without(found, OURS | THEIRS)) == kind(without(wanted, THEIRS))
    for key in ("status", "incomplete_details", "tool_choice", "truncation", "background"):
        assert found[key] == wanted[key], key


@pytest.mark.parametrize("id", ["resp_stream_text", "resp_stream_tools", "resp_stream_length"])
def test_stream(server: Server, id: str):
    found = events(server.http.post("/v1/responses", json=body_of(id)))
    wanted = [event["data"] for event in SHAPES[id]["events"]]
    for event in wanted:
        for item in [event.get("item") or {}, *event.get("response", {}).get("output", ())]:
            item.pop("summary", None) if item.get("type") == "message" else None
            if item.get("type") == "reasoning" and item["status"] is None:
                item["status"] = "completed"
    if id == "resp_stream_length":
        wanted[-1]["type"] = "response.incomplete"

    def kinds(found: list[dict[str, Any]]) -> list[Any]:
        shapes = [(event["type"], kind(without(event, OURS | THEIRS))) for event in found]
        return [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]

    assert kinds(found) == kinds(wanted)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("hi", {}),
        ("resp_tools", {"tools": TOOLS}),
        ("resp_tools", {"tools": TOOLS, "parallel_tool_calls": False}),
        ("resp_tools", {"tools": TOOLS, "tool_choice": "none"}),
        ("hi", {"max_output_tokens": 3}),
        ("cut", {"tools": TOOLS, "max_output_tokens": 30}),
        ("empty", {}),
        ("hi", {"include_reasoning": False}),
        ("hi", {"stop": ["lo"]}),
        ("empty", {"chat_template_kwargs": {"force_nonempty_content": True}}),
        ("é", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
    ids=str,
)
def test_stream_adds_up_to_the_whole(server: Server, text: str, fields: dict[str, Any]):
    whole = ask(server, text, **fields).json()
    found = events(ask(server, text, stream=True, **fields))
    final = found[-1]["response"]
    assert found[-1]["type"] == f"response.{whole['status']}"
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    ids = {"id", "call_id", "created_at"}
    assert without(final, ids) == without(whole, ids)
    assert final["output"] == [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert final["id"] == found[0]["response"]["id"]
    check_deltas(found)


def check_deltas(found: list[dict[str, Any]]) -> None:
    """Deltas between added and done join to what done says, under one id."""
    texts: dict[tuple[str, str], str] = {}
    for event in found:
        name, _, step = event["type"].removeprefix("response.").rpartition(".")
        if step == "delta":
            key = (name, event["item_id"])
            texts[key] = texts.get(key, "") + event["delta"]
        elif step == "done" and "item_id" in event and "part" not in event:
            said = event.get("text", event.get("arguments", event.get("input")))
            assert texts.get((name, event["item_id"]), "") == said
    added = [event["item"]["id"] for event in found if event["type"] == "response.output_item.added"]
    assert len(set(added)) == len(added)


def test_call_cut_by_the_limit_is_announced_but_never_done(server: Server):
    fields = {"tools": TOOLS, "max_output_tokens": 30}
    whole = ask(server, "cut", **fields).json()
    assert whole["status"] == "incomplete" and [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    found = events(ask(server, "cut", stream=True, **fields))
    assert "response.function_call_arguments.delta" in {event["type"] for event in found}
    assert "response.function_call_arguments.done" not in {event["type"] for event in found}


def test_usage_counts_cached_and_thinking_tokens(server: Server):
    usage = ask(server, "details_resp").json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 16}
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_engine_failure_in_a_stream(server: Server):
    found = events(ask(server, "err_engine_resp_stream", stream=True))
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    assert found[-1]["response"]["status"] == "failed" and found[-1]["response"]["error"]["code"] == "server_error"
    assert "scripted" not in found[-2]["message"]  # no internals


def test_logprobs_are_those_of_the_text_only(server: Server):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    (_, message) = ask(server, "é", **fields).json()["output"]
    tokens = message["content"][0]["logprobs"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == "Hé"
    assert len(tokens) >= 2 and all(len(token["top_logprobs"]) == 1 for token in tokens)
    assert ask(server, "é").json()["output"][1]["content"][0]["logprobs"] is None


def test_custom_tools_take_free_text(server: Server):
    tools = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}
    ]
    (item,) = ask(server, "custom", tools=tools).json()["output"]
    assert item["type"] == "custom_tool_call" and item["name"] == "patch" and item["input"] == '*** "a"'
    found = events(ask(server, "custom", tools=tools, stream=True))
    check_deltas(found)
    assert [event["type"].rpartition(".")[0] for event in found].count("response.custom_tool_call_input") == 2


def test_tools_of_a_namespace_come_back_with_it(server: Server, tokenizer: Tokenizer):
    inner = {
        "type": "function",
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    tools = [{"type": "namespace", "name": "files", "tools": [inner]}]
    (item,) = ask(server, "space", tools=tools).json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "files", "read")
    history = [
        {"role": "user", "content": "q"},
        item,
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"},
    ]
    assert "<function=files__read>" in prompt_of(server, tokenizer, history, tools=tools)


# Items to a prompt.


def prompt_of(server: Server, tokenizer: Tokenizer, items: Any, **fields: Any) -> str:
    server.engine.received.clear()
    response = ask(server, items, max_output_tokens=1, **fields)
    assert response.status_code == 200, response.text
    return tokenizer.decode(server.engine.received[0].prompt)


def test_what_the_assistant_did_in_one_go_is_one_message(server: Server, tokenizer: Tokenizer):
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "two"},
    ]
    text = prompt_of(server, tokenizer, items, tools=TOOLS)
    assert text.count("<|im_start|>assistant") == 2  # that one, and the one to come
    turn = text[text.index("<|im_start|>assistant") : text.index("<tool_response>")]
    assert turn.index("R") < turn.index("</think>") < turn.index("A") < turn.index("=f>") < turn.index("=g>")
    assert "<tool_response>\none\n" in text and "<tool_response>\ntwo\n" in text


def test_system_texts_at_the_beginning_are_one_and_later_ones_stay(server: Server, tokenizer: Tokenizer):
    items = [
        {"role": "developer", "content": "two"},
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "later"},
        {"role": "user", "content": "b"},
    ]
    text = prompt_of(server, tokenizer, items, instructions="one")
    assert text.startswith("<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\na<|im_end|>\n")
    assert "<|im_start|>system\nlater<|im_end|>\n<|im_start|>user\nb<|im_end|>\n" in text


def test_reasoning_comes_back_in_the_form_the_client_keeps(server: Server, tokenizer: Tokenizer):
    reasoning, message = ask(server, "hi", include=["reasoning.encrypted_content"]).json()["output"]
    assert reasoning["encrypted_content"]
    del reasoning["content"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    items = [{"role": "user", "content": "q"}, reasoning, call, output]
    assert "<think>\nThink." in prompt_of(server, tokenizer, items, tools=TOOLS)
    reasoning["encrypted_content"] = "gAAAAABo-not_ours"
    assert "Think." not in prompt_of(server, tokenizer, items, tools=TOOLS)


def test_kinds_of_items_and_tools_that_nobody_knows_do_no_harm(server: Server, tokenizer: Tokenizer):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "web_search_call", "id": "w"},
        {"type": "brand_new", "x": 1},
        {},
    ]
    tools = [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}]
    plain = prompt_of(server, tokenizer, "hi")
    assert prompt_of(server, tokenizer, items, tools=tools, tool_choice="auto") == plain
    assert prompt_of(server, tokenizer, items, tools=tools, tool_choice={"type": "web_search"}) == plain


@pytest.mark.parametrize(
    ("items", "where", "status"),
    [
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "input[0].content[0]", 400),
        ([{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}], "role", 400),
        ([{"role": "user", "content": 5}], "input[0].content", 400),
        ([{"type": "function_call", "name": "f", "arguments": "{"}], "input[0].arguments", 400),
        ([{"type": "function_call", "name": "f", "arguments": "[]"}], "input[0].arguments", 400),
        ([{"type": "item_reference", "id": "rs_1"}], "'rs_1'", 404),
        ([], "", 400),
    ],
)
def test_refused_items_are_named(server: Server, items: Any, where: str, status: int):
    response = ask(server, items)
    assert response.status_code == status
    assert response.json()["error"]["param"] == "input" and where in response.json()["error"]["message"]


def test_nothing_is_stored(server: Server):
    for method, path in (("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel")):
        response = server.http.request(method, path)
        assert response.status_code == 404 and "resp_1" in response.json()["error"]["message"]


def test_input_tokens_are_counted(server: Server):
    fields = {"input": "resp_tools", "instructions": "be brief", "tools": TOOLS}
    counted = server.http.post("/v1/responses/input_tokens", json=fields).json()
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == server.http.post("/v1/responses", json=fields).json()["usage"]["input_tokens"]


def test_effort_switches_thinking(server: Server, tokenizer: Tokenizer):
    assert prompt_of(server, tokenizer, "hi", reasoning={"effort": "none"}).endswith("<think></think>")
    assert prompt_of(server, tokenizer, "hi", reasoning={"effort": "low"}).endswith("<think>\n")


def test_openai_package(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="null") as client:
        response = client.responses.create(model="tiny", input="hi")
        assert response.output_text == "Hello" and response.usage and response.usage.total_tokens > 0
        with client.responses.stream(model="tiny", input="resp_tools", tools=TOOLS) as stream:  # type: ignore[arg-type]
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[-1] == "response.completed" and "response.function_call_arguments.delta" in kinds
        calls = [item for item in final.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"x": 5, "s": 'a "b"'}, {}]
        assert final.output_text == "Sure."
