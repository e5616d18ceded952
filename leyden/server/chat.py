"""POST /v1/chat/completions: messages in; reasoning, content and tool calls out.

There is one path for both ways of answering: a step of the engine becomes deltas, a stream sends them, and a whole answer
is their sum. Reasoning and content never share a delta.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from leyden.server import logprobs
from leyden.server.client import Stream
from leyden.server.parsers import (
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from leyden.server.protocol import ChatChoice, ChatCompletion, ChatRequest, Message
from leyden.server.service import Choice, Service, Step, advance, usage
from leyden.server.streaming import EventStream, event, json_response, unless_disconnected
from leyden.text.template import normalise
from leyden.text.tokenizer import Tokenizer
from leyden.types import Request

_EFFORT_HINTS = ("low_effort", "medium_effort")  # what templates of this family call a request to think less
_BRIEF_EFFORTS = ("minimal", "low")


async def create(service: Service, body: ChatRequest, http: HttpRequest) -> Response:
    body.check()
    model = service.check_model(body.model)
    response_id = service.response_id("chatcmpl", body, http)
    kwargs = _template_kwargs(service, body)
    prompt = await asyncio.to_thread(_prompt, service, body, kwargs)
    params = service.params(body, prompt, "messages")
    requests = service.requests(response_id, body, prompt, params)
    answer = _Answer(service, body, response_id, model, requests, kwargs)
    if body.stream:
        stream = await service.generate(body, requests)
        return EventStream(answer.frames(stream), service.config.ping_interval, service.headers(body))
    whole = await unless_disconnected(http.receive, answer.whole())
    return json_response(whole, headers=service.headers(body))


def _template_kwargs(service: Service, body: ChatRequest) -> dict[str, Any]:
    """The request's template variables over the server's; reasoning_effort speaks where neither says it exactly."""
    given = body.chat_template_kwargs or {}
    kwargs = {**service.config.default_chat_template_kwargs, **given}
    if body.reasoning_effort is not None:
        if "enable_thinking" not in given:
            kwargs["enable_thinking"] = body.reasoning_effort != "none"
        if body.reasoning_effort in _BRIEF_EFFORTS:
            kwargs = {name: True for name in _EFFORT_HINTS if name in service.template.variables} | kwargs
    return kwargs


def _prompt(service: Service, body: ChatRequest, kwargs: dict[str, Any]) -> list[int]:
    hidden = body.tool_choice == "none" and service.config.exclude_tools_when_tool_choice_none
    ids = service.template.encode(
        normalise(body.messages),
        None if hidden else body.tools,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
    )
    if body.add_special_tokens and service.tokenizer.bos_token_id is not None:
        ids.insert(0, service.tokenizer.bos_token_id)
    return service.truncate(ids, body)


def thinks(prompt: Sequence[int], tokenizer: Tokenizer, default: bool) -> bool:
    """Whether the answer to a prompt begins inside thinking: what its last turn opened and did not close decides."""
    opened, closed = tokenizer.id_of("<think>"), tokenizer.id_of("</think>")
    turn = tokenizer.id_of("<|im_start|>")
    for id in reversed(prompt):
        if id in (opened, closed):
            return id == opened
        if id == turn:
            break
    return default


class _Turn:
    """One choice on its way from tokens to the deltas of its message."""

    def __init__(self, choice: Choice, parser: OutputParser, reasoning_fields: Sequence[str], thinking: bool, end: int):
        self.choice = choice
        self.reasoning_tokens = 0
        self._parser = parser
        self._reasoning_fields = reasoning_fields
        self._thinking = thinking
        self._end_of_thinking = end
        self._open_call: int | None = None
        self._calls = 0

    def read(self, step: Step) -> list[dict[str, Any]]:
        """The deltas that a step brought, in order. The last step of the choice empties the parser."""
        self._count_reasoning(step.token_ids)
        events = self._parser.feed(step.text)
        if self.choice.finish_reason is not None:
            events += self._parser.finish(self.choice.finish_reason)
        deltas: list[dict[str, Any]] = []
        for found in events:
            if (delta := self._delta(found)) is not None and not (deltas and _join(deltas[-1], delta)):
                deltas.append(delta)
        return deltas

    @property
    def finish_reason(self) -> str | None:
        """A cut or unfinished call is no call: the client must not run it."""
        called = self._calls and self._open_call is None and self.choice.finish_reason == "stop"
        return "tool_calls" if called else self.choice.finish_reason

    @property
    def complete_calls(self) -> int:
        return self._calls - (self._open_call is not None)

    def _delta(self, found: Event) -> dict[str, Any] | None:
        match found:
            case ReasoningDelta(text):
                return dict.fromkeys(self._reasoning_fields, text) or None
            case ContentDelta(text):
                self._thinking = False
                return {"content": text}
            case ToolCallStart(index, id, name):
                self._thinking = False
                self._open_call, self._calls = index, index + 1
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
            case ToolCallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case ToolCallEnd():
                self._open_call = None
                return None

    def _count_reasoning(self, ids: Sequence[int]) -> None:
        if self._thinking:
            if self._end_of_thinking in ids:
                self._thinking = False
                ids = ids[: ids.index(self._end_of_thinking)]
            self.reasoning_tokens += len(ids)


def _join(last: dict[str, Any], delta: dict[str, Any]) -> bool:
    """Append a delta to the one before it, if both are of the same kind and, for calls, of the same call."""
    if last.keys() != delta.keys():
        return False
    if calls := delta.get("tool_calls"):
        if last["tool_calls"][-1]["index"] != calls[0]["index"]:
            return False
        last["tool_calls"][-1]["function"]["arguments"] += calls[0]["function"]["arguments"]
    else:
        for key, text in delta.items():
            last[key] += text
    return True


class _Answer:
    """One response: its turns, and the two ways of sending them."""

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        response_id: str,
        model: str,
        requests: list[Request],
        kwargs: dict[str, Any],
    ):
        self._service = service
        self._body = body
        self._requests = requests
        self._head: dict[str, Any] = {"id": response_id, "created": int(time.time()), "model": model}
        tokenizer, config = service.tokenizer, service.config
        prompt = requests[0].prompt
        thinking = thinks(prompt, tokenizer, kwargs.get("enable_thinking") is not False)
        both = ("reasoning", "reasoning_content") if config.reasoning_field == "both" else (config.reasoning_field,)
        self._reasoning_fields = both
        self._choices: dict[str, Choice] = {}
        self._turns: list[_Turn] = []
        for index, request in enumerate(requests):
            parser = OutputParser(
                tools=body.tools if body.tool_choice != "none" else None,
                thinking=thinking,
                force_nonempty_content=bool(kwargs.get("force_nonempty_content")),
                parallel=body.parallel_tool_calls is not False,
            )
            choice = Choice(index, request, tokenizer, keep=parser.keep(tokenizer))
            self._choices[request.id] = choice
            shown = both if body.include_reasoning else ()
            self._turns.append(_Turn(choice, parser, shown, thinking, tokenizer.id_of("</think>")))
        self._names = logprobs.Names(tokenizer, body.return_tokens_as_token_ids or config.return_tokens_as_token_ids)
        self._prompt_ids = prompt if body.return_token_ids else None
        self._prompt_text = tokenizer.decode(prompt) if body.return_prompt_text else None

    async def whole(self) -> ChatCompletion:
        messages = [self._empty_message() for _ in self._turns]
        steps: list[list[Step]] = [[] for _ in self._turns]
        with await self._service.generate(self._body, self._requests) as stream:
            async for delta in stream:
                choice, step = advance(stream, self._choices, delta)
                steps[choice.index].append(step)
                for piece in self._turns[choice.index].read(step):
                    _add(messages[choice.index], piece)
        prompt_logprobs = self._turns[0].choice.prompt_logprobs
        body: ChatCompletion = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(*found) for found in zip(self._turns, messages, steps, strict=True)],
            "service_tier": None,
            "system_fingerprint": self._service.fingerprint,
            "usage": self._usage(),
            "prompt_logprobs": None if prompt_logprobs is None else logprobs.prompt(self._names, prompt_logprobs),
            "prompt_token_ids": self._prompt_ids,
            "prompt_text": self._prompt_text,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return body

    def _choice(self, turn: _Turn, message: Message, steps: Sequence[Step]) -> ChatChoice:
        if "tool_calls" in message:
            message["content"] = (message["content"] or "").strip() or None
            message["tool_calls"] = message["tool_calls"][: turn.complete_calls]
            if not message["tool_calls"]:
                del message["tool_calls"]
        self._service.log_output(self._head["id"], message["content"] or "")
        token_ids = [id for step in steps for id in step.token_ids]
        found = [token for step in steps for token in step.logprobs or ()]
        whole = Step("", token_ids, found if self._body.logprobs else None)
        return {
            "index": turn.choice.index,
            "message": message,
            "logprobs": self._logprobs(whole),
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.choice.stop_reason,
            "token_ids": self._token_ids(whole),
            "routed_experts": None,
        }

    async def frames(self, stream: Stream) -> AsyncGenerator[bytes, None]:
        include_usage, continuous = self._service.usage_options(self._body)
        self._head["object"] = "chat.completion.chunk"
        started = False
        with stream:
            async for delta in stream:
                frames: list[bytes] = []
                if not started:  # only now: an error before the first token gives no half-begun answer
                    started = True
                    frames += [self._first_frame(turn, continuous) for turn in self._turns]
                choice, step = advance(stream, self._choices, delta)
                turn = self._turns[choice.index]
                deltas = turn.read(step)
                over = choice.finish_reason is not None
                if not deltas and (over or self._token_ids(step) or self._logprobs(step)):
                    deltas = [{}]
                for position, piece in enumerate(deltas):
                    last = over and position == len(deltas) - 1
                    frames.append(self._frame(turn, piece, step, last, include_usage, continuous))
                    step = Step("", [], None)  # its tokens have been told
                if frames:
                    yield b"".join(frames)
        if include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage(), **self._fingerprint()})

    def _first_frame(self, turn: _Turn, continuous: bool) -> bytes:
        delta = {"role": self._service.config.response_role, "content": self._echo()}
        chunk = {
            **self._head,
            "choices": [{"index": turn.choice.index, "delta": delta, "logprobs": None, "finish_reason": None}],
            "prompt_token_ids": self._prompt_ids,
            "prompt_text": self._prompt_text,
        }
        if continuous:
            chunk["usage"] = usage([turn.choice], details=False)
        return event(chunk)

    def _frame(
        self, turn: _Turn, delta: dict[str, Any], step: Step, last: bool, include_usage: bool, continuous: bool
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": turn.choice.index,
            "delta": delta,
            "logprobs": self._logprobs(step),
            "finish_reason": None,
            "token_ids": self._token_ids(step),
        }
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if last:
            choice["finish_reason"] = turn.finish_reason
            choice["stop_reason"] = turn.choice.stop_reason
            if not include_usage:
                chunk |= self._fingerprint()
        if continuous:
            chunk["usage"] = usage([turn.choice], details=False)
        return event(chunk)

    def _empty_message(self) -> Message:
        message: Message = {
            "role": self._service.config.response_role,
            "content": self._echo() or None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        for name in self._reasoning_fields:
            message[name] = None  # type: ignore[literal-required]
        return message

    def _echo(self) -> str:
        """With `echo`: the text of the last message, if it is the answer's own beginning."""
        last = self._body.messages[-1]
        content = last.get("content")
        own = self._body.echo and last.get("role") == self._service.config.response_role
        return content if own and isinstance(content, str) else ""

    def _logprobs(self, step: Step) -> dict[str, Any] | None:
        """Hidden reasoning hides its tokens too."""
        if not step.logprobs or not self._body.include_reasoning:
            return None
        return logprobs.chat(self._names, step.logprobs, self._body.top or 0)

    def _token_ids(self, step: Step) -> list[int] | None:
        return step.token_ids if self._body.return_token_ids and self._body.include_reasoning else None

    def _usage(self) -> Any:
        counted = usage([turn.choice for turn in self._turns])
        counted["completion_tokens_details"] = {"reasoning_tokens": sum(turn.reasoning_tokens for turn in self._turns)}
        return counted

    def _fingerprint(self) -> dict[str, str]:
        return {} if self._service.fingerprint is None else {"system_fingerprint": self._service.fingerprint}


def _add(message: Message, delta: dict[str, Any]) -> None:
    """Add a delta to the message it is of."""
    for call in delta.pop("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({key: value for key, value in call.items() if key != "index"})
        else:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    for key, text in delta.items():
        message[key] = (message[key] or "") + text  # type: ignore[literal-required]
