import json

import pytest

from leyden.server.parsers import ContentDelta, OutputParser, ToolCallArguments, ToolCallEnd, ToolCallStart, collect

TOOLS = [
    {"type": "function", "function": {"name": "run", "parameters": {"properties": {"command": {"type": "string"}}}}},
    {
        "name": "put",
        "parameters": {
            "properties": {
                "path": {"type": "string"},
                "body": {"type": "string"},
                "n": {"type": "integer"},
                "o": {"type": "object"},
            }
        },
    },
]


def call(name, *parameters):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.fixture
def answer(parse):
    """Content, and (name, arguments) of the calls, the same by the character and at once."""

    def run(text, tools=TOOLS, **options):
        events, _ = parse(list(text), tools, thinking=False, **options)
        assert parse([text], tools, thinking=False, **options)[0] == events
        parsed = collect(events)
        return parsed.content, [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]

    return run


def value(answer, text, name="body"):
    """What the value becomes that is written as `text` up to the end of the call."""
    content, calls = answer(f"<tool_call>\n<function=put>\n<parameter={name}>{text}")
    assert content is None
    return [arguments.get(name) for _, arguments in calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x</parameter></function></tool_call>", "x"),
        ("\n\nx\n\n</parameter></function>", "\nx\n"),
        ("\n</parameter></function>", ""),
        ("</parameter></function>", ""),
        ("\r\nx\r\n</parameter></function>", "\r\nx\r"),
        ('\n"\\\t\u2028🙂\n</parameter></function>', '"\\\t\u2028🙂'),
        ("a </parameter> b</parameter></function>", "a </parameter> b"),
        ("a\n</parameter>\n</parameter>\n</function>", "a\n</parameter>"),
        ("a </function> b\n</parameter></function>", "a </function> b"),
        ("<tool_call>x</tool_call></parameter></function>", "<tool_call>x</tool_call>"),
        ("a </function> </parameter> b</parameter></function>", "a </function> </parameter> b"),
        ("a <parameter=path> b</parameter></function>", "a <parameter=path> b"),
        ("a\n<parameter=other>\nb\n</parameter></function>", "a\n<parameter=other>\nb"),
        ("a\n<parameter=body>\nb\n</parameter></function>", "a\n<parameter=body>\nb"),
        ("a </function_x> b</parameter></function>", "a </function_x> b"),
        ("a <think>b</think></parameter></function>", "a <think>b</think>"),
        ("a < b </p </parameter></function>", "a < b </p "),
        # missing closers
        ("\na\n</function>\n</tool_call>", "a"),
        ("\na\n</tool_call>", "a"),
        ("\na\n", "a"),
        ("\na </para", "a </para"),
        ("\na\n</parameter>", "a"),
        ("\na\n</parameter>\n</tool_call>", "a"),
        ("a </parameter> b", "a </parameter> b"),
        ("a </function> b", "a "),
    ],
)
def test_where_a_value_ends(answer, text, expected):
    if text == "a </function> b":  # what stands after the end that is found is content
        assert answer("<function=put><parameter=body>" + text) == ("b", [("put", {"body": "a "})])
    else:
        assert value(answer, text) == [expected]


def test_a_forgotten_closer_before_the_next_known_parameter(answer):
    text = (
        "<tool_call><function=put><parameter=path>\na\n<parameter=body>\nb\n<parameter=n>\n5\n</function></tool_call>"
    )
    assert answer(text) == (None, [("put", {"path": "a", "body": "b", "n": 5})])
    doubted = "<function=put><parameter=path>\na</function>\n<parameter=n>\n5\n</parameter></function>"
    assert answer(doubted) == (None, [("put", {"path": "a</function>", "n": 5})])


def test_a_forgotten_closer_before_the_next_call(answer):
    open_call = "<tool_call>\n<function=run>\n<parameter=command>\nls\n</function>\n</tool_call>\n"
    assert answer(open_call + call("run", ("command", "pwd")))[1] == [
        ("run", {"command": "ls"}),
        ("run", {"command": "pwd"}),
    ]
    assert answer(open_call * 3)[1] == [("run", {"command": "ls"})] * 3
    said = open_call + "and\n" + open_call + "and\n<function=run><parameter=command>\nls"
    assert answer(said) == ("and\n\nand", [("run", {"command": "ls"})] * 3)
    quoted = open_call + call("unknown", ("x", "y"))
    assert len(answer(quoted)[1]) == 1  # a function that is not there: the text of a value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("run") + call("run"), ["run", "run"]),
        ("<tool_call><function=run></function><function=put></function></tool_call>", ["run", "put"]),
        ("<tool_call><function=run><function=put></tool_call>", ["run", "put"]),
        ("<tool_call><function=run>" + call("put"), ["run", "put"]),
        ("<tool_call><tool_call>\n" + call("run"), ["run"]),
        ("<tool_call><function=run\n</function>", ["run"]),
        ("<tool_call><function=run</function>", ["run"]),
        ("<tool_call><function= run >junk</parameter>junk</function>", ["run"]),
        ("<tool_call><function=unknown></function>", ["unknown"]),
        ("<function=run></function>", ["run"]),
        ("\n  <function=run></function>\n<function=put></function>", ["run", "put"]),
        (call("run") + "\n</function></tool_call></function_invocation></parameter>\n" + call("put"), ["run", "put"]),
        (call("run") + "<function=put></function>", ["run", "put"]),
    ],
)
def test_calls(answer, text, expected):
    assert answer(text) == (None, [(name, {}) for name in expected])


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> before, and </tool_call> after.",
        "<tool_call>",
        "<tool_call>\n<tool_call> x",
        "<tool_call><function=>",
        "a <function=run> b",
        "<function=unknown>\n</function>",
        "```\n<function=run>\n</function>\n```",
        "~~~xml\n<function=run>\n</function>\n~~~\n",
        "</function></parameter></tool_call>",
        "<parameter=x>1</parameter>",
        "\n\n indented \n",
        "<function=run",
    ],
)
def test_text_that_is_no_call(answer, text):
    assert answer(text) == (text, [])


def test_a_bare_call_after_a_fence(answer):
    text = "```\ncode\n```\n<function=run>\n</function>"
    assert answer(text) == ("```\ncode\n```", [("run", {})])


def test_without_tools_all_is_text(answer):
    text = "a\n" + call("run", ("command", "ls")) + "\n<function=run></function>"
    assert answer(text, tools=None) == (text, [])
    assert answer(text, tools=[]) == (text, [])


def test_text_around_calls(answer):
    text = "a\n" + call("run") + "\nb\n" + call("run") + "\n\n"
    assert answer(text) == ("a\n\nb", [("run", {}), ("run", {})])
    inside = "<tool_call><function=run></function>\n note </tool_call> end"
    assert answer(inside) == ("note  end", [("run", {})])


def test_only_the_first_call_if_they_may_not_be_parallel(answer):
    text = "a" + call("run", ("command", "ls")) + "b" + call("put", ("n", "1"))
    assert answer(text, parallel_tool_calls=False) == ("ab", [("run", {"command": "ls"})])


def test_the_last_of_two_equal_parameters_counts(answer):
    assert answer(call("put", ("n", "1"), ("path", "a"), ("n", "2")))[1] == [("put", {"n": 2, "path": "a"})]


def test_an_empty_value_of_a_type_without_an_empty_form_is_left_out(parse):
    events, _ = parse([call("put", ("n", ""), ("path", ""))], TOOLS, thinking=False)
    assert collect(events).tool_calls[0].arguments == '{"path": ""}'
    events, _ = parse([call("put", ("n", ""))], TOOLS, thinking=False)
    assert collect(events).tool_calls[0].arguments == "{}"


def test_events_of_a_call_as_it_streams():
    parser = OutputParser(TOOLS, thinking=False)
    pieces = ["Hi\n<tool", "_call>\n<function=put>", "\n<parameter=body>\na", "\n", "b\n</param", "eter>\n"]
    pieces += ["<parameter=n>\n", "12", "\n</parameter>\n", "</function>\n</tool_call>\n", "Bye"]
    events = [parser.feed(piece) for piece in pieces]
    start = events[1][0]
    assert isinstance(start, ToolCallStart) and start.id.startswith("call_")
    assert events == [
        [ContentDelta("Hi\n")],
        [ToolCallStart(0, start.id, "put")],
        [ToolCallArguments(0, '{"body": "a')],
        [],
        [ToolCallArguments(0, "\\nb")],
        [],
        [ToolCallArguments(0, '"')],
        [],
        [],
        [ToolCallArguments(0, ', "n": 12}'), ToolCallEnd(0)],
        [ContentDelta("\nBye")],
    ]
    assert parser.finish() == []
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


def test_a_call_that_a_stop_string_cut_is_no_call():
    parser = OutputParser(TOOLS, thinking=False)
    events = parser.feed("<tool_call><function=run><parameter=command>ls") + parser.finish(cut=True)
    assert collect(events).tool_calls == []
    assert parser.finish_reason("stop") == "stop"


def test_no_tag_text_in_content_that_is_cut(answer):
    text = "Hi " + call("run", ("command", "ls"))
    for end in range(len("Hi <tool_call>"), len(text)):
        assert answer(text[:end], cut=True)[0] in ("Hi ", "Hi")
    assert answer("a <b", cut=True)[0] == "a <b"
