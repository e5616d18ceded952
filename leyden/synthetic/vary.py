"""Small changes to the wording of training phrases: synonyms, courtesy, case, punctuation, words nobody knows.

A phrase is changed before its slots are filled, so values are never touched; neither is text in quotes nor anything
that decides an answer (numbers, formats, codes). Held-out phrases are used as they are written.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Protocol


class Choices(Protocol):
    """What is needed of a Draw."""

    def chance(self, p: float) -> bool: ...
    def pick(self, items: Sequence[str]) -> str: ...
    def invent(self) -> str: ...


# Words and their equals, at most one of which is in a phrase because of its grammar.
_EQUALS: dict[str, tuple[str, ...]] = {
    phrase: tuple(other for other in group if other != phrase)
    for group in (
        ("reply with", "answer with", "respond with", "come back with"),
        ("answer only with", "reply only with", "respond with just"),
        ("nothing else", "nothing more", "nothing beside it", "no other text", "no further words"),
        ("please", "kindly"),
        ("separated by commas", "with commas between them", "comma-separated", "divided by commas", "joined by commas"),
        ("alphabetically", "in alphabetical order", "by the alphabet"),
        ("in total", "altogether", "all together", "all in all"),
        ("together", "in sum", "combined"),
        ("which", "what"),
        ("largest", "biggest", "greatest"),
        ("i need", "we need", "i want", "i am looking for"),
        ("could you", "can you", "would you", "will you"),
        ("tell me", "let me know", "show me"),
        ("here is", "this is", "below is"),
        ("here are", "these are", "below are"),
        ("remove", "delete", "strike"),
        ("right", "correct", "proper"),
        ("fits", "matches", "applies"),
        ("evenly", "equally", "fairly"),
        ("begins", "starts"),
        ("lasts", "takes", "goes on for"),
        ("write", "put down"),
        ("choose", "pick", "select"),
        ("the list", "this list", "that list"),
        ("the text", "this text", "that text"),
        ("the message", "this message"),
        ("the format", "the form", "the notation"),
        ("sum up", "add up"),
        ("a total of", "in all"),
        ("one word", "a single word"),
        ("instead of", "in place of"),
    )
    for phrase in group
}
_EQUAL = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, _EQUALS), key=len, reverse=True))})\b", re.IGNORECASE)
_FIXED = re.compile(r'("[^"]*"|\{\w+\}|<[^>]*>)')
# Nouns of instructions before which an adjective without a meaning does no harm.
_PLAIN = re.compile(r"\b(the|this|these|our|my) (?=(?:list|text|message|numbers|items|table|data|review|team|rule|report)\b)")

# Phrases that stand inside another one or in data, where no greeting can be.
EMBEDDED = frozenset(
    f"{section}.{key}"
    for section, keys in {
        "tools": ("explicit",),
        "records": ("value", "key", "count", "which", "largest", "smallest", "sum"),
        "reading": ("setting", "level", "better"),
        "extract": ("keys", "items", "emails", "names", "line", "dates", "null", "only"),
        "classify": ("message", "review", "rule", "case"),
        "rewrite": ("backwards_too",),
    }.items()
    for key in keys
)

_BEFORE = (
    *("Hi. ", "Hello! ", "Hey, ", "Ok. ", "Ok, ", "Good morning. ", "Next: ", "Now, ", "So: ", "One question. ", "Quick one: "),
    *("Hello there. ", "Thanks for the last one. ", "Here is the next step. ", "A small task. ", "For the report: ", "Urgent: "),
    *("It is raining here. ", "I am on the train. ", "The meeting went well. ", "We are nearly done. ", "No hurry. "),
    *("My colleague asked me this. ", "This is for the weekly overview. ", "Sorry to bother you. ", "Back again. ", "- ", "Q: "),
)
_AFTER = (
    *(" Thanks.", " Thank you!", " Thanks a lot.", " Please.", " Many thanks in advance.", " Cheers.", " That is all for now."),
    *(" It is for our report.", " We need it today.", " I will check it later.", " Take your time.", " Regards."),
    *(" The coffee is ready, by the way.", " The others are waiting.", " I have a meeting soon.", " You are doing well."),
)


def reworded(draw: Choices, phrase: str) -> str:
    """`phrase` with some of its words replaced by their equals, and rarely an adjective that nobody knows."""
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
    """A whole request or rule with courtesy or an idle remark around it, or with less care for case and full stops."""
    if draw.chance(0.6):
        return phrase
    if draw.chance(0.2):
        phrase = _PLAIN.sub(lambda found: f"{found[0]}{draw.invent()} ", phrase, count=1)
    if draw.chance(0.25) and phrase[:1].isupper() and not phrase[1:2].isupper():
        phrase = phrase[0].lower() + phrase[1:]
    if draw.chance(0.35):
        phrase = draw.pick(_BEFORE) + phrase
    if draw.chance(0.25) and phrase[-1:] in (".", "?", "!"):
        phrase += draw.pick(_AFTER)
    if draw.chance(0.3) and phrase.endswith(".") and not phrase.endswith("}."):
        phrase = phrase[:-1] + draw.pick(("", "", "!", " ."))
    return phrase


@cache
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
