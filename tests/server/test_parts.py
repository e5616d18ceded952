"""Parser events to parts: order, white space at the borders of calls, cut calls, and whose token is whose."""

import pytest

from leyden.server.parsers import (
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    ReasoningIsContent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from leyden.server.parts import Change, Closed, Grown, Opened, Parts
from leyden.types import TokenLogprobs

CALL: list[Event] = [ToolCallStart(0, "c1", "f"), ToolCallArguments(0, "{}"), ToolCallEnd(0)]


def parts(*steps: list[Event], show_thinking: bool = True) -> tuple[list[tuple[str, str, bool]], list[Change]]:
    found = Parts(show_thinking)
    changes = [change for step in steps for change in found.read(step)] + found.finish()
    check(changes)
    return [(part.kind, part.text, part.complete) for part in found.all], changes


def check(changes: list[Change]) -> None:
    """Parts are numbered in order, open before they grow, and never overlap."""
    open_part = None
    opened = 0
    for change in changes:
        match change:
            case Opened(part):
                assert open_part is None and part.index == opened
                open_part, opened = part, opened + 1
            case Grown(part, text):
                assert part is open_part and text
            case Closed(part):
                assert part is open_part
                open_part = None


def test_thinking_text_and_calls_follow_each_other():
    found, changes = parts(
        [ReasoningDelta("I"), ContentDelta("Sure.")], [ContentDelta("\n"), *CALL], [ContentDelta("\nDone.\n")]
    )
    assert found == [("thinking", "I", True), ("text", "Sure.", True), ("call", "{}", True), ("text", "Done.", True)]
    assert [type(change).__name__ for change in changes[:3]] == ["Opened", "Grown", "Closed"]


def test_white_space_counts_inside_a_text_and_at_its_end_if_there_is_no_call():
    assert parts([ContentDelta("a ")], [ContentDelta("\n")], [ContentDelta("b\n")])[0] == [("text", "a \nb\n", True)]
    assert parts([ContentDelta("\n\na")])[0] == [("text", "\n\na", True)]
    assert parts([ContentDelta("a\n")], CALL)[0] == [("text", "a", True), ("call", "{}", True)]
    assert parts(CALL, [ContentDelta(" \n")])[0] == [("call", "{}", True)]


def test_a_cut_call_is_never_complete():
    found, changes = parts([ToolCallStart(0, "c1", "f"), ToolCallArguments(0, '{"x": ')])
    assert found == [("call", '{"x": ', False)]
    assert not any(isinstance(change, Closed) for change in changes)


def test_hidden_thinking_and_thinking_that_has_to_serve_as_answer():
    assert parts([ReasoningDelta("I"), ContentDelta("a")], show_thinking=False)[0] == [("text", "a", True)]
    events: list[Event] = [ReasoningDelta("I")]
    assert parts(events, [ReasoningIsContent("I")])[0] == [("thinking", "I", True), ("text", "I", True)]


def test_every_token_of_a_text_goes_to_that_text():
    found = Parts()

    def token(id: int) -> TokenLogprobs:
        return TokenLogprobs(id, -1.0, 1, [], [])

    found.read([ReasoningDelta("I")], [token(1)])
    found.read([ContentDelta("a")], [token(2)])
    found.read([], [token(3)])  # half a character
    found.read([ContentDelta("é")], [token(4)])
    found.read(CALL, [token(5)])
    found.read([ContentDelta("b")], [token(6)])
    found.finish()
    texts = [part for part in found.all if part.kind == "text"]
    assert [[token.token_id for token in part.logprobs] for part in texts] == [[2, 3, 4], [6]]


CALL_TEXT = "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>"
TEXT = f"Plan.\n</think>\nFirst.\n{CALL_TEXT}\nEnd."
TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_the_same_parts_for_every_way_of_cutting_the_output(size: int):
    parser = OutputParser(TOOLS, thinking=True)
    steps = [parser.feed(TEXT[start : start + size]) for start in range(0, len(TEXT), size)]
    found, _ = parts(*steps, parser.finish())
    assert found == [
        ("thinking", "Plan.", True),
        ("text", "\nFirst.", True),
        ("call", '{"x": 5}', True),
        ("text", "End.", True),
    ]
