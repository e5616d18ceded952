"""Model output to thinking, content and tool calls: one pass, the same result for every way of cutting the output.

    parser = OutputParser(tools, thinking=True)
    events = parser.feed(text) ... + parser.finish()      a stream
    collect(events)                                        a whole answer: the fold of the stream

Parsers are named as in vLLM, so that published commands work; one grammar stands behind all names of this family.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.server.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ReasoningIsContent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    merged,
)
from leyden.server.parsers.reasoning import NemotronV3, NoReasoning, ReasoningParser
from leyden.server.parsers.tags import SPECIAL, Lexer
from leyden.server.parsers.tools import Qwen3Coder, ToolParser

__all__ = [
    "REASONING_PARSERS",
    "SPECIAL",
    "TOOL_PARSERS",
    "ContentDelta",
    "Event",
    "OutputParser",
    "Parsed",
    "ReasoningDelta",
    "ReasoningIsContent",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "collect",
]

REASONING_PARSERS: dict[str | None, type[NemotronV3] | type[NoReasoning]] = {
    None: NoReasoning,
    "nemotron_v3": NemotronV3,
    "nano_v3": NemotronV3,
    "super_v3": NemotronV3,
    "qwen3": NemotronV3,
    "deepseek_r1": NemotronV3,
}
TOOL_PARSERS = {"qwen3_coder": Qwen3Coder, "qwen3_xml": Qwen3Coder}


class OutputParser:
    """Parser of one answer.

    tools     those of the request that may be called; none: call markup is text (tool_choice "none")
    thinking  whether the answer starts inside thinking (see text.thinking)
    force_nonempty_content  thinking becomes content if nothing else comes; always so if thinking is False
    parallel_tool_calls     False: only the first call is given
    special_at  offsets in the text at which special tokens stand (TextStream.special_at); None if they are not known.
                The stream has to keep the text of the tokens in SPECIAL and to drop that of all other special tokens.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: bool,
        force_nonempty_content: bool = False,
        parallel_tool_calls: bool = True,
        special_at: Container[int] | None = None,
        reasoning_parser: str | None = "nemotron_v3",
        tool_parser: str = "qwen3_coder",
    ):
        def make_tools() -> ToolParser:
            return TOOL_PARSERS[tool_parser](tools or (), parallel_tool_calls)

        self._lexer = Lexer(special_at)
        self._parser: ReasoningParser = REASONING_PARSERS[reasoning_parser](
            make_tools, thinking, force_nonempty_content
        )

    def feed(self, text: str) -> list[Event]:
        """What the next piece of text makes certain."""
        events: list[Event] = []
        for token in self._lexer.feed(text):
            self._parser.feed(token, events)
        return merged(events)

    def finish(self, cut: bool = False) -> list[Event]:
        """The rest. cut: the answer was ended by a length limit, a stop string or an abort, so an open call stays open.

        Otherwise the model ended it, and what it forgot to close is closed.
        """
        events: list[Event] = []
        self._parser.finish(self._lexer.flush(), cut, events)
        return merged(events)

    @property
    def called(self) -> bool:
        """Whether a call has started."""
        return self._parser.tools.calls > 0

    def finish_reason(self, engine: str) -> str:
        """After `finish`: "tool_calls" if the engine says "stop" and every call is complete, else what it says."""
        tools = self._parser.tools
        return "tool_calls" if engine == "stop" and tools.calls and not tools.open else engine


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass(slots=True)
class Parsed:
    """A whole answer; None where there is no text."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[Event]) -> Parsed:
    """The answer that a stream of events makes. Calls that do not end are left out."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    ended: set[int] = set()
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(_, id, name):
                calls.append(ToolCall(id, name, ""))
                arguments.append([])
            case ToolCallArguments(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index):
                calls[index].arguments = "".join(arguments[index])
                ended.add(index)
            case ReasoningIsContent(text):
                reasoning, content = [], [text]
    answer = "".join(content)
    complete = [call for index, call in enumerate(calls) if index in ended]
    return Parsed("".join(reasoning) or None, (answer.strip() if complete else answer) or None, complete)
