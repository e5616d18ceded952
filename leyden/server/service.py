"""What every generating endpoint shares: from a request's body to the engine, and from its deltas to text.

`Service` holds the parts of a running server and its rules for limits, defaults, names and ids; a `Choice` is one
answer while it is generated.
"""

import asyncio
import functools
import itertools
import re
import time
import uuid
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest

from leyden import __version__, log
from leyden.config.server import ServerConfig
from leyden.errors import Overloaded, RequestError
from leyden.server.client import EngineClient, Stream
from leyden.server.metrics import Metrics
from leyden.server.protocol import ChatRequest, CompletionRequest, StreamOptions, Usage
from leyden.text.stream import TextStream
from leyden.text.template import ChatTemplate
from leyden.text.thinking import ENDS, with_thinking
from leyden.text.tokenizer import Tokenizer
from leyden.text.words import spellings
from leyden.types import Delta, Repetition, Request, SamplingParams, TokenLogprobs

logger = log.get(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
LOWEST_TEMPERATURE = 0.01  # what is asked for between 0 and this is raised to it, as vLLM does
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SENT = (
    *_DEFAULTED,
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
)

Body = ChatRequest | CompletionRequest


@dataclass(slots=True)
class Step:
    """What one delta brought to a choice. `logprobs` has an entry per token id, if they were asked for."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class Choice:
    """One answer while it is generated: tokens in, text out, ended by the engine or by a stop string.

    token_ids, logprobs    all so far; logprobs stays empty if they were not asked for
    first, last, queued    by the clock of Request.arrival
    """

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, keep: Collection[int] = ()):
        """`keep`: special tokens whose text is needed (by a parser) although special tokens are skipped."""
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.first: float | None = None  # when the first token came
        self.last = 0.0  # when the newest one came
        self.queued = 0.0  # seconds in the queue
        self.drafts: list[tuple[int, int]] = []  # of each step that had some: how many, and how many were right
        self._text = TextStream(tokenizer, request.params, request.prompt, keep)

    @property
    def special_at(self) -> Container[int]:
        """Offsets in the text at which tokens of `keep` stand."""
        return self._text.special_at

    def advance(self, delta: Delta) -> Step:
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.drafted:
            self.drafts.append((delta.drafted, delta.accepted))
        ids = delta.token_ids
        # The token that ends an answer is no text, unless it was the client's and the client wants to see it.
        hidden = delta.finish_reason == "stop" and not (
            self.request.params.include_stop_str_in_output and delta.stop_reason is not None
        )
        before = self._text.tokens
        text = self._text.push(ids[:-1] if hidden else ids)
        taken = self._text.tokens - before
        if self._text.stop is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stop
        elif delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            if delta.finish_reason == "repetition":
                self.stop_reason = "repetition_detected"
            text += self._text.finish()
            taken = len(ids)
        step = Step(text, ids[:taken], (delta.logprobs or [])[:taken])
        self.token_ids += step.token_ids
        self.logprobs += step.logprobs
        return step


@dataclass
class Service:
    """The parts of a running server.

    defaults    sampling values of the checkpoint's generation_config.json, by the names of SamplingParams; max_tokens
                caps what a request may ask for, stop_token_ids are added to the request's
    names       what clients may call the model, "*" for anything; the first one is that of those who do not say
    root        where the model came from, for its card
    traced      is told of every choice that is over, and why
    """

    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    metrics: Metrics
    defaults: Mapping[str, Any]
    names: tuple[str, ...]
    root: str
    fingerprint: str | None = None
    traced: Callable[[Choice, str], None] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _count: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def max_model_len(self) -> int:
        return int(self.client.facts["max_model_len"])

    @functools.cached_property
    def most_characters(self) -> int:
        """A text with more characters than this has more tokens than the context: no token stands for more bytes."""
        tokens = range(self.tokenizer.vocab_size)
        return self.max_model_len * max(len(self.tokenizer.bytes_of(id)) for id in tokens)

    @property
    def signature(self) -> dict[str, str]:
        """system_fingerprint, if there is one, for the last chunk of a stream."""
        return {} if self.fingerprint is None else {"system_fingerprint": self.fingerprint}

    def check_model(self, name: str | None) -> str:
        if name and name not in self.names and "*" not in self.names:
            there = ", ".join(self.names)
            raise RequestError(f"the model {name!r} does not exist; this server has {there}", "model", 404)
        return name or self.names[0]

    def response_id(self, prefix: str, body: Body, http: HttpRequest) -> str:
        """The id in the body if it is a sane one, else that of the X-Request-Id header, which always has one."""
        given = body.request_id or ""
        return f"{prefix}{given if REQUEST_ID.fullmatch(given) else http.state.request_id}"

    def separate(self, body: Body, http: HttpRequest) -> None:
        """--cache-salt-per-key: requests with different API keys find nothing of each other in the cache."""
        if self.config.cache_salt_per_key:
            body.cache_salt = f"{http.state.key}:{body.cache_salt or ''}"

    def check_characters(self, text: str, field: str) -> None:
        """Whether it can fit into the context at all, before the time is spent to find out exactly."""
        if len(text) > self.max_model_len and len(text) > self.most_characters:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, but {field} has {len(text)} "
                "characters, which is more than so many tokens hold. Please reduce the length of the prompt.",
                field,
            )

    def truncate(self, prompt: list[int], body: Body) -> list[int]:
        """truncate_prompt_tokens: keep the end of the prompt, or its beginning if the side to cut is the right one."""
        if (keep := body.truncate_prompt_tokens) is None:
            return prompt
        if keep == -1:
            keep = max(self.max_model_len - max(body.limit[1] or 1, 1), 1)
        return prompt[-keep:] if body.truncation_side == "left" else prompt[:keep]

    async def banned(self, body: Body) -> list[list[int]]:
        """The bad words of a request, as the engine wants them."""
        if not body.bad_words:
            return []
        return await asyncio.to_thread(spellings, body.bad_words, self.tokenizer)

    def params(
        self, body: Body, prompt: Sequence[int], prompt_field: str, thinking: bool, banned: list[list[int]]
    ) -> SamplingParams:
        """How to generate, with the model's defaults and what the context has room for.

        `thinking`: the answer starts with it; `banned`: from banned(). Raises RequestError that names the field at
        fault: `prompt_field` if the prompt alone is too long.
        """
        values: dict[str, Any] = {name: self.defaults.get(name) for name in _DEFAULTED}
        values |= {name: value for name in _SENT if (value := getattr(body, name)) is not None}
        if 0 < (values["temperature"] or 0) < LOWEST_TEMPERATURE:
            values["temperature"] = LOWEST_TEMPERATURE
        limit_field, limit = body.limit
        if limit is not None and limit < 1:
            raise RequestError(f"{limit_field} must be at least 1, got {limit}", limit_field)
        self.check_vocabulary("allowed_token_ids", body.allowed_token_ids)
        self.check_vocabulary("logit_bias", body.logit_bias)
        self.check_vocabulary("stop_token_ids", body.stop_token_ids)
        self.check_vocabulary("logprob_token_ids", body.logprob_token_ids)
        stops = dict.fromkeys(body.stop_token_ids or ())
        if not body.ignore_eos:
            stops |= dict.fromkeys(self.defaults.get("stop_token_ids", ()))
        params = SamplingParams(
            **{name: value for name, value in values.items() if value is not None},
            logit_bias={id: min(max(bias, -100.0), 100.0) for id, bias in (body.logit_bias or {}).items()},
            banned=banned,
            seed=None if body.seed == -1 else body.seed,
            n=body.n,
            max_tokens=limit,
            stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
            stop_token_ids=list(stops),
            logprobs=self._check_top("top_logprobs" if isinstance(body, ChatRequest) else "logprobs", body.top),
            prompt_logprobs=self._check_top("prompt_logprobs", body.prompt_logprobs),
            repetition_detection=Repetition(**rule.model_dump()) if (rule := body.repetition_detection) else None,
            grammar=body.grammar(
                compact=bool(self.config.structured_outputs_config.get("disable_any_whitespace")),
                level=self.config.tool_strict_level or "auto",
            ),
        )
        params.max_tokens = self._room(body, len(prompt), prompt_field)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        return self._with_thinking(params, body, prompt, thinking)

    def _with_thinking(self, params: SamplingParams, body: Body, prompt: Sequence[int], starts: bool) -> SamplingParams:
        config, budget, grace = self.config, body.thinking_token_budget, body.thinking_token_grace
        if budget is None:
            budget = config.default_thinking_budget
        params.thinking_token_budget = budget if budget is not None and budget >= 0 else None
        params.thinking_token_grace = config.default_thinking_grace if grace is None else grace
        if params.grammar is not None and config.structured_outputs_config.get("enable_in_reasoning"):
            return params  # the grammar is that of the thinking too
        return with_thinking(
            params,
            prompt,
            self.tokenizer,
            starts=starts,
            calls=bool(body.callable_tools),
            forced=config.reasoning_config.get("reasoning_end_str") or ENDS,
        )

    def requests(self, response_id: str, body: Body, prompt: list[int], params: SamplingParams) -> list[Request]:
        """One engine request per choice. Their ids are unique although clients choose (and repeat) response ids."""
        number = next(self._count)
        seeds = [None if params.seed is None else params.seed + index for index in range(params.n)]
        marks = self.template.marks(prompt)
        if self.config.enable_log_requests:
            logger.info("%s: %d prompt tokens, %s", response_id, len(prompt), params)
            logger.debug("%s: prompt %r", response_id, self.tokenizer.decode(prompt)[: self.config.max_log_len])
        return [
            Request(
                id=f"{response_id}-{number:x}-{index}",
                prompt=prompt,
                params=params if params.n == 1 else replace(params, seed=seed, n=1),
                priority=body.priority,
                arrival=time.monotonic(),
                cache_salt=body.cache_salt or "",
                marks=marks,
            )
            for index, seed in enumerate(seeds)
        ]

    async def generate(self, body: Body, choices: Sequence[Choice], single: bool = False) -> "Run":
        """Submit the requests of the choices; RequestError or EngineDead if they are not taken.

        `single`: the run brings one token at a time.
        """
        self._check_queue(len(choices))
        # Nobody looks at an answer that is sent whole before its end, unless a stop string may end it early.
        whole = not body.stream and not choices[0].request.params.stop
        interval = self.max_model_len if whole else body.stream_interval or self.config.stream_interval
        stream = await self.client.generate(*(choice.request for choice in choices), interval=interval)
        self.metrics.choices.add(body.n)
        return Run(self, stream, choices, single)

    def _check_queue(self, more: int) -> None:
        if (limit := self.config.max_queued_requests) is None:
            return
        waiting = max(self.client.requests + more - int(self.client.facts["max_num_seqs"]), 0)
        if waiting > limit:
            self.metrics.rejected.inc()
            raise Overloaded(f"more than {limit} requests are waiting (--max-queued-requests); try again later")

    def log_answer(self, choice: Choice) -> None:
        if self.config.enable_log_requests and self.config.enable_log_outputs:
            text = self.tokenizer.decode(choice.token_ids)[: self.config.max_log_len]
            logger.info("%s: answer %r", choice.request.id, text)

    def numbers(self, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """Of an answer with one choice: --enable-per-request-metrics and --per-request-spec-decode-metrics."""
        choice, told = choices[0], dict[str, Any]()
        if len(choices) == 1 and self.config.enable_per_request_metrics and choice.first is not None:
            told |= _timings(choice, choice.first)
        if len(choices) == 1 and self.config.per_request_spec_decode_metrics != "none":
            detailed = self.config.per_request_spec_decode_metrics == "detailed"
            told["speculative_decoding"] = _drafts(choice.drafts, int(self.client.facts.get("drafts", 0)), detailed)
        return told or None

    def usage_options(self, body: Body) -> tuple[bool, bool]:
        """Whether a stream ends with its usage, and whether every chunk carries the usage so far."""
        force, options = self.config.enable_force_include_usage, body.stream_options or StreamOptions()
        include = force or options.include_usage
        return include, force or (include and options.continuous_usage_stats)

    def headers(self, body: Body) -> dict[str, str]:
        """Of the answer: fields that had no effect are named, so that nobody builds on them unknowingly."""
        return {"Warning": f'299 leyden "without effect: {", ".join(body.ignored)}"'} if body.ignored else {}

    def _room(self, body: Body, prompt: int, prompt_field: str) -> int:
        """The most tokens to generate. Agents know an overflow by the words "maximum context length"."""
        room = self.max_model_len - prompt
        limit_field, limit = body.limit
        if room < 1 or (limit is not None and limit > room):
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, but this request needs "
                f"{prompt} in the prompt and {limit or 'at least 1'} of output. "
                "Please reduce the length of the prompt or the number of tokens to generate.",
                prompt_field if room < 1 else limit_field,
            )
        return min(room, limit or body.default_limit or room, self.defaults.get("max_tokens") or room)

    def _check_top(self, name: str, top: int | None) -> int | None:
        most = int(self.client.facts["max_logprobs"])
        if top is not None and most != -1 and (top > most or top < 0):
            raise RequestError(f"{name} must be between 0 and {most} (--max-logprobs), got {top}", name)
        return top

    def check_vocabulary(self, name: str, ids: Collection[int] | None) -> None:
        size = int(self.client.facts["vocab_size"])
        if ids and (wrong := next((id for id in ids if not 0 <= id < size), None)) is not None:
            raise RequestError(f"{name}: token ids must be in [0, {size}), got {wrong}", name)


class Run:
    """The choices of one answer while the engine works on them: an async iterator of (choice, what it got).

    A choice that is over leaves the engine; leaving the `with` block early aborts the others.
    """

    def __init__(self, service: Service, stream: Stream, choices: Sequence[Choice], single: bool = False):
        self._service = service
        self._metrics = service.metrics
        self._stream = stream
        self._single = single
        self._cut: list[Delta] = []  # single tokens that have come, the next one last
        self._choices = {choice.request.id: choice for choice in choices}
        self._running = len(choices)
        self._expiry: asyncio.TimerHandle | None = None
        if seconds := service.config.request_timeout:
            error = RequestError(f"the answer took longer than {seconds:g} s (--request-timeout)", status=504)
            self._expiry = asyncio.get_running_loop().call_later(seconds, stream.end, error)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._stream.__exit__()
        if self._running:
            failed = self._stream.error is not None
            self._metrics.finished["error" if failed else "abort"].inc(self._running)
            self._metrics.client_aborts.inc(0 if failed else self._running)
            for choice in self._choices.values():
                if choice.finish_reason is None:
                    self._trace(choice, "error" if failed else "abort")
        else:
            self._metrics.most_generated.add(max(len(choice.token_ids) for choice in self._choices.values()))
        self._running = 0

    def __aiter__(self) -> "Run":
        return self

    async def __anext__(self) -> tuple[Choice, Step]:
        delta = self._cut.pop() if self._cut else await anext(self._stream)
        if self._single and len(delta.token_ids) > 1:
            self._cut = cut(delta)[::-1]
            delta = self._cut.pop()
        choice = self._choices[delta.request_id]
        step = choice.advance(delta)
        self._clock(choice, len(step.token_ids), delta.queued)
        if choice.finish_reason is not None:
            if delta.finish_reason is None:
                self._stream.drop(delta.request_id)
                self._cut = []
            self._finish(choice)
        return choice, step

    def _clock(self, choice: Choice, tokens: int, queued: float) -> None:
        """Note when tokens came. Of several at once nobody knows better than that they came at equal distances."""
        if not tokens:
            return
        now = time.monotonic()
        if choice.first is None:
            choice.first, choice.queued = now, queued
            self._metrics.first_token.add(now - choice.request.arrival)
        else:
            self._metrics.next_token.add((now - choice.last) / tokens, tokens)
        choice.last = now

    def _finish(self, choice: Choice) -> None:
        metrics, request, tokens = self._metrics, choice.request, len(choice.token_ids)
        self._running -= 1
        metrics.finished[choice.finish_reason or "abort"].inc()
        metrics.prompt.add(len(request.prompt))
        metrics.computed.add(len(request.prompt) - choice.cached_tokens)
        metrics.generated.add(tokens)
        metrics.max_tokens.add(request.params.max_tokens or 0)
        seconds = time.monotonic() - request.arrival
        metrics.whole.add(seconds)
        metrics.queued.add(choice.queued)
        metrics.inference.add(seconds - choice.queued)
        if choice.first is not None:
            metrics.prefill.add(choice.first - request.arrival - choice.queued)
            metrics.decode.add(choice.last - choice.first)
            if tokens > 1:
                metrics.per_token.add((choice.last - choice.first) / (tokens - 1))
        self._service.log_answer(choice)
        self._trace(choice, choice.finish_reason or "abort")

    def _trace(self, choice: Choice, reason: str) -> None:
        if self._service.traced is not None:
            self._service.traced(choice, reason)


def _timings(choice: Choice, first: float) -> dict[str, float]:
    tokens, seconds = len(choice.token_ids), choice.last - first
    return {
        "time_to_first_token_ms": 1000 * (first - choice.request.arrival),
        "generation_time_ms": 1000 * seconds,
        "queue_time_ms": 1000 * choice.queued,
        "mean_itl_ms": 1000 * seconds / max(tokens - 1, 1),
        "tokens_per_second": tokens / max(choice.last - choice.request.arrival, 1e-9),
    }


def _drafts(steps: Sequence[tuple[int, int]], most: int, detailed: bool) -> dict[str, Any]:
    """What became of an answer's drafts, at most `most` a step, in the words of vLLM."""
    drafted, accepted = sum(n for n, _ in steps), sum(n for _, n in steps)
    found = {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [sum(n == kept for _, kept in steps) for n in range(most + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": most,
    }
    if detailed:
        found |= {"per_step_accepted": [n for _, n in steps], "per_step_drafted": [n for n, _ in steps]}
    return found


def cut(delta: Delta) -> list[Delta]:
    """A delta as deltas of one token each."""
    last = len(delta.token_ids) - 1
    first = replace(delta, token_ids=delta.token_ids[:1], logprobs=delta.logprobs and delta.logprobs[:1])
    first.finish_reason = first.stop_reason = first.error = None
    rest = [
        Delta(request_id=delta.request_id, token_ids=[id], logprobs=delta.logprobs and [delta.logprobs[index]])
        for index, id in enumerate(delta.token_ids[1:], 1)
    ]
    final = rest[-1] if last else first
    final.finish_reason, final.stop_reason, final.error = delta.finish_reason, delta.stop_reason, delta.error
    return [first, *rest]


def fingerprint(config: ServerConfig, facts: Mapping[str, Any]) -> str | None:
    """system_fingerprint: two servers with equal ones answer a seeded request alike, as far as this one can know."""
    if config.fingerprint_mode == "custom":
        return config.fingerprint_value
    if config.fingerprint_mode == "none":
        return None
    full = "-".join(["leyden", __version__, *(f"{facts[name]}" for name in ("device", "dtype") if name in facts)])
    return full if config.fingerprint_mode == "full" else f"fp_{uuid.uuid5(uuid.NAMESPACE_URL, full).hex[:10]}"


def usage(choices: Sequence[Choice], details: bool = True) -> Usage:
    """Tokens of an answer: each prompt once, however many choices it has."""
    prompts = {id(choice.request.prompt): choice for choice in reversed(choices)}.values()
    prompt = sum(len(choice.request.prompt) for choice in prompts)
    completion = sum(len(choice.token_ids) for choice in choices)
    counted: Usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    if details:
        counted["prompt_tokens_details"] = {"cached_tokens": sum(choice.cached_tokens for choice in prompts)}
    return counted
