from collections.abc import Callable, Iterable
from typing import Any

import pytest

from leyden.server.parsers import Event, OutputParser, ToolCallStart
from leyden.server.parsers.events import merged


@pytest.fixture(scope="session")
def parse() -> Callable[..., tuple[list[Event], str]]:
    """Runs a parser over pieces of text: all events, neighbours joined, ids taken out; and the finish reason."""

    def run(pieces: Iterable[str], tools: Any = None, cut: bool = False, **options: Any) -> tuple[list[Event], str]:
        parser = OutputParser(tools, **options)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(cut)
        ids = [event.id for event in events if isinstance(event, ToolCallStart)]
        assert all(ids) and len(set(ids)) == len(ids)
        for event in events:
            if isinstance(event, ToolCallStart):
                event.id = ""
        return merged(events), parser.finish_reason("length" if cut else "stop")

    return run
