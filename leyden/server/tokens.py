"""POST /tokenize and /detokenize, and the render routes: what a request's prompt is, without generating anything."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from leyden.errors import RequestError
from leyden.server import turn
from leyden.server.completions import encode
from leyden.server.logprobs import Names
from leyden.server.protocol import ChatRequest, CompletionRequest
from leyden.server.service import Service
from leyden.server.streaming import json_response


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or messages as in a chat request."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = Field(None, description="unless set: for a text, not for messages")
    return_token_strs: bool | None = False

    @property
    def chat(self) -> ChatRequest:
        """The messages as a chat request, with its other fields; raises pydantic's ValidationError."""
        return ChatRequest.model_validate(
            {**self.model_dump(exclude_unset=True, exclude_none=True), **(self.model_extra or {})}
        )


class DetokenizeRequest(BaseModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class Rendered(TypedDict):
    prompt_text: str
    prompt_token_ids: list[int]


async def tokenize(service: Service, body: TokenizeRequest) -> Response:
    service.check_model(body.model)
    if body.messages is not None:
        chat = body.chat
        chat.check()
        ids = await turn.encode(service, chat)
    elif body.prompt is not None:
        (ids,) = await encode(service, [body.prompt], body.add_special_tokens is not False)
    else:
        raise RequestError("prompt or messages is required", "prompt")
    names = Names(service.tokenizer, as_ids=False)
    answer: Tokenized = {
        "count": len(ids),
        "max_model_len": service.max_model_len,
        "tokens": ids,
        "token_strs": [names(id) for id in ids] if body.return_token_strs else None,
    }
    return json_response(answer)


async def detokenize(service: Service, body: DetokenizeRequest) -> Response:
    service.check_model(body.model)
    service.check_vocabulary("tokens", body.tokens)
    answer: Detokenized = {"prompt": service.tokenizer.decode(body.tokens)}
    return json_response(answer)


async def render_chat(service: Service, body: ChatRequest) -> Response:
    """The prompt that a chat request would be answered from."""
    body.check()
    service.check_model(body.model)
    return json_response(_rendered(service, await turn.encode(service, body)))


async def render_completion(service: Service, body: CompletionRequest) -> Response:
    """The prompts that a completion request would be answered from."""
    body.check()
    service.check_model(body.model)
    prompts = await encode(service, body.prompts, body.add_special_tokens)
    return json_response([_rendered(service, service.truncate(ids, body)) for ids in prompts])


def _rendered(service: Service, ids: list[int]) -> Rendered:
    return {"prompt_text": service.tokenizer.decode(ids), "prompt_token_ids": ids}
