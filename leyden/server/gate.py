"""What every HTTP request passes first: its id, its key, its size; and last: its line in the log, its numbers.

One pure ASGI layer, so that streams stay streams.

X-Request-Id     kept if it is a sane one, made up otherwise; always sent back
Host             must be one of `allowed_hosts`, if there are any (a web page cannot pose as this machine)
API keys         Bearer or x-api-key, for everything but `open`; compared in constant time, over all keys
sizes            at most MAX_URL bytes of URL, MAX_HEADERS headers with together MAX_HEADER_BYTES, and
                 `max_body_bytes` of body
"""

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyden import log
from leyden.errors import RequestError
from leyden.server.metrics import Metrics
from leyden.server.protocol import error_body
from leyden.server.service import REQUEST_ID
from leyden.server.streaming import error_response

logger = log.get(__name__)

CLOSED = 499  # the status nginx logs for a client that went away; nobody receives it
OPEN = ("/health", "/ping", "/version")  # what needs no key
MAX_URL = 8 << 10
MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 << 10


class Gate:
    """Counts the requests that are inside in `running` of the application's state.

    open     paths that need no key
    quiet    paths without a line in the log; None: no path has one
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        keys: Sequence[str] = (),
        open: Collection[str] = OPEN,
        hosts: Sequence[str] = (),
        max_body_bytes: int = 64 << 20,
        root_path: str = "",
        quiet: Collection[str] | None = (),
    ):
        self._app = app
        self._metrics = metrics
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._open = open
        self._hosts = frozenset(hosts)
        self._max_body_bytes = max_body_bytes
        self._root_path = root_path.rstrip("/")
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16]
        scope.setdefault("state", {}).update(request_id=request_id, key="")
        log.request_id.set(request_id)
        status, received, sent = CLOSED, 0, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            self._check_size(received)
            return message

        async def labelled(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            else:
                sent += len(message.get("body", b""))
            await send(message)

        scope["root_path"] = self._root_path  # the prefix is optional: a proxy may or may not have taken it away
        path: str = scope["path"].removeprefix(self._root_path)
        state = scope["app"].state
        state.running += scope["method"] == "POST"
        try:
            try:
                self._check(scope, path, headers)
            except RequestError as error:
                extra = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
                response = error_response(path, error_body(error.status, error.message), extra)
                await response(scope, receive, labelled)
                return
            await self._app(scope, counted, labelled)
        finally:
            state.running -= scope["method"] == "POST"
            seconds = time.monotonic() - started
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.http(route, scope["method"], status, seconds, received, sent)
            if self._quiet is not None and path not in self._quiet:
                self._log(scope, path, status, seconds)

    def _log(self, scope: Scope, path: str, status: int, seconds: float) -> None:
        if logger.isEnabledFor(logging.INFO):
            client = (scope.get("client") or ("-",))[0]
            fields = {"method": scope["method"], "path": path, "status": status, "client": client}
            fields["milliseconds"] = round(1000 * seconds, 1)
            # %r: a path can hold line ends, which would forge lines of the log
            line = "%s %r %d in %.1f ms from %s"
            logger.info(line, scope["method"], path, status, 1000 * seconds, client, extra={"fields": fields})

    def _check(self, scope: Scope, path: str, headers: Headers) -> None:
        if len(scope["path"]) + len(scope["query_string"]) > MAX_URL:
            raise RequestError(f"a URL has at most {MAX_URL} bytes", status=414)
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise RequestError(f"at most {MAX_HEADERS} headers with {MAX_HEADER_BYTES} bytes are read", status=431)
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._hosts and name not in self._hosts:
            raise RequestError(f"{name!r} is not a name of this server; --allowed-hosts can add it", status=403)
        if self._digests and path not in self._open and scope["method"] != "OPTIONS":
            scope["state"]["key"] = self._key(headers)
        if (length := headers.get("content-length", "")).isdigit():
            self._check_size(int(length))

    def _key(self, headers: Headers) -> str:
        """The key as something that can be passed on."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = hashlib.sha256(key.strip().encode()).digest()
        if not any([hmac.compare_digest(digest, known) for known in self._digests]):
            raise RequestError("a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", status=401)
        return digest.hex()

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise RequestError(f"the body must be at most {self._max_body_bytes} bytes", status=413)
