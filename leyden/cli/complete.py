"""`leyden complete`: a running server continues texts, line by line."""

from collections.abc import Sequence

from rich.console import Console

from leyden.cli import remote

FLAGS = (
    *remote.FLAGS,
    remote.flag("--max-tokens", "most tokens of a continuation", type="int"),
    remote.flag("--quick", "continue this one text, print the result, end", "-q"),
)
ABOUT = "Lets a running server continue every line that is typed. ctrl-D ends."


def main(argv: Sequence[str]) -> int:
    values = remote.values("leyden complete [FLAGS]", ABOUT, argv, FLAGS)
    if values is None:
        return 0
    console = Console(highlight=False, soft_wrap=True)
    limit = {"max_tokens": values["max_tokens"]} if "max_tokens" in values else {}
    with remote.Server(values) as server:
        quick = values.get("quick")
        for prompt in [quick] if quick is not None else remote.lines(console):
            try:
                for choice in server.stream("/completions", {"prompt": prompt} | limit):
                    console.print(choice["text"], end="", markup=False)
            except KeyboardInterrupt:
                pass
            console.print()
            server.report(console)
    return 0
