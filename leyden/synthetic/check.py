"""Whether an answer is right: the model's message against what the example expects.

Kinds of check:
    tool_calls  the same calls, by name and by arguments in full (numbers by value, booleans are not numbers); the order
                does not count, because parallel calls have none
    answer      the expected text (or one of several) after trimming lines and a final full stop; no tool calls
    json        the content is JSON and equal in full; a ``` fence around it is allowed
    mentions    every expected piece of text occurs in the content
"""

import json
from collections.abc import Mapping
from typing import Any


def check(example: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether `message` (an assistant message of the OpenAI API) is a right last turn of `example`."""
    kind, expected = example["check"]["kind"], example["check"]["expected"]
    content = message.get("content") or ""
    calls = message.get("tool_calls") or []
    if kind == "tool_calls":
        return _same_calls(expected, calls)
    if calls:
        return False
    match kind:
        case "answer":
            accepted = expected if isinstance(expected, list) else [expected]
            return normalised(content) in [normalised(text) for text in accepted]
        case "json":
            try:
                return same(expected, json.loads(_unfenced(content)))
            except ValueError:
                return False
        case "mentions":
            return all(text in content for text in expected)
        case _:
            raise ValueError(f"check.kind must be tool_calls, answer, json or mentions, found {kind!r}")


def normalised(text: str) -> str:
    """`text` without blanks at the ends of lines and of the whole, and without one final full stop."""
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return lines.removesuffix(".").rstrip()


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 5 equals 5.0, but true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _same_calls(expected: list[dict[str, Any]], calls: list[Mapping[str, Any]]) -> bool:
    found = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        try:
            found.append((function["name"], json.loads(arguments or "{}") if isinstance(arguments, str) else arguments))
        except ValueError:
            return False
    for wanted in expected:
        matches = [
            i for i, (name, value) in enumerate(found) if name == wanted["name"] and same(value, wanted["arguments"])
        ]
        if not matches:
            return False
        del found[matches[0]]
    return not found


def _unfenced(text: str) -> str:
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text[text.index("\n") : -3]
    return text
