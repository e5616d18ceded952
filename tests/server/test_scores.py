"""Scoring prompts as evaluation tools do, over the real engine: every log-probability stands at its own token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from leyden.config.server import ServerConfig
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.server.app import build
from leyden.server.client import EngineClient, InThread
from leyden.testing.scripted import running
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from tests.engine.conftest import engine, tiny

PROMPT = [5, 77, 300, 12, 9, 9, 450, 31]


@pytest.fixture(scope="module")
def model() -> Nemotron:
    return tiny()


@pytest.fixture(scope="module")
def http(model: Nemotron, folder: Path, tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    client = EngineClient(InThread(engine(model, overlap=True, step_tokens=5)))  # prompts come in pieces
    app = build(ServerConfig(), client, tokenizer, ChatTemplate.from_folder(folder, tokenizer), model="tiny")
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def reference(model: Nemotron, tokens: list[int]) -> torch.Tensor:
    """fp32 [len(tokens), V]: log-probabilities of what follows each token."""
    with torch.inference_mode():
        hidden, _ = model(torch.tensor(tokens), Context.packed([len(tokens)]))
        return model.logits(hidden).log_softmax(-1)


def value(name: str) -> int:
    return int(name.removeprefix("token_id:"))


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("kind", ["ids", "many"])
def test_echo_scores_the_prompt_and_the_answer(http: httpx.Client, model: Nemotron, limit: int, kind: str):
    prompts = [PROMPT] if kind == "ids" else [PROMPT, PROMPT[::-1]]
    body: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": limit, "temperature": 0}
    body |= {"return_tokens_as_token_ids": True, "ignore_eos": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == len(prompts)
    for prompt, choice in zip(prompts, choices, strict=True):
        found = choice["logprobs"]
        tokens = [value(name) for name in found["tokens"]]
        assert tokens[: len(prompt)] == prompt and len(tokens) == len(prompt) + limit
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        wanted = reference(model, tokens)
        for place in range(1, len(tokens)):
            row = wanted[place - 1]
            assert found["token_logprobs"][place] == pytest.approx(float(row[tokens[place]]), abs=1e-4)
            top = {value(name): logprob for name, logprob in found["top_logprobs"][place].items()}
            assert set(row.topk(2).indices.tolist()) <= top.keys() and tokens[place] in top
            assert top == {id: pytest.approx(float(row[id]), abs=1e-4) for id in top}


def test_chosen_tokens_have_the_scores_of_the_model(http: httpx.Client, model: Nemotron):
    body = {"prompt": PROMPT, "logprobs": 0, "logprob_token_ids": [7, 400], "max_tokens": 2, "temperature": 0}
    found = http.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True}).json()["choices"][0]
    tokens = [value(name) for name in found["logprobs"]["tokens"]]
    wanted = reference(model, PROMPT + tokens)
    for place, top in enumerate(found["logprobs"]["top_logprobs"], len(PROMPT) - 1):
        for id in (7, 400):
            assert top[f"token_id:{id}"] == pytest.approx(float(wanted[place, id]), abs=1e-4)
