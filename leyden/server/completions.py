"""POST /v1/completions: text or token ids in, more of it out.

No template and no parsing: special tokens in the text of a prompt are special, and markup in an answer is text.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from leyden.errors import RequestError
from leyden.server import logprobs
from leyden.server.protocol import Completion, CompletionChoice, CompletionRequest
from leyden.server.service import Choice, Run, Service, Step, usage
from leyden.server.streaming import EventStream, event, json_response, unless_disconnected
from leyden.text.thinking import starts_thinking
from leyden.types import Request, SamplingParams, TokenLogprobs


async def create(service: Service, body: CompletionRequest, http: HttpRequest) -> Response:
    body.check()
    model = service.check_model(body.model)
    service.separate(body, http)
    response_id = service.response_id("cmpl-", body, http)
    requests: list[Request] = []
    limited = body.truncate_prompt_tokens is None
    banned = await service.banned(body)
    for ids in await encode(service, body.prompts, body.add_special_tokens, limited):
        prompt = service.truncate(ids, body)
        requests += service.requests(response_id, body, prompt, _params(service, body, prompt, banned))
    answer = _Answer(service, body, response_id, model, requests)
    if body.stream:
        run = await answer.run()
        return EventStream(run, answer.frames(run), service.config.ping_interval, service.headers(body))
    whole = await unless_disconnected(http.receive, answer.whole())
    return json_response(whole, headers=service.headers(body))


async def encode(
    service: Service, prompts: Sequence[str] | Sequence[list[int]], add_special_tokens: bool, limited: bool = False
) -> list[list[int]]:
    """Token ids of texts, or of ids; raises RequestError for an id outside the vocabulary.

    `limited`: a text that cannot fit into the context is not encoded at all.
    """

    def encode_all() -> list[list[int]]:
        found = []
        for prompt in prompts:
            if isinstance(prompt, str):
                if limited:
                    service.check_characters(prompt, "prompt")
                prompt = service.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            else:
                service.check_vocabulary("prompt", prompt)
            found.append(prompt)
        return found

    return await asyncio.to_thread(encode_all)


def _params(service: Service, body: CompletionRequest, prompt: list[int], banned: list[list[int]]) -> SamplingParams:
    if body.logprobs is not None and body.logprobs < 0:
        raise RequestError(f"logprobs must be at least 0, got {body.logprobs}", "logprobs")
    params = service.params(body, prompt, "prompt", starts_thinking(prompt, service.tokenizer, default=False), banned)
    if body.echo and params.prompt_logprobs is None:
        params.prompt_logprobs = params.logprobs
    return params


class _Answer:
    """One response: its choices, and the two ways of sending them."""

    def __init__(
        self, service: Service, body: CompletionRequest, response_id: str, model: str, requests: list[Request]
    ):
        self._service = service
        self._body = body
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        names = logprobs.Names(
            service.tokenizer, body.return_tokens_as_token_ids or service.config.return_tokens_as_token_ids
        )
        self._names = names
        self._choices = [Choice(index, request, service.tokenizer) for index, request in enumerate(requests)]
        self._logprobs = [logprobs.CompletionLogprobs(names, body.skip_special_tokens) for _ in requests]
        self._echoed = [not body.echo for _ in requests]

    async def run(self) -> Run:
        return await self._service.generate(self._body, self._choices)

    async def whole(self) -> Completion:
        texts = [""] * len(self._choices)
        pieces: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        with await self.run() as run:
            async for choice, step in run:
                text, piece = self._piece(choice, step)
                texts[choice.index] += text
                if piece is not None:
                    pieces[choice.index].append(piece)
        body: Completion = {
            "id": self._head["id"],
            "object": "text_completion",
            "created": self._head["created"],
            "model": self._head["model"],
            "choices": [
                self._choice(choice, text, logprobs.join(found) if found else None)
                for choice, text, found in zip(self._choices, texts, pieces, strict=True)
            ],
            "service_tier": None,
            "system_fingerprint": self._service.fingerprint,
            "usage": usage(self._choices),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": self._service.numbers(self._choices),
        }
        return body

    def _choice(self, choice: Choice, text: str, found: dict[str, Any] | None) -> CompletionChoice:
        prompt = choice.prompt_logprobs
        return {
            "index": choice.index,
            "text": text,
            "logprobs": found,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._body.return_token_ids else None,
            "prompt_logprobs": None if prompt is None else logprobs.prompt(self._names, prompt),
            "prompt_token_ids": choice.request.prompt if self._body.return_token_ids else None,
            "routed_experts": None,
        }

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        service, body = self._service, self._body
        include_usage, continuous = service.usage_options(body)
        untold = {choice.index for choice in self._choices} if body.return_token_ids else set()
        async for choice, step in run:
            text, piece = self._piece(choice, step)
            over = choice.finish_reason is not None
            if not (text or over or piece or (body.return_token_ids and step.token_ids)):
                continue
            chunk: dict[str, Any] = {
                **self._head,
                "choices": [
                    {
                        "index": choice.index,
                        "text": text,
                        "logprobs": piece,
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                        "prompt_token_ids": choice.request.prompt if choice.index in untold else None,
                        "token_ids": step.token_ids if body.return_token_ids else None,
                    }
                ],
            }
            untold.discard(choice.index)
            if over and not include_usage:
                chunk |= service.signature
            if continuous:
                chunk["usage"] = usage([choice], details=False)
            yield event(chunk)
        if include_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._choices), **service.signature})

    def _piece(self, choice: Choice, step: Step) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of a step; the first one of an echoing choice brings the prompt along."""
        text, ids = step.text, step.token_ids
        found: list[TokenLogprobs | None] = [*step.logprobs]
        if self._body.max_tokens == 0:  # the prompt was to be scored only: what was generated for it is left out
            text, ids, found = "", [], []
        if not self._echoed[choice.index]:
            self._echoed[choice.index] = True
            prompt = choice.request.prompt
            text = self._prompt_text(choice) + text
            if choice.prompt_logprobs is not None:
                ids, found = prompt + ids, [*choice.prompt_logprobs, *found]
        if self._body.logprobs is None or not ids:
            return text, None
        return text, self._logprobs[choice.index].add(found, ids)

    def _prompt_text(self, choice: Choice) -> str:
        given = self._body.prompts[choice.index // self._body.n]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        return self._service.tokenizer.decode(choice.request.prompt, self._body.skip_special_tokens)
