"""From the text of an answer to reasoning, content and tool calls (reasoning only for now)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.text.tokenizer import Tokenizer


@dataclass
class ReasoningDelta:
    text: str


@dataclass
class ContentDelta:
    text: str


@dataclass
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass
class ToolCallArguments:
    index: int
    text: str


@dataclass
class ToolCallEnd:
    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


class OutputParser:
    def __init__(
        self,
        tools: Sequence[dict[str, Any]] | None,
        thinking: bool,
        force_nonempty_content: bool = False,
        parallel: bool = True,
    ):
        self._thinking = thinking

    def keep(self, tokenizer: Tokenizer) -> Collection[int]:
        return [tokenizer.id_of("<think>"), tokenizer.id_of("</think>")]

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if not self._thinking:
            return [ContentDelta(text)]
        reasoning, end, content = text.partition("</think>")
        self._thinking = not end
        events: list[Event] = [ReasoningDelta(reasoning)] if reasoning else []
        return events + ([ContentDelta(content)] if content else [])

    def finish(self, reason: str) -> list[Event]:
        return []
