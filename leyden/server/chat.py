"""POST /v1/chat/completions: messages in; reasoning, content and tool calls out.

Both ways of answering see the same events of the parser: a stream sends them as deltas, a whole answer is their sum.
Reasoning and content never share a delta.
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
    SPECIAL,
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    ReasoningIsContent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
    starts_thinking,
)
from leyden.server.protocol import ChatChoice, ChatCompletion, ChatRequest, Message, Usage
from leyden.server.service import Choice, Service, Step, usage
from leyden.server.streaming import EventStream, event, json_response, unless_disconnected
from leyden.text.template import normalise
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
        return EventStream(stream, answer.frames(stream), service.config.ping_interval, service.headers(body))
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


class _Turn:
    """One choice on its way from tokens to what was said with them."""

    def __init__(self, choice: Choice, parser: OutputParser, thinking: bool, end: int, call: int):
        """`end` and `call`: ids of </think> and <tool_call>."""
        self.choice = choice
        self.reasoning_tokens = 0
        self._parser = parser
        self._thinking = thinking
        self._end = end
        self._call = call
        self._before_call: int | None = None

    def read(self, step: Step) -> list[Event]:
        """What a step brought, in order. The last step of the choice empties the parser."""
        self._count_reasoning(step.token_ids)
        events = self._parser.feed(step.text)
        if self.choice.finish_reason is not None:
            cut = self.choice.finish_reason != "stop" or isinstance(self.choice.stop_reason, str)
            events += self._parser.finish(cut)
            if self._thinking and self._before_call is not None and any(isinstance(e, ToolCallStart) for e in events):
                self.reasoning_tokens = self._before_call  # the call itself ended the thinking
        return events

    @property
    def finish_reason(self) -> str | None:
        reason = self.choice.finish_reason
        return None if reason is None else self._parser.finish_reason(reason)

    def _count_reasoning(self, ids: Sequence[int]) -> None:
        if not self._thinking:
            return
        if self._end in ids:
            self._thinking = False
            ids = ids[: ids.index(self._end)]
        if self._before_call is None and self._call in ids:
            self._before_call = self.reasoning_tokens + ids.index(self._call)
        self.reasoning_tokens += len(ids)


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
        both = ("reasoning", "reasoning_content") if config.reasoning_field == "both" else (config.reasoning_field,)
        self._reasoning_fields = both
        prompt = requests[0].prompt
        thinking = config.reasoning_parser is not None and starts_thinking(
            prompt, tokenizer, kwargs.get("enable_thinking") is not False
        )
        special = [tokenizer.id_of(text) for text in SPECIAL]
        end, call = tokenizer.id_of("</think>"), tokenizer.id_of("<tool_call>")
        self._choices: dict[str, Choice] = {}
        self._turns: list[_Turn] = []
        for index, request in enumerate(requests):
            choice = Choice(index, request, tokenizer, special)
            parser = OutputParser(
                body.tools if body.tool_choice != "none" else None,
                thinking=thinking,
                force_nonempty_content=bool(kwargs.get("force_nonempty_content")),
                parallel_tool_calls=body.parallel_tool_calls is not False,
                special_at=choice.special_at,
                reasoning_parser=config.reasoning_parser,
                tool_parser=config.tool_call_parser,
            )
            self._choices[request.id] = choice
            self._turns.append(_Turn(choice, parser, thinking, end, call))
        self._names = logprobs.Names(tokenizer, body.return_tokens_as_token_ids or config.return_tokens_as_token_ids)
        self._prompt_ids = prompt if body.return_token_ids else None
        self._prompt_text = tokenizer.decode(prompt) if body.return_prompt_text else None

    async def whole(self) -> ChatCompletion:
        events: list[list[Event]] = [[] for _ in self._turns]
        with await self._service.generate(self._body, self._requests) as stream:
            async for delta in stream:
                choice, step = self._service.advance(stream, self._choices, delta)
                events[choice.index] += self._turns[choice.index].read(step)
        prompt_logprobs = self._turns[0].choice.prompt_logprobs
        body: ChatCompletion = {
            "id": self._head["id"],
            "object": "chat.completion",
            "created": self._head["created"],
            "model": self._head["model"],
            "choices": [self._choice(*found) for found in zip(self._turns, events, strict=True)],
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

    def _choice(self, turn: _Turn, events: Sequence[Event]) -> ChatChoice:
        return {
            "index": turn.choice.index,
            "message": self._message(events),
            "logprobs": self._logprobs(turn.choice),
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.choice.stop_reason,
            "token_ids": self._token_ids(turn.choice),
            "routed_experts": None,
        }

    def _message(self, events: Sequence[Event]) -> Message:
        parsed = collect(events)
        message: Message = {
            "role": self._service.config.response_role,
            "content": self._echo() + (parsed.content or "") or None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        for name in self._reasoning_fields:
            message[name] = parsed.reasoning if self._body.include_reasoning else None  # type: ignore[literal-required]
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        return message

    async def frames(self, stream: Stream) -> AsyncGenerator[bytes, None]:
        include_usage, continuous = self._service.usage_options(self._body)
        head = self._head | {"object": "chat.completion.chunk"}

        def frame(turn: _Turn, choice: dict[str, Any], **more: Any) -> bytes:
            chunk = {**head, "choices": [{"index": turn.choice.index, **choice}], **more}
            if continuous:
                chunk["usage"] = usage([turn.choice], details=False)
            return event(chunk)

        started = False
        async for delta in stream:
            frames: list[bytes] = []
            if not started:  # only now: an error before the first token gives no half-begun answer
                started = True
                role = {"role": self._service.config.response_role, "content": self._echo()}
                first = {"delta": role, "logprobs": None, "finish_reason": None}
                prompt = {"prompt_token_ids": self._prompt_ids, "prompt_text": self._prompt_text}
                frames += [frame(turn, first, **prompt) for turn in self._turns]
            choice, step = self._service.advance(stream, self._choices, delta)
            turn = self._turns[choice.index]
            deltas = self._deltas(turn.read(step))
            found, token_ids = self._logprobs(step), self._token_ids(step)
            over = choice.finish_reason is not None
            if not deltas and (over or found or token_ids):
                deltas = [{}]
            for position, piece in enumerate(deltas, 1):
                told: dict[str, Any] = {
                    "delta": piece,
                    "logprobs": found,
                    "finish_reason": None,
                    "token_ids": token_ids,
                }
                if over and position == len(deltas):
                    told |= {"finish_reason": turn.finish_reason, "stop_reason": choice.stop_reason}
                    frames.append(frame(turn, told, **({} if include_usage else self._service.signature)))
                else:
                    frames.append(frame(turn, told))
                found, token_ids = None, None if token_ids is None else []  # told with the first delta
            if frames:
                yield b"".join(frames)
        if include_usage:
            yield event({**head, "choices": [], "usage": self._usage(), **self._service.signature})

    def _deltas(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """One delta per event, and one for all events of a call in a row."""
        deltas: list[dict[str, Any]] = []
        for found in events:
            match found:
                case ReasoningDelta(text):
                    if self._body.include_reasoning:
                        deltas.append(dict.fromkeys(self._reasoning_fields, text))
                case ContentDelta(text) | ReasoningIsContent(text):
                    deltas.append({"content": text})
                case ToolCallStart(index, id, name):
                    call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
                    deltas.append({"tool_calls": [call]})
                case ToolCallArguments(index, text):
                    last = deltas[-1].get("tool_calls") if deltas else None
                    if last and last[0]["index"] == index:
                        last[0]["function"]["arguments"] += text
                    else:
                        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
                case ToolCallEnd():
                    pass
        return deltas

    def _echo(self) -> str:
        """With `echo`: the text of the last message, if it is the answer's own beginning."""
        last = self._body.messages[-1]
        content = last.get("content")
        own = self._body.echo and last.get("role") == self._service.config.response_role
        return content if own and isinstance(content, str) else ""

    def _logprobs(self, told: Choice | Step) -> dict[str, Any] | None:
        """Hidden reasoning hides its tokens too."""
        if not told.logprobs or not self._body.include_reasoning:
            return None
        return logprobs.chat(self._names, told.logprobs, self._body.top or 0)

    def _token_ids(self, told: Choice | Step) -> list[int] | None:
        return told.token_ids if self._body.return_token_ids and self._body.include_reasoning else None

    def _usage(self) -> Usage:
        counted = usage([turn.choice for turn in self._turns])
        counted["completion_tokens_details"] = {"reasoning_tokens": sum(turn.reasoning_tokens for turn in self._turns)}
        return counted
