"""POST /v1/responses, the request: its fields, and its input items as the messages of a chat request.

Items of kinds that nobody here knows are skipped, never refused: agents send new ones all the time. Only text can be
read, so images and files are refused by name.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, StrictInt

from leyden import log
from leyden.errors import RequestError
from leyden.server.protocol import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Effort, Sampling

logger = log.get(__name__)

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_OURS = b"reasoning:"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning"} | {
    "response_format": "text"
}


class Reasoning(BaseModel):
    effort: Effort | None = None
    summary: str | None = None


class TextOptions(BaseModel):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(Sampling):
    """POST /v1/responses"""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, description=f"needs {_LOGPROBS} in include")
    include: list[str] | None = None
    include_reasoning: bool = True
    reasoning: Reasoning | None = None
    thinking_token_budget: StrictInt | None = Field(None, ge=-1)
    text: TextOptions | None = None
    structured_outputs: dict[str, Any] | None = None

    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: int | None = None

    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None

    store: bool | None = Field(None, description="without effect: nothing is stored")
    background: bool | None = None
    previous_response_id: str | None = None
    prompt: Any = None

    def check(self) -> None:
        """Raises RequestError for what would need a store of answers, which there is not."""
        if self.previous_response_id is not None:
            raise RequestError(
                f"the response {self.previous_response_id!r} is not stored; send the whole conversation as input",
                "previous_response_id",
                404,
            )
        if self.background:
            raise RequestError("background needs a store of answers, which this server has not", "background")
        if self.prompt is not None:
            raise RequestError("prompt: stored prompts are not supported", "prompt")
        if self.structured_outputs is not None and self.text is not None and self.text.format is not None:
            raise RequestError("structured_outputs and text.format exclude each other", "structured_outputs")

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    @property
    def wants_encrypted(self) -> bool:
        """Whether the client sends reasoning back only in the form that it takes for encrypted."""
        return _ENCRYPTED in (self.include or ())

    def chat(self, tools: "Tools") -> ChatRequest:
        """The same request in the terms of chat completions."""
        fields = {
            "messages": messages(self.input, self.instructions),
            "max_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "thinking_token_budget": self.thinking_token_budget,
            "response_format": _response_format(self.text.format if self.text else None),
            "structured_outputs": self.structured_outputs,
            "tools": tools.functions or None,
            "tool_choice": tools.choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatRequest.model_validate({**self.shared(), **fields})


class InputTokensRequest(BaseModel):
    """POST /v1/responses/input_tokens"""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        return ResponsesRequest.model_validate(self.model_dump(exclude_unset=True)).chat(Tools(self.tools))


def renamed(error: RequestError) -> RequestError:
    """The error with the name that its field has in this API."""
    error.param = _FIELDS.get(error.param or "", error.param)
    return error


@dataclass(frozen=True, slots=True)
class Tool:
    """What the client calls a function: a free-text (custom) tool, or one of a namespace."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Tools:
    """The tools of a request: as functions of a chat request, and back from their names.

    functions    for the chat request; tools that run elsewhere (web_search and so on) are left out
    """

    def __init__(self, given: Sequence[Mapping[str, Any]] | None):
        """Raises RequestError for a tool without a name."""
        self.functions: list[dict[str, Any]] = []
        self._by_name: dict[str, Tool] = {}
        for index, tool in enumerate(given or ()):
            self._add(f"tools[{index}]", tool, None)

    def find(self, name: str) -> Tool:
        return self._by_name.get(name) or Tool(name)

    def choice(self, given: str | Mapping[str, Any] | None) -> Any:
        """tool_choice in the form of chat completions; nothing to choose from is no error unless a call is a must."""
        if isinstance(given, Mapping):
            kind, name = given.get("type"), given.get("name")
            if kind == "allowed_tools":
                return self.choice(given.get("mode", "auto"))
            if kind in ("function", "custom"):
                return {"type": "function", "function": {"name": name}}
            given = "auto"  # a tool that runs elsewhere
        return given if self.functions or given == "required" else None

    def _add(self, where: str, tool: Mapping[str, Any], namespace: str | None) -> None:
        kind, name = tool.get("type"), tool.get("name")
        if kind not in ("function", "custom", "namespace"):
            logger.debug("%s of type %r has no effect", where, kind)
            return
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.name must be a text, got {name!r}", "tools")
        if kind == "namespace":
            inner = tool.get("tools")
            for index, part in enumerate(inner if isinstance(inner, list) else ()):
                if isinstance(part, Mapping):
                    self._add(f"{where}.tools[{index}]", part, name)
            return
        function: dict[str, Any] = {"name": _flat(namespace, name)}
        if (description := _describe(tool)) is not None:
            function["description"] = description
        function["parameters"] = _CUSTOM_INPUT if kind == "custom" else tool.get("parameters") or {}
        if tool.get("strict"):
            function["strict"] = True
        self.functions.append({"type": "function", "function": function})
        self._by_name[function["name"]] = Tool(name, namespace, kind == "custom")


def _flat(namespace: Any, name: Any) -> str:
    return f"{namespace}__{name}" if namespace else str(name)


def _describe(tool: Mapping[str, Any]) -> str | None:
    """What the model reads about a tool; the grammar of a free text too."""
    description, form = tool.get("description"), tool.get("format")
    if isinstance(form, Mapping) and form.get("definition"):
        return (
            f"{description or ''}\n\nThe input follows this {form.get('syntax')} grammar:\n{form['definition']}".strip()
        )
    return description if isinstance(description, str) else None


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return None if form is None else dict(form)
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def messages(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as chat messages. What the assistant did in one go is one message.

    Instructions and the system messages at the beginning are one system message; later ones stay where they are.
    Raises RequestError that names the item at fault.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if len(items) > MAX_MESSAGES:
        raise RequestError(f"input must hold at most {MAX_MESSAGES} items, got {len(items)}", "input")
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        _Reader(f"input[{index}]", item).add_to(found)
    return found


class _Reader:
    """One item of the input, on its way into the messages."""

    def __init__(self, where: str, item: Mapping[str, Any]):
        self._where = where
        self._item = item

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        item = self._item
        match item.get("type", "message" if "role" in item else None):
            case "message":
                self._message(messages)
            case "reasoning":
                _join(_assistant(messages), "reasoning_content", self._reasoning(), "\n")
            case "function_call":
                self._call(messages, _flat(item.get("namespace"), item.get("name")), self._arguments())
            case "custom_tool_call":
                self._call(messages, str(item.get("name")), {"input": item.get("input") or ""})
            case "local_shell_call":
                self._call(messages, "local_shell", item.get("action") or {})
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                output = self._text("output", item.get("output"))
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "item_reference":
                raise RequestError(f"{self._where}: the item {item.get('id')!r} is not stored", "input", 404)
            case kind:
                logger.debug("%s of type %r is skipped", self._where, kind)

    def _message(self, messages: list[dict[str, Any]]) -> None:
        role, text = self._item.get("role"), self._text("content", self._item.get("content"))
        if role == "assistant":
            _join(_assistant(messages), "content", text, "\n")
        elif role in ("system", "developer") and [message["role"] for message in messages] == ["system"]:
            _join(messages[0], "content", text, "\n\n")
        else:
            messages.append({"role": role, "content": text})

    def _call(self, messages: list[dict[str, Any]], name: str, arguments: Any) -> None:
        call = {
            "id": self._item.get("call_id"),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        _assistant(messages).setdefault("tool_calls", []).append(call)

    def _arguments(self) -> Any:
        text = self._item.get("arguments") or "{}"
        try:
            value = json.loads(text) if isinstance(text, str) else text
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self._where}.arguments must be JSON: {error}", "input") from None
        if not isinstance(value, dict):
            raise RequestError(f"{self._where}.arguments must be a JSON object, got {type(value).__name__}", "input")
        return value

    def _reasoning(self) -> str:
        """The text itself, else what we had given for encrypted, else the summary."""
        item = self._item
        found = self._text("content", item.get("content")) or decrypted(item.get("encrypted_content"))
        return found or self._text("summary", item.get("summary"))

    def _text(self, field: str, content: Any) -> str:
        where = f"{self._where}.{field}"
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise RequestError(f"{where} must be a text or a list of parts, got {type(content).__name__}", "input")
        texts = []
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXT_PARTS else None
            if not isinstance(text, str):
                raise RequestError(
                    f"{where}[{index}] must be a text part (the model reads text only), got {kind}", "input"
                )
            texts.append(text)
        return "\n".join(texts)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant that speaks now."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _join(message: dict[str, Any], field: str, text: str, between: str) -> None:
    before = message.get(field)
    message[field] = f"{before}{between}{text}" if before else text


def encrypted(text: str) -> str:
    """Reasoning for clients that keep it only in this form. It is encoded, not encrypted: it was theirs to read."""
    return base64.b64encode(_OURS + text.encode(errors="replace")).decode()


def decrypted(given: Any) -> str:
    """What `encrypted` was given; nothing if the value is none of ours."""
    try:
        data = base64.b64decode(given, validate=True) if isinstance(given, str) else b""
    except (binascii.Error, ValueError):
        return ""
    return data.removeprefix(_OURS).decode(errors="replace") if data.startswith(_OURS) else ""
