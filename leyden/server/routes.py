"""Which function answers which path, and what the documentation says about it."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import fastapi
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from leyden import __version__
from leyden.server import chat, completions, messages, responses, tokens
from leyden.server.blocks import CountTokensRequest, MessagesRequest
from leyden.server.health import health_check
from leyden.server.items import InputTokensRequest, ResponsesRequest
from leyden.server.metrics import CONTENT_TYPE, EngineNumbers
from leyden.server.protocol import (
    AnthropicError,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
    ModelCard,
    ModelList,
)
from leyden.server.service import Service
from leyden.server.streaming import json_response

VLLM_COMPAT = "0.27.1"  # the version of vLLM whose interface this is

Documented = dict[int | str, dict[str, Any]]

_ALWAYS = (400, 401, 403, 404, 413, 414, 429, 431, 500, 503, 504)  # what the layers around the routes may say


def _errors(model: Any = ErrorBody) -> Documented:
    return {status: {"model": model, "description": HTTPStatus(status).phrase} for status in _ALWAYS}


def _whole(model: Any, errors: Documented | None = None) -> Mapping[str, Any]:
    return {"response_model": None, "responses": {200: {"model": model}, **(errors or _errors())}}


def _streams(model: Any, errors: Documented | None = None) -> Mapping[str, Any]:
    content: dict[str, Any] = {"text/event-stream": {}}
    return {"response_model": None, "responses": {200: {"model": model, "content": content}, **(errors or _errors())}}


def add(app: fastapi.FastAPI, service: Service, numbers: EngineNumbers) -> None:
    _add_openai(app, service)
    _add_responses(app, service)
    _add_anthropic(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    _add_health(app, service, numbers)


def _add_openai(app: fastapi.FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", **_streams(ChatCompletion))
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        return await chat.create(service, body, http)

    @app.post("/v1/completions", **_streams(Completion))
    async def text_completions(body: CompletionRequest, http: Request) -> Response:
        return await completions.create(service, body, http)

    @app.post("/invocations", **_streams(ChatCompletion | Completion))
    async def invocations(body: dict[str, Any], http: Request) -> Response:
        """The one route of a SageMaker container: a chat or a completion request."""
        if "messages" in body:
            return await chat.create(service, ChatRequest.model_validate(body), http)
        return await completions.create(service, CompletionRequest.model_validate(body), http)


def _add_responses(app: fastapi.FastAPI, service: Service) -> None:
    @app.post("/v1/responses", **_streams(responses.ResponseObject))
    async def create_response(body: ResponsesRequest, http: Request) -> Response:
        return await responses.create(service, body, http)

    @app.post("/v1/responses/input_tokens", **_whole(responses.InputTokens))
    async def count_input_tokens(body: InputTokensRequest) -> Response:
        return await responses.count(service, body)

    @app.get("/v1/responses/{response_id}", response_model=None, responses=_errors())
    async def stored_response(response_id: str) -> Response:
        """Nothing is stored, so there is nothing to get."""
        raise responses.not_stored(response_id)

    @app.post("/v1/responses/{response_id}/cancel", response_model=None, responses=_errors())
    async def cancel_response(response_id: str) -> Response:
        raise responses.not_stored(response_id)


def _add_anthropic(app: fastapi.FastAPI, service: Service) -> None:
    errors = _errors(AnthropicError)

    @app.post("/v1/messages", **_streams(messages.AnthropicAnswer, errors))
    async def create_message(body: MessagesRequest, http: Request) -> Response:
        return await messages.create(service, body, http)

    @app.post("/v1/messages/count_tokens", **_whole(messages.InputTokens, errors))
    async def count_tokens(body: CountTokensRequest) -> Response:
        return await messages.count(service, body)


def _add_tokens(app: fastapi.FastAPI, service: Service) -> None:
    @app.post("/tokenize", **_whole(tokens.Tokenized))
    async def tokenize(body: tokens.TokenizeRequest) -> Response:
        return await tokens.tokenize(service, body)

    @app.post("/detokenize", **_whole(tokens.Detokenized))
    async def detokenize(body: tokens.DetokenizeRequest) -> Response:
        return await tokens.detokenize(service, body)

    @app.post("/v1/chat/completions/render", **_whole(tokens.Rendered))
    async def render_chat(body: ChatRequest) -> Response:
        return await tokens.render_chat(service, body)

    @app.post("/v1/completions/render", **_whole(list[tokens.Rendered]))
    async def render_completion(body: CompletionRequest) -> Response:
        return await tokens.render_completion(service, body)


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

    @app.get("/v1/models", **_whole(ModelList))
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(name) for name in service.names if name != "*"]})

    @app.get("/v1/models/{name:path}", **_whole(ModelCard))
    async def model_card(name: str) -> Response:
        if not name:
            raise HTTPException(404)
        return json_response(card(service.check_model(name)))


def _add_health(app: fastapi.FastAPI, service: Service, numbers: EngineNumbers) -> None:
    checking = asyncio.Lock()  # one at a time: anybody may ask
    described: Documented = {200: {"description": "it runs"}, 503: {"description": "it does not"}}

    @app.get("/health", response_class=Response, responses={**_errors(), **described})
    async def health(generate: bool = False) -> Response:
        """With generate=1 the engine has to generate a token first, which tells more and takes longer."""
        if generate:
            async with checking:
                works = await health_check(service)
        else:
            works = service.client.alive
        return Response(status_code=200 if works else 503)

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        return Response(status_code=200 if service.client.alive else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__, "vllm_compat": VLLM_COMPAT}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": app.state.running if service.config.enable_server_load_tracking else 0}

    @app.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        await numbers.refresh()
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
