"""What every HTTP request passes first: its id, its key, its size. One pure ASGI layer, so that streams stay streams.

X-Request-Id     kept if it is a sane one, made up otherwise; always sent back
Host             must be one of `allowed_hosts`, if there are any (a web page cannot pose as this machine)
API keys         Bearer or x-api-key, for everything but OPEN; compared in constant time, over all keys
sizes            at most MAX_HEADERS headers of together MAX_HEADER_BYTES, and `max_body_bytes` of body
"""

import hashlib
import hmac
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyden.errors import RequestError
from leyden.server.protocol import error_body
from leyden.server.service import REQUEST_ID
from leyden.server.streaming import json_response

OPEN = ("/health", "/ping", "/version")
MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 << 10


class Gate:
    """Counts the requests that are inside in `running` of the application's state."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], hosts: Sequence[str], max_body_bytes: int, root_path: str):
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._hosts = frozenset(hosts)
        self._max_body_bytes = max_body_bytes
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16]
        scope.setdefault("state", {})["request_id"] = request_id
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            self._check_size(size)
            return message

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        scope["root_path"] = self._root_path  # the prefix is optional: a proxy may or may not have taken it away
        state = scope["app"].state
        state.running += scope["method"] == "POST"
        try:
            try:
                self._check(scope, headers)
            except RequestError as error:
                extra = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
                response = json_response(error_body(error.status, error.message), error.status, extra)
                await response(scope, receive, labelled)
                return
            await self._app(scope, counted, labelled)
        finally:
            state.running -= scope["method"] == "POST"

    def _check(self, scope: Scope, headers: Headers) -> None:
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise RequestError(f"at most {MAX_HEADERS} headers with {MAX_HEADER_BYTES} bytes are read", status=431)
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._hosts and name not in self._hosts:
            raise RequestError(f"{name!r} is not a name of this server; --allowed-hosts can add it", status=403)
        path: str = scope["path"].removeprefix(self._root_path)
        if self._digests and path not in OPEN and scope["method"] != "OPTIONS" and not self._knows(headers):
            raise RequestError("a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", status=401)
        if (length := headers.get("content-length", "")).isdigit():
            self._check_size(int(length))

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = hashlib.sha256(key.strip().encode()).digest()
        return any([hmac.compare_digest(digest, known) for known in self._digests])

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise RequestError(f"the body must be at most {self._max_body_bytes} bytes", status=413)
