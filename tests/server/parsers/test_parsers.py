"""The cases of public bug reports and the goldens, cut in many ways, and the laws that hold for any output."""

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.server.parsers import (
    REASONING_PARSERS,
    SPECIAL,
    TOOL_PARSERS,
    ContentDelta,
    OutputParser,
    ReasoningDelta,
    ReasoningIsContent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from leyden.text.stream import TextStream
from leyden.text.tokenizer import Tokenizer
from leyden.types import SamplingParams

DATA = Path(__file__).parent.parent.parent / "data/parser"


def load(name):
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


CASES, AGREED, DIFFERENT = load("cases"), load("agreed"), load("different")
BY_ID = {case["id"]: case for case in CASES}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "n": {"type": "integer"},
                    "o": {"type": ["object", "null"]},
                    "b": {"type": "boolean"},
                },
            },
        },
    },
    {"name": "now"},
]


def cut_at(text, cuts):
    edges = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def at_random(text, seed):
    draw = random.Random(seed)
    return cut_at(text, [draw.randint(0, len(text)) for _ in range(draw.randint(1, 12))])


def steps(text, n):
    return [text[i : i + n] for i in range(0, len(text), n)]


def few_cuttings(text):
    return [[text], list(text), steps(text, 3), steps(text, 7), *(at_random(text, seed) for seed in range(5))]


def all_cuttings(text):
    singles = [[text[:i], text[i:]] for i in range(1, len(text))]
    return [[text], list(text), *singles, *(at_random(text, seed) for seed in range(50))]


def run_case(parse, case, pieces):
    kwargs = case.get("chat_template_kwargs", {})
    return parse(
        pieces,
        case["tools"],
        cut="engine_finish_reason" in case,
        thinking=case["thinking"],
        force_nonempty_content=kwargs.get("force_nonempty_content", False),
    )


def typed(value):
    """JSON with the types of its values; a number is a number."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    return (kind, value)


def result(events, finish_reason):
    """As the common rules compare it: texts trimmed, arguments parsed once."""
    parsed = collect(events)
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in parsed.tool_calls]
    return {
        "reasoning": (parsed.reasoning or "").strip() or None,
        "content": (parsed.content or "").strip() or None,
        "tool_calls": calls,
        "finish_reason": finish_reason,
    }


def check_case(parse, case, cuttings):
    whole = run_case(parse, case, [case["text"]])
    expected = {**case["expected"], "content": (case["expected"]["content"] or "").strip() or None}
    expected["reasoning"] = (expected["reasoning"] or "").strip() or None
    assert typed(result(*whole)) == typed(expected)
    for pieces in cuttings:
        assert run_case(parse, case, pieces) == whole, pieces


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_D10_cases_in_every_cutting(parse, case):
    check_case(parse, case, all_cuttings(case["text"]))


@pytest.mark.parametrize("case", AGREED, ids=lambda case: case["id"])
def test_goldens(parse, case):
    check_case(parse, case, few_cuttings(case["text"]))


@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case["id"])
def test_where_we_differ_on_purpose(parse, case):
    check_case(parse, case, few_cuttings(case["text"]))


def test_D01_long_values_come_in_small_steps():
    case = BY_ID["D01"]
    parser = OutputParser(case["tools"], thinking=False)
    silent = longest = 0
    inside = False
    for char in case["text"]:
        events = parser.feed(char)
        inside = inside or any(isinstance(event, ToolCallArguments) for event in events)
        silent = 0 if any(isinstance(event, ToolCallArguments) for event in events) else silent + inside
        longest = max(longest, silent)
    assert longest <= 64


def test_D09_text_is_not_held_longer_than_the_tag():
    text = BY_ID["D09"]["text"]
    parser = OutputParser(BY_ID["D09"]["tools"], thinking=False)
    shown = 0
    for position, char in enumerate(text, 1):
        shown += sum(len(event.text) for event in parser.feed(char))
        assert position - shown <= len("<tool_call> ")
    assert shown == len(text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_D10_shape_of_the_deltas(parse, case):
    events, _ = run_case(parse, case, list(case["text"]))
    started, ended, arguments = [], [], {}
    for event in events:
        match event:
            case ToolCallStart(index, _, name):
                assert index == len(started) == len(ended) and name
                started.append(index)
            case ToolCallArguments(index, text):
                assert index == started[-1] and text
                arguments[index] = arguments.get(index, "") + text
            case ToolCallEnd(index):
                assert index == started[-1] == len(ended)
                ended.append(index)
            case ContentDelta(text) if case["id"] != "D09":
                assert not any(tag in text for tag in ("<tool", "</tool", "<func", "</func", "<param", "</param"))
    assert started == ended
    assert all(isinstance(json.loads(text), dict) for text in arguments.values())


BODY = "0123456789" * 20
D11 = (
    "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n<parameter=content>\n"
    f"{BODY}\n</parameter>\n</function>\n</tool_call>"
)
WRITE_FILE = [{"function": {"name": "write_file", "parameters": {"properties": {"path": {}, "content": {}}}}}]
FULL = json.dumps({"path": "a.txt", "content": BODY})


@pytest.mark.parametrize("end", range(len("<tool_call>"), len(D11)))
def test_D11_cut_call(parse, end):
    events, reason = parse(list(D11[:end]), WRITE_FILE, cut=True, thinking=False)
    parsed = collect(events)
    assert reason == "length"
    assert parsed.content is None
    sent = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
    assert FULL.startswith(sent)
    complete = end >= D11.index("</function>") + len("</function>")
    assert [call.arguments for call in parsed.tool_calls] == ([FULL] if complete else [])


def test_D14a_thinking_is_sent_again_as_content(parse):
    events, _ = run_case(parse, BY_ID["D14a"], list(BY_ID["D14a"]["text"]))
    assert events == [ReasoningDelta("The answer is 4."), ReasoningIsContent("The answer is 4.")]


# --- laws

FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=run>", "<function=now>", "<function=other>"),
    *("<function=", "<function=run", "</function>", "</ function >", "</function_call>", "<parameter=command>"),
    *("<parameter=n>", "<parameter=o>", "<parameter=zzz>", "< parameter = b >", "<parameter=", "</parameter>"),
    *("</parameter >", "\n", " ", "  \n", "text", "a < b", "5", "null", '{"a": 1}', "True", "```", "\n```\n", "<"),
    *("</", "ü🙂", '\\"', "x" * 50, "<param", "\r\n", "Hello there. ", "\n<parameter=n>\n"),
    "<function=run>\n<parameter=command>\nls\n</parameter>\n</function>",
    "<tool_call>\n<function=run>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
]
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.text()
options = st.fixed_dictionaries(
    {
        "tools": st.sampled_from([TOOLS, TOOLS, None]),
        "cut": st.booleans(),
        "thinking": st.booleans(),
        "force_nonempty_content": st.booleans(),
        "parallel_tool_calls": st.booleans(),
        "reasoning_parser": st.sampled_from(["nemotron_v3", "nemotron_v3", None]),
    }
)


@settings(max_examples=500, deadline=None)
@given(outputs, st.lists(st.integers(0, 1000), max_size=6), options)
def test_any_output_gives_the_same_in_any_pieces(parse, text, cuts, options):
    whole = parse([text], **options)
    assert parse(list(text), **options) == whole
    assert parse(cut_at(text, [cut % (len(text) + 1) for cut in cuts]), **options) == whole


@settings(max_examples=300, deadline=None)
@given(outputs, options)
def test_calls_are_well_formed(parse, text, options):
    events, reason = parse([text], **options)
    started = [event.index for event in events if isinstance(event, ToolCallStart)]
    ended = [event.index for event in events if isinstance(event, ToolCallEnd)]
    assert started == list(range(len(started)))
    assert ended == started or options["cut"] and ended == started[:-1]
    assert len(started) <= 1 or options["parallel_tool_calls"]
    for call in collect(events).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    assert (reason == "tool_calls") == (bool(started) and not options["cut"])


@settings(max_examples=200, deadline=None)
@given(outputs)
def test_without_tools_and_thinking_nothing_is_lost(parse, text):
    events, reason = parse(list(text), thinking=False, reasoning_parser=None)
    assert reason == "stop"
    assert events == ([ContentDelta(text)] if text.strip() else [])


@pytest.mark.parametrize(
    ("before", "unit", "after"),
    [
        ("", "thinking < more\n", "</think>answer"),
        ("</think>", "some answer text\n", ""),
        ("</think>", " \n", ""),
        ("</think>", "<", ""),
        ("</think>", "<tool_call>", ""),
        ("</think>", "<function=", ""),
        ("</think>", "<tool_call><function=run><parameter=command>ls</parameter></function></tool_call>", ""),
        ("</think>", "<tool_call><function=run><parameter=command>ls</function></tool_call>\n", ""),
        ("</think>", "<tool_call><function=run><parameter=command>ls", ""),
        ("</think><tool_call><function=run><parameter=command>", "x = 1 < 2\n", "</parameter></function>"),
        ("</think><tool_call><function=run><parameter=o>", '{"a": 1}, ', "</parameter></function>"),
        ("</think><tool_call><function=run><parameter=command></function>", "</parameter>x", ""),
        ("</think><tool_call><function=run><parameter=command></function>", "</tool_call>x", ""),
        ("<tool_call><function=run>", "<parameter=command>x</parameter>", "</function></tool_call>"),
        ("<tool_call><function=run><parameter=command>", "</think>", ""),
    ],
)
def test_work_is_linear(before, unit, after):
    """Four times the output takes four times the function calls, and what is read again with each piece is short."""

    def work(n, size):
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        text = before + unit * n + after
        parser = OutputParser(TOOLS, thinking=True)
        held = 0
        sys.setprofile(count)
        try:
            for piece in steps(text, size):
                parser.feed(piece)
                held = max(held, len(parser._lexer._held))
            parser.finish()
        finally:
            sys.setprofile(None)
        return calls, held

    for size in (3, 10**9):
        small, _ = work(100, size)
        large, held = work(400, size)
        assert large <= 4.2 * small
        assert held < 300


# --- names, and the way from token ids


def test_names():
    assert set(REASONING_PARSERS) == {None, "nemotron_v3", "nano_v3", "super_v3", "qwen3", "deepseek_r1"}
    assert set(TOOL_PARSERS) == {"qwen3_coder", "qwen3_xml"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from leyden.testing.tokenizer import write

    folder = tmp_path_factory.mktemp("tokenizer")
    write(folder)
    return Tokenizer.from_folder(folder)


def events_of(ids, tokenizer, tools, step=1):
    stream = TextStream(tokenizer, SamplingParams(), keep=[tokenizer.added[text] for text in SPECIAL])
    parser = OutputParser(tools, thinking=True, special_at=stream.special_at)
    events = []
    for i in range(0, len(ids), step):
        events += parser.feed(stream.push(ids[i : i + step]))
    return events + parser.feed(stream.finish()) + parser.finish()


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_spelled_think_tags_are_text_where_tokens_are_known(tokenizer, step):
    spelled = tokenizer.encode("Tags are <think> and </think>, aren't they?", special=False)
    answer = tokenizer.encode("Yes: </think>.", special=False)
    parsed = collect(events_of([*spelled, tokenizer.added["</think>"], *answer], tokenizer, None, step))
    assert parsed.reasoning == "Tags are <think> and </think>, aren't they?"
    assert parsed.content == "Yes: </think>."


@pytest.mark.parametrize("special", [True, False])
def test_calls_are_found_as_tokens_and_as_text(tokenizer, special):
    case = BY_ID["D02"]
    ids = [tokenizer.added["</think>"], *tokenizer.encode(case["text"], special=special)]
    for step in (1, 3, 1000):
        parsed = collect(events_of(ids, tokenizer, case["tools"], step))
        assert [json.loads(call.arguments) for call in parsed.tool_calls] == [
            call["arguments"] for call in case["expected"]["tool_calls"]
        ]
        assert parsed.content == case["expected"]["content"]


def test_other_special_tokens_leave_no_text(tokenizer):
    ids = tokenizer.encode("a<SPECIAL_18></think>b<|im_start|><|im_end|>")
    assert collect(events_of(ids, tokenizer, None)).content == "b"
