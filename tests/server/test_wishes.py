"""Fields of vLLM that few use: bad_words, logprob_token_ids, repetition_detection."""

from typing import Any

import pytest

from leyden.testing.scripted import Case
from leyden.text.tokenizer import Tokenizer
from leyden.types import Repetition
from tests.server.conftest import Server, events


def test_bad_words_reach_the_engine_with_and_without_a_blank(server: Server, tokenizer: Tokenizer):
    wanted = [tokenizer.encode("zzz"), tokenizer.encode(" zzz")]
    for send in (server.chat, server.complete):
        server.engine.received.clear()
        assert send(bad_words=["zzz"], max_tokens=2).status_code == 200
        assert server.engine.received[0].params.banned == wanted


@pytest.mark.parametrize("words", [[""], ["a"] * 1025, ["a" * 1025], "a", [1]])
def test_bad_words_that_are_none(server: Server, words: Any):
    response = server.chat(bad_words=words)
    assert response.status_code == 400 and response.json()["error"]["param"] == "bad_words"


def test_chosen_tokens_in_chat_come_behind_the_one_that_was_taken(server: Server, tokenizer: Tokenizer):
    ids = [300, 301, tokenizer.encode("T")[0]]
    fields = {"logprobs": True, "logprob_token_ids": ids, "return_tokens_as_token_ids": True}
    whole = server.chat(**fields, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    for entry in whole:
        taken = int(entry["token"].removeprefix("token_id:"))
        told = [int(other["token"].removeprefix("token_id:")) for other in entry["top_logprobs"]]
        assert told == [taken, *(id for id in ids if id != taken)]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in events(server.chat(stream=True, **fields))]
    assert [entry for chunk in chunks if chunk for entry in chunk["content"]] == whole


def test_chosen_tokens_in_completions(server: Server):
    fields = {"logprobs": 0, "logprob_token_ids": [300, 301], "return_tokens_as_token_ids": True}
    found = server.complete(**fields).json()["choices"][0]["logprobs"]
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert list(top) == [token, "token_id:300", "token_id:301"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat", {"logprob_token_ids": [5]}),
        ("chat", {"logprob_token_ids": [512], "logprobs": True}),
        ("chat", {"logprob_token_ids": [1] * 129, "logprobs": True}),
        ("complete", {"logprob_token_ids": [5]}),
        ("complete", {"logprob_token_ids": [5], "logprobs": 1, "max_tokens": 0, "echo": True}),
    ],
)
def test_chosen_tokens_that_cannot_be(server: Server, path: str, fields: dict[str, Any]):
    response = getattr(server, path)(**fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == "logprob_token_ids"


def test_an_answer_that_repeats_itself(start: Any):
    rule = {"max_pattern_size": 3, "min_count": 4, "unknown": [1]}
    with start({"again": Case("</think>" + "ha " * 9, "repetition")}) as server:
        choice = server.chat("again", repetition_detection=rule).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
        last = events(server.chat("again", repetition_detection=rule, stream=True))[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")
        params = server.engine.received[0].params
        assert params.repetition_detection == Repetition(max_pattern_size=3, min_count=4)
        assert 'finished_reason="repetition",model_name="tiny"} 2.0' in server.http.get("/metrics").text


@pytest.mark.parametrize(
    "rule", [{"max_pattern_size": 5, "min_count": 1}, {"max_pattern_size": 9999, "min_count": 2}, 3]
)
def test_a_rule_that_makes_no_sense(server: Server, rule: Any):
    response = server.chat(repetition_detection=rule)
    assert response.status_code == 400 and response.json()["error"]["param"] == "repetition_detection"
