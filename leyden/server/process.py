"""The engine in a process of its own: the Link the server uses, and the program at its other end.

    API process                              engine process (python -m leyden.server.process FOLDER)
    OwnProcess.send   --- commands --->      drive(engine, ...)
    deliver           <--- events -----
    lifeline          ================       each side sees the end of the other one, however it came

Commands and events are msgpack over two ZMQ sockets in a folder that only this user can enter; nothing is pickled and
nothing listens on a network. Both processes log to the same stderr. Only the engine process loads torch.
"""

import asyncio
import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
import zmq

from leyden import errors, log
from leyden.config.engine import EngineConfig
from leyden.errors import EngineDead
from leyden.server.client import Close, Command, Died, Engine, Event, Ready, drive

logger = log.get(__name__)

GRACE = 5.0  # seconds an engine gets to close before it is killed
SAVING = 300.0  # the same with --cache-dir: a large cache takes its time to be written
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as enums they take longer than what they are for


class Start(msgspec.Struct):
    """The first message. `factory` is "module:function", called with the fields of `config` as keyword arguments."""

    factory: str
    config: dict[str, Any]
    log_level: str
    log_format: str


class OwnProcess:
    """A Link to an engine in its own process.

    The constructor starts it and blocks until it is ready; the error that stopped it from getting there is raised here,
    with the type it had. With `respawn` an engine that dies is started again, otherwise its end is final.
    """

    facts: dict[str, Any]

    def __init__(
        self,
        factory: str,
        config: dict[str, Any],
        *,
        respawn: bool = False,
        log_level: str = "INFO",
        log_format: str = "text",
    ):
        self._start = Start(factory, config, log_level, log_format)
        self._respawn = respawn
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._deliver: Callable[[Event], None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._spawn()

    def open(self, deliver: Callable[[Event], None]) -> None:
        self._deliver = deliver
        self._watch()

    def send(self, command: Command) -> None:
        with contextlib.suppress(zmq.ZMQError):  # its end is reported by the lifeline, not by whoever talks to it first
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def close(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
        self._unwatch()
        self.send(Close())
        await asyncio.to_thread(self._reap, SAVING if self._start.config.get("cache_dir") else GRACE)

    @property
    def pid(self) -> int:
        return self._process.pid

    # One life of the process: spawn, watch, unwatch, reap.

    def _spawn(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="leyden-")  # mode 0700, and the name cannot be guessed
        self._context = zmq.Context()
        self._commands = _bind(self._context, zmq.PUSH, self._folder, "commands")
        self._events = _bind(self._context, zmq.PULL, self._folder, "events")
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", "leyden.server.process", self._folder, str(fd)]
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
        self._commands.send(self._encoder.encode(self._start))
        try:
            self.facts = self._await_ready()
        except BaseException:
            self._reap(grace=0)
            raise

    def _await_ready(self) -> dict[str, Any]:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._lifeline, zmq.POLLIN)
        while self._events not in (ready := dict(poller.poll())):
            if ready:
                raise EngineDead(f"the engine process ended while it started ({self._code()})")
        match self._decoder.decode(self._events.recv()):
            case Ready(facts):
                return facts
            case Died(message, kind):
                raise getattr(errors, kind)(message)
            case event:
                raise AssertionError(f"the engine said {event} before it was ready")

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._events.fileno(), self._readable)
        loop.add_reader(self._lifeline, self._ended)
        loop.call_soon(self._readable)  # the descriptor of a ZMQ socket tells of changes only

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._events.closed:
            loop.remove_reader(self._events.fileno())
            loop.remove_reader(self._lifeline)

    def _readable(self) -> None:
        assert self._deliver is not None
        while not self._events.closed and int(self._events.getsockopt(_EVENTS)) & _POLLIN:
            self._deliver(self._decoder.decode(self._events.recv(zmq.NOBLOCK)))

    def _ended(self) -> None:
        assert self._deliver is not None
        self._readable()  # the last words
        self._unwatch()
        code = self._code()
        self._reap(grace=0)
        logger.error("the engine process ended (%s)", code)
        self._deliver(Died(f"the engine process ended ({code})", final=not self._respawn))
        if self._respawn:
            self._restart = asyncio.get_running_loop().create_task(self._again())

    async def _again(self) -> None:
        assert self._deliver is not None
        try:
            await asyncio.to_thread(self._spawn)
        except errors.LeydenError as error:
            self._deliver(Died(f"the engine could not be started again: {error}"))
            return
        self._watch()
        self._deliver(Ready(self.facts))

    def _code(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(GRACE)
            return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "it hangs"

    def _reap(self, grace: float = GRACE) -> None:
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lifeline.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, folder: str, name: str) -> zmq.Socket[bytes]:
    link = context.socket(kind)
    link.set_hwm(0)  # no limit: neither side ever waits for the other
    link.bind(f"ipc://{folder}/{name}")
    return link


def load(**config: Any) -> Engine:
    """The factory of the real engine; `config` holds the fields of EngineConfig."""
    from leyden.engine.engine import Engine as RealEngine

    return RealEngine.load(EngineConfig(**config))


def main(folder: str, lifeline: int) -> int:
    """The engine process: build, say Ready, drive. Returns the exit code."""
    os.set_inheritable(lifeline, False)
    for ending in (signal.SIGINT, signal.SIGTERM):  # ctrl-C and service managers reach both: the API process decides
        signal.signal(ending, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(socket.socket(fileno=lifeline),), daemon=True).start()
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for link, name in ((commands, "commands"), (events, "events")):
        link.set_hwm(0)
        link.connect(f"ipc://{folder}/{name}")
    encoder = msgspec.msgpack.Encoder()
    decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def receive(seconds: float) -> list[Command]:
        taken: list[Command] = []
        if seconds > 0:
            commands.poll(None if seconds == inf else int(seconds * 1000) + 1)
        with contextlib.suppress(zmq.Again):
            while True:
                taken.append(decoder.decode(commands.recv(zmq.NOBLOCK)))
        return taken

    def send(event: Event) -> None:
        events.send(encoder.encode(event))

    start = msgspec.msgpack.decode(commands.recv(), type=Start)
    log.setup(start.log_level, start.log_format)
    try:
        module, _, function = start.factory.partition(":")
        gc.disable()  # what is imported and loaded stays: a tenth of torch's import is looking for garbage in it
        engine: Engine = getattr(importlib.import_module(module), function)(**start.config)
        gc.freeze()
        gc.enable()
        send(Ready(engine.describe()))
        drive(engine, receive, send)
        code = 0
    except errors.LeydenError as error:  # says itself what is wrong and what to do: no traceback
        send(Died(str(error), type(error).__name__))
        code = 1
    except Exception as error:
        logger.exception("the engine failed")
        send(Died(f"the engine failed: {error!r}"))
        code = 1
    context.destroy(linger=1000)
    return code


def _follow(lifeline: socket.socket) -> None:
    """End with the API process: its end of the lifeline closes when it does."""
    lifeline.recv(1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
