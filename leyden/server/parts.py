"""An answer as a row of parts (thinking, text, calls) that open, grow and close one after the other.

Responses and Messages describe answers in this way. Both ways of sending go through here, so a whole answer is what a
stream would have sent. White space between text and a call belongs to neither and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from leyden.server.parsers import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ReasoningIsContent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from leyden.types import TokenLogprobs


@dataclass(slots=True, eq=False)
class Part:
    """`index` counts the parts of the answer; `id` and `name` are those of a call, whose text is its arguments.

    complete    False while it grows; of a call that was cut off for ever: it must not be run
    logprobs    of the tokens of a text, if they were asked for
    """

    kind: Literal["thinking", "text", "call"]
    index: int
    id: str = ""
    name: str = ""
    complete: bool = False
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Opened:
    part: Part


@dataclass(slots=True)
class Grown:
    part: Part
    text: str
    logprobs: list[TokenLogprobs]  # of the tokens that made the text


@dataclass(slots=True)
class Closed:
    part: Part


Change = Opened | Grown | Closed


class Parts:
    """Turns the parser's events into changes. At most one part is open."""

    def __init__(self, show_thinking: bool = True):
        self.all: list[Part] = []
        self._show_thinking = show_thinking
        self._open: Part | None = None
        self._space = ""  # white space that is text only if more text follows
        self._after_call = False
        self._tokens: list[TokenLogprobs] = []  # not yet given to a text

    def read(self, events: Sequence[Event], tokens: Sequence[TokenLogprobs] = ()) -> list[Change]:
        """What a step changes; `tokens` are the log-probabilities of its tokens."""
        out: list[Change] = []
        self._tokens += tokens
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._tokens = []
                    if self._show_thinking:
                        self._grow("thinking", text, out)
                case ContentDelta(text):
                    self._write(text, out)
                case ReasoningIsContent(text):
                    self._space = ""
                    self._grow("text", text, out)
                case ToolCallStart(_, id, name):
                    self._close(out)
                    self._space, self._tokens, self._after_call = "", [], True
                    self._begin(Part("call", len(self.all), id, name), out)
                case ToolCallArguments(_, text):
                    self._grow("call", text, out)
                case ToolCallEnd():
                    self._close(out)
        return out

    def finish(self) -> list[Change]:
        """The answer is over."""
        out: list[Change] = []
        if self._space and not self._after_call:
            self._grow("text", self._space, out)
        if self._open is not None and self._open.kind != "call":
            self._close(out)
        return out

    def _write(self, text: str, out: list[Change]) -> None:
        text = self._space + text
        if self._after_call and (self._open is None or self._open.kind != "text"):
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._grow("text", body, out)

    def _grow(self, kind: Literal["thinking", "text", "call"], text: str, out: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._close(out)
            self._begin(Part(kind, len(self.all)), out)
        part = self._open
        assert part is not None
        found, self._tokens = self._tokens, []
        part.pieces.append(text)
        if kind == "text":
            part.logprobs += found
        out.append(Grown(part, text, found))

    def _begin(self, part: Part, out: list[Change]) -> None:
        self.all.append(part)
        self._open = part
        out.append(Opened(part))

    def _close(self, out: list[Change]) -> None:
        if self._open is not None:
            self._open.complete = True
            out.append(Closed(self._open))
            self._open = None
