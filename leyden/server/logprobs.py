"""Log-probabilities in the three shapes that clients know: chat, completions, and of the prompt.

A token that is part of a character has no text of its own; it is written as OpenAI writes it, `bytes:\\xe4`, so that no
two tokens look alike. -inf becomes -9999, which JSON can hold.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from leyden.text.stream import Detokenizer
from leyden.text.tokenizer import Tokenizer
from leyden.types import TokenLogprobs

_FLOOR = -9999.0


class Names:
    """Tokens as text; with `as_ids` as `token_id:N`, for clients that want to be exact."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool):
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, id: int) -> str:
        if self._as_ids:
            return f"token_id:{id}"
        data = self.tokenizer.bytes_of(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat(names: Names, tokens: Sequence[TokenLogprobs], top: int | None) -> dict[str, Any]:
    """choices[].logprobs of a chat completion, with `top` alternatives per token; None: the token itself and all."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names(id),
            "logprob": max(logprob, _FLOOR),
            "bytes": list(names.tokenizer.bytes_of(id)),
        }

    content = []
    for token in tokens:
        told = list(zip(token.top_ids, token.top_logprobs, strict=True))
        if top is None:
            told = [(token.token_id, token.logprob), *(pair for pair in told if pair[0] != token.token_id)]
        elif top >= 0:
            told = told[:top]
        content.append(
            {**entry(token.token_id, token.logprob), "top_logprobs": [entry(id, value) for id, value in told]}
        )
    return {"content": content}


class CompletionLogprobs:
    """choices[].logprobs of a completion, piece by piece: offsets count the characters of the whole answer."""

    def __init__(self, names: Names, skip_special_tokens: bool):
        self._names = names
        self._text = Detokenizer(names.tokenizer, names.tokenizer.special_ids if skip_special_tokens else ())
        self._offset = 0

    def add(self, tokens: Sequence[TokenLogprobs | None], ids: Sequence[int]) -> dict[str, list[Any]]:
        """`tokens` are the log-probabilities of `ids`; None for the first token of a prompt, which has none."""
        piece: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for id, token in zip(ids, tokens, strict=True):
            piece["text_offset"].append(self._offset)
            piece["tokens"].append(self._names(id))
            piece["token_logprobs"].append(None if token is None else max(token.logprob, _FLOOR))
            piece["top_logprobs"].append(None if token is None else self._top(token))
            self._offset += len(self._text.push((id,)))
        return piece

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """The token itself and the most likely ones, which may hold it again."""
        pairs = [(token.token_id, token.logprob), *zip(token.top_ids, token.top_logprobs, strict=True)]
        return {self._names(id): max(value, _FLOOR) for id, value in pairs}


def join(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {key: [item for piece in pieces for item in piece[key]] for key in pieces[0]}


def prompt(names: Names, tokens: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """prompt_logprobs: per position {token id: {logprob, rank, decoded_token}}, null for the first."""
    entries: list[dict[str, Any] | None] = []
    for token in tokens:
        if token is None:
            entries.append(None)
            continue
        most_likely = zip(token.top_ids, token.top_logprobs, itertools.count(1), strict=False)
        ranked = [(token.token_id, token.logprob, token.rank), *most_likely]
        entries.append(
            {
                str(id): {"logprob": max(value, _FLOOR), "rank": rank, "decoded_token": names(id)}
                for id, value, rank in ranked
            }
        )
    return entries
