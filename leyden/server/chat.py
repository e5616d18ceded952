"""POST /v1/chat/completions: messages in; reasoning, content and tool calls out.

Both ways of answering see the same events of the parser: a stream sends them as deltas, a whole answer is their sum.
Reasoning and content never share a delta.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from leyden.server import logprobs
from leyden.server.parsers import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ReasoningIsContent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from leyden.server.protocol import ChatChoice, ChatCompletion, ChatRequest, Message, Usage
from leyden.server.service import Choice, Run, Service, Step, usage
from leyden.server.streaming import EventStream, event, json_response, unless_disconnected
from leyden.server.turn import Turn, begin


async def create(service: Service, body: ChatRequest, http: HttpRequest) -> Response:
    body.check()
    model = service.check_model(body.model)
    service.separate(body, http)
    response_id = service.response_id("chatcmpl-", body, http)
    answer = _Answer(service, body, response_id, model, await begin(service, body, response_id))
    if body.stream:
        run = await answer.run()
        return EventStream(run, answer.frames(run), service.config.ping_interval, service.headers(body))
    whole = await unless_disconnected(http.receive, answer.whole())
    return json_response(whole, headers=service.headers(body))


class _Answer:
    """One response: its turns, and the two ways of sending them."""

    def __init__(self, service: Service, body: ChatRequest, response_id: str, model: str, turns: list[Turn]):
        self._service = service
        self._body = body
        self._turns = turns
        self._head: dict[str, Any] = {"id": response_id, "created": int(time.time()), "model": model}
        tokenizer, config = service.tokenizer, service.config
        both = ("reasoning", "reasoning_content") if config.reasoning_field == "both" else (config.reasoning_field,)
        self._reasoning_fields = both
        prompt = turns[0].choice.request.prompt
        self._names = logprobs.Names(tokenizer, body.return_tokens_as_token_ids or config.return_tokens_as_token_ids)
        self._prompt_ids = prompt if body.return_token_ids else None
        self._prompt_text = tokenizer.decode(prompt) if body.return_prompt_text else None

    async def run(self) -> Run:
        return await self._service.generate(self._body, [turn.choice for turn in self._turns])

    async def whole(self) -> ChatCompletion:
        events: list[list[Event]] = [[] for _ in self._turns]
        with await self.run() as run:
            async for choice, step in run:
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
            "metrics": self._service.numbers([turn.choice for turn in self._turns]),
        }
        return body

    def _choice(self, turn: Turn, events: Sequence[Event]) -> ChatChoice:
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

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        include_usage, continuous = self._service.usage_options(self._body)
        head = self._head | {"object": "chat.completion.chunk"}

        def frame(turn: Turn, choice: dict[str, Any], **more: Any) -> bytes:
            chunk = {**head, "choices": [{"index": turn.choice.index, **choice}], **more}
            if continuous:
                chunk["usage"] = usage([turn.choice], details=False)
            return event(chunk)

        started = False
        async for choice, step in run:
            frames: list[bytes] = []
            if not started:  # only now: an error before the first token gives no half-begun answer
                started = True
                role = {"role": self._service.config.response_role, "content": self._echo()}
                first = {"delta": role, "logprobs": None, "finish_reason": None}
                prompt = {"prompt_token_ids": self._prompt_ids, "prompt_text": self._prompt_text}
                frames += [frame(turn, first, **prompt) for turn in self._turns]
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
            told = {"choices": [], "usage": self._usage(), **self._service.signature}
            if numbers := self._service.numbers([turn.choice for turn in self._turns]):
                told["metrics"] = numbers
            yield event({**head, **told})

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
        top = None if self._body.logprob_token_ids else self._body.top or 0
        return logprobs.chat(self._names, told.logprobs, top)

    def _token_ids(self, told: Choice | Step) -> list[int] | None:
        return told.token_ids if self._body.return_token_ids and self._body.include_reasoning else None

    def _usage(self) -> Usage:
        counted = usage([turn.choice for turn in self._turns])
        counted["completion_tokens_details"] = {"reasoning_tokens": sum(turn.reasoning_tokens for turn in self._turns)}
        return counted
