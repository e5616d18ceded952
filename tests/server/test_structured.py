"""Grammars and budgets over HTTP, with a real engine and random weights: D17, D18 and tool calls that have to come."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyden.config.server import ServerConfig
from leyden.server.app import build
from leyden.server.client import EngineClient, InThread
from leyden.testing.scripted import running
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from tests.engine.conftest import TINY, engine, tiny
from tests.server.conftest import events

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def serve(folder: Path, tokenizer: Tokenizer) -> Callable[..., contextlib.AbstractContextManager[httpx.Client]]:
    model = tiny()
    model.config = replace(TINY, eos_token_ids=(tokenizer.eos_token_id,))

    @contextlib.contextmanager
    def serve(**config: Any) -> Iterator[httpx.Client]:
        worker = engine(model, tokenizer=lambda: tokenizer, overlap=True, max_model_len=1024, pages=600)
        template = ChatTemplate.from_folder(folder, tokenizer)
        app = build(ServerConfig(**config), EngineClient(InThread(worker)), tokenizer, template, model="tiny")
        with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
            yield http
            worker.check()

    return serve


@pytest.fixture(scope="module")
def http(serve: Callable[..., contextlib.AbstractContextManager[httpx.Client]]) -> Iterator[httpx.Client]:
    with serve() as http:
        yield http


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "temperature": 1, "seed": 0}
    return http.post("/v1/chat/completions", json=body | fields)


def choices(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [found | {"usage": response.json()["usage"]} for found in response.json()["choices"]]


def choice(response: httpx.Response) -> dict[str, Any]:
    (found,) = choices(response)
    return found


def valid(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"ok", "n"} and type(value["ok"]) is bool and value["n"] in range(100)


# D18


def test_D18_thinking_first_then_the_schema(http: httpx.Client):
    """Temperature 0, and 1 with seeds 0 to 19, of each kind, eight at a time."""
    sampling = [{"temperature": 0}, *({"seed": seed} for seed in range(20))]

    def thinks(how: dict[str, Any]) -> bool:
        found = choice(chat(http, response_format=FORMAT, thinking_token_budget=8, **how))
        message, counted = found["message"], found["usage"]["completion_tokens_details"]["reasoning_tokens"]
        # the model may end its thinking before
        return valid(message["content"]) and found["finish_reason"] == "stop" and 0 <= counted <= 8

    def answers(how: dict[str, Any]) -> bool:
        found = choice(chat(http, response_format=FORMAT, **OFF, **how))
        return valid(found["message"]["content"]) and not found["message"]["reasoning"]

    def completes(how: dict[str, Any]) -> bool:
        body = {"prompt": "hi", "max_tokens": 200, "temperature": 1, "response_format": FORMAT, **how}
        found = choice(http.post("/v1/completions", json=body))
        return valid(found["text"]) and found["finish_reason"] == "stop"

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask, how) for how in sampling for ask in (thinks, answers, completes)]
        assert all(job.result() for job in jobs)
    assert http.get("/health").status_code == 200


def test_D18_streams_too(http: httpx.Client, tokenizer: Tokenizer):
    bias = {str(tokenizer.id_of("</think>")): -100}
    response = chat(http, response_format=FORMAT, thinking_token_budget=8, logit_bias=bias, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
    assert valid("".join(delta.get("content") or "" for delta in deltas))
    assert any(delta.get("reasoning") for delta in deltas)


def test_completion_that_goes_on_thinking_is_free_until_it_ends(http: httpx.Client):
    """NVIDIA's way of budgets by two calls: the rendered prompt goes to /v1/completions."""
    prompt = "<|im_start|>assistant\n<think>\nSo far"
    body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "response_format": FORMAT}
    found = choice(
        http.post("/v1/completions", json=body | {"thinking_token_budget": 20, "skip_special_tokens": False})
    )
    thought, end, answer = found["text"].partition("</think>")
    assert thought and end and valid(answer.removesuffix("<|im_end|>"))


# tools


def call_of(found: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the calls by name, after checking them."""
    calls = {
        call["function"]["name"]: json.loads(call["function"]["arguments"]) for call in found["message"]["tool_calls"]
    }
    for name, arguments in calls.items():
        if name == "stop":
            assert arguments == {}
        else:
            assert name == "get_weather" and arguments.keys() == {"city", "days"}
            # the grammar leaves one blank around listed words, which a model that knows the format makes a line end
            assert arguments["city"].strip() in ("Paris", "Rome") and type(arguments["days"]) is int
    assert found["message"]["content"] is None
    return calls


BUDGET = {"thinking_token_budget": 5}


@pytest.mark.parametrize("thinking", [BUDGET, OFF], ids=["thinking", "at once"])
def test_required_brings_a_call_whatever_the_weights(http: httpx.Client, thinking: dict[str, Any]):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **thinking}
    for found in choices(chat(http, n=8, **fields)):
        assert found["finish_reason"] == "tool_calls" and len(call_of(found)) == 1
        assert bool(found["message"]["reasoning"]) == (thinking is BUDGET)


@pytest.mark.parametrize("stream", [False, True])
def test_named_brings_that_call_and_the_finish_reason_of_openai(http: httpx.Client, stream: bool):
    named = {"type": "function", "function": {"name": "get_weather"}}
    response = chat(http, tools=TOOLS, tool_choice=named, stream=stream, **BUDGET)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(response)]
        calls = [call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        assert calls[0]["name"] == "get_weather" and json.loads("".join(call["arguments"] for call in calls))
        assert chunks[-1]["finish_reason"] == "stop"
    else:
        found = choice(response)
        assert found["finish_reason"] == "stop" and call_of(found).keys() == {"get_weather"}


def likely(tokenizer: Tokenizer, **bias: float) -> dict[str, Any]:
    names = {"call": "<tool_call>", "end": "<|im_end|>", "brace": "{"}
    return {"logit_bias": {str(tokenizer.id_of(names[name])): value for name, value in bias.items()}}


def test_several_calls_are_several_calls(http: httpx.Client):
    found = choices(chat(http, tools=TOOLS[1:], tool_choice="required", n=8, **OFF))
    assert max(len(one["message"]["tool_calls"]) for one in found) > 1


def test_strict_tools_bind_calls_and_leave_the_rest_free(http: httpx.Client, tokenizer: Tokenizer):
    """With `<tool_call>` made likely, calls come among free text; those of a strict tool follow its schema."""
    strict = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}]
    found = choices(chat(http, tools=strict, n=8, **likely(tokenizer, call=6.0, end=3.0), **OFF))
    called = [one for one in found if one["finish_reason"] == "tool_calls"]
    assert called and any(one["message"]["content"] for one in found)
    for one in called:
        call_of(one | {"message": one["message"] | {"content": None}})


def test_a_wish_for_the_answer_beside_tools_is_met_by_either(http: httpx.Client, tokenizer: Tokenizer):
    strict = [{"type": "function", "function": {"name": "stop", "strict": True}}]
    wish = {
        "tools": strict,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": FORMAT,
        "n": 8,
        **OFF,
    }
    for found in choices(chat(http, **wish, **likely(tokenizer, brace=50.0))):
        assert valid(found["message"]["content"]) and "tool_calls" not in found["message"]
    for found in choices(chat(http, **wish, **likely(tokenizer, call=50.0))):
        assert call_of(found) == {"stop": {}} and found["finish_reason"] == "tool_calls"


def test_errors_come_before_the_stream_and_name_the_field(http: httpx.Client):
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}, "strict": True}}]
    for fields, param, word in (
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}},
            "response_format",
            "nope",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "parenthesis"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "not defined"),
        ({"tools": broken}, "tools", "<function=f>"),
    ):
        for stream in (False, True):
            response = chat(http, stream=stream, **fields)
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"] == param and word in error["message"]
    assert valid(choice(chat(http, response_format=FORMAT, **OFF))["message"]["content"])


# D17


def forever(tokenizer: Tokenizer) -> dict[str, Any]:
    """A model that says x for ever."""
    (x,) = tokenizer.encode("x")
    return {"temperature": 0, "max_tokens": 40, "logit_bias": {str(x): 100.0}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [10, 0, 1])
def test_D17_budget_binds(http: httpx.Client, tokenizer: Tokenizer, stream: bool, budget: int):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = chat(http, thinking_token_budget=budget, stream=stream, **options, **forever(tokenizer))
    if stream:
        *chunks, last = events(response)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        reasoning, content = ("".join(d.get(key) or "" for d in deltas) for key in ("reasoning", "content"))
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        found = choice(response)
        reasoning, content = found["message"]["reasoning"] or "", found["message"]["content"]
        reason, usage = found["finish_reason"], found["usage"]
    assert (reasoning, content, reason) == ("x" * budget, "x" * (40 - budget - 1), "length")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == budget and usage["completion_tokens"] == 40


@pytest.mark.parametrize("fields", [{}, {"thinking_token_budget": -1}, {"thinking_token_budget": None}])
def test_D17_no_budget_no_limit(http: httpx.Client, tokenizer: Tokenizer, fields: dict[str, Any]):
    message = choice(chat(http, **fields, **forever(tokenizer)))["message"]
    assert (message["reasoning"], message["content"]) == ("x" * 40, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 3},
        {"reasoning_budget": 3},
        {"max_thinking_tokens": 3},
        {"chat_template_kwargs": {"reasoning_budget": 3}},
        {"vllm_xargs": {"thinking_budget": 3}},
    ],
)
def test_every_name_of_the_budget(http: httpx.Client, tokenizer: Tokenizer, fields: dict[str, Any]):
    assert choice(chat(http, **fields, **forever(tokenizer)))["message"]["reasoning"] == "xxx"


@pytest.mark.parametrize("value", [True, 1.5, -2, "5"])
def test_bad_budgets_are_refused_by_name(http: httpx.Client, value: Any):
    for field in ("thinking_token_budget", "reasoning_budget", "thinking_token_grace"):
        response = chat(http, **{field: value})
        assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_budget_has_no_effect_without_thinking(http: httpx.Client, tokenizer: Tokenizer):
    message = choice(chat(http, thinking_token_budget=0, **OFF, **forever(tokenizer)))["message"]
    assert (message["reasoning"], message["content"]) == (None, "x" * 40)


def test_thinking_that_is_in_the_prompt_is_charged(http: httpx.Client, tokenizer: Tokenizer):
    prompt = "<|im_start|>assistant\n<think>\nxxx"
    body = {"prompt": prompt, "thinking_token_budget": 5, "skip_special_tokens": False, **forever(tokenizer)}
    spent = len(tokenizer.encode("xxx"))
    assert choice(http.post("/v1/completions", json=body))["text"].startswith("x" * (5 - spent) + "</think>x")


def test_the_server_may_set_budget_grace_and_last_words(serve: Any, tokenizer: Tokenizer):
    line = str(tokenizer.encode("\n")[0])
    config = {"default_thinking_budget": 4, "reasoning_config": {"reasoning_end_str": " Enough."}}
    with serve(default_thinking_grace=6, **config) as http:
        message = choice(chat(http, **forever(tokenizer)))["message"]
        assert message["reasoning"] == "x" * 10 + " Enough." and message["content"]
        message = choice(chat(http, thinking_token_grace=0, **forever(tokenizer)))["message"]
        assert message["reasoning"] == "x" * 4 + " Enough."
        message = choice(chat(http, thinking_token_budget=-1, **forever(tokenizer)))["message"]
        assert message["reasoning"] == "x" * 40
        message = choice(chat(http, temperature=0, max_tokens=40, logit_bias={line: 100.0}))["message"]
        assert re.fullmatch(r"\n{4} Enough\.", message["reasoning"])


def test_grammars_may_rule_thinking_too_and_be_compact(serve: Any):
    options = {"enable_in_reasoning": True, "disable_any_whitespace": True}
    with serve(structured_outputs_config=options) as http:
        message = choice(chat(http, structured_outputs={"json": SCHEMA}))["message"]
        assert valid(message["reasoning"]) and "\n" not in message["reasoning"]
