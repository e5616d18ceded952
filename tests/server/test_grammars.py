"""From fields to grammars. That the grammars do what they should is for test_structured.py."""

import json
from typing import Any

import pytest

from leyden.errors import RequestError
from leyden.server.protocol import ChatRequest, CompletionRequest
from leyden.types import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = {"type": "object"}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


def tag(form: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


FORM = {"type": "any_text"}
OLDER = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
OLDER_FORM = {
    "type": "triggered_tags",
    "triggers": ["<a"],
    "tags": [{"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}],
}
CHOICE = {"type": "or", "elements": [{"type": "const_string", "value": value} for value in ("a", "b")]}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", json.dumps(OBJECT)),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json", json.dumps(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json", json.dumps(OBJECT)),
        ({"response_format": {"type": "structural_tag", "format": FORM}}, "structural_tag", tag(FORM)),
        ({"response_format": {"type": "structural_tag", **OLDER}}, "structural_tag", tag(OLDER_FORM)),
        ({"structured_outputs": {"json": SCHEMA}}, "json", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": '{"a": 1}'}}, "json", '{"a": 1}'),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "compact_json", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json", json.dumps(OBJECT)),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structural_tag", tag(CHOICE)),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
        ({"structured_outputs": {"structural_tag": tag(FORM)}}, "structural_tag", tag(FORM)),
        ({"structured_outputs": {"structural_tag": json.dumps(OLDER)}}, "structural_tag", tag(OLDER_FORM)),
        ({"guided_json": SCHEMA}, "json", json.dumps(SCHEMA)),
        ({"guided_json_object": True}, "json", json.dumps(OBJECT)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"], "guided_json": None}, "structural_tag", tag(CHOICE)),
        ({"guided_grammar": 'root ::= "a"', "guided_json_object": False}, "ebnf", 'root ::= "a"'),
    ],
)
def test_what_an_answer_must_be(fields, kind, text):
    for body in (completion(**fields), chat(**fields)):
        assert body.grammar() == Grammar(kind, text)
        assert body.grammar().param in fields


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_answers_without_a_grammar(fields):
    assert completion(**fields).grammar() is None and chat(**fields).grammar() is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "xml"}}, "type must be text, json_object"),
        ({"response_format": {}}, "type must be text, json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "must be an object with a name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "a JSON schema is an object"),
        ({"response_format": {"type": "structural_tag"}}, "a structural tag has a format"),
        ({"response_format": {"type": "structural_tag", "structures": 5, "triggers": []}}, "a structural tag has"),
        ({"structured_outputs": {}}, "must hold one of json, .* got none"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "got json, regex"),
        ({"structured_outputs": {"regex": 5}}, "regex must be a text, got 5"),
        ({"structured_outputs": {"regex": ""}}, "regex must be a text"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "choice must be a list of texts, none of them empty"),
        ({"structured_outputs": {"choice": [1]}}, "choice must be a list"),
        ({"structured_outputs": {"grammar": {"a": 1}}}, "grammar must be a text"),
        ({"structured_outputs": {"json_object": False}}, "json_object must be true"),
        ({"structured_outputs": {"structural_tag": "{"}}, "not JSON"),
        ({"structured_outputs": {"structural_tag": "[1]"}}, "must be a JSON object"),
        ({"structured_outputs": {"structural_tag": 5}}, "must be an object with a format"),
        ({"guided_choice": []}, "choice must be a list"),
    ],
)
def test_wishes_without_a_meaning_are_refused(fields, says):
    with pytest.raises(RequestError, match=says) as caught:
        chat(**fields).grammar()
    assert caught.value.param in fields


def test_two_wishes_are_refused():
    with pytest.raises(RequestError, match="guided_regex and response_format both say"):
        completion(guided_regex="a", response_format={"type": "json_object"}).grammar()


# tools


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("f", parameters=SCHEMA), tool("g", parameters=SCHEMA, strict=True), tool("h")]


def form(**fields: Any) -> Any:
    grammar = chat(**{"tools": TOOLS, **fields}).grammar(level=fields.pop("level", "auto"))
    assert grammar is not None and grammar.kind == "structural_tag" and grammar.param == "tools"
    return json.loads(grammar.text)["format"]


def bodies(tags: Any) -> dict[str, Any]:
    """Schema by tool."""
    names = [tag["begin"].removeprefix("<tool_call>\n<function=").removesuffix(">\n") for tag in tags]
    return dict(zip(names, [tag["content"]["json_schema"] for tag in tags], strict=True))


NOTHING = {"type": "object", "properties": {}}


def test_no_tools_and_loose_tools_need_no_grammar():
    for fields in ({}, {"parallel_tool_calls": False}, {"tool_choice": "auto"}):
        assert chat(tools=[tool("f", parameters=SCHEMA)], **fields).grammar() is None
    assert chat(tools=TOOLS, tool_choice="none").grammar() is None
    wish = {"structured_outputs": {"regex": "a"}}
    assert chat(tools=TOOLS, tool_choice="none", **wish).grammar() == Grammar("regex", "a")


def test_required_is_calls_and_nothing_else():
    lead, calls = form(tool_choice="required")["elements"]
    assert lead == {"type": "regex", "pattern": r"\n{0,2}"}
    assert calls["at_least_one"] and not calls["stop_after_first"]
    assert bodies(calls["tags"]) == {"f": SCHEMA, "g": SCHEMA, "h": NOTHING}
    assert form(tool_choice="required", parallel_tool_calls=False)["elements"][1]["stop_after_first"]
    assert form(tool_choice="required", response_format={"type": "json_object"}) == form(tool_choice="required")


def test_a_named_tool_is_called_once():
    _, calls = form(tool_choice={"type": "function", "function": {"name": "h"}})["elements"]
    assert bodies(calls["tags"]) == {"h": NOTHING} and calls["at_least_one"] and calls["stop_after_first"]


def test_strict_tools_are_held_to_their_schema_among_free_text():
    calls = form()
    assert calls["type"] == "triggered_tags" and calls["triggers"] == ["<tool_call>"]
    assert bodies(calls["tags"]) == {"f": True, "g": SCHEMA, "h": True} and not calls["stop_after_first"]
    assert form(parallel_tool_calls=False)["stop_after_first"]


@pytest.mark.parametrize(
    ("level", "choice", "wanted"),
    [
        ("function", "auto", {"f": True, "g": True, "h": True}),
        ("function", "required", {"f": True, "g": True, "h": True}),
        ("parameter", "auto", {"f": SCHEMA, "g": SCHEMA, "h": NOTHING}),
    ],
)
def test_the_server_may_say_how_strict_it_is(level, choice, wanted):
    grammar = chat(tools=TOOLS, tool_choice=choice).grammar(level=level)
    assert grammar is not None
    found = json.loads(grammar.text)["format"]
    assert bodies(found["tags"] if choice == "auto" else found["elements"][1]["tags"]) == wanted


@pytest.mark.parametrize(
    ("wish", "part"),
    [
        ({"json": SCHEMA}, {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 16}),
        ({"regex": "a"}, {"type": "regex", "pattern": "a"}),
        ({"choice": ["a", "b"]}, CHOICE),
        ({"grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"', "syntax": "ebnf"}),
        ({"grammar": 'start: "a"'}, {"type": "grammar", "grammar": 'start: "a"', "syntax": "lark"}),
        ({"structural_tag": {"format": FORM}}, FORM),
    ],
)
def test_with_a_wish_for_the_answer_it_is_that_or_calls(wish, part):
    either = form(tools=[tool("f")], structured_outputs=wish)
    assert either["type"] == "or" and either["elements"][0] == part
    assert bodies(either["elements"][1]["elements"][1]["tags"]) == {"f": True}


def test_a_schema_that_is_no_json_is_refused_beside_tools_too():
    with pytest.raises(RequestError, match="structured_outputs: it is not JSON"):
        chat(tools=[tool("f")], structured_outputs={"json": "{"}).grammar()
