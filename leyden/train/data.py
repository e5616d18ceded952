"""Training data: conversations in JSON lines, and what of them a model learns.

A line is an object with `messages` in the OpenAI chat format (reasoning under `reasoning_content` or `reasoning`, calls
under `tool_calls`) and optional `tools`; other keys are ignored. Refused, by file and line: what a chat request with
the same messages would be refused for, and conversations without an assistant turn.

The loss covers what the model itself would have generated: of every assistant turn, the tokens after the generation
prompt up to and including the end-of-turn token. The tokens before it are exactly those that the server would have fed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.errors import ConfigError, RequestError
from leyden.text.template import ChatTemplate, normalise
from leyden.text.tokenizer import Tokenizer

Conversation = Mapping[str, Any]


@dataclass(slots=True)
class TokenSequence:
    """Token ids and, for each of them, whether predicting it is trained (`learn` is as long as `ids`)."""

    ids: list[int]
    learn: list[bool]


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The conversations of a JSON lines file, with their messages in the form that templates read.

    Empty lines are skipped. Raises ConfigError "FILE line N: ..." for a line that cannot be used or an unreadable file.
    """
    return (conversation for _, conversation in _located(path))


def rendered(path: str | Path, template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[TokenSequence]:
    """What a JSON lines file gives to train on. Raises ConfigError as `read` does, also for what does not render."""
    for where, conversation in _located(path):
        try:
            yield from sequences(conversation, template, tokenizer)
        except RequestError as error:
            raise ConfigError(f"{where}: {error.message}") from None


def write(path: str | Path, conversations: Iterable[Conversation]) -> int:
    """One line per conversation; returns how many."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for conversation in conversations:
            file.write(json.dumps(conversation, ensure_ascii=False) + "\n")
            count += 1
    return count


def sequences(conversation: Conversation, template: ChatTemplate, tokenizer: Tokenizer) -> list[TokenSequence]:
    """What to train on: usually one sequence, more where the template rewrites the history.

    Templates of this family drop the reasoning of earlier turns when a new user message comes. The tokens of the later
    turn then no longer continue those of the earlier one, so the conversation gives one sequence up to the rewriting
    and another one after it, in which the turns already learnt are context only. A turn without reasoning is learnt as
    the answer to a prompt with thinking off.
    """
    messages = [_trimmed(message) for message in normalise(conversation["messages"])]
    tools = conversation.get("tools") or None
    found: list[TokenSequence] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        thinking = {"enable_thinking": bool(message.get("reasoning_content"))}
        prompt = template.encode(messages[:i], tools, kwargs=thinking)
        ids = template.encode(messages[: i + 1], tools, add_generation_prompt=False)
        while ids and ids[-1] != tokenizer.eos_token_id:  # the line end after it belongs to the next turn
            ids.pop()
        if ids[: len(prompt)] != prompt:
            raise RequestError(
                f"messages[{i}] does not continue the generation prompt of the chat template", "messages"
            )
        continued = found and ids[: len(found[-1].ids)] == found[-1].ids
        learnt = found.pop().learn if continued else []
        learn = learnt + [False] * (len(prompt) - len(learnt)) + [True] * (len(ids) - len(prompt))
        found.append(TokenSequence(ids, learn))
    return found


def texts(conversations: Iterable[Conversation], template: ChatTemplate) -> Iterator[str]:
    """Every conversation as the chat template writes it, earlier reasoning included: to train a tokenizer on."""
    kept = {"truncate_history_thinking": False}
    for each in conversations:
        messages = normalise(each["messages"])
        yield template.render(messages, each.get("tools"), add_generation_prompt=False, kwargs=kept)


def _located(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE line N", conversation) for each line that is not empty."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} line {number}"
                    yield where, _conversation(line, where)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a JSON lines file: {error}") from None


def _conversation(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: each line must be a JSON object, found no JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("messages"), list):
        raise ConfigError(
            f"{where}: each line must be a JSON object with a list of messages, found {line.strip()[:60]!r}"
        )
    tools = found.get("tools")
    if not (tools is None or isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(f"{where}: tools must be a list of objects or null, found {tools!r:.60}")
    try:
        messages = normalise(found["messages"])
    except RequestError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{where}: messages must hold an assistant turn to learn from, found none")
    return found | {"messages": messages}


def _trimmed(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning without blanks around it: the generation prompt already ends the line that it stands on."""
    if isinstance(reasoning := message.get("reasoning_content"), str):
        return message | {"reasoning_content": reasoning.strip()}
    return message
