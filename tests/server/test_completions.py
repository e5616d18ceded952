"""Completions: kinds of prompts, echo and scoring, log-probabilities, streams."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from leyden.testing.scripted import Case
from leyden.text.tokenizer import Tokenizer
from tests.server.conftest import Server, events


@pytest.fixture(scope="module")
def server(start: Any) -> Iterator[Server]:
    cases = {"abc": "Hi there", "a": "first", "b": "second", "7": "x"}
    with start(cases, defaults={"stop_token_ids": [2]}) as server:
        yield server


def test_openai_package(server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="null") as client:
        whole = client.completions.create(model="tiny", prompt="abc")
        assert whole.choices[0].text == "Hi there" and whole.choices[0].finish_reason == "stop"
        stream = client.completions.create(model="tiny", prompt="abc", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hi there"


def test_sixteen_tokens_unless_asked_for_more(server: Server):
    long = "no case has this text, so it comes back as it is, which is more than sixteen tokens"
    assert server.complete(long).json()["usage"]["completion_tokens"] == 16
    assert server.complete(long).json()["choices"][0]["finish_reason"] == "length"
    assert server.complete(long, max_tokens=500).json()["choices"][0]["text"] == long


@pytest.mark.parametrize("kind", ["texts", "ids"])
def test_many_prompts_and_copies(server: Server, tokenizer: Tokenizer, kind: str):
    prompt: Any = ["a", "b"]
    if kind == "ids":
        prompt = [tokenizer.encode(text) for text in prompt]
    whole = server.complete(prompt, n=2, add_special_tokens=False).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole["choices"]] == ["first", "first", "second", "second"]
    assert whole["usage"]["prompt_tokens"] == 2
    body = {"n": 2, "add_special_tokens": False, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.complete(prompt, **body))
    texts = ["", "", "", ""]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]


def test_equal_prompts_are_counted_apart(server: Server):
    usage = server.complete(["a", "a"], add_special_tokens=False).json()["usage"]
    assert usage["prompt_tokens"] == 2


def test_echo_scores_the_prompt(server: Server):
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0, "add_special_tokens": False}
    choice = server.complete("abc", **fields).json()["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"] and choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"c": -0.5}]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 3


@pytest.mark.parametrize("echo", [False, True])
def test_pieces_of_a_stream_add_up(server: Server, echo: bool):
    fields = {"echo": echo, "logprobs": 2, "return_token_ids": True}
    whole = server.complete("abc", **fields).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in events(server.complete("abc", stream=True, **fields))]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for key, wanted in whole["logprobs"].items():
        assert [item for choice in choices for item in (choice["logprobs"] or {key: []})[key]] == wanted
    assert [id for choice in choices for id in choice["token_ids"]] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_offsets_follow_characters_not_tokens(start: Any, tokenizer: Tokenizer):
    byte_ids = {tokenizer.bytes_of(id): id for id in range(512) if id not in tokenizer.special_ids}
    steps = [[byte_ids[bytes([byte])]] for byte in "é!".encode()]
    with start({"abc": Case(steps=steps)}) as server:
        found = server.complete("abc", logprobs=0).json()["choices"][0]["logprobs"]
        assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"]
        assert found["text_offset"] == [0, 0, 1, 2]


def test_special_tokens_in_a_prompt_count(server: Server, tokenizer: Tokenizer):
    server.engine.received.clear()
    server.complete("<|im_start|>user\nhi<|im_end|>\n")
    prompt = server.engine.received[0].prompt
    assert prompt[0] == tokenizer.bos_token_id and prompt[1] == tokenizer.id_of("<|im_start|>")


def test_D23e_a_character_that_begins_in_the_prompt(start: Any, tokenizer: Tokenizer):
    byte_ids = {tokenizer.bytes_of(id): id for id in range(512) if id not in tokenizer.special_ids}
    first, second, third = (byte_ids[bytes([byte])] for byte in "世".encode())
    case = Case(steps=[[third], [byte_ids[b"!"]]])
    prompt = [*tokenizer.encode("earlier "), first, second]
    with start({tokenizer.decode(prompt): case}) as server:
        text = server.complete(prompt).json()["choices"][0]["text"]
        assert text.endswith("!") and "earlier" not in text


def test_token_ids_as_tokens(server: Server, tokenizer: Tokenizer):
    found = server.complete("7", logprobs=0, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{tokenizer.id_of('x')}", f"token_id:{tokenizer.eos_token_id}"]


@pytest.mark.parametrize("stream", [False, True])
def test_context(start: Any, stream: bool):
    with start({}, max_model_len=64) as server:
        for prompt, fields, param in (
            ([50] * 64, {}, "prompt"),
            ([50] * 60, {"max_tokens": 5}, "max_tokens"),
        ):
            error = server.complete(prompt, stream=stream, **fields).json()["error"]
            assert "maximum context length is 64 tokens" in error["message"] and error["param"] == param
        assert server.complete([50] * 60, stream=stream, max_tokens=4).status_code == 200
        assert server.complete([50] * 60, stream=stream).status_code == 200  # nobody asked for the default sixteen
