"""Small changes to the wording of training phrases: synonyms, courtesy, case, punctuation, words nobody knows.

A phrase is changed before its slots are filled, so values are never touched; neither is text in quotes nor anything
that decides an answer (numbers, formats, codes). Held-out phrases are used as they are written. The tables of words are
in data/vary.toml.
"""

import re
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol


class Choices(Protocol):
    """What is needed of a Draw."""

    def chance(self, p: float) -> bool: ...
    def pick(self, items: Sequence[str]) -> str: ...
    def invent(self) -> str: ...


_TABLE = tomllib.loads((Path(__file__).parent / "data" / "vary.toml").read_text(encoding="utf-8"))
EMBEDDED: frozenset[str] = frozenset(_TABLE["embedded"])
_EQUALS = {word: tuple(other for other in group if other != word) for group in _TABLE["equal"] for word in group}
_EQUAL = re.compile(rf"\b(?:{'|'.join(sorted(_EQUALS, key=len, reverse=True))})\b", re.IGNORECASE)
_FIXED = re.compile(r'("[^"]*"|\{\w+\}|<[^>]*>)')
_PLAIN = re.compile(rf"\b(?:the|this|these|our|my) (?=(?:{'|'.join(_TABLE['plain'])})\b)")


def reworded(draw: Choices, phrase: str) -> str:
    """`phrase` with some of its words replaced by their equals."""
    pieces = _pieces(phrase)
    if len(pieces) == 1:
        return phrase
    said = ""
    for i, piece in enumerate(pieces):
        if i % 2 and draw.chance(0.35):
            new = draw.pick(_EQUALS[piece.lower()])
            piece = new[0].upper() + new[1:] if piece[0].isupper() else new
        said += piece
    return said


def framed(draw: Choices, phrase: str) -> str:
    """A whole request or rule, now and then with courtesy or an idle remark around it, an adjective that nobody knows,
    or less care for case and full stops."""
    if draw.chance(0.6):
        return phrase
    if draw.chance(0.2):
        phrase = _PLAIN.sub(lambda found: f"{found[0]}{draw.invent()} ", phrase, count=1)
    if draw.chance(0.25) and phrase[:1].isupper() and not phrase[1:2].isupper():
        phrase = phrase[0].lower() + phrase[1:]
    if draw.chance(0.35) and not phrase.startswith("{"):
        before = draw.pick(_TABLE["before"])
        phrase = before + (phrase[:1].lower() + phrase[1:] if before.endswith(", ") else phrase)
    if draw.chance(0.25) and phrase[-1:] in (".", "?", "!"):
        phrase += draw.pick(_TABLE["after"])
    if draw.chance(0.3) and phrase.endswith(".") and not phrase.endswith("}."):
        phrase = phrase[:-1] + draw.pick(("", "", "!"))
    return phrase


@lru_cache(maxsize=20_000)
def _pieces(phrase: str) -> tuple[str, ...]:
    """`phrase` cut so that every second piece has equals; slots, quoted text and <placeholders> are left whole."""
    pieces = [""]
    for i, part in enumerate(_FIXED.split(phrase)):
        if i % 2:
            pieces[-1] += part
            continue
        end = 0
        for found in _EQUAL.finditer(part):
            pieces[-1] += part[end : found.start()]
            pieces += [found[0], ""]
            end = found.end()
        pieces[-1] += part[end:]
    return tuple(pieces)
