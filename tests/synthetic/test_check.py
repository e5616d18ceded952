import pytest

from leyden.synthetic.check import check, normalised, same


def example(kind, expected):
    return {"check": {"kind": kind, "expected": expected}}


def calls(*pairs):
    return {"content": None, "tool_calls": [{"function": {"name": name, "arguments": args}} for name, args in pairs]}


WEATHER = [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]


@pytest.mark.parametrize(
    ("message", "right"),
    [
        (calls(("get_weather", '{"city": "Oslo", "days": 2}')), True),
        (calls(("get_weather", '{"days": 2.0, "city": "Oslo"}')), True),
        (calls(("get_weather", {"city": "Oslo", "days": 2})), True),
        (calls(("get_weather", '{"city": "Oslo"}')), False),
        (calls(("get_weather", '{"city": "Oslo", "days": "2"}')), False),
        (calls(("get_weather", '{"city": "Oslo", "days": 2, "units": "c"}')), False),
        (calls(("weather", '{"city": "Oslo", "days": 2}')), False),
        (calls(("get_weather", '{"city": "Oslo", "da')), False),
        (calls(*[("get_weather", '{"city": "Oslo", "days": 2}')] * 2), False),
        ({"content": "It is cold."}, False),
    ],
)
def test_tool_calls(message, right):
    assert check(example("tool_calls", WEATHER), message) is right


def test_parallel_calls_may_come_in_any_order():
    expected = [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": True}}]
    assert check(example("tool_calls", expected), calls(("b", '{"x": true}'), ("a", "")))
    assert not check(example("tool_calls", expected), calls(("b", '{"x": 1}'), ("a", "{}")))


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("42 kg", True),
        (" 42 kg.\n", True),
        ("42", True),
        ("43 kg", False),
        ("42 KG", False),
        ("It is 42 kg", False),
        (None, False),
    ],
)
def test_answer(content, right):
    assert check(example("answer", ["42 kg", "42"]), {"content": content}) is right


def test_an_answer_with_calls_is_wrong():
    assert not check(example("answer", "ok"), {"content": "ok"} | calls(("a", "{}")) | {"content": "ok"})


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ('{"a": 1, "b": [null]}', True),
        ('```json\n{"b": [null], "a": 1}\n```', True),
        ('{"a": 1}', False),
        ("a: 1", False),
    ],
)
def test_json(content, right):
    assert check(example("json", {"a": 1, "b": [None]}), {"content": content}) is right


def test_mentions():
    wanted = example("mentions", ["--port", "8000"])
    assert check(wanted, {"content": "Use --port; the default is 8000."})
    assert not check(wanted, {"content": "Use --port."})


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="check.kind must be tool_calls, answer, json or mentions, found 'vibes'"):
        check(example("vibes", ""), {"content": "x"})


def test_lines_are_kept():
    assert normalised("- a \n- b\n\n") == "- a\n- b" != normalised("- a - b")


def test_booleans_are_no_numbers():
    assert same(True, True) and same(1, 1.0) and not same(True, 1) and not same(0, False) and not same([1], [1, 2])
