import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.server.parsers.schema import DROP, Parameters, dumps


def read(text, schema, **root):
    return Parameters({"properties": {"p": schema}, **root}).value("p", text)


def same(value, expected):
    return json.dumps(value) == json.dumps(expected)


@pytest.mark.parametrize(
    ("types", "text", "expected"),
    [
        ("string", "null", "null"),
        ("string", " 5 ", " 5 "),
        ("integer", " -7\n", -7),
        ("integer", "+8", 8),
        ("integer", "1_000", "1_000"),
        ("integer", "5.0", 5),
        ("integer", "5.5", 5.5),
        ("integer", "1e3", 1000),
        ("integer", "9" * 5000, "9" * 5000),
        ("integer", "0x10", "0x10"),
        ("integer", "null", None),
        ("integer", "True", "True"),
        ("number", "99.50", 99.5),
        ("number", ".5", 0.5),
        ("number", "12345678901234567890", 12345678901234567890),
        ("number", "1e400", "1e400"),
        ("number", "-inf", "-inf"),
        ("number", "NaN", "NaN"),
        ("number", "٣", 3),
        ("boolean", "FALSE", False),
        ("boolean", "1", True),
        ("boolean", "yes", "yes"),
        ("object", '{"a": 1}', {"a": 1}),
        ("object", "[1]", "[1]"),
        ("object", '"{\\"a\\": 1}"', {"a": 1}),
        ("object", "{'a': None, 'b': (1, 2)}", {"a": None, "b": [1, 2]}),
        ("object", "{'a': open('x')}", "{'a': open('x')}"),
        ("object", '{"a": NaN}', '{"a": NaN}'),
        ("array", "('a', True)", ["a", True]),
        ("array", "{1, 2}", "{1, 2}"),
        ("array", "['\\d']", ["\\d"]),
        ("array", "[" * 100_000, "[" * 100_000),
        ("array", "-" * 60_000 + "1", "-" * 60_000 + "1"),
        ("array", "[b'x']", "[b'x']"),
        (["integer", "string"], "5", 5),
        (["integer", "string"], "5.5", "5.5"),
        (["integer", "string"], "null", "null"),
        (["integer", "string"], "", ""),
        (["string", "null"], "None", None),
        (["string", "null"], "", None),
        (["integer", "boolean"], "1", 1),
        (["integer", "null"], "", None),
        ("integer", "", DROP),
        ("array", " \n", DROP),
        ("int", "3", 3),
        ("dict", "{}", {}),
        ("whatever", "3", "3"),
        ([], "3", "3"),
        (5, "3", "3"),
    ],
)
def test_types(types, text, expected):
    value = read(text, {"type": types})
    assert value is expected or same(value, expected)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({}, "5", "5"),
        (True, "5", "5"),
        (None, "5", "5"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["auto", 0, None]}, "0", 0),
        ({"enum": [True]}, "true", True),
        ({"type": "string", "enum": ["1", 1]}, "1", "1"),
        ({"const": 3}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}]}]}, "null", None),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "4", 4),
        ({"properties": {}}, "{}", {}),
        ({"prefixItems": []}, "[1]", [1]),
        ({"$ref": "#/$defs/a~1b"}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/nowhere"}, "5", "5"),
        ({"$ref": "https://example.org/x"}, "5", "5"),
    ],
)
def test_how_a_schema_says_its_types(schema, text, expected):
    definitions = {"a/b": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]}}
    assert same(read(text, schema, **{"$defs": definitions}), expected)


def test_strings_inside_follow_the_inner_schema():
    inner = {"k": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array", "items": {"type": "boolean"}}}
    schema = {"type": "object", "properties": inner}
    given = {"k": "5", "s": "5", "l": ["true", "no"], "x": "5", "e": ""}
    assert read(json.dumps(given), schema) == {"k": 5, "s": "5", "l": [True, "no"], "x": "5", "e": ""}
    assert read('{"k": ""}', schema) == {"k": ""}
    nested = '{"a": ' * 100 + '"5"' + "}" * 100
    loop = {"type": "object", "properties": {"a": {"$ref": "#/$defs/loop"}}}
    shallow = '{"a": {"a": "5"}}'
    loop["properties"]["a"] = {"anyOf": [loop, {"type": "integer"}]}
    assert read(shallow, loop) == {"a": {"a": 5}}
    assert json.dumps(read(nested, loop)) == nested  # too deep to be worth it
    assert read('["5"]', {"type": "array", "items": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": {"type": "number"}}}) == [
        5
    ]


def test_unknown_parameters():
    assert same(Parameters({"additionalProperties": {"type": "integer"}}).value("x", "5"), 5)
    for schema in ({"additionalProperties": True}, {"properties": None}, None, "x", {}):
        assert Parameters(schema).value("x", "5") == "5"


def test_what_streams():
    parameters = Parameters({"properties": {"s": {"type": "string"}, "n": {"type": ["string", "null"]}, "x": {}}})
    assert [parameters.is_text(name) for name in ("s", "n", "x", "other")] == [True, False, True, True]


schemas = st.recursive(
    st.sampled_from([{}, True, {"type": "integer"}, {"type": ["null", "array"]}, {"enum": [1, "a"]}, {"$ref": "#"}, 5]),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", "boolean", "number"]),
            "anyOf": st.lists(inner, max_size=3),
            "properties": st.dictionaries(st.sampled_from("ab"), inner),
            "items": inner,
        },
    ),
    max_leaves=8,
)
texts = st.text() | st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=6,
).map(json.dumps)


@settings(deadline=None)
@given(schemas, texts)
def test_any_text_for_any_schema_gives_json(schema, text):
    value = read(text, schema)
    assert value is DROP or json.loads(dumps(value)) == value


def test_half_a_surrogate_pair_is_escaped():
    assert dumps({"a": "ü\ud800"}) == '{"a": "\\u00fc\\ud800"}'
    assert dumps({"a": "ü"}) == '{"a": "ü"}'
