"""leyden bench evals: how often a served model is right, over the HTTP API, on examples that training never saw.

The examples are those of leyden.synthetic, held out by templates and by words. Each is asked as it was made (some with
thinking, some without); with --both, all are asked twice instead, with thinking on and off, which shows what thinking
costs and brings. Answers are greedy, and right only if they match exactly: parsed tool calls in full, final answers by
text or as JSON.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from tqdm import tqdm

from leyden.errors import ConfigError, LeydenError
from leyden.synthetic import check, generate

_START = 600.0  # seconds that a server may take to start
_ANSWER = 600.0  # and an answer


@dataclass(frozen=True, kw_only=True)
class Answer:
    family: str
    kind: str  # "tool calls" or "answers"
    thinking: bool
    right: bool
    seconds: float  # from sending to the last byte
    tokens: int
    message: dict[str, Any]


@contextlib.contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[str]:
    """Base URL of `leyden serve MODEL`, which ends with the block. Raises ConfigError if it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning")
    command = [sys.executable, "-m", "leyden", "serve", model, *where, *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"the server did not come up; its command was: {' '.join(command)}")
            time.sleep(0.1)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait()


async def ask(url: str, examples: Sequence[Any], *, at_once: int, max_tokens: int, key: str) -> list[Answer]:
    """The served model's answers, in the order of `examples`, with at most `at_once` requests under way."""
    gate = asyncio.Semaphore(at_once)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=_ANSWER, headers=headers, limits=httpx.Limits(max_connections=None)) as client:
        model = (await client.get(f"{url}/models")).raise_for_status().json()["data"][0]["id"]
        bar = tqdm(total=len(examples), unit="answer", disable=None)

        async def one(example: Any) -> Answer:
            body = {"model": model, "messages": example["messages"][:-1], "temperature": 0, "max_tokens": max_tokens}
            body["chat_template_kwargs"] = {"enable_thinking": example["thinking"]}
            if example["tools"]:
                body["tools"] = example["tools"]
            async with gate:
                began = time.perf_counter()
                response = await client.post(f"{url}/chat/completions", json=body)
                seconds = time.perf_counter() - began
            found = response.raise_for_status().json()
            message = found["choices"][0]["message"]
            bar.update()
            return Answer(
                family=example["family"],
                kind="tool calls" if example["check"]["kind"] == "tool_calls" else "answers",
                thinking=example["thinking"],
                right=check(example, message),
                seconds=seconds,
                tokens=found["usage"]["completion_tokens"],
                message=message,
            )

        answers = await asyncio.gather(*map(one, examples))
        bar.close()
        return answers


def table(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Group of answers -> its size, share of right ones, median seconds and mean tokens of an answer."""
    groups = defaultdict(list)
    for answer in answers:
        mode = "with" if answer.thinking else "without"
        for name in ("all", answer.kind, f"{answer.kind}, {mode} thinking", f"family {answer.family}"):
            groups[name].append(answer)
    return {
        name: {
            "answers": len(found),
            "right": sum(answer.right for answer in found) / len(found),
            "seconds": median(answer.seconds for answer in found),
            "tokens": sum(answer.tokens for answer in found) / len(found),
        }
        for name, found in sorted(groups.items())
    }


def draw(found: dict[str, dict[str, float]], figure: Path) -> None:
    """Accuracy against the time of an answer, a point for each kind of task with and without thinking."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(7, 5), layout="constrained")
    axes = canvas.subplots()
    for name, group in found.items():
        if not name.endswith("thinking"):
            continue
        filled = "C0" if ", with " in name else "none"
        marker = "o" if name.startswith("tool calls") else "s"
        axes.plot(group["seconds"], 100 * group["right"], marker, color="C0", markerfacecolor=filled, markersize=9)
        axes.annotate(name, (group["seconds"], 100 * group["right"]), (7, 5), textcoords="offset points", fontsize=9)
    axes.set_xlabel("median seconds of an answer")
    axes.set_ylabel("right, %")
    axes.set_xlim(left=0)
    axes.margins(0.25)
    axes.set_ylim(0, 105)
    axes.grid(alpha=0.3)
    axes.set_title("held-out examples, greedy")
    canvas.savefig(figure, dpi=120)


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser("leyden bench evals", description=about[0], epilog=about[1])
    parser.add_argument("model", nargs="?", help="checkpoint to serve for it; other flags go to `leyden serve`")
    parser.add_argument("--base-url", help="of a server that runs already, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="", help="for that server")
    parser.add_argument("-n", "--examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the examples")
    parser.add_argument("--split", choices=("heldout", "train"), default="heldout", help="templates and words used")
    parser.add_argument("--both", action="store_true", help="ask everything with thinking on and with thinking off")
    parser.add_argument("--at-once", type=int, default=16, help="requests under way")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    parser.add_argument("--families", action="store_true", help="print a line for every kind of task")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for evals.json, evals.png and answers.jsonl")
    args, flags = parser.parse_known_args(argv)
    if bool(args.model) == bool(args.base_url):
        raise ConfigError("leyden bench evals: give a MODEL to serve, or the --base-url of a server that runs")
    if args.base_url and flags:
        raise ConfigError(f"leyden bench evals: unknown with --base-url: {' '.join(flags)}")
    examples: list[Any] = list(generate(args.seed, args.examples, args.split))
    if args.both:
        examples = [{**example, "thinking": mode} for mode in (True, False) for example in examples]
    with served(args.model, flags) if args.model else contextlib.nullcontext(args.base_url.rstrip("/")) as url:
        began = time.monotonic()
        asked = ask(url, examples, at_once=args.at_once, max_tokens=args.max_tokens, key=args.api_key)
        try:
            answers = asyncio.run(asked)
        except httpx.HTTPError as error:
            advice = "is it the address of a server, with /v1 at its end?"
            raise LeydenError(f"no answers from {url}: {str(error).splitlines()[0]}; {advice}") from None
        taken = time.monotonic() - began
    found = table(answers)
    print(f"{len(answers)} answers in {taken:.0f} s, {args.at_once} at once")
    print(f"{'':34} {'answers':>8} {'right':>7} {'seconds':>8} {'tokens':>7}")
    for name, group in found.items():
        if args.families or not name.startswith("family"):
            print(
                f"{name:34} {group['answers']:8} {group['right']:7.1%} {group['seconds']:8.2f} {group['tokens']:7.0f}"
            )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        setting = {"examples": args.examples, "seed": args.seed, "split": args.split, "at_once": args.at_once}
        text = json.dumps({"setting": setting, "groups": found}, indent=2)
        (args.out / "evals.json").write_text(text + "\n")
        with (args.out / "answers.jsonl").open("w") as file:
            for example, answer in zip(examples, answers, strict=True):
                record = {"family": answer.family, "right": answer.right, "thinking": answer.thinking}
                print(json.dumps(record | {"expected": example["check"], "message": answer.message}), file=file)
        draw(found, args.out / "evals.png")
    return 0
