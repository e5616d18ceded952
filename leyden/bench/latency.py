"""How long one batch takes from its prompts to the last token of its answers, without a server: as vllm bench latency.

The same prompts of random tokens are answered again and again; times vary with what else runs on the machine, which the
percentiles show. Prefixes are not cached unless --enable-prefix-caching says so: all but the first batch would find
their prompts there. The first batches, whose times do not count, load kernels and record graphs.

    leyden bench latency MODEL                                      batches of 8, 32 tokens in, 128 out
    leyden bench latency MODEL --batch-size 1 --input-len 1000      one prompt of 1,000 tokens
    leyden bench latency FOLDER --load-format dummy                 random weights: config.json is enough
"""

import time
from collections.abc import Sequence

import numpy
from tqdm import tqdm

from leyden.bench import offline
from leyden.types import SamplingParams

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def main(argv: Sequence[str]) -> int:
    """`leyden bench latency`: print mean, deviation and percentiles in seconds."""
    parser = offline.parser("latency", __doc__ or "")
    for name, least, default, about in (
        ("--input-len", 1, 32, "tokens of a prompt"),
        ("--output-len", 1, 128, "tokens of an answer"),
        ("--batch-size", 1, 8, "prompts of a batch"),
        ("--num-iters-warmup", 0, 10, "batches that do not count"),
        ("--num-iters", 1, 30, "batches that count"),
    ):
        about = f"{about} (default {default})"
        parser.add_argument(name, type=offline.whole(least), metavar="N", default=default, help=about)
    given, launch = offline.parse(parser, argv)
    cached = launch.engine.enable_prefix_caching is True
    llm = offline.load(launch, given, given.input_len + given.output_len, enable_prefix_caching=cached)
    prompts = offline.tokens(launch, [given.input_len] * given.batch_size)
    params = SamplingParams(n=given.n, ignore_eos=True, max_tokens=given.output_len)

    def seconds() -> float:
        started = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - started

    for _ in tqdm(range(given.num_iters_warmup), desc="before", unit="batch"):
        seconds()
    taken = [seconds() for _ in tqdm(range(given.num_iters), desc="measured", unit="batch")]
    mean, deviation = float(numpy.mean(taken)), float(numpy.std(taken))
    percentiles = dict(zip(PERCENTAGES, numpy.percentile(taken, PERCENTAGES).tolist(), strict=True))
    print(f"Avg latency: {mean} seconds")
    print(f"Std latency: {deviation} seconds")
    for percentage, value in percentiles.items():
        print(f"{percentage}% percentile latency: {value} seconds")
    numbers = {"avg_latency": mean, "std_latency": deviation, "latencies": taken, "percentiles": percentiles}
    offline.keep(given.output_json, numbers)
    return 0
