import re

import pytest

from leyden.synthetic import values
from leyden.synthetic.draw import Draw

KINDS = [*values.KINDS, "city", "date", "minutes", "seconds", "days", "id", "int:3:9", "enum:low:high", "list:tag"]
TYPES = {"string": str, "integer": int, "number": (int, float), "array": list, "object": dict}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_values_fit_their_schema(kind, split):
    schema = values.schema(kind)
    for i in range(60):
        value = values.sample(Draw(2, i, split), kind, thinking=i % 2 == 0, hint="ticket")
        assert isinstance(value.json, TYPES[schema["type"]])
        assert value.said
        if "enum" in schema:
            assert value.json in schema["enum"]
        if schema["type"] == "object":
            assert list(value.json) == list(schema["properties"]) == schema["required"]


def test_integers_are_said_in_digits_or_words():
    said = {values.integer(Draw(0, i, "train"), 3, 5).said for i in range(80)}
    assert said == {"3", "4", "5", "three", "four", "five"}


def test_dates_are_iso():
    for i in range(80):
        value = values.sample(Draw(1, i, "train"), "date", thinking=True)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", value.json)
        assert (value.said == value.json) == (not value.working)


def test_without_thinking_nothing_needs_arithmetic():
    for i in range(80):
        value = values.sample(Draw(1, i, "train"), "minutes")
        assert value.said == f"{value.json} minutes" and not value.working


def test_listed():
    assert [values.listed(list(items)) for items in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]


def test_defaults():
    assert [values.default(kind) for kind in ("flag", "enum:a:b", "int:2:5", "city")] == [False, "a", 2, None]


def test_counts_are_objects_of_numbers():
    value = values.sample(Draw(0, 0, "train"), "counts:beds:rooms")
    assert values.schema("counts:beds:rooms")["required"] == list(value.json) == ["beds", "rooms"]
    assert all(f"{key} {count}" in value.said for key, count in value.json.items())
