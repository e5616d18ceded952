"""Answers that take time: server-sent events, and clients that go away before the end.

Pure ASGI, because anything that buffers between here and the socket hides a disconnect. A client that closes its
connection cancels the work for it at once, streaming or not; what runs in the engine is aborted by leaving its Stream.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyden import log
from leyden.errors import EngineDead, RequestError
from leyden.server.protocol import ErrorBody, anthropic_error, error_body

logger = log.get(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: it keeps proxies and clients waiting and carries nothing

to_json = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % to_json(data)


def named_event(data: Any) -> bytes:
    """An event whose name is the `type` in its data."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), to_json(data))


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(data), status, headers, "application/json")


def failure(error: Exception) -> ErrorBody:
    """What a client is told about an error: no internals, unless the request itself is at fault."""
    if isinstance(error, RequestError):
        return error_body(error.status, error.message, error.param)
    if isinstance(error, EngineDead):
        return error_body(503, "the engine is not running")
    return error_body(500, "the server failed on this request; its log says why")


def error_response(path: str, body: ErrorBody, headers: dict[str, str] | None = None) -> Response:
    """An error in the form that clients of the path know."""
    error = body["error"]
    told = anthropic_error(error["code"], error["message"]) if path.startswith("/v1/messages") else body
    return json_response(told, error["code"], headers)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises ClientDisconnect, with `work` cancelled, if the client goes away first.

    The body of the request must have been read: from then on `receive` tells of a disconnect and of nothing else.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = asyncio.ensure_future(_disconnect(receive))
    leave = functools.partial(_cancel, task)
    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone.done() and not gone.cancelled() and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()


def _cancel(task: asyncio.Task[Any], _: asyncio.Future[None]) -> None:
    task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the frames of an async generator as they come; an error on the way becomes a last event.

    source           what the frames are made of; left at the end, even if no frame was ever asked for
    ping_interval    seconds without a frame after which a comment line is sent; 0: never
    done             the frame that ends the stream, after an error too
    failed           what an error looks like
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AbstractContextManager[Any],
        frames: AsyncGenerator[bytes, None],
        ping_interval: float,
        headers: dict[str, str],
        done: bytes = DONE,
        failed: Callable[[Exception], bytes] = lambda error: event(failure(error)),
    ):
        self.status_code = 200
        self.background = None
        self._source = source
        self._frames = frames
        self._ping_interval = ping_interval
        self._done = done
        self._failed = failed
        self._sent = False
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._source:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pings = asyncio.ensure_future(self._ping(send)) if self._ping_interval else None
            try:
                await unless_disconnected(receive, self._write(send))
            except ClientDisconnect:
                pass
            finally:
                if pings is not None:
                    pings.cancel()

    async def _write(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    self._sent = True
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:
            if not isinstance(error, RequestError | EngineDead):
                logger.exception("a stream failed")
            frame = self._failed(error)
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": self._done, "more_body": False})

    async def _ping(self, send: Send) -> None:
        while True:
            self._sent = False
            await asyncio.sleep(self._ping_interval)
            if not self._sent:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
