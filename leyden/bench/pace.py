"""What a long prompt does to those that run: times between tokens while a prompt of many steps arrives."""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from leyden.bench.sized import engine as sized
from leyden.engine.engine import Engine
from leyden.types import Request, SamplingParams


@dataclass(slots=True)
class Figures:
    """Seconds; the times between tokens are those of all streams."""

    alone: list[float]  # between tokens, nothing else running
    beside: list[float]  # while the prompt arrives
    first: float  # until the prompt's first token

    @property
    def ratio(self) -> float:
        """The 99th percentile over the median, while the prompt arrives."""
        return percentile(self.beside, 0.99) / statistics.median(self.beside)

    @property
    def stretch(self) -> float:
        """The 99th percentile while the prompt arrives over the median of streams alone."""
        return percentile(self.beside, 0.99) / statistics.median(self.alone)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def measure(engine: Engine, streams: int, tokens: int, steps: int = 300) -> Figures:
    """`streams` short prompts generate; after `steps` steps a prompt of `tokens` tokens arrives, and is waited for."""
    made = random.Random(0)
    vocab = engine.config.vocab_size

    def submit(name: str, n: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompt = [made.randrange(vocab) for _ in range(n)]
        engine.submit(Request(id=name, prompt=prompt, params=params, arrival=time.monotonic()))

    for i in range(streams):
        submit(f"stream {i}", 8, engine.max_model_len - 8)
    last: dict[str, float] = {}
    gaps: dict[bool, list[float]] = {False: [], True: []}
    started = first = 0.0
    step = 0
    while not first:
        if step == steps:
            submit("long", tokens, 1)
            started = time.perf_counter()
        for delta in engine.step():
            now = time.perf_counter()
            if delta.request_id == "long":
                first = now - started
            elif delta.request_id in last and step > steps // 3:
                gaps[started > 0].append(now - last[delta.request_id])
            last[delta.request_id] = now
        step += 1
    for i in range(streams):
        engine.abort(f"stream {i}")
    while engine.busy:
        engine.step()
    return Figures(gaps[False], gaps[True], first)


def main(argv: Sequence[str]) -> int:
    """`leyden bench pace`: print the times with and without pacing."""
    parser = argparse.ArgumentParser("leyden bench pace", description=__doc__)
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--streams", type=int, default=8, help="requests that run (default 8)")
    parser.add_argument("--budget", type=int, default=512, help="most tokens of a step (default 512)")
    parser.add_argument("--steps", type=int, default=32, help="the prompt's length in steps of that size (default 32)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    given = parser.parse_args(argv)
    tokens = given.budget * given.steps
    for paced in (True, False):
        engine = sized(
            given.model,
            seqs=given.streams + 1,
            snapshots=4,
            pages=(given.streams + 1) * (tokens // 16 + 8),
            max_model_len=tokens + 64,
            step_tokens=given.budget,
            device=given.device,
            paced=paced,
        )
        figures = measure(engine, given.streams, tokens)
        print(
            f"{'paced' if paced else 'whole steps':<12} {given.streams} streams: {_ms(figures.alone)} alone, "
            f"{_ms(figures.beside)} while {tokens:,} tokens arrive: p99/p50 {figures.ratio:.2f}, p99 over alone "
            f"{figures.stretch:.1f}; first token of the prompt after {figures.first:.2f} s"
        )
    return 0


def _ms(gaps: list[float]) -> str:
    return f"p50 {statistics.median(gaps) * 1e3:.2f} p99 {percentile(gaps, 0.99) * 1e3:.2f} ms"
