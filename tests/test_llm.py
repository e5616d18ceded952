"""The engine in this process: what LLM adds to it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError, RequestError
from leyden.llm import LLM
from leyden.testing.checkpoints import tiny
from leyden.types import Grammar, SamplingParams

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}'


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny(folder)
    return LLM(str(folder), device="cpu", max_model_len=256, kv_cache_memory_bytes=2**24, max_num_seqs=4)


def test_answers_follow_a_grammar(llm: LLM):
    params = SamplingParams(temperature=1.0, seed=3, grammar=Grammar("regex", "[a-z]{3}"), max_tokens=20)
    for output in llm.generate(["one", "two", "three"], params):
        assert re.fullmatch("[a-z]{3}", output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
    with pytest.raises(RequestError, match="grammar: "):
        llm.generate("one", SamplingParams(grammar=Grammar("regex", "(")))


def test_thinking_keeps_its_budget_and_the_grammar_comes_after_it(llm: LLM):
    params = SamplingParams(
        temperature=1.0, seed=3, grammar=Grammar("json", SCHEMA), thinking_token_budget=6, max_tokens=120
    )
    (answer,) = llm.chat([{"role": "user", "content": "hi"}], params).outputs
    end = answer.token_ids.index(llm.tokenizer.id_of("</think>"))
    assert end == 6 and json.loads(llm.tokenizer.decode(answer.token_ids[end + 1 : -1])).keys() == {"n"}
    assert params.thinking is None  # the caller's own are left as they are
    (answer,) = llm.chat([{"role": "user", "content": "hi"}], params, enable_thinking=False).outputs
    assert json.loads(answer.text).keys() == {"n"}


def test_bad_words_are_never_said(llm: LLM):
    def answer(**more: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **more)
        return llm.generate("one", params)[0].outputs[0].token_ids

    said = next(id for id in answer() if llm.tokenizer.decode([id]).isalpha())
    assert said not in answer(bad_words=[llm.tokenizer.decode([said])])


def test_its_cache_outlives_it(tmp_path: Path):
    tiny(tmp_path / "model")
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 2}
    options["cache_dir"] = str(tmp_path / "cache")
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(str(tmp_path / "model"), **options) as first:
        (said,) = first.generate("one two three", params)
    with LLM(str(tmp_path / "model"), **options) as second:
        (again,) = second.generate([[*said.prompt_token_ids, *said.outputs[0].token_ids, 5]], params)
        assert second.engine.stats().cached_tokens >= len(said.prompt_token_ids)
    assert len(again.outputs[0].token_ids) == 4


def test_ids_alone_need_no_tokenizer(llm: LLM, tmp_path: Path):
    tiny(tmp_path, tokenizer=False)
    ids = LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        device="cpu",
        max_model_len=256,
        kv_cache_memory_bytes=2**24,
        max_num_seqs=4,
    )
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (answer,) = ids.generate([4, 5, 6], params)[0].outputs
    (other,) = llm.generate([4, 5, 6], params)[0].outputs
    assert answer.token_ids == other.token_ids and answer.text == "" and answer.finish_reason == "length"
    for prompt, wish in (("text", params), ([4], SamplingParams(stop=["a"])), ([4], SamplingParams(bad_words=["a"]))):
        with pytest.raises(ConfigError, match="skip_tokenizer_init"):
            ids.generate(prompt, wish)


def test_the_tokenizer_may_lie_elsewhere(llm: LLM, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    texts = tmp_path_factory.mktemp("texts")
    tiny(texts)
    tiny(tmp_path, tokenizer=False)
    made = LLM(str(tmp_path), tokenizer=str(texts), device="cpu", max_model_len=64, kv_cache_memory_bytes=2**24)
    params = SamplingParams(temperature=0, max_tokens=5)
    assert made.generate("hi", params)[0].outputs == llm.generate("hi", params)[0].outputs
