"""What the output parsers say, in the order in which the model said it."""

from dataclasses import dataclass
from itertools import groupby


@dataclass(slots=True)
class ReasoningDelta:
    text: str


@dataclass(slots=True)
class ContentDelta:
    text: str


@dataclass(slots=True)
class ToolCallStart:
    """Calls are numbered 0, 1, 2 ... in the order in which they start, and never overlap."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class ToolCallArguments:
    """The next piece of the arguments; all pieces of a call that ends are one JSON object."""

    index: int
    text: str


@dataclass(slots=True)
class ToolCallEnd:
    """The call is complete. A call that was cut off has no such event and must not be run."""

    index: int


@dataclass(slots=True)
class ReasoningIsContent:
    """At the end, where content was promised and only reasoning came: this, all of it, is the content.

    A whole answer then has no reasoning; a stream has sent it as reasoning already and sends it again as content.
    """

    text: str


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | ReasoningIsContent


Piece = ReasoningDelta | ContentDelta | ToolCallArguments


def merged(events: list[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one text joined."""
    if len(events) < 2:
        return events
    joined: list[Event] = []
    for _, group in groupby(events, _text_of):
        first, *rest = group
        if rest and isinstance(first, Piece):
            first.text += "".join(event.text for event in rest if isinstance(event, Piece))
            rest = []
        joined += [first, *rest]
    return joined


def _text_of(event: Event) -> tuple[type[Event], int]:
    """Which text an event adds to."""
    return type(event), event.index if isinstance(event, ToolCallArguments) else 0
