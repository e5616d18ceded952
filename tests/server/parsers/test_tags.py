import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.server.parsers.tags import SPECIAL, Lexer, Tag, blank, raw


def lex(pieces, special_at=None):
    """Tokens with neighbouring text joined, and the unfinished tag at the end."""
    lexer = Lexer(special_at)
    joined = []
    for token in (token for piece in pieces for token in lexer.feed(piece)):
        if isinstance(token, str) and joined and isinstance(joined[-1], str):
            joined[-1] += token
        else:
            joined.append(token)
    return joined, lexer.flush()


@pytest.mark.parametrize(
    ("text", "kind", "name", "whole"),
    [
        ("<think>", "think", "", True),
        ("</tool_call>", "/tool_call", "", True),
        ("<function=a.b-c_1>", "function", "a.b-c_1", True),
        ("< function = get it >", "function", "get it", True),
        ("<function=>", "function", "", True),
        ("< / parameter >", "/parameter", "", True),
        ("</function_invocation>", "/function_invocation", "", True),
        ("<parameter=größe>", "parameter", "größe", True),
    ],
)
def test_tags(text, kind, name, whole):
    for pieces in ([text], list(text)):
        assert lex(pieces) == ([Tag(text, kind, name, whole)], "")


@pytest.mark.parametrize("end", ["\n", "<"])
def test_a_name_ends_at_a_line_end_or_at_the_next_tag(end):
    for pieces in (["<function=run" + end], list("<function=run" + end)):
        tokens, tail = lex(pieces)
        assert tokens[0] == Tag("<function=run", "function", "run", False)
        assert "".join(map(raw, tokens[1:])) + tail == end


@pytest.mark.parametrize(
    "text",
    [
        "<thinker>",
        "< think>",
        "<tool_call >",
        "<function>",
        "</tool>",
        "<  function=a>",
        "<function=" + "x" * 300 + ">",
    ],
)
def test_text(text):
    for pieces in ([text], list(text)):
        assert lex(pieces) == ([text], "")


@pytest.mark.parametrize(
    "text", ["<", "</", "< /", "<tool_cal", "</thin", "<function", "< parameter = ke", "</function_x"]
)
def test_an_unfinished_tag_is_held_back(text):
    for pieces in (["a" + text], list("a" + text)):
        assert lex(pieces) == (["a"], text)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL, "<", "/", "function", "=", ">", "parameter", " ", "\n", "a", "think"])))
def test_nothing_is_lost_and_pieces_do_not_matter(parts):
    text = "".join(parts)
    tokens, tail = lex([text])
    assert "".join(map(raw, tokens)) + tail == text
    assert lex(parts) == lex(list(text)) == (tokens, tail)


def test_think_tags_count_only_where_special_tokens_stand():
    text = "a</think>b</think><think>"
    for pieces in ([text], list(text)):
        assert lex(pieces, {10}) == (["a</think>b", Tag("</think>", "/think"), "<think>"], "")
    assert lex(["<tool_call>"], set()) == ([Tag("<tool_call>", "tool_call")], "")


def test_blank():
    assert blank("") and blank(" \n") and not blank("a") and not blank(Tag("<think>", "think"))
