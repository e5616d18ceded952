"""How many requests and tokens a second the engine gets through with all requests waiting: as vllm bench throughput.

Prompts are random tokens, or the lines of a file: JSON objects with a "prompt", which is a text, taken as it stands, or
a list of token ids. Of a file with fewer than --num-prompts lines each is asked once, for those asked again would be
found in the cache.

    leyden bench throughput MODEL --input-len 1024 --output-len 128
    leyden bench throughput MODEL --prefix-len 2000 --random-range-ratio 0.5     a common beginning, other lengths
    leyden bench throughput MODEL --dataset-path prompts.jsonl --num-prompts 100
    leyden bench throughput FOLDER --load-format dummy                           random weights: config.json is enough
"""

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyden.bench import offline
from leyden.config.launch import Launch
from leyden.errors import ConfigError
from leyden.text.tokenizer import Tokenizer
from leyden.types import SamplingParams

_INPUT, _OUTPUT = 1024, 128  # tokens, as in vllm's random data


def read(file: Path, most: int, tokenizer: Path) -> list[list[int]]:
    """The first `most` prompts of a file as token ids; `tokenizer` is the folder of one, for texts."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {file}: cannot be read ({error})") from None
    found: list[list[int]] = []
    words: Tokenizer | None = None
    for number, line in enumerate(lines[:most], 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if isinstance(prompt, str) and prompt:
            words = words or Tokenizer.from_folder(tokenizer)
            prompt = words.encode(prompt, add_special_tokens=True)
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise ConfigError(
                f"--dataset-path {file}, {number}. prompt: expected a JSON object in one line with a text or token ids"
                f' as "prompt", got {line[:80]!r}'
            )
        found.append(prompt)
    if not found:
        raise ConfigError(f"--dataset-path {file}: expected one JSON object a line, and the file is empty")
    return found


def requests(given: argparse.Namespace, launch: Launch) -> list[tuple[list[int], int]]:
    """(prompt, tokens of the answer) of each request, those that do not count in front. Raises ConfigError."""
    name = given.dataset_name or ("custom" if given.dataset_path else "random")
    if name not in ("random", "custom"):
        raise ConfigError(
            f"--dataset-name {name}: there are random, and custom for files of other data (--dataset-path FILE), one "
            'JSON object a line: {"prompt": "text"}'
        )
    if (name == "custom") != bool(given.dataset_path):
        raise ConfigError("--dataset-path FILE and --dataset-name custom go together: random tokens come from no file")
    output, count = given.output_len or _OUTPUT, given.num_warmups + given.num_prompts
    if name == "custom":
        for flag in ("input_len", "prefix_len", "random_range_ratio"):
            if getattr(given, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} is about random tokens, and --dataset-path has others")
        prompts = read(given.dataset_path, count, offline.texts(launch.engine))
        if len(prompts) <= given.num_warmups:
            raise ConfigError(f"--num-warmups {given.num_warmups} leaves none of {len(prompts)} prompts to be measured")
        return [(prompt, output) for prompt in prompts]
    ratio = given.random_range_ratio or 0.0
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {ratio:g}")
    made = random.Random(launch.engine.seed)

    def about(length: int) -> int:
        return made.randint(max(math.floor(length * (1 - ratio)), 1), math.ceil(length * (1 + ratio)))

    (prefix,) = offline.tokens(launch, [given.prefix_len or 0], launch.engine.seed + 1)
    prompts = offline.tokens(launch, [about(given.input_len or _INPUT) for _ in range(count)])
    return [(prefix + prompt, about(output)) for prompt in prompts]


def main(argv: Sequence[str]) -> int:
    """`leyden bench throughput`: print requests and tokens per second."""
    parser = offline.parser("throughput", __doc__ or "")
    lengths: dict[str, Any] = {"type": offline.whole(1), "metavar": "N"}
    parser.add_argument("--dataset-name", metavar="NAME", help="random, or custom: a file (default: as --dataset-path)")
    parser.add_argument("--dataset-path", type=Path, metavar="FILE", help='prompts, {"prompt": "text"} a line')
    parser.add_argument(
        "--num-prompts", type=offline.whole(1), metavar="N", default=1000, help="how many (default 1000)"
    )
    parser.add_argument(
        "--input-len", "--random-input-len", help=f"random tokens of a prompt (default {_INPUT})", **lengths
    )
    parser.add_argument(
        "--output-len", "--random-output-len", help=f"tokens of an answer (default {_OUTPUT})", **lengths
    )
    parser.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        type=offline.whole(0),
        metavar="N",
        help="random tokens in front of them that all prompts share (default 0)",
    )
    parser.add_argument(
        "--random-range-ratio",
        type=float,
        metavar="R",
        help="lengths are drawn from (1 - R) to (1 + R) times (default 0)",
    )
    parser.add_argument(
        "--num-warmups", type=offline.whole(0), metavar="N", default=0, help="requests before, not counted (default 0)"
    )
    parser.add_argument("--backend", choices=["vllm"], help="no effect: there is one engine")
    parser.add_argument("--async-engine", action="store_true", help="no effect: there is one engine")
    given, launch = offline.parse(parser, argv)
    asked = requests(given, launch)
    llm = offline.load(launch, given, max(len(prompt) + tokens for prompt, tokens in asked))

    def run(some: Sequence[tuple[list[int], int]]) -> tuple[float, int, int]:
        """(seconds, tokens of prompts, tokens of answers)"""
        prompts = [prompt for prompt, _ in some]
        params = [SamplingParams(n=given.n, ignore_eos=True, max_tokens=tokens) for _, tokens in some]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=True)
        seconds = time.perf_counter() - started
        answers = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        return seconds, sum(map(len, prompts)), answers

    if given.num_warmups:
        run(asked[: given.num_warmups])
    count = len(asked) - given.num_warmups
    seconds, read_tokens, written = run(asked[given.num_warmups :])
    total = read_tokens + written
    print(
        f"Throughput: {count / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s, "
        f"{written / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {read_tokens}")
    print(f"Total num output tokens:  {written}")
    numbers = {
        "elapsed_time": seconds,
        "num_requests": count,
        "total_num_tokens": total,
        "requests_per_second": count / seconds,
        "tokens_per_second": total / seconds,
    }
    offline.keep(given.output_json, numbers)
    return 0
