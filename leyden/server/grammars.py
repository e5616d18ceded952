"""From the fields of a request to the grammar of its answer.

    response_format, structured_outputs, guided_*    what the answer is: JSON, a choice, a regular expression ...
    tools                                            calls as the chat format has them, where tool_choice or a tool's
                                                     `strict` asks for it

With tools that may be called and a wish for the answer, the answer is either. Fields and their meaning are those of
OpenAI's API and of vLLM; a structural tag is xgrammar's. Whether a schema, an expression or a grammar is right is for
the engine to say, which compiles it: here only its shape is looked at. RequestError names the field.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.errors import RequestError
from leyden.text.thinking import CALLS, ENDS, OPENS
from leyden.types import MOST_BLANKS, Grammar

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# The names that structured_outputs had in older versions of vLLM, one field for each kind.
LEGACY = {f"guided_{kind}": kind for kind in ("json", "json_object", "regex", "choice", "grammar")}


def of_answer(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    legacy: Mapping[str, Any],
    compact: bool = False,
) -> Grammar | None:
    """What the answer has to be; None if that is free.

    legacy   the fields of LEGACY that are given
    compact  no white space in JSON
    """
    found: list[Grammar | None] = [_grammar(LEGACY[name], value, name, compact) for name, value in legacy.items()]
    if response_format is not None:
        found.append(_response_format(response_format, compact))
    if structured_outputs is not None:
        found.append(_structured_outputs(structured_outputs, compact))
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        names = " and ".join(grammar.param for grammar in grammars)
        raise RequestError(f"{names} both say what the answer must be: give one of them", grammars[-1].param)
    return grammars[0] if grammars else None


def _response_format(given: Mapping[str, Any], compact: bool) -> Grammar | None:
    param = "response_format"
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return _grammar("json_object", True, param, compact)
        case "json_schema":
            named = given.get("json_schema")
            if not isinstance(named, Mapping):
                raise RequestError("response_format.json_schema must be an object with a name and a schema", param)
            schema = named.get("schema")
            return _grammar("json_object", True, param, compact) if schema is None else _json(schema, param, compact)
        case "structural_tag":
            return _grammar("structural_tag", given, param, compact)
        case kind:
            kinds = "text, json_object, json_schema or structural_tag"
            raise RequestError(f"response_format.type must be {kinds}, got {kind!r}", param)


def _structured_outputs(given: Mapping[str, Any], compact: bool) -> Grammar:
    param = "structured_outputs"
    kinds = [kind for kind in _KINDS if given.get(kind) is not None]
    if len(kinds) != 1:
        raise RequestError(f"{param} must hold one of {', '.join(_KINDS)}, got {', '.join(kinds) or 'none'}", param)
    return _grammar(kinds[0], given[kinds[0]], param, compact or bool(given.get("disable_any_whitespace")))


def _grammar(kind: str, value: Any, param: str, compact: bool) -> Grammar:
    match kind, value:
        case "json", _:
            return _json(value, param, compact)
        case "json_object", True:
            return _json({"type": "object"}, param, compact)
        case "regex", str() if value:
            return Grammar("regex", value, param)
        case "choice", list() if value and all(isinstance(item, str) and item for item in value):
            strings = [{"type": "const_string", "value": item} for item in value]
            return _tag({"type": "or", "elements": strings}, param)
        case "grammar", str() if value:
            return Grammar("ebnf" if "::=" in value else "lark", value, param)
        case "structural_tag", str():
            return _grammar(kind, _object(value, param), param, compact)
        case "structural_tag", Mapping():
            return _tag(value["format"] if "format" in value else _older_tag(value, param), param)
    wanted = {
        "json_object": "true",
        "choice": "a list of texts, none of them empty",
        "structural_tag": "an object with a format",
    }
    raise RequestError(f"{param}: {kind} must be {wanted.get(kind, 'a text')}, got {value!r:.80}", param)


def _json(schema: Any, param: str, compact: bool) -> Grammar:
    if not isinstance(schema, str | Mapping | bool):
        raise RequestError(f"{param}: a JSON schema is an object, got {type(schema).__name__}", param)
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Grammar("compact_json" if compact else "json", text, param)


def _older_tag(given: Mapping[str, Any], param: str) -> dict[str, Any]:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]} as a format."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in given["structures"]
        ]
        return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}
    except (KeyError, TypeError):
        raise RequestError(f"{param}: a structural tag has a format, or structures and triggers", param) from None


def _tag(form: Any, param: str) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}), param)


def _object(text: str, param: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param}: it is not JSON: {error}", param) from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{param}: it must be a JSON object, got {type(value).__name__}", param)
    return value


# Tools


def of_tools(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool,
    answer: Grammar | None,
    level: str = "auto",
) -> Grammar | None:
    """What an answer that may call `tools` has to be: calls for choice "required" or a tool's name, else `answer` or
    calls, else calls among free text. None if that leaves nothing to say.

    level   what is enforced: "function" the names; "parameter" the parameters of all tools too; "auto" both for calls
            that have to come, and else for tools with strict=true (then the names of the others as well)
    """
    functions = [tool["function"] for tool in tools]
    must = choice == "required" or isinstance(choice, Mapping)
    if isinstance(choice, Mapping):
        functions = [function for function in functions if function["name"] == choice["function"]["name"]]
        parallel = False
    if not must and answer is None and level == "auto" and not any(function.get("strict") for function in functions):
        return None
    tags = [_call(f, level == "parameter" or level == "auto" and (must or bool(f.get("strict")))) for f in functions]
    if not must and answer is None:
        return _tag(
            {
                "type": "triggered_tags",
                "triggers": [CALLS],
                "tags": tags,
                "excludes": [OPENS, ENDS],
                "stop_after_first": not parallel,
            },
            "tools",
        )
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    form: dict[str, Any] = {"type": "sequence", "elements": [{"type": "regex", "pattern": r"\n{0,2}"}, calls]}
    if not must and answer is not None:
        form = {"type": "or", "elements": [_form(answer), form]}
    return _tag(form, "tools")


def _call(function: Mapping[str, Any], parameters: bool) -> dict[str, Any]:
    """One call as a structural tag; `parameters`: they follow the tool's schema."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "tag",
        "begin": f"{CALLS}\n<function={function['name']}>\n",
        "content": {
            "type": "json_schema",
            "json_schema": schema if parameters else True,
            "style": "qwen_xml",
            "max_whitespace_cnt": 1,  # the line ends of the format; around listed words more would be part of the value
        },
        "end": "</function>\n</tool_call>",
    }


def _form(grammar: Grammar) -> Any:
    """A grammar as a part of a structural tag. There, JSON is never compact."""
    text = grammar.text
    match grammar.kind:
        case "json" | "compact_json":
            try:
                schema = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{grammar.param}: it is not JSON: {error}", grammar.param) from None
            return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_BLANKS}
        case "regex":
            return {"type": "regex", "pattern": text}
        case "structural_tag":
            return json.loads(text)["format"]
        case syntax:
            return {"type": "grammar", "grammar": text, "syntax": syntax}
