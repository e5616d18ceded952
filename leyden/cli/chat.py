"""`leyden chat`: a conversation with a running server, line by line. Reasoning is shown dimmed."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from leyden.cli import remote

FLAGS = (
    *remote.FLAGS,
    remote.flag("--system-prompt", "text that stands before the conversation"),
    remote.flag("--quick", "send this one message, print the answer, end", "-q"),
)
ABOUT = "Talks to a running server. An empty conversation starts with /new, ctrl-D ends."


def main(argv: Sequence[str]) -> int:
    values = remote.values("leyden chat [FLAGS]", ABOUT, argv, FLAGS)
    if values is None:
        return 0
    console = Console(highlight=False, soft_wrap=True)
    with remote.Server(values) as server:
        opening = [{"role": "system", "content": text}] if (text := values.get("system_prompt")) else []
        if (quick := values.get("quick")) is not None:
            _answer(server, console, [*opening, {"role": "user", "content": quick}])
            return 0
        console.print(f"[dim]{server.model} at {server.url}; /new forgets, ctrl-D ends[/]")
        messages = list(opening)
        for line in remote.lines(console):
            if line == "/new":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(server, console, messages)})
    return 0


def _answer(server: remote.Server, console: Console, messages: list[dict[str, Any]]) -> str:
    """Stream one answer to the screen; returns its content. ctrl-C ends the answer, not the conversation."""
    content = ""
    reasoning = False
    try:
        for choice in server.stream("/chat/completions", {"messages": messages}):
            delta = choice["delta"]
            thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
            if thought:
                reasoning = True
                console.print(thought, end="", style="dim", markup=False)
            if text := delta.get("content") or "":
                if reasoning and not content:
                    console.print("\n")
                content += text
                console.print(text, end="", markup=False)
    except KeyboardInterrupt:
        pass
    console.print()
    server.report(console)
    return content
