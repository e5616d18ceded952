"""`leyden chat`: a conversation with a running server, line by line. Reasoning is shown dimmed."""

from collections.abc import Sequence
from typing import Any

from leyden.cli import remote
from leyden.errors import LeydenError

FLAGS = (
    *remote.FLAGS,
    remote.flag("--system-prompt", "text that stands before the conversation"),
    remote.flag("--quick", "send this one message, print the answer, end", "-q"),
)
ABOUT = "Talks to a running server. /new starts over, ctrl-C cuts an answer, ctrl-D ends."


def main(argv: Sequence[str]) -> int:
    values = remote.values("leyden chat [FLAGS]", ABOUT, argv, FLAGS)
    if values is None:
        return 0
    opening = [{"role": "system", "content": text}] if (text := values.get("system_prompt")) else []
    with remote.Server(values) as server:
        if (quick := values.get("quick")) is not None:
            _answer(server, [*opening, {"role": "user", "content": quick}])
            return 0
        remote.say(f"{server.model} at {server.url}\n", "dim")
        messages = list(opening)
        for line in remote.lines():
            if line == "/new":
                messages = list(opening)
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                messages = [*asked, {"role": "assistant", "content": _answer(server, asked)}]
            except LeydenError as error:  # the conversation goes on as if the line had not been said
                remote.say(f"{error}\n", "red")
    return 0


def _answer(server: remote.Server, messages: list[dict[str, Any]]) -> str:
    """Stream one answer to the screen; returns its content."""
    content = thoughts = ""
    try:
        for choice in server.stream("/chat/completions", {"messages": messages}):
            delta = choice["delta"]
            if thought := delta.get("reasoning") or delta.get("reasoning_content") or "":
                thoughts += thought
                remote.say(thought, "dim")
            if text := delta.get("content") or "":
                if thoughts and not content:
                    remote.say("\n\n")
                content += text
                remote.say(text)
    except KeyboardInterrupt:
        pass
    remote.say("\n" + server.report())
    return content
