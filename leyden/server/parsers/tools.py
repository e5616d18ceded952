"""Tool parser `qwen3_coder`: calls as the Nemotron 3 family writes them.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is everything up to `</parameter>`, less one newline at each side; other markup in it is data. A `</parameter>`
after which nothing of the format follows is data too. What is missing is repaired: without `</parameter>` a value
ends at a line that opens a parameter which the tool has and the call has not had yet, else at `</function>`, else at
`</tool_call>`, else at the end. What never becomes a call stays text.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol
from uuid import uuid4

from leyden.server.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from leyden.server.parsers.schema import DROP, Parameters, dumps
from leyden.server.parsers.tags import Tag, Token, blank, raw

_ENDS = ("/function", "/tool_call", "tool_call")  # may end a value that has no </parameter>
_FOLLOWS = (*_ENDS, "parameter", "function")  # may follow </parameter>
_TO_NEXT_CALL = ("/function", "/tool_call", "tool_call", "function", "")  # in this order, a value had no </parameter>


class ToolParser(Protocol):
    """Reads the answer, token by token."""

    names: Collection[str]  # tools that can be called

    def feed(self, token: Token, out: list[Event]) -> None: ...

    def finish(self, tail: str, cut: bool, out: list[Event]) -> None:
        """The output is over; `tail` is an unfinished tag. cut: it was ended from outside, so nothing is repaired."""

    @property
    def started(self) -> bool:
        """Whether there is any content or call."""

    @property
    def open(self) -> bool:
        """Whether a call has started and not ended."""

    @property
    def reading_value(self) -> bool:
        """Whether markup is data where the output stands."""

    @property
    def calls(self) -> int:
        """Calls started so far."""


class Qwen3Coder:
    """States: _content -> _preamble -> _arguments <-> _value, _between calls; each a method that takes one token.

    tools     as in a request, {"function": {"name", "parameters"}} or the inner object itself; none: all is text
    parallel  False: calls after the first are read and dropped
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), parallel: bool = True):
        functions = [tool.get("function", tool) for tool in tools]
        self._tools = {function["name"]: Parameters(function.get("parameters")) for function in functions}
        self.names: Collection[str] = self._tools.keys()
        self._parallel = parallel
        self._state: Callable[[Token, list[Event]], None] = self._content
        self._shows = False  # content has come since the last call: until then white space waits
        self._space: list[str] = []
        self._lines = _Lines()
        self._held: list[Token] = []  # not decided yet: a possible call, or a possible end of a value
        self._wrapped = False  # inside <tool_call>
        self._final = False  # no more output will come
        self.calls = 0
        # of the call that is being read
        self._parameters = Parameters(None)
        self._keys: list[str] = []
        self._empty = True  # no argument written yet
        # of the value that is being read
        self._streams = True  # a string, sent as it comes
        self._pieces: list[str] = []  # anything else, sent when it is complete
        self._first = True  # nothing of the value has come
        self._newline = False  # a newline came that is data only if more of the value follows
        self._last = ""  # the text before the next token
        self._close: int | None = None  # index in _held of a </parameter>, the end if the format goes on after it
        self._steps = 0  # how far what is held follows _TO_NEXT_CALL; -1: not at all

    def feed(self, token: Token, out: list[Event]) -> None:
        self._state(token, out)

    @property
    def started(self) -> bool:
        return self._shows or self.calls > 0 or self._state != self._content

    @property
    def open(self) -> bool:
        return self.reading_value or self._state == self._arguments

    @property
    def reading_value(self) -> bool:
        return self._state == self._value

    def finish(self, tail: str, cut: bool, out: list[Event]) -> None:
        if not cut:
            self._final = True
            if tail and self._state in (self._content, self._preamble, self._value):
                self._state(tail, out)
            if self._state == self._value:
                self._end_last_value(out)
            if self._state == self._arguments:
                self._end_call(out)
            if self._state == self._preamble:
                self._release(out)
        elif tail and self._state == self._content:
            self._text(tail, out)

    # --- outside of calls

    def _content(self, token: Token, out: list[Event]) -> None:
        match token:
            case Tag(kind="tool_call") if self._tools:
                self._held = [token]
                self._state = self._preamble
            case Tag(kind="function", name=name) if name in self._tools and self._lines.own:
                self._start_call(name, out)
            case Tag(kind="/tool_call") if self._wrapped:
                self._wrapped = False
            case _:
                self._text(raw(token), out)

    def _preamble(self, token: Token, out: list[Event]) -> None:
        """After `<tool_call>`: a function, or it was text."""
        match token:
            case Tag(kind="function", name=name) if name:
                self._held = []
                self._wrapped = True
                self._start_call(name, out)
            case Tag(kind="tool_call"):
                self._held.append(token)
            case _ if blank(token):
                self._held.append(token)
            case _:
                self._release(out)
                self._content(token, out)

    def _between(self, token: Token, out: list[Event]) -> None:
        """After a call: another one, closers that are missing nothing, or text."""
        match token:
            case Tag(kind="/tool_call"):
                self._wrapped = False
            case Tag(kind="function", name=name) if self._wrapped and name:
                self._start_call(name, out)
            case Tag(kind=kind) if kind.startswith("/") and kind != "/think":
                pass
            case str() if self._wrapped:
                if text := token.lstrip():
                    self._state = self._content
                    self._text(text, out)
            case _:
                if not blank(token):
                    self._state = self._content
                self._content(token, out)

    def _text(self, text: str, out: list[Event]) -> None:
        if self._tools:
            self._lines.push(text)
        if not self._shows:
            self._space.append(text)
            if blank(text):
                return
            text = "".join(self._space)
            self._shows, self._space = True, []
        out.append(ContentDelta(text))

    def _release(self, out: list[Event]) -> None:
        held, self._held = self._held, []
        self._state = self._content
        self._text("".join(map(raw, held)), out)

    # --- a call

    def _start_call(self, name: str, out: list[Event]) -> None:
        self._parameters = self._tools.get(name, Parameters(None))
        self._keys = []
        self._empty = True
        self._state = self._arguments
        self._shows = False
        self.calls += 1
        if self._shown:
            out.append(ToolCallStart(self.calls - 1, f"call_{uuid4().hex[:24]}", name))

    def _arguments(self, token: Token, out: list[Event]) -> None:
        match token:
            case Tag(kind="parameter", name=name):
                self._start_value(name, out)
            case Tag(kind="/function"):
                self._end_call(out)
            case Tag(kind="/tool_call" | "tool_call" | "function"):  # </function> is missing
                self._end_call(out)
                self._between(token, out)

    def _end_call(self, out: list[Event]) -> None:
        self._write("{}" if self._empty else "}", out)
        if self._shown:
            out.append(ToolCallEnd(self.calls - 1))
        self._lines = _Lines()
        self._state = self._between

    def _write(self, text: str, out: list[Event]) -> None:
        if text and self._shown:
            out.append(ToolCallArguments(self.calls - 1, text))

    @property
    def _shown(self) -> bool:
        return self._parallel or self.calls == 1

    # --- a value

    def _start_value(self, key: str, out: list[Event]) -> None:
        self._keys.append(key)
        self._streams = self._parameters.is_text(key)
        self._pieces = []
        self._first, self._newline, self._last = True, False, "\n"
        self._steps = 0
        self._state = self._value
        if self._streams:
            self._write_key(out)
            self._write('"', out)

    def _value(self, token: Token, out: list[Event]) -> None:
        if self._close is not None:
            if blank(token):
                self._held.append(token)
                return
            close, self._close = self._close, None
            if isinstance(token, Tag) and token.kind in _FOLLOWS:
                self._end_value(self._held[:close], out)
                self._arguments(token, out)
                return
            if close == 0:  # it was data, and nothing before it is in doubt
                held, self._held, self._steps = self._held, [], 0
                self._push("".join(map(raw, held)), out)
        match token:
            case Tag(kind="/parameter"):
                self._close = len(self._held)
                self._hold(token)
            case Tag(kind="parameter", whole=True, name=name) if self._opens_next(name):
                self._end_value(self._held, out)
                self._start_value(name, out)
            case Tag(kind="function", name=name) if name in self._tools and _TO_NEXT_CALL[self._steps] == "function":
                self._end_value_before_held(out)
                self._state(token, out)
            case Tag(kind=kind) if kind in _ENDS and self._final:
                self._end_value([], out)
                self._arguments(token, out)
            case _ if self._held or isinstance(token, Tag) and token.kind in _ENDS:
                self._hold(token)
            case _:
                self._push(raw(token), out)

    def _opens_next(self, name: str) -> bool:
        """Whether a parameter opened here is the next one, so that </parameter> was forgotten."""
        before = raw(self._held[-1]) if self._held else self._last
        return before.endswith("\n") and name in self._parameters.properties and name not in self._keys

    def _hold(self, token: Token) -> None:
        """The token may be data, or what stands after the value: the end of this call and the beginning of another."""
        self._held.append(token)
        if isinstance(token, Tag) and token.kind == _TO_NEXT_CALL[self._steps]:
            self._steps += 1
        elif not blank(token):
            self._steps = -1

    def _end_value_before_held(self, out: list[Event]) -> None:
        held, self._held = self._held, []
        self._end_value([], out)
        for token in held:
            self._state(token, out)

    def _end_last_value(self, out: list[Event]) -> None:
        """The output is over inside a value."""
        if self._close is not None:
            self._end_value(self._held[: self._close], out)
            return
        self._end_value_before_held(out)
        if self._state == self._value:
            self._end_last_value(out)

    def _push(self, text: str, out: list[Event]) -> None:
        """More text of the value."""
        self._last = text
        if not self._streams:
            self._pieces.append(text)
            return
        if self._first:
            self._first = False
            text = text.removeprefix("\n")
        if text:
            text = "\n" + text if self._newline else text
            self._newline = text.endswith("\n")
            self._write(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1], out)

    def _end_value(self, rest: Sequence[Token], out: list[Event]) -> None:
        """The value ends with the text of these tokens."""
        for token in rest:
            self._push(raw(token), out)
        self._held, self._close = [], None
        self._state = self._arguments
        if self._streams:
            self._write('"', out)
            return
        value = self._parameters.value(self._keys[-1], "".join(self._pieces).removeprefix("\n").removesuffix("\n"))
        if value is not DROP:
            self._write_key(out)
            self._write(dumps(value), out)

    def _write_key(self, out: list[Event]) -> None:
        self._write(("{" if self._empty else ", ") + dumps(self._keys[-1]) + ": ", out)
        self._empty = False


class _Lines:
    """Where content stands: at the beginning of a line, inside a fenced block of code?"""

    def __init__(self) -> None:
        self._line = ""  # the first three characters of the line, leading blanks left out
        self._fenced = False

    @property
    def own(self) -> bool:
        """Whether markup here stands at the beginning of a line that is no quoted code."""
        return not self._line and not self._fenced

    def push(self, text: str) -> None:
        first, *rest = text.split("\n")
        self._line = (self._line + first).lstrip()[:3]
        for line in rest:
            if self._line in ("```", "~~~"):
                self._fenced = not self._fenced
            self._line = line.lstrip()[:3]
