"""POST /v1/messages, the request: Anthropic's fields and content blocks as a chat request.

System messages inside the conversation stay where they are, so that a prefix once computed stays one. Only text can be
read: images and documents are refused. `cache_control` has no effect, because everything is cached.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, StrictInt, field_validator

from leyden import log
from leyden.errors import RequestError
from leyden.server.protocol import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Sampling, Stop

logger = log.get(__name__)

# Claude Code begins its system prompt with a line that is different in each request: no prefix would ever be found.
_BILLING = "x-anthropic-billing-header"
_AS_TEXT = ("server_tool_use", "web_search_tool_result")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Thinking(BaseModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: StrictInt | None = Field(None, ge=0)


class AnthropicChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(BaseModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(Sampling):
    """POST /v1/messages/count_tokens"""

    model: str = Field(min_length=1)
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("tools")
    @classmethod
    def _tools(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for index, tool in enumerate(tools or ()):
            if not isinstance(tool.get("name"), str) or not tool["name"]:
                raise ValueError(f"tools[{index}].name must be a text")
            if _ours(tool) and not isinstance(tool.get("input_schema"), dict):
                raise ValueError(f"tools[{index}].input_schema must be a JSON schema object")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, choice: AnthropicChoice | None) -> AnthropicChoice | None:
        if choice is not None and choice.type == "tool" and not choice.name:
            raise ValueError("tool_choice of type tool needs the name of one")
        return choice

    def chat(self) -> ChatRequest:
        """The same request in the terms of chat completions. Raises RequestError for a block that cannot be read."""
        tools = [_tool(tool) for tool in self.tools or () if _ours(tool)]
        choice, thinking, output = self.tool_choice, self.thinking, self.output_config
        form = output.format if output else None
        fields = self.shared() | {
            "messages": [*_system(self.system), *_messages(self.messages)],
            "tools": tools or None,
            "tool_choice": _tool_choice(choice) if choice is not None and tools else None,
            "parallel_tool_calls": not (choice is not None and choice.disable_parallel_tool_use),
            "reasoning_effort": output.effort if output else None,
            "response_format": {"type": "json_schema", "json_schema": {"name": "output", **form}} if form else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if thinking is not None and thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif thinking is not None and thinking.type == "enabled":
            fields["thinking_token_budget"] = thinking.budget_tokens
            fields["chat_template_kwargs"] = {"enable_thinking": True} | (self.chat_template_kwargs or {})
        return ChatRequest.model_validate(fields)


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Stop] | None = Field(None, max_length=64)
    metadata: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        chat = super().chat()
        chat.max_tokens, chat.stop = self.max_tokens, self.stop_sequences or self.stop
        return chat


def _ours(tool: Mapping[str, Any]) -> bool:
    """Whether the client runs the tool; those with another type are run by Anthropic's servers."""
    return tool.get("type") in (None, "custom")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": {"type": "object"} | tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key)}
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> Iterator[dict[str, Any]]:
    texts = [system] if isinstance(system, str) else [_text(f"system[{i}]", b) for i, b in enumerate(system or ())]
    if kept := [text for text in texts if not text.startswith(_BILLING)]:
        yield {"role": "system", "content": "\n".join(kept)}


def _messages(messages: Sequence[AnthropicMessage]) -> Iterator[dict[str, Any]]:
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(where, message.content)
        else:
            yield from _others(where, message.role, message.content)


def _assistant(where: str, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_text(f"{where}[{index}]", block))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _others(where: str, role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Texts in a row as one message, each result of a tool as a message of its own, in the order given."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            content = _result(f"{where}[{index}].content", block.get("content"))
            failed = "Error: " if block.get("is_error") else ""
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": failed + content}
        else:
            texts.append(_text(f"{where}[{index}]", block))
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


def _result(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of blocks", "messages")
    return "\n".join(_text(f"{where}[{index}]", block) for index, block in enumerate(content))


def _text(where: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "tool_reference":
        return str(block.get("tool_name", ""))
    if kind in _AS_TEXT:
        return json.dumps({key: value for key, value in block.items() if key != "cache_control"}, ensure_ascii=False)
    raise RequestError(f"{where} must be a text block (the model reads text only), got {kind!r}", "messages")
