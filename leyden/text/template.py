"""Chat messages to the prompt, through the checkpoint's own Jinja template.

Only the server's template is ever run, in a sandbox. What a client sends is data: `encode` never turns the text of a
special token inside a message, a tool definition or a tool result into that token, so nobody can forge a turn.
"""

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leyden.errors import CheckpointError, RequestError
from leyden.text.tokenizer import Tokenizer, read_json

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_SECONDS = 10.0  # that rendering may take
_PHRASE, _PHRASES = 32, 1024  # characters of texts whose ids are kept, and how many of them
_TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED = frozenset({"messages", "tools", "documents", "tokenizer", "tokenize", "chat_template"}) | {
    "add_generation_prompt",
    "continue_final_message",
}
# The template itself reads and moves these two in the text of earlier answers, so there they are structure.
_THINK = frozenset({"<think>", "</think>"})


class ChatTemplate:
    """A compiled chat template and the tokenizer that its prompts are for.

    source     the Jinja text
    variables  names that the template reads besides messages and tools; other keyword arguments have no effect
    """

    def __init__(self, source: str, tokenizer: Tokenizer):
        """Raises CheckpointError if `source` is not a Jinja template."""
        self.source = source
        self._tokenizer = tokenizer
        self._fragments = "\0".join(tokenizer.added)
        self._phrase = functools.lru_cache(_PHRASES)(functools.partial(tokenizer.encode, special=False))
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is no Jinja, line {error.lineno}: {error.message}") from None
        self.variables = frozenset(read) - environment.globals.keys() - _RESERVED - tokenizer.special_tokens.keys()

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """chat_template.jinja, else "chat_template" of tokenizer_config.json: a text, or a list with a default.

        Raises CheckpointError if there is none.
        """
        file = Path(folder) / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"), tokenizer)
        source = read_json(Path(folder) / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            raise CheckpointError(
                f"{folder} holds no chat template: neither chat_template.jinja nor a (default) chat_template in "
                "tokenizer_config.json; give one with --chat-template"
            )
        return cls(source, tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> str:
        """The prompt as text. `messages` have been through `normalise`; `kwargs` is chat_template_kwargs.

        continue_final_message leaves the last message open, at its end, and implies add_generation_prompt=False.
        Raises RequestError if the template refuses the messages, if it makes more than `most` characters of them, or if
        kwargs names what a request may not set.
        """
        mark = _unused_character(messages, tools, kwargs) if continue_final_message else ""
        return self._render(messages, tools, kwargs or {}, add_generation_prompt, mark * 2, most)

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        plain_content: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of what `render` gives, with special tokens only where the template puts them.

        plain_content=False encodes the rendered text as a whole instead, so that `<|im_end|>` in a message ends a turn.
        """
        if not plain_content:
            text = self.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=kwargs,
                most=most,
            )
            return self._tokenizer.encode(text)
        # A character that occurs nowhere goes into each special text of the client's, which is then none to the
        # pattern that finds the template's own; it is taken out again before the text between those is encoded.
        mark = _unused_character(messages, tools, kwargs)
        text = self._render(
            [self._shield_message(message, mark) for message in messages],
            self._shield(tools, mark),
            self._shield(kwargs or {}, mark),
            add_generation_prompt,
            mark * 2 if continue_final_message else "",
            most,
        )
        if mark not in text:
            return self._tokenizer.encode(text)
        ids: list[int] = []
        position = 0
        for special in self._tokenizer.added_pattern.finditer(text):
            ids += self._plain(text[position : special.start()].replace(mark, ""))
            ids.append(self._tokenizer.added[special[0]])
            position = special.end()
        ids += self._plain(text[position:].replace(mark, ""))
        return ids

    def _plain(self, text: str) -> list[int]:
        """What stands between two special tokens. Most of it is the template's own, short, and always the same."""
        return self._phrase(text) if len(text) <= _PHRASE else self._tokenizer.encode(text, special=False)

    def marks(self, ids: Sequence[int]) -> list[int]:
        """Lengths at which later prompts are likely to leave this one: the state is worth keeping there.

        The end of the system block, which conversations with the same tools share, and the last header: behind it the
        next prompt of this conversation has the answer in another form (thinking dropped or closed at once).
        """
        turn = self._tokenizer.added.get("<|im_start|>")
        starts = [i for i, id in enumerate(ids) if id == turn]
        return [starts[1], starts[-1]] if len(starts) > 2 else starts[1:]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
        end: str,
        most: int | None = None,
    ) -> str:
        """With `end` not empty: up to the end of the last message, which is found by putting `end` there."""
        if forbidden := sorted(_RESERVED & kwargs.keys()):
            raise RequestError(f"chat_template_kwargs must not set {', '.join(forbidden)}", "chat_template_kwargs")
        if end:
            messages = _with_end(messages, end + " ")
        context = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt and not end,
            **self._tokenizer.special_tokens,
            **{name: value for name, value in kwargs.items() if name in self.variables},
        }
        try:
            text = "".join(_limited(self._template.generate(context), most))
        except RequestError:
            raise
        except Exception as error:  # whatever the template does with a client's data is the request's failure
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from None
        if not end:
            return text
        head, found, tail = text.rpartition(end)
        if not found:
            raise RequestError("continue_final_message: the chat template leaves out the last message", "messages")
        return head if tail.startswith(" ") else head.rstrip()  # as trimmed as the template trims it

    def _shield_message(self, message: Message, mark: str) -> dict[str, Any]:
        def shield(key: str, value: Any) -> Any:
            if key == "role":
                return value
            own = _THINK if message["role"] == "assistant" and key != "tool_calls" else frozenset()
            return self._shield(value, mark, own)

        return {key: shield(key, value) for key, value in message.items()}

    def _shield(self, value: Any, mark: str, own: frozenset[str] = frozenset()) -> Any:
        """The value with every special text in it split by `mark`, and so every string that is a part of one.

        The latter because the template may complete it: `<` + key + `>` around a key "think".
        """
        if isinstance(value, str):
            if value and value in self._fragments and value not in own:
                return value[0] + mark + value[1:]
            return self._tokenizer.added_pattern.sub(
                lambda found: found[0] if found[0] in own else found[0][0] + mark + found[0][1:], value
            )
        if isinstance(value, Mapping):
            return {self._shield(key, mark): self._shield(item, mark, own) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield(item, mark, own) for item in value]
        return value


def _limited(pieces: Iterable[str], most: int | None) -> Iterator[str]:
    """The pieces of a prompt, as long as it is not too long and does not take too long."""
    length, deadline = 0, time.monotonic() + MOST_SECONDS
    for piece in pieces:
        length += len(piece)
        if most is not None and length > most:
            raise RequestError(
                f"the prompt has more than {most} characters, so it is beyond the maximum context length. "
                "Please reduce the length of the messages.",
                "messages",
            )
        if time.monotonic() > deadline:
            raise RequestError(f"the chat template took longer than {MOST_SECONDS} s for these messages", "messages")
        yield piece


def normalise(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages in the one form that templates read; the input is left as it is.

    List content is joined with newlines, null content becomes "" (of an assistant it stays), developer is system,
    tool call arguments become mappings, and `reasoning` goes under the name `reasoning_content`.
    Raises RequestError that names the message, and within it the part or the call, for anything else.
    """
    if not (normal := [_normalise(index, message) for index, message in enumerate(messages)]):
        raise RequestError("messages must hold at least one message, got none", "messages")
    return normal


def _normalise(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _refused(f"{where} must be an object", message)
    role = message.get("role")
    if role not in ROLES:
        raise _refused(f"{where}.role must be one of {', '.join(ROLES)}", role)
    normal = {key: value for key, value in message.items() if key != "reasoning"}
    normal["role"] = "system" if role == "developer" else role
    normal["content"] = _text(f"{where}.content", message.get("content"))
    if normal["content"] is None and role != "assistant":
        normal["content"] = ""
    if message.get("reasoning") is not None:
        normal["reasoning_content"] = message["reasoning"]
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise _refused(f"{where}.tool_calls must be a list", calls)
        normal["tool_calls"] = [_normalise_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return normal


def _text(where: str, content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(f"{where} must be a string or a list of text parts", content)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind not in _TEXT_PARTS:
            raise _refused(f"{where}[{index}] must be a text part (the model reads text only)", kind or part)
        elif not isinstance(part.get("text"), str):
            raise _refused(f"{where}[{index}].text must be a string", part.get("text"))
        else:
            texts.append(part["text"])
    return "\n".join(texts)


def _normalise_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _refused(f"{where} must be an object with the name of a function", call)
    if "arguments" not in function:
        return dict(call)
    where += ".function.arguments" if "function" in call else ".arguments"
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} must be JSON: {error}", "messages") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _refused(f"{where} must be a JSON object", arguments)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _refused(wanted: str, found: Any) -> RequestError:
    shown = repr(found)
    return RequestError(f"{wanted}, got {shown if len(shown) <= 80 else shown[:77] + '...'}", "messages")


def _with_end(messages: Sequence[Message], end: str) -> list[Message]:
    if not messages or not isinstance(content := messages[-1].get("content"), str):
        raise RequestError("continue_final_message needs a last message with text content", "messages")
    return [*messages[:-1], {**messages[-1], "content": content + end}]


def _unused_character(*values: Any) -> str:
    """A character of the private use area that occurs nowhere in the values."""
    used = json.dumps(values, ensure_ascii=False, default=str)
    for code in range(0xE000, 0xF900):
        if chr(code) not in used:
            return chr(code)
    raise RequestError("the messages use every character of Unicode's private use area", "messages")


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks an answer for training: here just its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face transformers sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
