"""`leyden complete`: a running server continues texts, line by line."""

from collections.abc import Sequence

from leyden.cli import remote

FLAGS = (
    *remote.FLAGS,
    remote.flag("--max-tokens", "most tokens of a continuation", type="int"),
    remote.flag("--quick", "continue this one text, print the result, end", "-q"),
)
ABOUT = "Lets a running server continue every line that is typed. ctrl-C cuts a continuation, ctrl-D ends."


def main(argv: Sequence[str]) -> int:
    values = remote.values("leyden complete [FLAGS]", ABOUT, argv, FLAGS)
    if values is None:
        return 0
    limit = {"max_tokens": values["max_tokens"]} if "max_tokens" in values else {}
    quick = values.get("quick")
    with remote.Server(values) as server:
        for prompt in [quick] if quick is not None else remote.lines():
            try:
                for choice in server.stream("/completions", {"prompt": prompt} | limit):
                    remote.say(choice["text"])
            except KeyboardInterrupt:
                pass
            remote.say("\n" + server.report())
    return 0
