"""The HTTP server: routes, error shapes, and the program around them.

build    the FastAPI application over an engine client (tests call it without a socket)
serve    uvicorn around it, until it is told to stop or the engine is gone
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import fastapi
import uvicorn
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from leyden import __version__, log
from leyden.config.server import ServerConfig
from leyden.errors import ConfigError, EngineDead, Overloaded, RequestError
from leyden.server import chat, completions
from leyden.server.client import EngineClient
from leyden.server.gate import Gate
from leyden.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from leyden.server.protocol import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
    ModelCard,
    ModelList,
    decode,
    error_body,
    invalid,
)
from leyden.server.service import Service, fingerprint
from leyden.server.streaming import failure, json_response
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer

logger = log.get(__name__)

VLLM_COMPAT = "0.27.1"  # the version of vLLM whose interface this is
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_CLOSED = 499  # the status nginx logs for a client that went away; nobody receives it


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

    Raises ConfigError if `config` names a parser that there is not.

    model       the model as it was given: its name, unless the config has others
    defaults    sampling values of generation_config.json: see Service
    """
    for name, accepted in (("reasoning_parser", REASONING_PARSERS), ("tool_call_parser", TOOL_PARSERS)):
        if getattr(config, name) not in accepted:
            names = ", ".join(sorted(filter(None, accepted)))
            raise ConfigError(f"--{name.replace('_', '-')} must be one of {names}, got {getattr(config, name)!r}")
    service = Service(
        config=config,
        client=client,
        tokenizer=tokenizer,
        template=template,
        defaults=defaults or {},
        names=config.served_model_name or (model,),
        root=model,
        fingerprint=fingerprint(config, client.facts),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        client.open()
        yield
        await client.close()

    app = fastapi.FastAPI(
        title="leyden",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",  # /docs and /redoc go with it
    )
    app.router.route_class = _JsonRoute
    app.state.running = 0
    _add_errors(app, config)
    _add_generation(app, service)
    _add_models(app, service)
    _add_health(app, service)
    hosts = config.allowed_hosts or ((*_LOOPBACK_NAMES, config.host) if config.local and not config.uds else ())
    app.add_middleware(
        Gate, keys=config.api_key, hosts=hosts, max_body_bytes=config.max_body_bytes, root_path=config.root_path
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


class _JsonRequest(Request):
    """A request whose body has been decoded by our rules, not by Python's more lenient ones."""

    decoded: dict[str, Any]

    async def json(self) -> Any:
        return self.decoded


class _JsonRoute(APIRoute):
    """Reads bodies before FastAPI does, so that every malformed one is a RequestError."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        route = super().get_route_handler()
        if self.body_field is None:
            return route

        async def read(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise RequestError(f"the content type must be application/json, got {kind or 'none'}")
            read = _JsonRequest(request.scope, request.receive)
            read.decoded = decode(await read.body())
            return await route(read)

        return read


def _add_errors(app: fastapi.FastAPI, config: ServerConfig) -> None:
    """Every error in the one shape; what a client did wrong is never a 500 and never shows our insides."""

    @app.exception_handler(RequestError)
    @app.exception_handler(EngineDead)
    async def known(_: Request, error: Exception) -> Response:
        if config.log_error_stack:
            logger.error("request failed", exc_info=error)
        body = failure(error)
        headers = {}
        if isinstance(error, Overloaded):
            headers["Retry-After"] = str(error.retry_after)
        elif isinstance(error, EngineDead):
            headers["Retry-After"] = "5"
        return json_response(body, body["error"]["code"], headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return await known(request, invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
        headers = dict(error.headers or {})
        return json_response(error_body(error.status_code, message), error.status_code, headers)

    @app.exception_handler(RecursionError)
    async def too_deep(request: Request, _: Exception) -> Response:
        return await known(request, RequestError("the body is nested too deeply"))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=_CLOSED)

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> Response:
        return json_response(failure(error), 500)  # the server logs it with its traceback


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": HTTPStatus(status).phrase} for status in (400, 401, 404, 413, 500, 503)
}


def _add_generation(app: fastapi.FastAPI, service: Service) -> None:
    def responses(whole: type) -> dict[int | str, dict[str, Any]]:
        stream = {"text/event-stream": {"schema": {"type": "string"}}}
        return {200: {"model": whole, "content": stream}, **_ERRORS}

    @app.post("/v1/chat/completions", response_model=None, responses=responses(ChatCompletion))
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        return await chat.create(service, body, http)

    @app.post("/v1/completions", response_model=None, responses=responses(Completion))
    async def text_completions(body: CompletionRequest, http: Request) -> Response:
        return await completions.create(service, body, http)


def _add_models(app: fastapi.FastAPI, service: Service) -> None:
    def card(name: str) -> ModelCard:
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": service.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "vllm",  # clients choose their dialect by it
            "root": service.root,
            "parent": None,
            "max_model_len": service.max_model_len,
            "permission": [permission],
        }

    @app.get("/v1/models", response_model=None, responses={200: {"model": ModelList}})
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    @app.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelCard}, 404: _ERRORS[404]})
    async def model_card(name: str) -> Response:
        if not name:
            raise HTTPException(404)
        return json_response(card(service.check_model(name)))


def _add_health(app: fastapi.FastAPI, service: Service) -> None:
    @app.get("/health", response_model=None)
    @app.get("/ping", response_model=None)
    @app.post("/ping", response_model=None)
    async def health() -> Response:
        return Response(status_code=200 if service.client.alive else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__, "vllm_compat": VLLM_COMPAT}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": app.state.running if service.config.enable_server_load_tracking else 0}


class _Server(uvicorn.Server):
    """uvicorn, stopped by a signal without dying of it: the exit code is ours to choose."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self.handle_exit, sig, None)
        yield
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(sig)


class _Quiet(logging.Filter):
    """Leaves paths out of the access log."""

    def __init__(self, paths: tuple[str, ...]):
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        path = str(record.args[2]) if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return path.partition("?")[0] not in self._paths


def serve(app: fastapi.FastAPI, config: ServerConfig, client: EngineClient) -> int:
    """Run until SIGINT or SIGTERM (exit code 0) or until the engine is gone (1).

    Requests that run when a signal comes get `shutdown_timeout` seconds.
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
        access_log=not config.disable_uvicorn_access_log,
        timeout_graceful_shutdown=config.shutdown_timeout or 1,  # with 0 uvicorn reports requests that had just ended
        server_header=False,
    )
    if config.disable_access_log_for_endpoints:
        logging.getLogger("uvicorn.access").addFilter(_Quiet(config.disable_access_log_for_endpoints))
    if not config.local and not config.api_key:
        logger.warning(
            "anyone who reaches %s port %d can use this server; --api-key prevents it", config.host, config.port
        )

    async def main() -> int:
        server = _Server(settings)
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
