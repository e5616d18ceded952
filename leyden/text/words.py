"""Words that an answer must not hold, as sequences of token ids."""

from collections.abc import Sequence

from leyden.text.tokenizer import Tokenizer


def spellings(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Every word as it is encoded at the beginning of a text and behind a blank, each sequence once.

    There are other ways to cut a word into tokens; models hardly ever take them. Added tokens in a word are tokens.
    """
    texts = [blank + word.lstrip() for word in words for blank in ("", " ")]
    found = dict.fromkeys(tuple(tokenizer.encode(text)) for text in texts)
    return [list(ids) for ids in found if ids]
