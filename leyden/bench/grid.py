"""The grid of batch sizes, contexts and prompts to measure, as flags: the same for every program that measures it.

No torch: `leyden bench peers` is to be small beside what it measures.
"""

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Flags whose values are lists of whole numbers, and how time is counted."""
    for name, default, about in (
        ("batches", "1,8", "sequences side by side"),
        ("contexts", "128,2048", "tokens before decoding"),
        ("prefill", "512,2048", "tokens of prompts"),
    ):
        parser.add_argument(f"--{name}", type=_numbers, default=default, help=f"{about} (default {default})")
    parser.add_argument("--processor-time", action="store_true", help="count seconds of processors, not of the clock")
    parser.add_argument("--since", type=float, help=argparse.SUPPRESS)  # when the process was started, time.time()


def words(given: argparse.Namespace) -> list[str]:
    """The same flags for a program that measures it, and --threads."""
    lists = [
        word for name in ("batches", "contexts", "prefill") for word in (f"--{name}", listed(getattr(given, name)))
    ]
    return [*lists, "--threads", str(given.threads), *(["--processor-time"] if given.processor_time else [])]


def listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas, got {text!r}") from None
