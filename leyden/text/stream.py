"""Token ids to text while they arrive: whole characters only, and stop strings.

    Detokenizer   ids -> text; a character whose bytes are not all there yet waits for them
    StopStrings   text -> text that surely comes before any stop string
    TextStream    both, for one answer, counting tokens: what the HTTP server and LLM use

Each is fed the answer of one request in any pieces and gives the same text for every way of cutting it.
"""

import codecs
from collections.abc import Collection, Sequence

from leyden.text.tokenizer import Tokenizer
from leyden.types import SamplingParams

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer:
    """Joins the bytes of tokens into text.

    skip        ids that leave no text (special tokens)
    mark        ids whose places are to be told apart from the same characters spelled with other tokens
    special_at  offsets in the text at which tokens of `mark` begin
    prompt      ids before the answer: the bytes of a character that begins there and ends in the answer are used;
                no other text of the prompt comes out

    Joined over an answer, `push` and a last `flush` give tokenizer.decode(ids).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip: Collection[int] = (),
        prompt: Sequence[int] = (),
        mark: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skip = skip
        self._mark = frozenset(mark)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decode(b"".join(map(tokenizer.bytes_of, prompt[-_LONGEST_CHARACTER:])))
        self._length = 0
        self.special_at: set[int] = set()

    def push(self, ids: Sequence[int]) -> str:
        """Text that these ids complete; an unfinished character waits, bytes that can be no UTF-8 become U+FFFD."""
        if len(ids) > 1 and not self._mark.isdisjoint(ids):
            return "".join([self.push((id,)) for id in ids])
        bytes_of, skip = self._tokenizer.bytes_of, self._skip
        text = self._decode(b"".join([bytes_of(id) for id in ids if id not in skip]))
        self._length += len(text)
        if self._mark and ids and ids[0] in self._mark:
            self.special_at.add(self._length - len(bytes_of(ids[0])))
        return text

    def flush(self) -> str:
        """U+FFFD if the answer ended inside a character, else nothing."""
        return self._decode(b"", True)


class StopStrings:
    """Cuts a text at the stop string that is complete first; of two that end together, the longer one.

    Text that may be the beginning of a stop string is held back until more text decides.
    """

    def __init__(self, stop: Sequence[str], include: bool = False):
        self._stop = stop
        self._firsts = {string[0] for string in stop}
        self._longest = max(map(len, stop), default=0)
        self._include = include  # the stop string itself comes out too
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text; nothing comes out after it

    def push(self, text: str, search: bool = True) -> str:
        """Text that can be shown now. `search=False`: a stop string that ends in `text` does not count."""
        if self.found is not None:
            return ""
        known = len(self._held)  # no stop string ends before this
        text = self._held + text
        if search:
            starts = [(text.find(string, max(0, known - len(string) + 1)), string) for string in self._stop]
            if ends := [(start + len(string), -len(string), string) for start, string in starts if start >= 0]:
                end, _, self.found = min(ends)
                self._held = ""
                return text[: end if self._include else end - len(self.found)]
        start = self._first_possible(text)
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """The text held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_possible(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                if any(len(string) > len(end) and string.startswith(end) for string in self._stop):
                    return start
        return len(text)


class TextStream:
    """The text of one answer, as it may be shown.

    stop     the stop string that ended the answer, None as long as there is none
    tokens   ids taken so far; those after the one that completed a stop string are not counted

    Stop strings are searched in all text, thinking included, from the first token after min_tokens on. The caller
    leaves out a stop token at the end of the answer: it is no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        keep: Collection[int] = (),
    ):
        """`keep`: ids that an output parser reads; other special tokens then leave no text, whatever is asked for."""
        skip = tokenizer.special_ids.difference(keep) if keep or params.skip_special_tokens else ()
        self._detokenizer = Detokenizer(tokenizer, skip, prompt, keep)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self.tokens = 0

    @property
    def special_at(self) -> set[int]:
        """Offsets in the text at which tokens of `keep` begin; grows with it."""
        return self._detokenizer.special_at

    @property
    def stop(self) -> str | None:
        return self._stops.found if self._stops else None

    def push(self, ids: Sequence[int]) -> str:
        """Text that these ids add."""
        if self._stops is None:
            self.tokens += len(ids)
            return self._detokenizer.push(ids)
        text = ""
        for id in ids:  # one at a time: which token completes a stop string must not depend on how many came together
            if self._stops.found is not None:
                break
            self.tokens += 1
            text += self._stops.push(self._detokenizer.push((id,)), search=self.tokens > self._min_tokens)
        return text

    def finish(self) -> str:
        """What was held back, once the answer is over."""
        if self._stops is None:
            return self._detokenizer.flush()
        return self._stops.push(self._detokenizer.flush(), search=False) + self._stops.flush()
