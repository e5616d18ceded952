"""The program `leyden`: finds the command, runs it, and turns errors into messages and exit codes.

      0  done        1  a file, the checkpoint, the engine or the server failed
    130  ctrl-C      2  the command line cannot be meant

Nothing here loads torch: `leyden --version` and every message about a flag come at once.
"""

import importlib
import sys
from collections.abc import Sequence

from leyden import __version__
from leyden.errors import ConfigError, LeydenError

# command -> (module with main(argv) -> exit code, what it does)
COMMANDS = {
    "serve": ("leyden.cli.serve", "serve a model over HTTP"),
    "chat": ("leyden.cli.chat", "talk to a running server"),
    "plan": ("leyden.cli.plan", "say what a model needs and what a GPU would hold, without the GPU"),
    "complete": ("leyden.cli.complete", "let a running server continue texts"),
    "quantize": ("leyden.quantize.command", "store a model in fewer bits"),
    "train": ("leyden.train.command", "train a model on conversations"),
    "bench": ("leyden.cli.bench", "measure: leyden bench latency, throughput, start, evals and more"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` without the program's name, None for that of the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else "--help"
    if command in ("--version", "-v"):
        print(__version__)
        return 0
    if command in ("--help", "-h", "help"):
        print(_usage())
        return 0
    if command not in COMMANDS:
        print(f"leyden: unknown command {command!r}\n{_usage()}", file=sys.stderr)
        return 2
    try:
        run = importlib.import_module(COMMANDS[command][0]).main
        return int(run(words[1:]))
    except ConfigError as error:
        print(f"leyden {command}: {error}\nleyden {command} --help tells more", file=sys.stderr)
        return 2
    except LeydenError as error:
        print(f"leyden {command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"leyden {command}: {error.filename} cannot be read or written: {error.strerror}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "leyden":
            raise
        package = error.name.split(".")[0]
        print(f"leyden {command}: needs the Python package {package!r}, which is not installed", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    lines = [f"  leyden {name:<10} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage:", *lines, f"  leyden {'--version':<10} {__version__}", "", "leyden COMMAND --help"])
