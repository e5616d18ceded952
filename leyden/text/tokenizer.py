"""Text to token ids and back, over a checkpoint's tokenizer.json.

For byte-level BPE only (every token stands for an exact byte string); anything else is refused when it is loaded.
Added tokens (`<|im_end|>`, `<think>` ...) are recognised in text unless the caller says that the text is plain.
"""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from leyden.errors import CheckpointError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """The vocabulary of a checkpoint.

    vocab_size      ids in use, added tokens included (the embedding may have more rows)
    eos_token_id    the token that ends a turn
    bos_token_id    None if the checkpoint names none
    special_tokens  texts by role ("eos_token": "<|im_end|>"), as chat templates read them
    added           ids of the added tokens by text; none of them is ever the result of encoding plain text
    special_ids     the added tokens that are hidden from readers (skip_special_tokens)
    added_pattern   matches the text of any added token, the longest one first
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str]):
        self._backend = backend
        # The same model and rules without added tokens: here `<|im_end|>` is ten ordinary characters.
        self._plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.added_pattern = re.compile(_any_of(self.added))
        self._added_ids = frozenset(added)
        self._bytes = _TokenBytes(backend, {id: token.content for id, token in added.items()})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = special_tokens
        self.eos_token_id = self.id_of(special_tokens["eos_token"])
        self.bos_token_id = self.id_of(special_tokens["bos_token"]) if "bos_token" in special_tokens else None

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and tokenizer_config.json or special_tokens_map.json for the special tokens.

        Raises CheckpointError if a file is missing, is not JSON, or does not describe byte-level BPE with an eos token.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{folder} holds no tokenizer.json; fetch it together with the weights")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from None
        if not isinstance(backend.model, models.BPE) or not _is_byte_level(backend.decoder):
            found = f"{type(backend.model).__name__} with decoder {type(backend.decoder).__name__}"
            raise CheckpointError(f"{file} must hold a byte-level BPE tokenizer, found {found}")
        backend.no_truncation()
        backend.no_padding()
        special = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
        special_tokens = {name: _text(special[name]) for name in _SPECIAL_NAMES if special.get(name)}
        if "eos_token" not in special_tokens:
            raise CheckpointError(f"{folder}: tokenizer_config.json and special_tokens_map.json name no eos_token")
        return cls(backend, special_tokens)

    def encode(self, text: str, add_special_tokens: bool = False, special: bool = True) -> list[int]:
        """Ids of a text. `special=False`: the text of added tokens in it is ordinary text.

        add_special_tokens puts in what the checkpoint's post-processor says (bos), never a second bos.
        """
        text = _well_formed(text)
        if not special:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
            if self._added_ids.isdisjoint(ids):
                return ids
            return [part for id in ids for part in (self._spell(id) if id in self._added_ids else (id,))]
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        if skip_special_tokens:
            ids = [id for id in ids if id not in self.special_ids]
        return b"".join([self._bytes[id] for id in ids]).decode("utf-8", "replace")

    def bytes_of(self, id: int) -> bytes:
        """The exact bytes of one token; empty for an id outside the vocabulary."""
        return self._bytes[id]

    @cached_property
    def line_ends(self) -> tuple[int, ...]:
        """Ids of the tokens with a line end in them."""
        return tuple(id for id in range(self.vocab_size) if b"\n" in self._bytes[id])

    def id_of(self, token: str) -> int:
        """Id of a token by its text as the vocabulary spells it; CheckpointError if there is none."""
        id = self._backend.token_to_id(token)
        if id is None:
            raise CheckpointError(f"the tokenizer must have a token {token!r}, found none")
        return int(id)

    def _spell(self, id: int) -> list[int]:
        """The bytes of a token as single-byte tokens (for a vocabulary whose merges lead to an added token)."""
        return [self.id_of(_BYTE_TO_CHAR[byte]) for byte in self._bytes[id]]


class _TokenBytes(dict[int, bytes]):
    """Filled on demand: translating 131,072 entries at start-up would cost a noticeable part of a second."""

    def __init__(self, backend: tokenizers.Tokenizer, added: dict[int, str]):
        super().__init__({id: text.encode() for id, text in added.items()})
        self._token_of = backend.id_to_token

    def __missing__(self, id: int) -> bytes:
        token = self._token_of(id) if 0 <= id < 2**32 else None
        if token is None:
            return b""
        self[id] = bytes(_CHAR_TO_BYTE[char] for char in token)
        return self[id]


def _byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_BYTE_TO_CHAR = _byte_alphabet()
_CHAR_TO_BYTE = {char: byte for byte, char in _BYTE_TO_CHAR.items()}


def _any_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of the words, as a trie: a thousand words cost what one does."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(char) + pattern(rest) for char, rest in node.items() if char]
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return joined + "?" if "" in node else joined

    return pattern(tree) or r"(?!)"


def _well_formed(text: str) -> str:
    """JSON can carry half a surrogate pair, which is no character and which the library refuses: U+FFFD instead."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_byte_level(decoder: Any) -> bool:
    return isinstance(decoder, decoders.ByteLevel) or (
        isinstance(decoder, decoders.Sequence) and b'"ByteLevel"' in decoder.__getstate__()
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. CheckpointError if it holds anything else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, found {type(content).__name__}")
    return content


def _text(token: Any) -> str:
    """A special token is written as its text, or as an object with the text under "content"."""
    return str(token["content"] if isinstance(token, dict) else token)
