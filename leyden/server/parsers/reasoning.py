"""Reasoning parser `nemotron_v3`: what is thinking, and where does the answer begin.

The prompt ends in `<think>` or in `<think></think>`, so the output starts inside thinking or after it. The first
`</think>` ends thinking. So does a tool call, if the model forgets to close: `<tool_call>` and a function that the
request has. That is only certain at the end (a call that is followed by `</think>` was an idea), so it waits till then.
"""

from collections.abc import Callable
from typing import Protocol

from leyden.server.parsers.events import Event, ReasoningDelta, ReasoningIsContent
from leyden.server.parsers.tags import Tag, Token, blank, raw
from leyden.server.parsers.tools import ToolParser


class ReasoningParser(Protocol):
    def feed(self, token: Token, out: list[Event]) -> None: ...

    def finish(self, tail: str, cut: bool, out: list[Event]) -> None:
        """The output is over; `tail` is an unfinished tag. cut: it was ended from outside, not by the model."""

    @property
    def tools(self) -> ToolParser: ...


class NoReasoning:
    """Everything is answer, think tags included."""

    def __init__(self, tools: Callable[[], ToolParser], thinking: bool = True, force_nonempty_content: bool = False):
        self.tools = tools()

    def feed(self, token: Token, out: list[Event]) -> None:
        if isinstance(token, Tag) and token.kind.endswith("think"):
            token = token.raw
        self.tools.feed(token, out)

    def finish(self, tail: str, cut: bool, out: list[Event]) -> None:
        self.tools.finish(tail, cut, out)


class NemotronV3:
    """States: _thinking -> (_looking -> _trying) -> _answering, each a method that takes one token.

    tools     makes the parser that reads the answer
    thinking  whether the output starts inside thinking
    force_nonempty_content  if neither answer nor call comes, the thinking is the answer; always so without thinking
    """

    def __init__(self, tools: Callable[[], ToolParser], thinking: bool = True, force_nonempty_content: bool = False):
        self._new_tools = tools
        self.tools = tools()
        self._state = self._thinking if thinking else self._answering
        self._needs_content = force_nonempty_content or not thinking
        self._space = _TrailingSpace()
        self._thoughts: list[str] = []  # all of them, if they may have to serve as content
        self._held: list[Token] = []  # a call inside thinking, not yet decided
        self._trial: list[Event] = []  # what the call would be

    def feed(self, token: Token, out: list[Event]) -> None:
        self._state(token, out)

    def finish(self, tail: str, cut: bool, out: list[Event]) -> None:
        if self._state == self._trying:
            self._decide(out)
        if self._state == self._answering:
            self.tools.finish(tail, cut, out)
        elif not cut:
            self._release(out)
            self._think(tail, out)
        elif not self._held:  # half a call is not shown; all else is given as it is
            self._think(tail, out)
            self._emit(self._space.flush(), out)
        if self._needs_content and not self.tools.started and self._thoughts:
            out.append(ReasoningIsContent("".join(self._thoughts)))

    def _thinking(self, token: Token, out: list[Event]) -> None:
        match token:
            case Tag(kind="think"):
                pass
            case Tag(kind="/think"):
                self._state = self._answering
            case Tag(kind="tool_call") if self.tools.names:
                self._held = [token]
                self._state = self._looking
            case _:
                self._think(raw(token), out)

    def _looking(self, token: Token, out: list[Event]) -> None:
        """After `<tool_call>`: does the opening of a known function follow?"""
        self._held.append(token)
        match token:
            case Tag(kind="function", name=name) if name in self.tools.names:
                self._state = self._trying
                for held in self._held:
                    self.tools.feed(held, self._trial)
            case Tag(kind="tool_call"):
                pass
            case _ if not blank(token):
                self._held.pop()
                self._release(out)
                self._state = self._thinking
                self._thinking(token, out)

    def _trying(self, token: Token, out: list[Event]) -> None:
        if isinstance(token, Tag) and token.kind == "/think" and not self.tools.reading_value:
            self._give_up(out)
        else:
            self._held.append(token)
            self.tools.feed(token, self._trial)

    def _decide(self, out: list[Event]) -> None:
        """The end, and no `</think>` came after a call: it was real. Unless one stands in a value that has no end."""
        tokens = self._held
        closes = next((i for i, token in enumerate(tokens) if isinstance(token, Tag) and token.kind == "/think"), None)
        if closes is not None and self.tools.open:
            self._held = tokens[:closes]
            self._give_up(out)
            for token in tokens[closes:]:
                self._answering(token, out)
        else:
            out += self._trial
            self._held = []
            self._state = self._answering

    def _give_up(self, out: list[Event]) -> None:
        """The call was an idea, and thinking ends here."""
        self._release(out)
        self.tools, self._trial = self._new_tools(), []
        self._state = self._answering

    def _answering(self, token: Token, out: list[Event]) -> None:
        match token:
            case Tag(kind="/think") if not self.tools.reading_value:
                pass
            case Tag(kind="think") if not self.tools.started:
                self._state = self._thinking
            case Tag(kind="think" | "/think"):
                self.tools.feed(token.raw, out)
            case _:
                self.tools.feed(token, out)

    def _think(self, text: str, out: list[Event]) -> None:
        self._emit(self._space.push(text), out)

    def _emit(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(ReasoningDelta(text))
            if self._needs_content:
                self._thoughts.append(text)

    def _release(self, out: list[Event]) -> None:
        """What was held as a possible call is thinking."""
        held, self._held = self._held, []
        self._think("".join(map(raw, held)), out)


class _TrailingSpace:
    """Passes text on and keeps back the white space at its end: it only counts if more text follows."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._passed = False  # whether anything but white space has come

    def push(self, text: str) -> str:
        body = text.rstrip()
        if not body:
            self._held.append(text)
            return ""
        passed = "".join(self._held) + body
        self._held = [text[len(body) :]]
        self._passed = True
        return passed

    def flush(self) -> str:
        """The white space that was kept back, if it stands at the end of some text."""
        held, self._held = self._held, []
        return "".join(held) if self._passed else ""
