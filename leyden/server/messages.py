"""POST /v1/messages, the answer: Anthropic's content blocks, as one message or as the events that build it up.

A call that was cut off by max_tokens is left out of a whole message; a stream, which has shown its beginning, closes
the block. Both say stop_reason max_tokens, which tells a client not to run it.
"""

import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from leyden.errors import RequestError
from leyden.server import turn
from leyden.server.blocks import CountTokensRequest, MessagesRequest
from leyden.server.parts import Change, Closed, Grown, Opened, Part, Parts
from leyden.server.protocol import ChatRequest, anthropic_error
from leyden.server.service import Run, Service
from leyden.server.streaming import EventStream, failure, json_response, named_event, unless_disconnected

_SIGNATURE = "unsigned"  # clients want one and send it back; nobody checks it here
_DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")} | {
    "call": ("input_json_delta", "partial_json")
}


class AnthropicUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class AnthropicAnswer(TypedDict):
    id: str
    type: str
    role: str
    content: list[dict[str, Any]]
    model: str
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class InputTokens(TypedDict):
    input_tokens: int
    context_management: dict[str, int]


async def create(service: Service, body: MessagesRequest, http: HttpRequest) -> Response:
    model = service.check_model(body.model)
    chat = body.chat()
    chat.check()
    service.separate(chat, http)
    response_id = service.response_id("msg_", chat, http)
    try:
        (only,) = await turn.begin(service, chat, response_id, "other")
    except RequestError as error:
        if "maximum context length" in error.message:  # the words that clients of Anthropic look for
            error.message = f"prompt is too long: {error.message}"
        raise
    answer = _Answer(service, chat, response_id, model, only)
    if body.stream:
        run = await answer.run()
        headers = service.headers(chat)
        return EventStream(run, answer.frames(run), service.config.ping_interval, headers, b"", _failed)
    whole = await unless_disconnected(http.receive, answer.whole())
    return json_response(whole, headers=service.headers(chat))


async def count(service: Service, body: CountTokensRequest) -> Response:
    """POST /v1/messages/count_tokens"""
    service.check_model(body.model)
    found = len(await turn.encode(service, body.chat()))
    counted: InputTokens = {"input_tokens": found, "context_management": {"original_input_tokens": found}}
    return json_response(counted)


def _failed(error: Exception) -> bytes:
    told = failure(error)["error"]
    return named_event(anthropic_error(told["code"], told["message"]))


class _Answer:
    """One message: its parts as blocks, and the two ways of sending them."""

    def __init__(self, service: Service, chat: ChatRequest, response_id: str, model: str, turn: turn.Turn):
        self._service = service
        self._chat = chat
        self._turn = turn
        self._parts = Parts()
        self._head = {"id": response_id, "type": "message", "role": "assistant", "model": model}

    async def run(self) -> Run:
        return await self._service.generate(self._chat, [self._turn.choice])

    async def whole(self) -> AnthropicAnswer:
        with await self.run() as run:
            async for _ in self._changes(run):
                pass
        blocks = [_block(part) for part in self._parts.all if part.complete]
        if all(block["type"] == "thinking" for block in blocks):
            blocks.append({"type": "text", "text": ""})
        answer: Any = {**self._head, "content": blocks, **self._stop(), "usage": self._usage()}
        found: AnthropicAnswer = answer
        return found

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        started = False
        async for changes in self._changes(run):
            frame = b"".join(map(named_event, _events(changes)))
            if not started:  # only now: before the first token nobody knows how much of the prompt was cached
                started = True
                stop = {"stop_reason": None, "stop_sequence": None}
                usage = self._usage() | {"output_tokens": 0}
                message: dict[str, Any] = {**self._head, "content": [], **stop, "usage": usage}
                frame = named_event({"type": "message_start", "message": message}) + frame
            if frame:
                yield frame
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        yield named_event(end) + named_event({"type": "message_stop"})

    async def _changes(self, run: Run) -> AsyncGenerator[list[Change], None]:
        async for choice, step in run:
            changes = self._parts.read(self._turn.read(step))
            if choice.finish_reason is not None:
                changes += self._parts.finish()
                if all(part.kind == "thinking" for part in self._parts.all):  # a message is never without an answer
                    empty = Part("text", len(self._parts.all), complete=True)
                    self._parts.all.append(empty)
                    changes += [Opened(empty), Closed(empty)]
                elif not (last := self._parts.all[-1]).complete:
                    changes.append(Closed(last))
            yield changes

    def _stop(self) -> dict[str, Any]:
        choice = self._turn.choice
        if choice.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(part.kind == "call" and part.complete for part in self._parts.all):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> AnthropicUsage:
        choice = self._turn.choice
        return {
            "input_tokens": len(choice.request.prompt) - choice.cached_tokens,
            "output_tokens": len(choice.token_ids),
            "cache_read_input_tokens": choice.cached_tokens,
            "cache_creation_input_tokens": 0,
        }


def _events(changes: Iterable[Change]) -> Iterator[dict[str, Any]]:
    for change in changes:
        index = {"index": change.part.index}
        match change:
            case Opened(part):
                yield {"type": "content_block_start", **index, "content_block": _begin(part)}
            case Grown(part, text):
                kind, name = _DELTAS[part.kind]
                yield {"type": "content_block_delta", **index, "delta": {"type": kind, name: text}}
            case Closed(part):
                if part.kind == "thinking":
                    signature = {"type": "signature_delta", "signature": _SIGNATURE}
                    yield {"type": "content_block_delta", **index, "delta": signature}
                yield {"type": "content_block_stop", **index}


def _begin(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block(part: Part) -> dict[str, Any]:
    match part.kind:
        case "call":
            return _begin(part) | {"input": json.loads(part.text)}
        case "thinking":
            return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
        case "text":
            return {"type": "text", "text": part.text}
