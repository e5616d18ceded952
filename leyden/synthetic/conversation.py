"""An example under construction: messages in the OpenAI chat format, written turn by turn."""

import re
from collections.abc import Sequence
from typing import Any, TypedDict

from leyden.synthetic.draw import Draw
from leyden.synthetic.toolbox import Call, Setting, Tool
from leyden.synthetic.values import json_text

Message = dict[str, Any]


class Check(TypedDict):
    """What the target has to be; see leyden.synthetic.check."""

    kind: str  # "answer", "json", "mentions", "tool_calls"
    expected: Any


class Example(TypedDict):
    """One conversation. The last message is the assistant turn that is checked; the others lead there."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    thinking: bool
    family: str
    template: str  # ids of the phrases it is made of, joined with "+"
    check: Check


class Conversation:
    """Collects the turns; reasoning is kept only with thinking on."""

    def __init__(self, draw: Draw, thinking: bool):
        self.draw = draw
        self.thinking = thinking
        self.messages: list[Message] = []
        self.calls = 0

    def system(self, *rules: str) -> None:
        """A system prompt: up to three lines about the assistant, then the rules; none if there is nothing to say."""
        draw = self.draw
        slots = {name: draw.word(name) for name in ("first_name", "last_name", "city", "company")}
        lines = [draw.text("system.persona", **slots) for _ in range(draw.pick((0, 0, 0, 0, 1, 1, 1, 2, 2, 3)))]
        if text := draw.pick((" ", "\n")).join(dict.fromkeys([*lines, *rules])):
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, content: str, working: str) -> None:
        message = {"role": "assistant", "content": content}
        self.messages.append(message | ({"reasoning_content": working} if self.thinking else {}))

    def call(self, calls: Sequence[Call], working: str = "") -> None:
        """An assistant turn with calls; its reasoning defaults to each request, its tool and arguments."""
        heads = [f"call {i}" for i in range(1, len(calls) + 1)] if len(calls) > 1 else ["needed"]
        steps = (f"{head}: {each.ask}\n{each.working}" for head, each in zip(heads, calls, strict=True))
        working = working or "\n".join(steps)
        made = []
        for call in calls:
            self.calls += 1
            function = {"name": call.tool.name, "arguments": json_text(call.arguments)}
            made.append({"id": f"call_{self.calls}", "type": "function", "function": function})
        message: Message = {"role": "assistant", "content": "", "tool_calls": made}
        self.messages.append(message | ({"reasoning_content": working} if self.thinking else {}))

    def result(self, *results: str) -> None:
        """One tool message per call of the turn before, in order."""
        made = self.messages[-1]["tool_calls"]
        for call, content in zip(made, results, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    def example(self, kind: str, expected: Any, tools: Sequence[Tool] = (), setting: Setting | None = None) -> Example:
        """The finished example; its family is filled in by the caller of the sampler."""
        schemas = [tool.schema(setting.described, setting.defaults) for tool in tools] if setting else []
        return {
            "messages": self.messages,
            "tools": schemas or None,
            "thinking": self.thinking,
            "family": "",
            "template": "+".join(self.draw.templates),
            "check": {"kind": kind, "expected": expected},
        }


def question(
    draw: Draw, thinking: bool, text: str, expected: Any, working: str, kind: str = "answer", answer: str | None = None
) -> Example:
    """One user turn and its answer: `answer`, or the expected one (the first, if several are accepted)."""
    if answer is None:
        answer = json_text(expected) if kind == "json" else expected[0] if isinstance(expected, list) else expected
    conversation = Conversation(draw, thinking)
    conversation.system()
    conversation.user(text)
    conversation.answer(answer, working)
    return conversation.example(kind, expected)


def expected_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [{"name": call.tool.name, "arguments": call.arguments} for call in calls]


def words_of(name: str) -> str:
    """A name of code as words: "getTicket", "GET_TICKET" and "get-ticket" -> "get ticket"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_-]", " ", name).lower()
