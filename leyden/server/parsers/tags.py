"""Cuts model output into text and markup tags, while it arrives and however it arrives.

    <think> </think> <tool_call> </tool_call>      single tokens of the vocabulary, known exactly
    <function=NAME> </function> <parameter=KEY> </parameter>      ordinary text; a blank inside is tolerated

The lexer only cuts; what a tag means, or that it is mere text where it stands, is for the parsers to say.
"""

import re
from collections.abc import Container
from dataclasses import dataclass

from leyden.text.thinking import MARKUP

SPECIAL = MARKUP

_NAME = r"[^<>\n]{0,256}"
_TAG = re.compile(
    r"<(?:/?(?:think|tool_call)>"
    r"| ?/ ?(?:parameter|function\w{0,40}) ?>"
    rf"| ?(?P<opens>parameter|function) ?= ?(?P<name>{_NAME})(?P<end>>|(?=[<\n])))"
)


def _beginning(word: str) -> str:
    """A regular expression for any beginning of the word, the empty one too."""
    return "".join(f"(?:{char}" for char in word) + ")?" * len(word)


_UNFINISHED = re.compile(
    f"<(?:{_beginning('think>')}|{_beginning('/think>')}|{_beginning('tool_call>')}|{_beginning('/tool_call>')}"
    rf"| ?(?:/ ?)?(?:{_beginning('parameter')}|{_beginning('function')})"
    r"| ?/ ?(?:parameter|function\w{0,40}) ?"
    rf"| ?(?:parameter|function) ?(?:= ?{_NAME})?)"
)


@dataclass(slots=True, frozen=True)
class Tag:
    raw: str  # as the model wrote it
    kind: str  # "think", "/think", "tool_call", "/tool_call", "function", "/function", "parameter", "/parameter"
    name: str = ""  # of an opened function or parameter
    whole: bool = True  # False: a name that a line end or "<" ended, not ">"


Token = str | Tag


def raw(token: Token) -> str:
    return token if isinstance(token, str) else token.raw


def blank(token: Token) -> bool:
    return isinstance(token, str) and (not token or token.isspace())


class Lexer:
    """Tokens as soon as they are certain. Holds back nothing but the beginning of a possible tag.

    special_at  offsets in the whole text at which special tokens really stand. `</think>` anywhere else was spelled
                with ordinary tokens, so it is text. None: not known, everything that looks like a tag is one.
    """

    def __init__(self, special_at: Container[int] | None = None):
        self._special_at = special_at
        self._offset = 0  # of the held text in the whole text
        self._held = ""

    def feed(self, text: str) -> list[Token]:
        text = self._held + text
        if "<" not in text:
            self._offset += len(text)
            return [text] if text else []
        tokens: list[Token] = []
        position = 0
        for match in _TAG.finditer(text):
            kind = match["opens"] or match[0][1:-1].replace(" ", "")
            if kind.endswith("think") and not self._is_special(match.start()):
                continue
            if match.start() > position:
                tokens.append(text[position : match.start()])
            tokens.append(Tag(match[0], kind, (match["name"] or "").strip(), match["end"] != ""))
            position = match.end()
        end = text.rfind("<", position)
        if end < 0 or not _UNFINISHED.fullmatch(text, end) or self._spelled(text, end):
            end = len(text)
        if end > position:
            tokens.append(text[position:end])
        self._held = text[end:]
        self._offset += end
        return tokens

    def flush(self) -> str:
        """The unfinished tag at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _is_special(self, position: int) -> bool:
        return self._special_at is None or self._offset + position in self._special_at

    def _spelled(self, text: str, position: int) -> bool:
        """Whether this is a whole think tag that was found not to be special."""
        return text.endswith("think>") and not self._is_special(position)
