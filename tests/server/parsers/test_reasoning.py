import pytest

from leyden.server.parsers import ContentDelta, ReasoningDelta, ReasoningIsContent, collect

TOOLS = [{"function": {"name": "run", "parameters": {"properties": {"command": {"type": "string"}}}}}]
CALL = "<tool_call>\n<function=run>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
UNKNOWN = CALL.replace("run", "other")


@pytest.fixture
def answer(parse):
    """Reasoning, content and the names called, the same by the character and at once."""

    def run(text, tools=TOOLS, **options):
        events, _ = parse(list(text), tools, **{"thinking": True, **options})
        assert parse([text], tools, **{"thinking": True, **options})[0] == events
        parsed = collect(events)
        return parsed.reasoning, parsed.content, [call.name for call in parsed.tool_calls]

    return run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r\n</think>\n\na\n", ("r", "\n\na\n", [])),
        ("  r </think>a", ("  r", "a", [])),
        ("r", ("r", None, [])),
        (" \n</think> \n", (None, None, [])),
        ("r<think>s</think>a<think>b</think>c", ("rs", "a<think>bc", [])),
        ("r</think>\n<think></think>a", ("r", "\na", [])),
        ("r\n</think>\n<think>s</think>a", ("r\ns", "\na", [])),
        ("r</think>" + CALL + "<think>x", ("r", "<think>x", ["run"])),
    ],
)
def test_where_thinking_ends(answer, text, expected):
    assert answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r\n" + CALL, ("r", None, ["run"])),
        ("r\n" + CALL + CALL + "\n", ("r", None, ["run", "run"])),
        ("r<tool_call>\n" + CALL, ("r", None, ["run"])),
        ("r\n" + CALL + "\nDone.", ("r", "Done.", ["run"])),
        ("r\n" + CALL.replace("ls", "a</think>b"), ("r", None, ["run"])),
        ("r\n" + UNKNOWN, ("r\n" + UNKNOWN, None, [])),
        ("use <tool_call> then", ("use <tool_call> then", None, [])),
        ("use <tool_call>", ("use <tool_call>", None, [])),
        ("use <function=run> then", ("use <function=run> then", None, [])),
        ("r\n" + CALL + " no.</think>a", ("r\n" + CALL + " no.", "a", [])),
        ("r\n" + CALL + "</think>" + CALL, ("r\n" + CALL, None, ["run"])),
        ("<tool_call><function=run> it.</think>a", ("<tool_call><function=run> it.", "a", [])),
        (
            "<tool_call><function=run><parameter=command>ls</think>a " + CALL[:5],
            ("<tool_call><function=run><parameter=command>ls", "a <tool", []),
        ),
    ],
)
def test_a_call_ends_thinking_only_if_it_is_one(answer, text, expected):
    assert answer(text) == expected


def test_without_tools_a_call_in_thinking_is_thinking(answer):
    assert answer("r " + CALL, tools=None) == ("r " + CALL, None, [])


def test_what_is_cut_is_given_as_it_is_but_no_half_call(answer):
    assert answer("r \n", cut=True) == ("r \n", None, [])
    assert answer("r </thi", cut=True) == ("r </thi", None, [])
    assert answer("r <tool_call>\n", cut=True) == ("r", None, [])
    assert answer("r " + CALL[:40], cut=True) == ("r", None, [])
    assert answer("r " + CALL[:-5], cut=True) == ("r", None, ["run"])


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a", {}, (None, "a", [])),
        ("</think>a", {}, (None, "a", [])),
        ("<think></think>a", {}, (None, "a", [])),
        ("<think>r</think>a", {}, ("r", "a", [])),
        ("<think>r", {}, (None, "r", [])),
        ("<think>r</think>\n", {}, (None, "r", [])),
        ("<think>r</think>" + CALL, {}, ("r", None, ["run"])),
        ("r</think> ", {"thinking": True}, ("r", None, [])),
        ("r</think> ", {"thinking": True, "force_nonempty_content": True}, (None, "r", [])),
        ("r</think>a", {"thinking": True, "force_nonempty_content": True}, ("r", "a", [])),
        ("r" + CALL, {"thinking": True, "force_nonempty_content": True}, ("r", None, ["run"])),
        ("r" + CALL[:40], {"thinking": True, "force_nonempty_content": True, "cut": True}, ("r", None, [])),
        ("\n</think>\n", {"thinking": True, "force_nonempty_content": True}, (None, None, [])),
    ],
)
def test_content_where_it_was_promised(answer, text, options, expected):
    assert answer(text, **{"thinking": False, **options}) == expected


def test_a_stream_sends_thinking_first_and_again_as_content(parse):
    events, _ = parse(["a", "b</think>"], thinking=True, force_nonempty_content=True)
    assert events == [ReasoningDelta("ab"), ReasoningIsContent("ab")]


def test_thinking_streams_but_for_the_white_space_at_its_end(parse):
    from leyden.server.parsers import OutputParser

    parser = OutputParser(thinking=True)
    assert [parser.feed(piece) for piece in ("a ", "\n", "b\n", "</think>", "\nc")] == [
        [ReasoningDelta("a")],
        [],
        [ReasoningDelta(" \nb")],
        [],
        [ContentDelta("\nc")],
    ]


def test_no_reasoning_parser(answer):
    assert answer("a<think>b</think>c" + CALL, reasoning_parser=None) == (None, "a<think>b</think>c", ["run"])
