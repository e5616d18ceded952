"""The HTTP server: routes, error shapes, and the program around them.

build    the FastAPI application over an engine client (tests call it without a socket)
serve    uvicorn around it, until it is told to stop or the engine is gone
"""

import asyncio
import contextlib
import inspect
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from types import FrameType
from typing import Any

import fastapi
import uvicorn
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyden import __version__, log
from leyden.config.server import ServerConfig
from leyden.errors import ConfigError, EngineDead, Overloaded, RequestError
from leyden.server import routes
from leyden.server.client import EngineClient
from leyden.server.gate import CLOSED, OPEN, Gate
from leyden.server.metrics import EngineNumbers, Metrics, report
from leyden.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from leyden.server.protocol import decode, error_body, invalid
from leyden.server.service import Service, fingerprint
from leyden.server.streaming import error_response, failure
from leyden.server.tracing import Tracing
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer

logger = log.get(__name__)

_LAST_WORDS = 2  # seconds in which requests that are ended can say so
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def build(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    model: str,
    defaults: Mapping[str, Any] | None = None,
) -> fastapi.FastAPI:
    """The application, which opens `client` when it starts and closes it when it ends.

    Raises ConfigError if `config` names a parser that there is not, or wants traces that cannot be sent.

    model       the model as it was given: its name, unless the config has others
    defaults    sampling values of generation_config.json: see Service
    """
    for name, accepted in (("reasoning_parser", REASONING_PARSERS), ("tool_call_parser", TOOL_PARSERS)):
        if getattr(config, name) not in accepted:
            names = ", ".join(sorted(filter(None, accepted)))
            raise ConfigError(f"--{name.replace('_', '-')} must be one of {names}, got {getattr(config, name)!r}")
    served = config.served_model_name or (model,)
    if served[0] == "*":
        served = (model, *served)
    tracing = Tracing(config.otlp_traces_endpoint, served[0]) if config.otlp_traces_endpoint else None
    metrics = Metrics(served[0], int(client.facts["max_model_len"]))
    numbers = EngineNumbers(client, metrics)
    service = Service(
        config=config,
        client=client,
        tokenizer=tokenizer,
        template=template,
        metrics=metrics,
        defaults=defaults or {},
        names=served,
        root=model,
        fingerprint=fingerprint(config, client.facts),
        traced=tracing.record if tracing is not None else None,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        client.open()
        lines = None if config.disable_log_stats else asyncio.ensure_future(report(numbers))
        yield
        if lines is not None:
            lines.cancel()
        await client.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = _App(
        title="leyden",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",  # /docs and /redoc go with it
    )
    app.router.route_class = _JsonRoute
    app.state.running = 0
    _add_errors(app, config)
    routes.add(app, service, numbers)
    if tracing is not None:
        app.add_middleware(tracing.around)
    hosts = config.allowed_hosts or ((*_LOOPBACK_NAMES, config.host) if config.local and not config.uds else ())
    logged = not config.disable_uvicorn_access_log and config.uvicorn_log_level in ("trace", "debug", "info")
    app.add_middleware(
        Gate,
        metrics=metrics,
        keys=config.api_key,
        open=OPEN if config.metrics_auth else (*OPEN, "/metrics"),
        hosts=hosts,
        max_body_bytes=config.max_body_bytes,
        root_path=config.root_path,
        quiet=config.disable_access_log_for_endpoints if logged else None,
    )
    if config.allowed_origins:  # outermost: a refusal needs the headers too, or the browser hides it from the page
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    return app


class _App(fastapi.FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The documentation, without the status 422 that FastAPI would give: what cannot be validated is a 400 here."""
        document = super().openapi()
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        return document


class _JsonRoute(APIRoute):
    """Reads bodies itself and calls the endpoint with them, as `body`, and with the request, if it wants it, as `http`.

    FastAPI writes the documentation; its own way from a body to an endpoint is more lenient about what JSON is, and
    slower than everything else that a short request needs.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        if self.body_field is None:
            return super().get_route_handler()
        endpoint: Callable[..., Awaitable[Response]] = self.endpoint
        annotations = inspect.get_annotations(endpoint)
        adapter: TypeAdapter[Any] = TypeAdapter(annotations["body"])
        wants_http = "http" in annotations

        async def read(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise RequestError(f"the content type must be application/json, got {kind or 'none'}")
            body = adapter.validate_python(decode(await request.body()))
            return await (endpoint(body=body, http=request) if wants_http else endpoint(body=body))

        return read

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HEAD is GET here; of its answer uvicorn sends the head alone."""
        if scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            scope = {**scope, "method": "GET"}
        await super().handle(scope, receive, send)


def _add_errors(app: fastapi.FastAPI, config: ServerConfig) -> None:
    """Every error in the one shape; what a client did wrong is never a 500 and never shows our insides."""

    @app.exception_handler(RequestError)
    @app.exception_handler(EngineDead)
    async def known(request: Request, error: Exception) -> Response:
        if config.log_error_stack:
            logger.error("request failed", exc_info=error)
        headers = {}
        if isinstance(error, Overloaded):
            headers["Retry-After"] = str(error.retry_after)
        elif isinstance(error, EngineDead):
            headers["Retry-After"] = "5"
        return error_response(_path(request), failure(error), headers)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def malformed(request: Request, error: RequestValidationError | ValidationError) -> Response:
        return await known(request, invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
        headers = dict(error.headers or {})
        return error_response(_path(request), error_body(error.status_code, message), headers)

    @app.exception_handler(RecursionError)
    async def too_deep(request: Request, _: Exception) -> Response:
        return await known(request, RequestError("the body is nested too deeply"))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLOSED)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return error_response(_path(request), failure(error))  # the server logs it with its traceback


def _path(request: Request) -> str:
    """The path as the routes have it, without what a proxy put before it."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


class _Server(uvicorn.Server):
    """uvicorn, stopped by a signal without dying of it: the exit code is ours to choose.

    Requests that run then have `grace` seconds; those that are left are told why they end, and their streams are whole.
    """

    def __init__(self, settings: uvicorn.Config, client: EngineClient, grace: float):
        super().__init__(settings)
        self._client, self._grace = client, grace
        self._ending = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace, self._end)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second signal ends the grace, the third everything."""
        if self.should_exit and not self._ending:
            self._end()
        else:
            super().handle_exit(sig, frame)

    def _end(self) -> None:
        self._ending = True
        self._client.end(Overloaded("the server is shutting down", 503))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self.handle_exit, sig, None)
        yield
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(sig)


def serve(app: fastapi.FastAPI, config: ServerConfig, client: EngineClient) -> int:
    """Run until SIGINT or SIGTERM (exit code 0) or until the engine is gone (1).

    Requests that run when a signal comes get `shutdown_timeout` seconds, then they end with an error of status 503.
    """
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        uds=config.uds,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or "TLSv1",
        log_config=None,  # leyden.log has set up logging
        log_level=config.uvicorn_log_level,
        access_log=False,  # the gate writes it
        timeout_graceful_shutdown=config.shutdown_timeout + _LAST_WORDS,
        server_header=False,
    )
    if not config.local and not config.api_key:
        logger.warning(
            "anyone who reaches %s port %d can use this server; --api-key prevents it", config.host, config.port
        )

    async def main() -> int:
        server = _Server(settings, client, config.shutdown_timeout)
        death = asyncio.ensure_future(client.died())
        death.add_done_callback(lambda _: setattr(server, "should_exit", True))
        await server.serve()
        if death.done():
            logger.error("stopped because the engine is gone: %s", client.death)
            return 1
        death.cancel()
        return 0 if server.started else 1

    with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
        return runner.run(main())
