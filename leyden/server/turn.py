"""What every endpoint with messages shares: from messages to a prompt, from tokens to what was said with them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from leyden.server.parsers import SPECIAL, Event, OutputParser, ToolCallStart
from leyden.server.protocol import ChatRequest
from leyden.server.service import Choice, Service, Step
from leyden.text.template import normalise
from leyden.text.thinking import starts_thinking

_EFFORT_HINTS = ("low_effort", "medium_effort")  # what templates of this family call a request to think less
_FEW, _SHORT = 8, 2000  # messages and characters that the event loop can spare the time for
_BRIEF_EFFORTS = ("minimal", "low")


class Turn:
    """One choice on its way from tokens to what was said with them."""

    def __init__(
        self,
        choice: Choice,
        parser: OutputParser,
        thinking: bool,
        end: int,
        call: int,
        count: Callable[[bool, int], None],
        named: bool = False,
    ):
        """`end` and `call`: ids of </think> and <tool_call>. `count` is told: any call, tokens of thinking.

        named: the client has chosen the tool.
        """
        self.choice = choice
        self.reasoning_tokens = 0
        self._parser = parser
        self._thinking = thinking
        self._end = end
        self._call = call
        self._before_call: int | None = None
        self._count = count
        self._named = named

    def read(self, step: Step) -> list[Event]:
        """What a step brought, in order. The last step of the choice empties the parser."""
        self._count_reasoning(step.token_ids)
        events = self._parser.feed(step.text)
        if self.choice.finish_reason is not None:
            cut = self.choice.finish_reason != "stop" or isinstance(self.choice.stop_reason, str)
            events += self._parser.finish(cut)
            if self._thinking and self._before_call is not None and any(isinstance(e, ToolCallStart) for e in events):
                self.reasoning_tokens = self._before_call  # the call itself ended the thinking
            self._count(self._parser.called, self.reasoning_tokens)
        return events

    @property
    def finish_reason(self) -> str | None:
        reason = self.choice.finish_reason
        if reason is None or self._named:  # OpenAI: a call that the client has chosen is just an end
            return reason
        return self._parser.finish_reason(reason)

    def _count_reasoning(self, ids: Sequence[int]) -> None:
        if not self._thinking:
            return
        if self._end in ids:
            self._thinking = False
            ids = ids[: ids.index(self._end)]
        if self._before_call is None and self._call in ids:
            self._before_call = self.reasoning_tokens + ids.index(self._call)
        self.reasoning_tokens += len(ids)


async def begin(service: Service, body: ChatRequest, response_id: str, kind: str = "chat_completions") -> list[Turn]:
    """One turn per choice, ready for Service.generate; raises RequestError for what cannot be served as asked.

    `kind`: under which of metrics.PARSED it is counted.
    """
    kwargs = template_kwargs(service, body)
    prompt = await encode(service, body, limited=True)
    tokenizer, config = service.tokenizer, service.config
    thinking = config.reasoning_parser is not None and starts_thinking(
        prompt, tokenizer, kwargs.get("enable_thinking") is not False
    )
    params = service.params(body, prompt, "messages", thinking, await service.banned(body))
    special = [tokenizer.id_of(text) for text in SPECIAL]
    end, call = tokenizer.id_of("</think>"), tokenizer.id_of("<tool_call>")

    def count(called: bool, thought: int) -> None:
        service.metrics.reasoning.inc(thought)
        if body.tools:
            service.metrics.parsed(kind, bool(body.stream), called)

    turns = []
    for index, request in enumerate(service.requests(response_id, body, prompt, params)):
        choice = Choice(index, request, tokenizer, special)
        parser = OutputParser(
            body.callable_tools,
            thinking=thinking,
            force_nonempty_content=bool(kwargs.get("force_nonempty_content")),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            special_at=choice.special_at,
            reasoning_parser=config.reasoning_parser,
            tool_parser=config.tool_call_parser,
        )
        turns.append(Turn(choice, parser, thinking, end, call, count, named=isinstance(body.tool_choice, dict)))
    return turns


def template_kwargs(service: Service, body: ChatRequest) -> dict[str, Any]:
    """The request's template variables over the server's; reasoning_effort speaks where neither says it exactly."""
    given = body.chat_template_kwargs or {}
    kwargs = {**service.config.default_chat_template_kwargs, **given}
    if body.reasoning_effort is not None:
        if "enable_thinking" not in given:
            kwargs["enable_thinking"] = body.reasoning_effort != "none"
        if body.reasoning_effort in _BRIEF_EFFORTS:
            kwargs = {name: True for name in _EFFORT_HINTS if name in service.template.variables} | kwargs
    return kwargs


async def encode(service: Service, body: ChatRequest, limited: bool = False) -> list[int]:
    """Token ids of the messages' prompt. `limited`: one that cannot fit into the context is not encoded at all."""
    limited = limited and body.truncate_prompt_tokens is None
    if _short(body):
        return _encode(service, body, limited)
    return await asyncio.to_thread(_encode, service, body, limited)


def _short(body: ChatRequest) -> bool:
    """Whether the prompt is made sooner than another thread would begin with it."""
    contents = [message.get("content") for message in body.messages]
    texts = [content for content in contents if isinstance(content, str)]
    return not body.tools and len(texts) == len(contents) <= _FEW and sum(map(len, texts)) <= _SHORT


def _encode(service: Service, body: ChatRequest, limited: bool) -> list[int]:
    hidden = body.tool_choice == "none" and service.config.exclude_tools_when_tool_choice_none
    ids = service.template.encode(
        normalise(body.messages),
        None if hidden else body.tools,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        kwargs=template_kwargs(service, body),
        most=service.most_characters if limited else None,
    )
    if body.add_special_tokens and service.tokenizer.bos_token_id is not None:
        ids.insert(0, service.tokenizer.bos_token_id)
    return service.truncate(ids, body)
