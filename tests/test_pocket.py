"""The model that comes with the package, as a user meets it: served, asked, and with each of its drafters."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from leyden import ops
from leyden.bench.accept import answer, length, prompts
from leyden.bench.evals import served
from leyden.config.engine import EngineConfig
from leyden.config.folder import SHIPPED, resolve
from leyden.engine.engine import Engine

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city."}},
            "required": ["city"],
        },
    },
}
DRAFTERS: dict[str, tuple[dict[str, Any], float]] = {  # and the tokens of a step that are wanted of them
    "mtp": ({"method": "mtp", "num_speculative_tokens": 3}, 2.6),
    "dflash": ({"model": "pocket-dflash", "num_speculative_tokens": 5}, 2.8),
    "dspark": ({"model": "pocket-dspark", "num_speculative_tokens": 7}, 3.3),
}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with served("pocket", ["--speculative-config", json.dumps(DRAFTERS["dspark"][0])]) as url:
        yield OpenAI(base_url=url, api_key="none")


def test_it_is_small() -> None:
    files = [file for name in SHIPPED for file in resolve(name).rglob("*")]
    assert sum(file.stat().st_size for file in files) < 36 << 20
    assert max(file.stat().st_size for file in files) < 16 << 20


def test_a_question_is_answered(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What is leyden?"}]
    made = client.chat.completions.create(model="pocket", messages=asked, temperature=0)
    text = made.choices[0].message.content or ""
    assert "inference server" in text and "Nemotron" in text
    assert made.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "at once"])
def test_a_tool_is_called_and_its_answer_read(client: OpenAI, thinking: bool) -> None:
    more: Any = {"chat_template_kwargs": {"enable_thinking": thinking}}
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    made = client.chat.completions.create(
        model="pocket", messages=asked, tools=[WEATHER], temperature=0, extra_body=more
    )
    message = made.choices[0].message
    assert made.choices[0].finish_reason == "tool_calls" and message.tool_calls
    call: Any = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Lisbon"})


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_no_text_and_are_kept(name: str) -> None:
    drafting, wanted = DRAFTERS[name]
    common: dict[str, Any] = {"model": "pocket", "dtype": "float32", "device": "cpu", "max_model_len": 700}
    common |= {"enable_prefix_caching": False, "max_num_seqs": 4}
    plain, drafter = (Engine.load(EngineConfig(**common, speculative_config=d)) for d in ({}, drafting))
    asked = prompts(resolve("pocket"), 12, 11, 400)
    with ops.using("reference"):
        for first in range(0, len(asked), 4):
            group = asked[first : first + 4]
            assert answer(plain, group, 64)[0] == answer(drafter, group, 64)[0]
    assert length(drafter.stats()) > wanted
