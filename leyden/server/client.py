"""The server's view of an engine: send requests, read deltas, ask for numbers.

    EngineClient    what the API code uses; the same wherever the engine runs
    Stream          the deltas of one answer (of all its copies and prompts)
    Link            how commands reach an engine and events come back
    InThread        a Link to an engine in a thread of this process (tests, small programs)
    drive           the loop around an engine, in whatever thread or process it has

The Link to an engine in its own process is in process.py. Nothing here knows HTTP, and nothing here blocks: a slow
reader finds its deltas merged into one, so the engine never waits for a client.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, Protocol

import msgspec

from leyden import log
from leyden.errors import EngineDead, Overloaded, RequestError
from leyden.types import Delta, EngineStats, Request

logger = log.get(__name__)

_PAUSE = 0.002  # seconds between two looks at requests that are not ready


class Engine(Protocol):
    """What `drive` asks of an engine. A request that cannot be served raises RequestError from `ready` or `submit`.

    busy    whether `step` has anything to do
    rest    seconds until it has, if nothing is asked of it: 0 if it has already, inf if it never will have
    ready   whether `submit` would return at once; what is needed for that goes on in the background
    """

    @property
    def busy(self) -> bool: ...
    @property
    def rest(self) -> float: ...
    def ready(self, request: Request) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def stats(self) -> EngineStats: ...
    def describe(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


# Commands: API -> engine.


class Submit(msgspec.Struct, tag=True):
    """All requests of one answer; answered by Accepted or Refused under the id of the first."""

    requests: list[Request]


class Abort(msgspec.Struct, tag=True):
    ids: list[str]


class AskStats(msgspec.Struct, tag=True):
    """Answered by one Stats event; answers come in the order of the questions."""


class Close(msgspec.Struct, tag=True):
    pass


Command = Submit | Abort | AskStats | Close


# Events: engine -> API.


class Ready(msgspec.Struct, tag=True):
    facts: dict[str, Any]


class Accepted(msgspec.Struct, tag=True):
    id: str


class Refused(msgspec.Struct, tag=True):
    id: str
    message: str
    param: str | None
    status: int
    retry_after: int | None = None

    @property
    def error(self) -> RequestError:
        if self.retry_after is not None:
            return Overloaded(self.message, self.status, self.retry_after)
        return RequestError(self.message, self.param, self.status)


class Deltas(msgspec.Struct, tag=True):
    deltas: list[Delta]


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats


class Died(msgspec.Struct, tag=True):
    """The engine is gone, for good if `final`. `kind` names the error of leyden.errors that ended it."""

    message: str
    kind: str = "EngineDead"
    final: bool = True


Event = Ready | Accepted | Refused | Deltas | Stats | Died


def drive(engine: Engine, receive: Callable[[float], Iterable[Command]], send: Callable[[Event], None]) -> None:
    """Run `engine` until a Close command. `receive(seconds)` gives the commands that have come, and waits so long for
    one: while the engine has nothing to do. Requests that are not ready wait here, and hold up nobody."""
    held: list[Submit] = []
    while True:
        for command in receive(0 if held else engine.rest):
            match command:
                case Submit():
                    held.append(command)
                case Abort(ids):
                    held = [submit for submit in held if submit.requests[0].id not in ids]
                    for request_id in ids:
                        engine.abort(request_id)
                case AskStats():
                    send(Stats(engine.stats()))
                case Close():
                    engine.close()
                    return
        for submit in held:
            if (verdict := _submit(engine, submit.requests)) is not None:
                held = [other for other in held if other is not submit]
                send(verdict)
        if engine.busy:
            if deltas := engine.step():
                send(Deltas(deltas))
        elif held:
            time.sleep(_PAUSE)


def _submit(engine: Engine, requests: list[Request]) -> Event | None:
    """The verdict; None if it is too early for one."""
    taken: list[Request] = []
    try:
        if not all([engine.ready(request) for request in requests]):
            return None
        for request in requests:
            engine.submit(request)
            taken.append(request)
    except RequestError as error:
        for request in taken:
            engine.abort(request.id)
        retry_after = error.retry_after if isinstance(error, Overloaded) else None
        return Refused(requests[0].id, error.message, error.param, error.status, retry_after)
    return Accepted(requests[0].id)


class Link(Protocol):
    """A way to an engine. After `open`, every event goes to `deliver`, in the thread of the running event loop."""

    facts: dict[str, Any]

    def open(self, deliver: Callable[[Event], None]) -> None: ...
    def send(self, command: Command) -> None: ...
    async def close(self) -> None: ...


class InThread:
    """A Link to an engine that runs in a thread of this process."""

    def __init__(self, engine: Engine):
        self.facts = engine.describe()
        self._engine = engine
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def open(self, deliver: Callable[[Event], None]) -> None:
        loop = asyncio.get_running_loop()

        def send(event: Event) -> None:
            loop.call_soon_threadsafe(deliver, event)

        def run() -> None:
            try:
                drive(self._engine, self._receive, send)
            except Exception as error:
                logger.exception("the engine failed")
                send(Died(f"the engine failed: {error!r}"))

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    async def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(Close())
            await asyncio.to_thread(self._thread.join)

    def _receive(self, seconds: float) -> list[Command]:
        commands: list[Command] = []
        with contextlib.suppress(queue.Empty):
            commands.append(self._inbox.get(seconds > 0, None if seconds == inf else seconds))
            while True:
                commands.append(self._inbox.get_nowait())
        return commands


class Stream:
    """The deltas of one answer, as an async iterator; `Delta.request_id` says of which copy.

    Leaving the `with` block early aborts what still runs:

        with await client.generate(*requests) as stream:
            async for delta in stream:
                ...

    At most one delta waits per request: later ones are merged into it. With `interval` above 1 a delta is handed out
    once it has that many tokens; the first and the last of a request never wait.
    """

    def __init__(self, ids: Iterable[str], abort: Callable[[list[str]], None], interval: int = 1):
        self._running = set(ids)
        self._abort = abort
        self._interval = interval
        self._started: set[str] = set()
        self._waiting: dict[str, Delta] = {}
        self.error: Exception | None = None  # ends the stream
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        request_id = delta.request_id
        if request_id not in self._running:
            return
        if (held := self._waiting.get(request_id)) is None:
            self._waiting[request_id] = held = delta
        else:
            merge(held, delta)
        if held.finish_reason is not None:
            self._running.discard(request_id)
        if held.finish_reason == "error":
            logger.error("%s: %s", request_id, held.error)
            held.finish_reason = None
            self.end(RequestError("the engine failed on this request; the server's log says why", status=500))
        elif self._due(held):
            self._wake()

    def end(self, error: Exception) -> None:
        """Abort everything: what has come before is delivered, then the error is raised."""
        self.__exit__()
        self.fail(error)

    def fail(self, error: Exception) -> None:
        self.error = error
        self._running.clear()
        self._wake()

    def drop(self, request_id: str) -> None:
        """Abort one of the requests: nothing more of it is delivered."""
        self._waiting.pop(request_id, None)
        if request_id in self._running:
            self._running.discard(request_id)
            self._abort([request_id])

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        while True:
            for request_id, delta in self._waiting.items():
                if self._due(delta):
                    del self._waiting[request_id]
                    self._started.add(request_id)
                    return delta
            if self.error is not None:
                raise self.error
            if not self._running:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._running:
            self._abort(list(self._running))
            self._running.clear()

    def _due(self, delta: Delta) -> bool:
        return (
            len(delta.token_ids) >= self._interval
            or delta.finish_reason is not None
            or delta.request_id not in self._started
            or self.error is not None
        )

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge(held: Delta, delta: Delta) -> None:
    """Append what `delta` brought to `held`, the delta before it of the same request."""
    held.token_ids += delta.token_ids
    if delta.logprobs is not None:
        held.logprobs = (held.logprobs or []) + delta.logprobs
    if delta.prompt_logprobs is not None:
        held.prompt_logprobs = delta.prompt_logprobs
    held.cached_tokens = max(held.cached_tokens, delta.cached_tokens)
    held.queued = max(held.queued, delta.queued)
    held.finish_reason, held.stop_reason, held.error = delta.finish_reason, delta.stop_reason, delta.error


class EngineClient:
    """An engine as the API code sees it. `open` it inside the event loop that will use it."""

    def __init__(self, link: Link):
        self.facts = link.facts  # Engine.describe(): max_model_len, max_logprobs, vocab_size and more
        self.alive = True
        self.death: str | None = None  # why the engine ended
        self._link = link
        self._streams: dict[str, Stream] = {}
        self._verdicts: dict[str, asyncio.Future[None]] = {}
        self._questions: list[asyncio.Future[EngineStats]] = []
        self._died = asyncio.Event()

    def open(self) -> None:
        self._link.open(self._deliver)

    async def close(self) -> None:
        self._lose("the server is shutting down")
        await self._link.close()

    def end(self, error: RequestError) -> None:
        """Abort every request; whoever waits for one is told `error`."""
        for verdict in self._verdicts.values():
            if not verdict.done():
                verdict.set_exception(error)
        for stream in set(self._streams.values()):
            stream.end(error)

    @property
    def requests(self) -> int:
        """Requests that the engine has, running or waiting."""
        return len(self._streams)

    async def died(self) -> str:
        """Return once the engine has ended for good, with the reason."""
        await self._died.wait()
        return self.death or ""

    async def generate(self, *requests: Request, interval: int = 1) -> Stream:
        """Submit the requests of one answer: all are accepted, or RequestError, Overloaded or EngineDead is raised."""
        self._check()
        ids = [request.id for request in requests]
        stream = Stream(ids, self._abort, interval)
        self._streams.update(dict.fromkeys(ids, stream))
        verdict = self._verdicts[ids[0]] = asyncio.get_running_loop().create_future()
        self._link.send(Submit(list(requests)))
        try:
            await verdict
        except RequestError:
            self._forget(ids)
            raise
        except asyncio.CancelledError:
            self._abort(ids)
            raise
        finally:
            self._verdicts.pop(ids[0], None)
        return stream

    async def stats(self) -> EngineStats:
        self._check()
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._questions.append(answer)
        self._link.send(AskStats())
        return await answer

    def _check(self) -> None:
        if not self.alive:
            raise EngineDead(self.death or "the engine is not running")

    def _forget(self, ids: list[str]) -> None:
        for request_id in ids:
            self._streams.pop(request_id, None)

    def _abort(self, ids: list[str]) -> None:
        self._forget(ids)
        if self.alive:
            self._link.send(Abort(ids))

    def _deliver(self, event: Event) -> None:
        match event:
            case Deltas(deltas):
                for delta in deltas:
                    over = delta.finish_reason is not None
                    find = self._streams.pop if over else self._streams.get
                    if (stream := find(delta.request_id, None)) is not None:
                        stream.put(delta)
            case Accepted(request_id):
                if verdict := self._pending(request_id):
                    verdict.set_result(None)
            case Refused():
                if verdict := self._pending(event.id):
                    verdict.set_exception(event.error)
            case Stats(stats):
                answer = self._questions.pop(0)
                if not answer.done():
                    answer.set_result(stats)
            case Ready(facts):
                self.facts, self.alive, self.death = facts, True, None
                self._died.clear()
            case Died(message):
                if self.alive:  # the first reason is the best one
                    self._lose(message)
                if event.final:
                    self._died.set()

    def _pending(self, request_id: str) -> asyncio.Future[None] | None:
        verdict = self._verdicts.get(request_id)
        return None if verdict is None or verdict.done() else verdict

    def _lose(self, reason: str) -> None:
        """Everything that waits for the engine learns that it will not answer."""
        self.alive, self.death = False, reason
        error = EngineDead(reason)
        for stream in set(self._streams.values()):
            stream.fail(error)
        waiting: list[asyncio.Future[Any]] = [*self._verdicts.values(), *self._questions]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        self._streams.clear()
        self._questions.clear()
