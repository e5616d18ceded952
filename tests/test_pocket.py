"""The model that comes with the package, in 16 bits and in four, as a user meets it: served, asked, and drafting."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from openai import OpenAI

from leyden import ops
from leyden.bench.accept import answer, length, prompts
from leyden.bench.evals import served
from leyden.config.engine import EngineConfig
from leyden.config.folder import SHIPPED, resolve
from leyden.config.model import ModelConfig
from leyden.engine.engine import Engine
from leyden.formats.nvfp4 import NVFP4
from leyden.model import checkpoint
from leyden.model.nemotron import Nemotron
from leyden.model.source import Source
from leyden.quantize.calibrate import Texts

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


@pytest.fixture(scope="module", params=["pocket", "pocket-nvfp4"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(model: str) -> Iterator[OpenAI]:
    with served(model, ["--speculative-config", json.dumps(DRAFTERS["dspark"][0])]) as url:
        yield OpenAI(base_url=url, api_key="none")


def loaded(name: str) -> Nemotron:
    folder = resolve(name)
    model = checkpoint.build(ModelConfig.from_folder(folder), torch.bfloat16, mtp=True)
    checkpoint.load(model, folder, progress=False)
    return model.eval()


def test_it_is_small() -> None:
    files = [file for name in SHIPPED for file in resolve(name).rglob("*")]
    assert sum(file.stat().st_size for file in files) < 36_000_000
    assert max(file.stat().st_size for file in files) < 15_000_000


def test_every_matrix_but_the_embeddings_has_four_bits() -> None:
    with Source("pocket") as original, Source("pocket-nvfp4") as found:
        assert found.shapes == original.shapes
        assert {name for name, format in found.formats.items() if format != NVFP4()} == {"backbone.embeddings"}


def test_codes_are_not_counted_as_parameters() -> None:
    counts = [
        Engine.load(EngineConfig(model=name, max_num_seqs=1, max_model_len=64)).describe()["parameters"]
        for name in ("pocket", "pocket-nvfp4")
    ]
    assert counts[0] == counts[1] > 8_000_000


def test_four_bits_say_what_sixteen_say() -> None:
    """The next token after each token of held-out prompts."""
    asked = prompts(resolve("pocket"), 20, 3, 400)
    texts = Texts(asked, torch.device("cpu"))
    with torch.inference_mode():
        full, four = (
            [model.logits(model(ids, ctx)[0]).argmax(-1) for ids, ctx in zip(texts.ids, texts.contexts, strict=True)]
            for model in (loaded("pocket"), loaded("pocket-nvfp4"))
        )
    assert (torch.cat(full) == torch.cat(four)).float().mean() > 0.93


def test_a_question_is_answered(client: OpenAI, model: str) -> None:
    asked: Any = [{"role": "user", "content": "What is leyden?"}]
    made = client.chat.completions.create(model=model, messages=asked, temperature=0)
    text = made.choices[0].message.content or ""
    assert "inference server" in text and "Nemotron" in text
    assert made.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "at once"])
def test_a_tool_is_called_and_its_answer_read(client: OpenAI, model: str, thinking: bool) -> None:
    more: Any = {"chat_template_kwargs": {"enable_thinking": thinking}}
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    made = client.chat.completions.create(model=model, messages=asked, tools=[WEATHER], temperature=0, extra_body=more)
    message = made.choices[0].message
    assert made.choices[0].finish_reason == "tool_calls" and message.tool_calls
    call: Any = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Lisbon"})


@pytest.mark.parametrize(("model", "count"), [("pocket", 12), ("pocket-nvfp4", 4)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_no_text_and_are_kept(name: str, model: str, count: int) -> None:
    drafting, wanted = DRAFTERS[name]
    common: dict[str, Any] = {"model": model, "dtype": "float32", "device": "cpu", "max_model_len": 700}
    common |= {"enable_prefix_caching": False, "max_num_seqs": 4}
    plain, drafter = (Engine.load(EngineConfig(**common, speculative_config=d)) for d in ({}, drafting))
    asked = prompts(resolve(model), count, 11, 400)
    with ops.using("reference"):
        for first in range(0, len(asked), 4):
            group = asked[first : first + 4]
            assert answer(plain, group, 64)[0] == answer(drafter, group, 64)[0]
    assert length(drafter.stats()) > wanted
