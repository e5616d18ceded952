"""NVIDIA's way of limiting thinking from the client's side: two calls, with the template applied by the client.

The first call, a chat, thinks for at most `budget` tokens. If it did not come to an end, the client ends the thinking
itself and lets /v1/completions continue the prompt that it has rendered with the model's own template.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import openai
import pytest

from leyden.testing.scripted import Case
from leyden.text.tokenizer import Tokenizer
from tests.server.conftest import Server

CASES: dict[str, str | Case] = {"long": "one two three four five six</think>never seen", "short": "Easy.</think>Yes"}


class BudgetClient:
    def __init__(self, client: openai.OpenAI, folder: Path):
        self._client = client
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string((folder / "chat_template.jinja").read_text())

    def ask(self, messages: list[dict[str, Any]], budget: int, max_tokens: int) -> dict[str, Any]:
        first = self._client.chat.completions.create(
            model="tiny",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=budget,
        )
        message: Any = first.choices[0].message
        thought = message.reasoning or ""
        if first.choices[0].finish_reason != "length":
            return {"reasoning": thought, "content": message.content}
        thought = f"{thought}.\n"
        used = first.usage.completion_tokens if first.usage else 0
        prompt = self._template.render(messages=messages, add_generation_prompt=True) + f"{thought}</think>\n\n"
        second = self._client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens - used)
        return {"reasoning": thought, "content": second.choices[0].text, "prompt": prompt}


@pytest.fixture
def served(start: Any, folder: Path) -> Iterator[tuple[Server, BudgetClient]]:
    with (
        start({**CASES, "second": "the answer"}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="null") as client,
    ):
        yield server, BudgetClient(client, folder)


def test_thinking_that_ends_in_time(served: tuple[Server, BudgetClient]):
    _, client = served
    found = client.ask([{"role": "user", "content": "short"}], budget=50, max_tokens=100)
    assert found == {"reasoning": "Easy.", "content": "Yes"}


def test_thinking_that_is_cut(served: tuple[Server, BudgetClient], tokenizer: Tokenizer):
    server, client = served
    found = client.ask([{"role": "user", "content": "long"}], budget=8, max_tokens=100)
    cut = found["reasoning"].removesuffix(".\n")
    assert cut and "one two three four five six".startswith(cut)  # verbatim, and not taken for content
    first, second = server.engine.received
    assert first.params.max_tokens == 8 and second.params.max_tokens == 92
    # The text of special tokens gives special tokens; in front stands the bos that completions add, once.
    assert second.prompt[0] == tokenizer.bos_token_id and second.prompt.count(tokenizer.bos_token_id) == 1
    assert second.prompt[1 : len(first.prompt) + 1] == first.prompt
    assert second.prompt.count(tokenizer.id_of("</think>")) == first.prompt.count(tokenizer.id_of("</think>")) + 1
    assert tokenizer.decode(second.prompt[1:]) == found["prompt"]


def test_continuing_on_the_chat_route_instead(served: tuple[Server, BudgetClient], tokenizer: Tokenizer):
    server, _ = served
    messages = [{"role": "user", "content": "long"}, {"role": "assistant", "content": "<think>\nA.\n</think>\n\nSo"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 3}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert tokenizer.decode(server.engine.received[0].prompt).endswith("</think>\n\nSo")
