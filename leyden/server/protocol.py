"""The wire: what clients may send, what they get back, how errors look.

Requests are pydantic models (the documentation at /docs comes from them); answers are TypedDicts, so that writing one
costs no validation. Unknown fields are ignored, as clients expect. What this server cannot do yet is refused by name,
never ignored; ranges of sampling values are checked by leyden.types, once for HTTP and for Python callers.

Field names, shapes and defaults: OpenAI's chat completions and completions, with the additions of vLLM 0.27.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import msgspec
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator
from typing_extensions import TypedDict  # pydantic reads the one of typing from Python 3.12 on only

from leyden.errors import RequestError
from leyden.server.grammars import LEGACY, of_answer, of_tools
from leyden.types import MAX_LOGPROB_IDS, Grammar

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_ANSWERS = 4096  # prompts times choices
MAX_TOOLS = 1024
MAX_MESSAGES = 10_000
MAX_WORDS = 1024

Stop = Annotated[str, Field(max_length=1024)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Fields that ask for something that this server does not do, with what to say about it.
REFUSED = {
    "use_beam_search": "beam search is not supported",
    "prompt_embeds": "prompts are text or token ids",
    "suffix": "text is only continued, not filled in",
    "chat_template": "the server's own template is the only one it runs",
}
BUDGETS = (
    ("chat_template_kwargs", "reasoning_budget", "thinking_token_budget"),
    ("vllm_xargs", "thinking_budget", "thinking_token_budget"),
    ("vllm_xargs", "thinking_budget_grace_period", "thinking_token_grace"),
)
# Like those of LEGACY, but without a meaning here: they must not be taken for unknown, harmless fields.
NO_EFFECT = ("guided_decoding_backend", "guided_whitespace_pattern")


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class RepetitionDetection(BaseModel):
    """Fields of leyden.types.Repetition."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class Sampling(BaseModel):
    """The fields of every request that generates. None means: the default of the model or of the server."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = Field(None, max_length=4096, description="token id: bias in [-100, 100]")
    allowed_token_ids: list[int] | None = None
    seed: int | None = Field(None, description="-1: none")

    min_tokens: int = 0
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    stream: bool | None = False
    stream_interval: int | None = Field(None, ge=1, description="tokens of one chunk")

    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: int = 0
    request_id: str | None = None

    def shared(self) -> dict[str, Any]:
        """The fields of this class that the client has set, for another kind of request."""
        return self.model_dump(include=set(Sampling.model_fields), exclude_unset=True)


class Generation(Sampling):
    """The fields of chat completions and completions."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = None

    stream_options: StreamOptions | None = None

    prompt_logprobs: int | None = Field(None, ge=-1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None

    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="-1: to what the context holds")
    truncation_side: Literal["left", "right"] = "left"

    response_format: dict[str, Any] | None = None
    thinking_token_budget: StrictInt | None = Field(
        None,
        ge=-1,
        validation_alias=AliasChoices("thinking_token_budget", "reasoning_budget", "max_thinking_tokens"),
        description="most tokens of thinking; -1: no limit",
    )
    thinking_token_grace: StrictInt | None = Field(
        None, ge=0, description="tokens that thinking may take beyond its budget to end a line"
    )
    use_beam_search: bool = False
    bad_words: Annotated[list[Stop], Field(max_length=MAX_WORDS)] | None = Field(None, description="never generated")
    logprob_token_ids: list[int] | None = Field(
        None, max_length=MAX_LOGPROB_IDS, description="tokens to tell about, instead of the most likely ones"
    )
    repetition_detection: RepetitionDetection | None = Field(
        None, description="ends an answer whose last tokens are one pattern, min_count times in a row"
    )
    structured_outputs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _budget(cls, data: Any) -> Any:
        """Other places in which clients put the budget of thinking."""
        for place, name, field in BUDGETS:
            inner = data.get(place) if isinstance(data, dict) else None
            if isinstance(inner, dict) and name in inner and data.get(field) is None:
                data = {**data, field: inner[name]}
        return data

    @property
    def ignored(self) -> list[str]:
        """Fields that a client may believe to have an effect."""
        extra = self.model_extra or {}
        pattern = (self.structured_outputs or {}).get("whitespace_pattern")
        names = [name for name in NO_EFFECT if extra.get(name) is not None]
        return names + (["structured_outputs.whitespace_pattern"] if pattern is not None else [])

    def grammar(self, compact: bool = False, level: str = "auto") -> Grammar | None:
        """What the answer has to match. `compact`: JSON without white space; level: see grammars.of_tools."""
        extra = self.model_extra or {}
        legacy = {name: extra[name] for name in LEGACY if extra.get(name) not in (None, False)}
        return of_answer(self.response_format, self.structured_outputs, legacy, compact)

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call."""
        return []

    def check(self) -> None:
        """Raises RequestError for what pydantic cannot see: fields that depend on each other or are not supported."""
        for name, reason in REFUSED.items():
            if getattr(self, name, None) not in (None, False):
                raise RequestError(f"{name}: {reason}", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for requests with stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not available with stream=true", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens")


class ChatRequest(Generation):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]] = Field(max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, description="wins over max_tokens")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=-1)

    tools: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True

    reasoning_effort: Effort | None = None
    include_reasoning: bool = True
    echo: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("tools")
    @classmethod
    def _tools(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for index, tool in enumerate(tools or ()):
            if tool.get("type") != "function":
                raise ValueError(f"tools[{index}].type must be 'function', got {tool.get('type')!r}")
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
                raise ValueError(f"tools[{index}].function must be an object with a name")
            if not isinstance(function.get("parameters") or {}, dict):
                raise ValueError(f"tools[{index}].function.parameters must be a JSON schema object")
        return tools

    def check(self) -> None:
        super().check()
        if self.logprob_token_ids and not self.logprobs:
            raise RequestError("logprob_token_ids needs logprobs=true", "logprob_token_ids")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message, add_generation_prompt begins a new one: "
                "set one of them only",
                "continue_final_message",
            )
        for index, message in enumerate(self.messages):
            if message.get("content") is None and message.get("role") in ("system", "developer", "user"):
                raise RequestError(f"messages[{index}].content must be text or text parts, got null", "messages")
        self._check_tool_choice()

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice is None or choice == "none":
            return
        if not self.tools:
            raise RequestError("tool_choice needs tools", "tool_choice")
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            names = [tool["function"]["name"] for tool in self.tools]
            if choice.get("type") != "function" or name not in names:
                raise RequestError(f"tool_choice must name one of the tools {names}, got {choice}", "tool_choice")

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    def grammar(self, compact: bool = False, level: str = "auto") -> Grammar | None:
        answer = super().grammar(compact)
        if not self.callable_tools:
            return answer
        parallel = self.parallel_tool_calls is not False
        return of_tools(self.callable_tools, self.tool_choice, parallel=parallel, answer=answer, level=level)

    default_limit: ClassVar[int | None] = None  # tokens to generate if the request does not say; None: all that fit

    @property
    def limit(self) -> tuple[str, int | None]:
        """The most tokens to generate, with the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def top(self) -> int | None:
        """How many alternatives to report per token; None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation):
    """POST /v1/completions"""

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    suffix: str | None = None
    prompt_embeds: Any = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, prompt: Any) -> Any:
        """One look instead of four tries: a union would report every branch, and try all of them on a long list."""
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list):
            first = prompt[0] if prompt else ""
            if isinstance(first, list):
                if all(isinstance(ids, list) and _all_ids(ids) for ids in prompt):
                    return prompt
            elif _all_ids(prompt) or all(isinstance(text, str) for text in prompt):
                return prompt
        raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")

    def check(self) -> None:
        super().check()
        if self.logprob_token_ids and (self.logprobs is None or self.max_tokens == 0):
            raise RequestError("logprob_token_ids needs logprobs, and an answer", "logprob_token_ids")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a list; raises RequestError if there is nothing to continue."""
        prompt = self.prompt
        many: Any = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not many or any(not one for one in many):
            raise RequestError("prompt must not be empty", "prompt")
        if len(many) > MAX_PROMPTS:
            raise RequestError(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(many)}", "prompt")
        if len(many) * self.n > MAX_ANSWERS:
            raise RequestError(f"{len(many)} prompts with n={self.n} are more than {MAX_ANSWERS} answers", "n")
        return list(many)

    default_limit: ClassVar[int | None] = 16

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_tokens == 0 and self.echo:  # score the prompt; the one token that is generated is not shown
            return "max_tokens", 1
        return "max_tokens", self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs


def _all_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


# What comes back. Null keys are written: clients of OpenAI and vLLM look for them.


class Usage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: NotRequired[dict[str, int]]
    completion_tokens_details: NotRequired[dict[str, int]]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(TypedDict):
    error: ErrorDetail


class Message(TypedDict):
    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[dict[str, Any]]]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None


class ChatCompletion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: dict[str, Any] | None


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    routed_experts: None


class Completion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None
    system_fingerprint: str | None
    usage: Usage
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: dict[str, Any] | None


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[dict[str, Any]]


class ModelList(TypedDict):
    object: str
    data: list[ModelCard]


_TYPES = {
    400: "BadRequestError",
    401: "authentication_error",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    414: "UriTooLongError",
    429: "TooManyRequestsError",
    431: "HeadersTooLargeError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


def error_body(status: int, message: str, param: str | None = None) -> ErrorBody:
    kind = _TYPES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: str
    error: AnthropicErrorDetail


def anthropic_error(status: int, message: str) -> AnthropicError:
    kind = "api_error" if status >= 500 else _ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body; raises RequestError for anything else, NaN and Infinity included.

    A body that is nested too deeply raises RecursionError.
    """
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise _malformed(body, error) from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def _malformed(body: bytes, error: Exception) -> RequestError:
    """Python's parser lets through what JSON has not: it can tell which field is no finite number."""
    try:
        value = json.loads(body)
    except ValueError:
        return RequestError(f"the body is not valid JSON: {error}")
    for path in _not_finite(value):
        return RequestError(f"{path} must be a finite number", path.partition(".")[0])
    return RequestError(f"the body is not valid JSON: {error}")


def _not_finite(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_finite(item, f"{path}.{index}")


def invalid(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """What pydantic found, as our error: the field by its plain name, the place within it in the message."""
    error = errors[0]
    path = [str(part) for part in error["loc"]]
    if path and path[0] in ("body", "query", "path"):
        del path[0]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "missing":
        return RequestError(f"{path[0] if path else 'a body'} is required", path[0] if path else None)
    shown = repr(error.get("input"))
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return RequestError(f"{'.'.join(path)}: {message}, got {shown}", path[0] if path else None)
