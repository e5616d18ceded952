"""Answers that follow a grammar: xgrammar compiles it and knows which tokens may come next; this file says when.

    Compiler    compiles, in threads of its own, within limits of size and time, and keeps the results
    Grammars    how far each answer has come, and the tokens that it may go on with
    Allowed     those tokens for some rows of a step, on their way to the sampler

An answer follows its grammar from the first token after thinking, and cannot end before: the tokens that would end it
are closed while it thinks. A compile that hangs cannot be stopped; it costs a thread, and its requests are refused.
xgrammar is imported when the first grammar is asked for.
"""

import json
import os
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leyden import log
from leyden.errors import RequestError
from leyden.text.thinking import MARKUP
from leyden.text.tokenizer import Tokenizer
from leyden.types import MOST_BLANKS, Admit, Delta, Grammar, Markers, Request, Row, Sampled

logger = log.get(__name__)

SECONDS = 5.0  # for one grammar
CHARACTERS = 256 << 10
REGEX_CHARACTERS = 8 << 10
DEPTH = 64  # of a JSON schema
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
_KEPT, _KEPT_BYTES = 256, 512 << 20
# What an answer may cost the loop: an ambiguous grammar costs more with every token. Usual are 2 µs a token.
_PATIENCE, _PATIENCE_PER_TOKEN = 0.05, 2e-4
_PLACE = re.compile(r"^\[[\d:]+\] \S+: (?:Check failed: .*? is false: )?")


@dataclass(slots=True)
class _Job:
    future: "Future[Any]"  # of xgrammar's CompiledGrammar, or ValueError
    began: float


class Compiler:
    """Compiled grammars, the last ones kept. `stop_ids` may follow a complete answer, and nothing else."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, stop_ids: Iterable[int]):
        """`tokenizer` is called in another thread when the first grammar comes; vocab_size is that of the logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = sorted(stop_ids)
        self._jobs: OrderedDict[Grammar, _Job] = OrderedDict()
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def ready(self, grammar: Grammar) -> bool:
        """Whether `get` would return at once; starts what is needed for it. RequestError if it cannot be compiled."""
        most = REGEX_CHARACTERS if grammar.kind == "regex" else CHARACTERS
        if not 1 <= len(grammar.text) <= most:
            message = f"it must have between 1 and {most} characters, got {len(grammar.text)}"
            raise RequestError(f"{grammar.param}: {message}", grammar.param)
        if not self._compilers.done():
            return False
        try:
            self._compilers.result()
        except Exception as error:
            need = "need the package xgrammar" if isinstance(error, ImportError) else "are not possible here"
            raise RequestError(f"{grammar.param}: answers with a grammar {need}: {error}", grammar.param) from None
        job = self._jobs.get(grammar) or self._start(grammar)
        self._jobs.move_to_end(grammar)
        if not job.future.done() and time.monotonic() - job.began < SECONDS:
            return False
        try:
            job.future.result(timeout=0)
        except TimeoutError:
            if job.future.cancel():
                del self._jobs[grammar]
            message = f"it took longer than {SECONDS:g} s to compile; make it smaller"
        except ValueError as error:
            message = str(error)
        else:
            return True
        raise RequestError(f"{grammar.param}: {message}", grammar.param)

    def get(self, grammar: Grammar) -> Any:
        """The compiled grammar. Waits for it; RequestError as from `ready`."""
        while not self.ready(grammar):
            time.sleep(0.001)
        return self._jobs[grammar].future.result()

    def _start(self, grammar: Grammar) -> _Job:
        job = self._jobs[grammar] = _Job(self._submit(lambda: self._compile(grammar)), time.monotonic())
        bytes_kept = 0
        for number, (old, kept) in enumerate(reversed(list(self._jobs.items()))):
            if kept.future.done():
                failed = kept.future.exception() is not None
                bytes_kept += len(old.text) if failed else kept.future.result().memory_size_bytes
                if number >= _KEPT or bytes_kept > _KEPT_BYTES:
                    del self._jobs[old]
        return job

    def _submit(self, work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._queue.put((future, work))
        return future

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

    @cached_property
    def _compilers(self) -> "Future[tuple[Any, Any]]":
        """xgrammar's compilers: one for which added tokens are no text, and one for which those of MARKUP are."""
        for _ in range(_THREADS):
            threading.Thread(target=self._work, name="grammar", daemon=True).start()
        return self._submit(lambda: (self._compiler(()), self._compiler(MARKUP)))

    def _compiler(self, shown: Sequence[str]) -> Any:
        import xgrammar

        tokenizer = self._tokenizer()
        hidden = set(tokenizer.added.values()) - {tokenizer.added[text] for text in shown if text in tokenizer.added}
        vocabulary = [b"" if id in hidden else tokenizer.bytes_of(id) for id in range(self._vocab_size)]
        info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=self._stop_ids)
        return xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_enabled=False)

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.kind in ("json", "compact_json", "structural_tag"):
            _check_json(grammar.text)
        text, marked = self._compilers.result()
        try:
            match grammar.kind:
                case "json":
                    return text.compile_json_schema(grammar.text, max_whitespace_cnt=MOST_BLANKS)
                case "compact_json":
                    return text.compile_json_schema(grammar.text, any_whitespace=False)
                case "regex":
                    return text.compile_regex(grammar.text)
                case "ebnf":
                    return marked.compile_grammar(grammar.text)
                case "lark":
                    return marked.compile_lark(grammar.text)
                case _:
                    return marked.compile_structural_tag(grammar.text)
        except Exception as error:  # mostly RuntimeError
            reason = _PLACE.sub("", str(error)).strip()[:500]
            where = _at_fault(grammar.text) if grammar.kind == "structural_tag" else None
            raise ValueError(f"{where}: {reason}" if where else reason) from None


def _check_json(text: str) -> None:
    """ValueError for what is no JSON, or too deep to be tried."""
    try:
        depth = _depth(json.loads(text))
    except RecursionError:
        depth = DEPTH + 1
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if depth > DEPTH:
        raise ValueError(f"it must not be nested deeper than {DEPTH} levels")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _at_fault(text: str) -> str | None:
    """The beginning of the first tag that cannot be compiled by itself; of a tool call, it has the tool's name."""
    import xgrammar

    for tag in _tags(json.loads(text)):
        try:
            xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": tag})
        except RuntimeError:
            return repr(tag.get("begin"))
    return None


def _tags(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and value.get("type") == "tag":
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inner:
        yield from _tags(part)


@dataclass(slots=True)
class Allowed:
    """What may come next in some places of a step."""

    places: list[int]  # n of the places at which something is sampled
    words: Tensor  # int32 [n, ceil(V / 32)] on the host; bit i of a word is token 32 * word + i

    def at(self, places: list[int]) -> "Allowed | None":
        """The same where only these places, all different, are sampled at."""
        rows = {place: i for i, place in enumerate(self.places)}
        kept = [(n, rows[place]) for n, place in enumerate(places) if place in rows]
        if not kept:
            return None
        return Allowed([n for n, _ in kept], self.words[[row for _, row in kept]])

    def unpack(self, vocab_size: int, device: torch.device) -> Tensor:
        """bool [n, V] on the device."""
        words = self.words.to(device, non_blocking=True)
        bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
        return bits.flatten(1)[:, :vocab_size].bool()


@dataclass(slots=True)
class _Answer:
    """One answer on its way through its grammar."""

    matcher: Any
    markers: Markers | None  # of its thinking, while it thinks
    closed: Tensor  # words of the tokens that would end it
    tokens: int = 0  # that its matcher has accepted
    seconds: float = 0.0

    def take(self, ids: Iterable[int]) -> str | None:
        """Go on with tokens that were sampled; why that is impossible, if it is."""
        started = time.thread_time()
        for id in ids:
            if not self._accept(id):
                return f"its grammar does not allow what was sampled (token {id})"
        self.seconds += time.thread_time() - started
        if self.seconds > _PATIENCE + _PATIENCE_PER_TOKEN * self.tokens:
            return "its grammar is too ambiguous to be followed"
        return None

    def along(self, drafts: Iterable[int]) -> Iterator[int]:
        """Stand behind each of `drafts` in turn, as far as they are allowed; in the end, where it was."""
        markers, tokens = self.markers, self.tokens
        for n, id in enumerate(drafts):
            if id < 0 or not self._accept(id):
                break
            yield n
        if self.tokens > tokens:
            self.matcher.rollback(self.tokens - tokens)
        self.markers, self.tokens = markers, tokens

    def _accept(self, id: int) -> bool:
        if self.markers is not None:
            if id not in self.markers.ends:
                return True
            tag, self.markers = self.markers.ends[0], None
            if id == tag:
                return True  # a tool call that ends thinking is a part of the answer, the tag is not
        if self.matcher.is_terminated():
            return True  # ignore_eos: more of the same
        if not self.matcher.accept_token(id):
            return False
        self.tokens += 1
        return True


class Grammars:
    """The answers under way that have a grammar, by request; those that have none cost nothing."""

    def __init__(self, compiler: Compiler, vocab_size: int, stop_ids: Iterable[int]):
        """`stop_ids`: what may follow a complete answer."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._stop_words = self._words(stop_ids)
        self._answers: dict[str, _Answer] = {}
        self._slots: dict[int, str] = {}  # the request that is, or was, in a slot
        self._drafts: dict[int, list[int]] = {}  # what its next row brings

    def ready(self, request: Request) -> bool:
        """Whether `begin` would return at once. RequestError as from Compiler."""
        return request.params.grammar is None or self._compiler.ready(request.params.grammar)

    def begin(self, request: Request) -> None:
        """A request starts. Waits until its grammar is compiled; RequestError if it cannot be."""
        params = request.params
        if params.grammar is None:
            return
        compiled = self._compiler.get(params.grammar)
        import xgrammar

        thinking = params.thinking
        self._answers[request.id] = _Answer(
            xgrammar.GrammarMatcher(compiled),
            thinking.markers if thinking is not None and thinking.open else None,
            self._stop_words | self._words(params.stop_token_ids),
        )

    def admit(self, admits: list[Admit]) -> None:
        for a in admits:
            if a.params.grammar is not None:
                self._slots[a.slot] = a.request_id
            else:
                self._slots.pop(a.slot, None)
            self._drafts.pop(a.slot, None)

    def follow(self, deltas: list[Delta]) -> dict[str, str]:
        """Take in what was sampled. Gives the requests that cannot go on, with the reason."""
        lost = {}
        for delta in deltas:
            answer = self._answers.get(delta.request_id)
            if answer is None:
                continue
            if delta.finish_reason is not None:
                del self._answers[delta.request_id]
            elif reason := answer.take(delta.token_ids):
                lost[delta.request_id] = reason
        return lost

    def expect(self, rows: Sequence[Row], results: Sequence[Sampled]) -> None:
        """Take note of what is proposed behind rows that have a grammar."""
        if self._answers:
            for row, result in zip(rows, results, strict=True):
                if row.sample and row.slot in self._slots:
                    self._drafts[row.slot] = result.drafts

    def concern(self, rows: Sequence[Row]) -> bool:
        """Whether any of these rows has a grammar."""
        return bool(self._answers) and any(self._slots.get(row.slot) in self._answers for row in rows)

    def allowed(self, rows: Sequence[Row]) -> Allowed | None:
        """For the rows that have a grammar; every token before them must have been given to `follow`, and their drafts
        to `expect`.
        """
        firsts = accumulate((row.drafts + 1 for row in rows), initial=0)
        asked = [
            (row, place, answer)
            for row, place in zip(rows, firsts, strict=False)
            if (answer := self._answers.get(self._slots.get(row.slot, ""))) is not None
        ]
        if not asked:
            return None
        # Behind a draft that is refused it does not matter what may come.
        words = torch.full((sum(row.drafts + 1 for row, _, _ in asked), len(self._stop_words)), -1, dtype=torch.int32)
        places: list[int] = []
        fill = {}
        for row, place, answer in asked:
            n = len(places)
            places += range(place, place + row.drafts + 1)
            if not self._closed(answer, words[n]):
                fill[n] = answer.matcher
            drafts, taken = self._drafts.get(row.slot, []), 0
            for i in answer.along(drafts[: row.drafts]):
                taken = i + 1
                if not self._closed(answer, words[n + taken]):
                    answer.matcher.fill_next_token_bitmask(words, n + taken)
            drafts[taken:] = [-1] * (len(drafts) - taken)  # so they do not count as drafts
        if fill:
            self._filler.batch_fill_next_token_bitmask(list(fill.values()), words, list(fill))
        words[~words.any(1)] = -1  # a grammar that leads nowhere: it will refuse what is sampled, whatever that is
        return Allowed(places, words)

    def _closed(self, answer: _Answer, words: Tensor) -> bool:
        """Fill `words` for an answer that does not follow its grammar now; False if it does."""
        if answer.markers is not None:
            words.copy_(~answer.closed)
        elif answer.matcher.is_terminated():
            words.copy_(self._stop_words)
        else:
            return False
        return True

    @cached_property
    def _filler(self) -> Any:
        import xgrammar

        return xgrammar.BatchGrammarMatcher(_THREADS)

    def _words(self, ids: Iterable[int]) -> Tensor:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=bool)
        bits[list(ids)] = True
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
