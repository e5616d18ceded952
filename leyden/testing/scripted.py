"""The real server over an engine that replays texts: for testing clients, and for testing the server itself.

    python -m leyden.testing.scripted FILE --port 8000

FILE is {"cases": {ID: {"text": ..., "finish_reason": "stop", "chunks": [...], "cached_tokens": 0}}}. The answer to a
request is the case whose ID is its last user message (or its whole prompt, on /v1/completions); an unknown one gets its
own words back. After results of tools, "ID #1" (2, 3 ...) comes first, so that a loop of calls can end. Only `text` is
needed:

    finish_reason    "stop": an end-of-sequence token follows the text; "length": the text is cut there;
                     "error": the engine fails on the request there; "crash": the engine dies there
    chunks           lengths, in characters, of the pieces that come in one engine step each; the rest comes token by
                     token

It generates nothing and knows no model: tokens, counts, limits and log-probabilities are made up, the same each time.
Grammars are compiled, so that wrong ones are refused, and then not followed.
"""

import argparse
import bisect
import contextlib
import itertools
import json
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import fastapi
import uvicorn

from leyden import log
from leyden.config.server import ServerConfig
from leyden.errors import ConfigError, RequestError
from leyden.server.app import build, serve
from leyden.server.client import EngineClient, InThread, Link
from leyden.server.process import OwnProcess
from leyden.testing import tokenizer as testing_tokenizer
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from leyden.types import STEP_SIZES, Delta, EngineStats, Request, TokenLogprobs

_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_NEXT_BEST = 21  # the second most likely token is always this many ids further on


@dataclass(frozen=True)
class Case:
    """One answer. `steps` gives the token ids of each engine step directly, instead of `text` and `chunks`."""

    text: str = ""
    finish_reason: str = "stop"
    chunks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    steps: list[list[int]] | None = None


@dataclass
class _Running:
    request: Request
    case: Case
    steps: Iterator[list[int]]
    generated: int = 0


class ScriptedEngine:
    """An engine that replays cases, one step of every running request at a time.

    step_seconds    how long a step takes
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        cases: Mapping[str, Case] | None = None,
        *,
        max_model_len: int = 2048,
        step_seconds: float = 0.0,
    ):
        self.max_model_len = max_model_len
        self.received: list[Request] = []
        self.aborted: list[str] = []
        self._tokenizer = tokenizer
        self._cases = cases or {}
        self._step_seconds = step_seconds
        self._running: dict[str, _Running] = {}
        # Steps of the cases above, by id(), once they are known.
        self._encoded: dict[int, list[list[int]] | None] = {id(case): None for case in self._cases.values()}
        self._stats = EngineStats()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def rest(self) -> float:
        return 0 if self.busy else inf

    def describe(self) -> dict[str, Any]:
        return {
            "model": "scripted",
            "device": "none",
            "max_model_len": self.max_model_len,
            "max_num_seqs": 256,
            "max_logprobs": 20,
            "vocab_size": self._tokenizer.vocab_size,
        }

    def ready(self, request: Request) -> bool:
        return request.params.grammar is None or self._compiler.ready(request.params.grammar)

    def submit(self, request: Request) -> None:
        if len(request.prompt) >= self.max_model_len:
            raise RequestError(f"the prompt must be shorter than {self.max_model_len} tokens")
        self.received.append(request)
        case = self._find(request.prompt)
        self._running[request.id] = _Running(request, case, self._steps(case, request.params.ignore_eos))
        self._stats.prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._count("abort")

    def step(self) -> list[Delta]:
        time.sleep(self._step_seconds)
        self._stats.steps += 1
        self._stats.step_tokens += len(self._running)
        self._stats.step_sizes[bisect.bisect_left(STEP_SIZES, len(self._running))] += 1
        deltas = [self._advance(running) for running in list(self._running.values())]
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._running[delta.request_id]
                self._count(delta.finish_reason)
        return deltas

    def stats(self) -> EngineStats:
        self._stats.running = len(self._running)
        return self._stats

    def close(self) -> None:
        self._running.clear()

    @cached_property
    def _compiler(self) -> Any:
        from leyden.engine.grammar import Compiler  # needs torch, which nothing else here does

        return Compiler(lambda: self._tokenizer, self._tokenizer.vocab_size, [self._tokenizer.eos_token_id])

    def _count(self, reason: str) -> None:
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    def _find(self, prompt: list[int]) -> Case:
        text = self._tokenizer.decode(prompt)
        turns = _USER_TURN.findall(text)
        results = sum(1 for _ in itertools.takewhile(lambda turn: turn.startswith("<tool_response>"), reversed(turns)))
        said = turns[: len(turns) - results]
        key = said[-1] if said else self._tokenizer.decode(prompt, skip_special_tokens=True)
        return self._cases.get(f"{key} #{results}") or self._cases.get(key, Case(key))

    def _steps(self, case: Case, forever: bool) -> Iterator[list[int]]:
        steps = self._encoded.get(id(case)) or self._encode(case)
        if id(case) in self._encoded:
            self._encoded[id(case)] = steps
        if forever:
            yield from itertools.cycle(steps or [[self._tokenizer.eos_token_id]])
        yield from steps
        if case.finish_reason == "stop":
            yield [self._tokenizer.eos_token_id]

    def _encode(self, case: Case) -> list[list[int]]:
        if case.steps is not None:
            return case.steps
        ends = [0, *itertools.accumulate(case.chunks)]
        pieces = [case.text[start:end] for start, end in itertools.pairwise(ends)]
        steps = [self._tokenizer.encode(piece) for piece in pieces if piece]
        return steps + [[id] for id in self._tokenizer.encode(case.text[ends[-1] :])]

    def _advance(self, running: _Running) -> Delta:
        params = running.request.params
        delta = Delta(request_id=running.request.id)
        if running.generated == 0:
            delta.cached_tokens = running.case.cached_tokens
            delta.queued = time.monotonic() - running.request.arrival
            self._stats.cached_tokens += delta.cached_tokens
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = self._prompt_logprobs(running.request.prompt, params.prompt_logprobs)
        step = next(running.steps, None)
        if step is None:
            if running.case.finish_reason == "crash":
                raise RuntimeError("scripted crash")
            delta.finish_reason = running.case.finish_reason
            delta.error = "scripted failure" if delta.finish_reason == "error" else None
        for id in step or ():
            delta.token_ids.append(id)
            running.generated += 1
            ends = not params.ignore_eos and running.generated > params.min_tokens
            if ends and (id == self._tokenizer.eos_token_id or id in params.stop_token_ids):
                delta.finish_reason = "stop"
                delta.stop_reason = None if id == self._tokenizer.eos_token_id else id
            elif running.generated == params.max_tokens:
                delta.finish_reason = "length"
            if delta.finish_reason is not None:
                break
        self._stats.generated_tokens += len(delta.token_ids)
        if params.logprobs is not None:
            delta.logprobs = [self._logprobs(id, params.logprobs, -0.25, -2.0) for id in delta.token_ids]
            for entry in delta.logprobs if params.logprob_token_ids else ():
                entry.top_ids = list(params.logprob_token_ids or ())
                entry.top_logprobs = [-0.25 if id == entry.token_id else -3.0 for id in entry.top_ids]
        return delta

    def _logprobs(self, id: int, top: int, best: float, second: float) -> TokenLogprobs:
        likely = [id, (id + _NEXT_BEST) % self._tokenizer.vocab_size][:top]
        return TokenLogprobs(id, best, 1, likely, [best, second][:top])

    def _prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprobs | None]:
        return [None, *(self._logprobs(id, top, -0.5, -1.0) for id in prompt[1:])]


def read(file: str | Path) -> dict[str, Case]:
    """The cases of a FILE; ConfigError if it is not what the module's docstring describes."""
    try:
        cases = json.loads(Path(file).read_text(encoding="utf-8"))["cases"]
        return {key: Case(**case) for key, case in cases.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} must hold {{'cases': {{ID: {{'text': ...}}}}}}: {error!r}") from None


def engine(
    folder: str, cases: dict[str, dict[str, Any]], max_model_len: int = 2048, step_seconds: float = 0.0
) -> ScriptedEngine:
    """Factory for an engine in its own process: `folder` holds the tokenizer."""
    tokenizer = Tokenizer.from_folder(folder)
    scripted = {key: Case(**case) for key, case in cases.items()}
    return ScriptedEngine(tokenizer, scripted, max_model_len=max_model_len, step_seconds=step_seconds)


@contextlib.contextmanager
def running(app: fastapi.FastAPI) -> Iterator[str]:
    """Serve `app` on a free port of this machine, in a thread; gives its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        settings = uvicorn.Config(app, log_config=None, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server did not start")
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser("python -m leyden.testing.scripted", description="A server that replays texts.")
    parser.add_argument("file", help='JSON: {"cases": {ID: {"text": ...}}}')
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", default="scripted")
    parser.add_argument("--max-model-len", type=int, default=32768, metavar="TOKENS")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long an engine step takes")
    parser.add_argument("--own-process", action="store_true", help="give the engine a process of its own")
    args = parser.parse_args()
    log.setup()
    with tempfile.TemporaryDirectory() as folder:
        testing_tokenizer.write(folder)
        tokenizer = Tokenizer.from_folder(folder)
        cases = read(args.file)
        limits = {"max_model_len": args.max_model_len, "step_seconds": args.step_seconds}
        link: Link
        if args.own_process:
            told = {"folder": folder, "cases": {key: asdict(case) for key, case in cases.items()}, **limits}
            link = OwnProcess("leyden.testing.scripted:engine", told)
        else:
            link = InThread(ScriptedEngine(tokenizer, cases, **limits))
        config = ServerConfig(host=args.host, port=args.port)
        client = EngineClient(link)
        template = ChatTemplate.from_folder(folder, tokenizer)
        return serve(build(config, client, tokenizer, template, model=args.served_model_name), config, client)


if __name__ == "__main__":
    raise SystemExit(main())
