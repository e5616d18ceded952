"""What a hit costs: the first token of a long prompt, computed, found on the device, and found in host memory."""

import argparse
import random
import time
from collections.abc import Sequence

from leyden.bench.sized import engine as sized
from leyden.engine.engine import Engine
from leyden.types import Request, SamplingParams


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first token of a prompt, how many of its tokens were cached), with nothing else running."""
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.submit(Request(id="one", prompt=prompt, params=params))
    started = time.perf_counter()
    while engine.busy:
        for delta in engine.step():
            if delta.token_ids:
                seconds, cached = time.perf_counter() - started, delta.cached_tokens
    return seconds, cached


def measure(engine: Engine, tokens: int, repeats: int = 3) -> dict[str, float]:
    """Seconds to the first token: "computed", "device", "host". Everything but one token is cached in a hit."""
    made = random.Random(0)
    prompt = [made.randrange(engine.config.vocab_size) for _ in range(tokens)]
    first_token(engine, prompt[:16])  # kernels are loaded, decode steps recorded
    seconds = {"computed": first_token(engine, prompt)[0]}
    for where in ("device", "host"):
        taken = []
        for extra in range(repeats):
            if where == "host":  # another prompt as long pushes it out
                first_token(engine, [(token + 1 + extra) % engine.config.vocab_size for token in prompt])
            spent, cached = first_token(engine, [*prompt, extra])
            assert cached == tokens, f"{cached} of {tokens} tokens were cached"
            taken.append(spent)
        seconds[where] = min(taken)
    return seconds


def main(argv: Sequence[str]) -> int:
    """`leyden bench hit`: print the three times and their ratios."""
    parser = argparse.ArgumentParser("leyden bench hit", description=__doc__)
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt (default 32768)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    given = parser.parse_args(argv)
    page = 16
    pages = -(-given.tokens // page)
    engine = sized(
        given.model,
        seqs=1,
        snapshots=7,
        pages=pages + pages // 2,
        page=page,
        max_model_len=given.tokens + 64,
        step_tokens=2048,
        host=(64, 8 * pages),
        device=given.device,
    )
    seconds = measure(engine, given.tokens)
    for where, spent in seconds.items():
        print(f"{given.tokens:,} tokens {where:>8}: {spent * 1e3:9.1f} ms, {spent / seconds['computed']:7.2%}")
    return 0
