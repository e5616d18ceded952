"""POST /v1/responses, the answer: output items, as one object or as the events that describe how it comes about.

The object at the end of a stream is made of the items that were streamed, with the same ids. A call that was cut off
is in neither: it was announced, but there is no `done` event for it, and nobody may run it. Nothing is stored.
"""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any, NotRequired

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from leyden.errors import RequestError
from leyden.server import logprobs, turn
from leyden.server.items import InputTokensRequest, ResponsesRequest, Tools, encrypted, renamed
from leyden.server.parsers import SPECIAL
from leyden.server.parts import Change, Closed, Grown, Opened, Part, Parts
from leyden.server.protocol import ChatRequest
from leyden.server.service import Run, Service
from leyden.server.streaming import EventStream, failure, json_response, named_event, unless_disconnected
from leyden.types import TokenLogprobs


class ResponseObject(TypedDict):
    id: str
    object: str
    created_at: int
    status: str
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    metadata: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    background: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    previous_response_id: None
    prompt: None
    reasoning: dict[str, Any] | None
    service_tier: str
    text: dict[str, Any] | None
    top_logprobs: int | None
    truncation: str
    usage: dict[str, Any] | None
    user: str | None
    presence_penalty: float
    frequency_penalty: float
    store: NotRequired[bool]


class InputTokens(TypedDict):
    object: str
    input_tokens: int


async def create(service: Service, body: ResponsesRequest, http: HttpRequest) -> Response:
    try:
        body.check()
        model = service.check_model(body.model)
        tools = Tools(body.tools)
        chat = body.chat(tools)
        chat.check()
        service.separate(chat, http)
        response_id = service.response_id("resp_", chat, http)
        (only,) = await turn.begin(service, chat, response_id, "responses")
        answer = _Answer(service, body, chat, response_id, model, only, tools)
        if body.stream:
            run = await answer.run()
            headers = service.headers(chat)
            return EventStream(
                run, answer.frames(run), service.config.ping_interval, headers, done=b"", failed=answer.failed
            )
    except RequestError as error:
        raise renamed(error) from None
    whole = await unless_disconnected(http.receive, answer.whole())
    return json_response(whole, headers=service.headers(chat))


async def count(service: Service, body: InputTokensRequest) -> Response:
    """POST /v1/responses/input_tokens"""
    service.check_model(body.model)
    try:
        ids = await turn.encode(service, body.chat())
    except RequestError as error:
        raise renamed(error) from None
    counted: InputTokens = {"object": "response.input_tokens", "input_tokens": len(ids)}
    return json_response(counted)


def not_stored(response_id: str) -> RequestError:
    return RequestError(f"the response {response_id!r} is not stored: this server stores none", "response_id", 404)


class _Answer:
    """One response: its parts as items, and the two ways of sending them."""

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        chat: ChatRequest,
        response_id: str,
        model: str,
        turn: turn.Turn,
        tools: Tools,
    ):
        self._service = service
        self._body = body
        self._chat = chat
        self._id = response_id
        self._created = int(time.time())
        self._model = model
        self._turn = turn
        self._tools = tools
        self._parts = Parts(body.include_reasoning)
        self._items: list[dict[str, Any]] = []  # complete ones
        self._ids: dict[Part, str] = {}
        self._sequence = 0
        self._markup = frozenset(service.tokenizer.id_of(text) for text in SPECIAL)
        self._names = logprobs.Names(service.tokenizer, service.config.return_tokens_as_token_ids)

    async def run(self) -> Run:
        return await self._service.generate(self._chat, [self._turn.choice], single=self._body.wants_logprobs)

    async def whole(self) -> ResponseObject:
        with await self.run() as run:
            async for changes in self._changes(run):
                for _ in self._events(changes):
                    pass
        return self._response(self._status)

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        begun = ({"type": f"response.{word}", "response": self._response("in_progress")} for word in _BEGUN)
        yield self._frame(begun)
        async for changes in self._changes(run):
            if frame := self._frame(self._events(changes)):
                yield frame
        yield self._frame([{"type": f"response.{self._status}", "response": self._response(self._status)}])

    def failed(self, error: Exception) -> bytes:
        """The events of an answer that the engine could not finish."""
        told = failure(error)["error"]
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": told["message"]}
        return self._frame(
            [
                {"type": "error", "code": "server_error", "message": told["message"], "param": told["param"]},
                {"type": "response.failed", "response": response},
            ]
        )

    async def _changes(self, run: Run) -> AsyncGenerator[list[Change], None]:
        async for choice, step in run:
            tokens = [token for token in step.logprobs if token.token_id not in self._markup]
            changes = self._parts.read(self._turn.read(step), tokens)
            if choice.finish_reason is not None:
                changes += self._parts.finish()
            yield changes

    def _frame(self, events: Iterable[dict[str, Any]]) -> bytes:
        frames = []
        for event in events:
            frames.append(named_event({**event, "sequence_number": self._sequence}))
            self._sequence += 1
        return b"".join(frames)

    def _events(self, changes: Iterable[Change]) -> Iterator[dict[str, Any]]:
        """What a stream says about changes; what is complete becomes an item of the answer."""
        for change in changes:
            match change:
                case Opened(part):
                    self._ids[part] = f"{_PREFIXES[self._type(part)]}_{uuid.uuid4().hex}"
                    yield from self._opened(part, self._place(part))
                case Grown(part, text, found):
                    yield from self._grown(part, self._place(part), text, found)
                case Closed(part):
                    last = part.kind == "text" and part is self._parts.all[-1]
                    item = self._item(part, self._status if last else "completed")
                    yield from self._closed(part, self._place(part), item)
                    self._items.append(item)
                    yield {"type": "response.output_item.done", "output_index": part.index, "item": item}

    def _opened(self, part: Part, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        item = self._item(part, "in_progress")
        if part.kind == "thinking":
            item["content"] = None
        elif part.kind == "text":
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": part.index, "item": item}
        if part.kind == "thinking":
            yield {"type": "response.reasoning_part.added", **place, "part": self._content(part)}
        elif part.kind == "text":
            yield {"type": "response.content_part.added", **place, "part": self._content(part) | {"logprobs": []}}

    def _grown(
        self, part: Part, place: dict[str, Any], text: str, found: list[TokenLogprobs]
    ) -> Iterator[dict[str, Any]]:
        match self._type(part):
            case "reasoning":
                yield {"type": "response.reasoning_text.delta", **place, "delta": text}
            case "message":
                yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": self._logprobs(found)}
            case "function_call":
                yield {"type": "response.function_call_arguments.delta", **place, "delta": text}

    def _closed(self, part: Part, place: dict[str, Any], item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        content = self._content(part)
        match self._type(part):
            case "reasoning":
                yield {"type": "response.reasoning_text.done", **place, "text": part.text}
                yield {"type": "response.reasoning_part.done", **place, "part": content}
            case "message":
                found = self._logprobs(part.logprobs)
                yield {"type": "response.output_text.done", **place, "text": part.text, "logprobs": found}
                yield {"type": "response.content_part.done", **place, "part": content}
            case "function_call":
                name = {"name": item["name"], "arguments": part.text}
                yield {"type": "response.function_call_arguments.done", **place, **name}
            case "custom_tool_call":  # a text inside JSON: it is only known as a whole
                yield {"type": "response.custom_tool_call_input.delta", **place, "delta": item["input"]}
                yield {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]}

    def _place(self, part: Part) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._ids[part], "output_index": part.index}
        return place if part.kind == "call" else place | {"content_index": 0}

    def _type(self, part: Part) -> str:
        if part.kind == "call":
            return "custom_tool_call" if self._tools.find(part.name).custom else "function_call"
        return "reasoning" if part.kind == "thinking" else "message"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._ids[part], "type": self._type(part), "status": status}
        if part.kind == "thinking":
            hidden = encrypted(part.text) if part.complete and self._body.wants_encrypted else None
            return item | {"summary": [], "content": [self._content(part)], "encrypted_content": hidden}
        if part.kind == "text":
            return item | {"role": "assistant", "content": [self._content(part)]}
        tool = self._tools.find(part.name)
        item |= {"call_id": part.id, "name": tool.name}
        if tool.custom:
            return item | {"input": _free_text(part)}
        return item | {"arguments": part.text, "namespace": tool.namespace}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind == "thinking":
            return {"type": "reasoning_text", "text": part.text}
        found = self._logprobs(part.logprobs) if self._body.wants_logprobs else None
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": found}

    def _logprobs(self, tokens: list[TokenLogprobs]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = logprobs.chat(self._names, tokens, self._body.top_logprobs or 0)["content"]
        return found

    @property
    def _status(self) -> str:
        return "incomplete" if self._turn.choice.finish_reason == "length" else "completed"

    def _response(self, status: str) -> ResponseObject:
        body, params = self._body, self._turn.choice.request.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self._model,
            "output": [] if status == "in_progress" else self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "tool_choice": body.tool_choice or ("auto" if self._tools.functions else "none"),
            "tools": body.tools or [],
            "top_p": params.top_p,
            "background": False,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": body.reasoning.model_dump() if body.reasoning else None,
            "service_tier": body.service_tier or "auto",
            "text": body.text.model_dump(exclude_unset=True) if body.text else None,
            "top_logprobs": body.top_logprobs,
            "truncation": body.truncation or "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
        }

    def _usage(self) -> dict[str, Any]:
        choice = self._turn.choice
        read, written = len(choice.request.prompt), len(choice.token_ids)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self._turn.reasoning_tokens},
            "total_tokens": read + written,
        }


_BEGUN = ("created", "in_progress")
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}


def _free_text(part: Part) -> str:
    """The input of a custom tool, which the model was shown as a function with one text."""
    if not part.complete:
        return ""
    value = json.loads(part.text).get("input", "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
