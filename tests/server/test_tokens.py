"""Prompts without answers: /tokenize, /detokenize, the render routes, and the one that takes both kinds."""

import json

from leyden.text.tokenizer import Tokenizer
from tests.server.conftest import DATA, Server

SHAPES = {shape["id"]: shape for shape in json.loads((DATA / "shapes.json").read_text())["shapes"]}


def test_text_there_and_back(server: Server, tokenizer: Tokenizer):
    body = {"prompt": "hi 世", "add_special_tokens": False, "return_token_strs": True}
    found = server.http.post("/tokenize", json=body).json()
    assert found.keys() == {"count", "max_model_len", "tokens", "token_strs"}
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["tokens"] == tokenizer.encode("hi 世") and found["max_model_len"] == 2048
    assert found["token_strs"][:2] == ["h", "i"]
    assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "hi 世"}
    begun = server.http.post("/tokenize", json={"prompt": "hi 世"}).json()
    assert begun["tokens"] == [tokenizer.bos_token_id, *found["tokens"]] and begun["token_strs"] is None
    marked = server.http.post("/tokenize", json={"prompt": "a<|im_end|>", "add_special_tokens": False}).json()
    assert marked["tokens"][-1] == tokenizer.eos_token_id
    assert server.http.post("/detokenize", json={"tokens": marked["tokens"]}).json() == {"prompt": "a<|im_end|>"}


def test_messages_are_tokenised_as_the_chat_route_does(server: Server):
    for fields in (
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"add_generation_prompt": False},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
         "continue_final_message": True},
    ):  # fmt: skip
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        asked = server.http.post("/v1/chat/completions", json={**body, "return_token_ids": True, "max_tokens": 1})
        counted = server.http.post("/tokenize", json=body).json()
        assert counted["tokens"] == asked.json()["prompt_token_ids"]
        assert counted["count"] == asked.json()["usage"]["prompt_tokens"]
        rendered = server.http.post("/v1/chat/completions/render", json=body).json()
        assert rendered["prompt_token_ids"] == counted["tokens"]
        assert server.http.post("/detokenize", json={"tokens": counted["tokens"]}).json() == {
            "prompt": rendered["prompt_text"]
        }


def test_a_prompt_longer_than_the_context_can_be_counted(server: Server):
    assert server.http.post("/tokenize", json={"prompt": "7!" * 1500}).json()["count"] == 3001


def test_completion_prompts_are_rendered_one_by_one(server: Server, tokenizer: Tokenizer):
    body = {"prompt": ["a", "bc"], "truncate_prompt_tokens": 1}
    found = server.http.post("/v1/completions/render", json=body).json()
    assert found == [
        {"prompt_text": "a", "prompt_token_ids": tokenizer.encode("a")},
        {"prompt_text": "c", "prompt_token_ids": tokenizer.encode("c")},
    ]


def test_invocations_picks_the_kind_of_request(server: Server):
    chat = server.http.post("/invocations", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["content"] == "Hello"
    text = server.http.post("/invocations", json={"prompt": "hi"}).json()
    assert text["object"] == "text_completion"
    refused = server.http.post("/invocations", json={"messages": "hi"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"


def test_errors_name_the_field(server: Server):
    for path, body, param in (
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": 5}, "tools"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/v1/completions/render", {"prompt": ""}, "prompt"),
    ):
        response = server.http.post(path, json=body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
