"""Tool calls over HTTP: whole and streamed, cut, several, and in the history."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from leyden.text.tokenizer import Tokenizer
from tests.server.conftest import Server, events

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "ok": {"type": "boolean"}},
            },
        },
    }
]


def call(city: str, days: int) -> str:
    return (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n"
        f"<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>"
    )


CASES = {
    "one": f"I look.</think>Let me see.\n{call('Paris', 2)}",
    "two": f"</think>{call('Paris', 2)}\n{call('Rome', 3)}",
    "forgot": f"I look. {call('Paris', 2)}",
    "D11": (
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n<parameter=content>\n"
        f"{'0123456789' * 20}\n</parameter>\n</function>\n</tool_call>"
    ),
    "prose": "</think>A call begins with <tool_call> and a function.",
}


@pytest.fixture(scope="module")
def server(start: Any) -> Iterator[Server]:
    with start(CASES) as server:
        yield server


def calls_of(chunks: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Names and arguments of streamed calls, after checking how they are told."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for delta in (choice["delta"] for choice in chunk["choices"]):
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(calls):
                    assert piece["id"] and piece["type"] == "function" and piece["function"]["name"]
                    calls.append(piece)
                else:
                    assert piece["index"] == len(calls) - 1 and piece.keys() == {"index", "function"}
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    assert len({piece["id"] for piece in calls}) == len(calls)
    return [(piece["function"]["name"], json.loads(piece["function"]["arguments"])) for piece in calls]


@pytest.mark.parametrize(
    ("text", "fields", "wanted"),
    [
        ("one", {}, [("Paris", 2)]),
        ("two", {}, [("Paris", 2), ("Rome", 3)]),
        ("two", {"parallel_tool_calls": False}, [("Paris", 2)]),
        ("forgot", {}, [("Paris", 2)]),
    ],
)
def test_calls(server: Server, text: str, fields: dict[str, Any], wanted: list[tuple[str, int]]):
    arguments = [("get_weather", {"city": city, "days": days}) for city, days in wanted]
    whole = server.chat(text, tools=TOOLS, **fields).json()
    message = whole["choices"][0]["message"]
    found = [(item["function"]["name"], json.loads(item["function"]["arguments"])) for item in message["tool_calls"]]
    assert found == arguments and whole["choices"][0]["finish_reason"] == "tool_calls"
    chunks = events(server.chat(text, tools=TOOLS, stream=True, **fields))
    assert calls_of(chunks) == arguments
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    if text == "one":
        assert message["content"] == "Let me see." and message["reasoning"] == "I look."
    if text == "forgot":
        assert message["content"] is None and message["reasoning"].strip() == "I look."


def test_tokens_of_a_call_are_no_reasoning(server: Server, tokenizer: Tokenizer):
    usage = server.chat("forgot", tools=TOOLS).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode("I look. "))


def test_openai_package_streams_calls(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="null") as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "one"}],
            tools=TOOLS,  # type: ignore[arg-type]
            stream=True,
        )
        pieces = [chunk.choices[0].delta.tool_calls[0] for chunk in stream if chunk.choices[0].delta.tool_calls]
    assert pieces[0].function.name == "get_weather" and pieces[0].function.arguments is not None
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == {"city": "Paris", "days": 2}


def test_D11_a_cut_call_is_no_call(server: Server, tokenizer: Tokenizer):
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": len(tokenizer.encode(CASES["two"])) - 8}
    choice = server.chat("two", **fields).json()["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["message"]["tool_calls"]) == 1
    chunks = events(server.chat("two", stream=True, **fields))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    fields["max_tokens"] = 20
    choice = server.chat("two", **fields).json()["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seen", ["<function=wri", "a.txt\n</parameter>", "0123456789" * 10, "</function>"])
def test_D11_wherever_a_call_is_cut(server: Server, tokenizer: Tokenizer, seen: str, stream: bool):
    ids = tokenizer.encode(CASES["D11"])
    limit = next(n for n in range(len(ids)) if seen in tokenizer.decode(ids[:n]))
    properties = {"path": {"type": "string"}, "content": {"type": "string"}}
    tool = {"name": "write_file", "parameters": {"type": "object", "properties": properties}}
    fields = {"tools": [{"type": "function", "function": tool}], "max_tokens": limit}
    fields |= {"chat_template_kwargs": {"enable_thinking": False}}
    arguments = json.dumps({"path": "a.txt", "content": "0123456789" * 20})
    if stream:
        *chunks, last = events(server.chat("D11", stream=True, stream_options={"include_usage": True}, **fields))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        pieces = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", ())]
        assert arguments.startswith("".join(pieces))
        assert not any(delta.get("content") for delta in deltas)
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        answer = server.chat("D11", **fields).json()
        message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
        usage = answer["usage"]
        listed = [item["function"]["arguments"] for item in message.get("tool_calls", ())]
        assert listed == ([arguments] if seen == "</function>" else []) and message["content"] is None
    assert (reason, usage["completion_tokens"]) == ("length", limit)


def test_without_calls(server: Server):
    choice = server.chat("prose", tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == "A call begins with <tool_call> and a function."
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    choice = server.chat("two", tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"].count("<tool_call>") == 2 and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_D14a_thinking_serves_as_content(start: Any, stream: bool):
    with start({"hi": "Only thoughts.</think>\n"}) as server:
        fields = {"chat_template_kwargs": {"force_nonempty_content": True}, "stream": stream}
        response = server.chat(**fields)
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
            assert "".join(delta.get("content", "") for delta in deltas) == "Only thoughts."
        else:
            message = response.json()["choices"][0]["message"]
            assert (message["content"], message["reasoning"]) == ("Only thoughts.", None)


ARGUMENTS = {"city": "Paris", "days": 2, "ok": True}
HISTORY = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "<parameter=ok>\nTrue\n</parameter>\n</function>\n</tool_call>\n<|im_end|>\n<|im_start|>user\n<tool_response>\n"
    "sunny\n</tool_response>\n<|im_end|>"
)


def ask_with_history(server: Server, arguments: Any) -> Any:
    function = {"name": "get_weather", "arguments": arguments}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    server.engine.received.clear()
    return server.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS, "max_tokens": 1})


@pytest.mark.parametrize("arguments", [json.dumps(ARGUMENTS), ARGUMENTS], ids=["text", "object"])
def test_D21_history(server: Server, tokenizer: Tokenizer, arguments: Any):
    assert ask_with_history(server, arguments).status_code == 200
    assert HISTORY in tokenizer.decode(server.engine.received[0].prompt)


def test_D21_bad_history_is_located(server: Server):
    error = ask_with_history(server, '{"city": ').json()["error"]
    assert error["param"] == "messages" and "messages[1].tool_calls[0]" in error["message"]
    assert ask_with_history(server, "").status_code == 200
