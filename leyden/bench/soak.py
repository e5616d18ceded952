"""Whether anything leaks: an engine at full load for minutes, in a cache too small for it.

Conversations that come back, prefixes that many share, tenants, priorities, aborts at any moment, preemption all the
time, and a tier of host memory. The sums of the cache are checked as it goes. In the end everything must be free: the
exit code is 1 if a slot, a page or a place in the tier is missing. The memory of the process is reported as a trend,
from the end of the first tenth on: what is allocated once is allocated by then.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from leyden.bench.sized import engine as sized
from leyden.engine.engine import Engine
from leyden.types import Delta, Request, SamplingParams

_CHECK_EVERY = 50  # steps
_LOOKS = 200  # at the memory of the process, over the whole run


@dataclass(slots=True)
class Figures:
    requests: int = 0
    aborted: int = 0
    steps: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)  # (seconds, resident bytes)

    def trend(self) -> float:
        """Bytes a second that the process grew by, by least squares, without the first tenth."""
        points = self.memory[len(self.memory) // 10 :]
        if len(points) < 2:
            return 0.0
        t0 = sum(t for t, _ in points) / len(points)
        m0 = sum(m for _, m in points) / len(points)
        spread = sum((t - t0) ** 2 for t, _ in points)
        return sum((t - t0) * (m - m0) for t, m in points) / spread if spread else 0.0


class Load:
    """Requests as they come: most go on with a conversation, some begin one with a prefix that many have."""

    def __init__(self, vocab: int, longest: int, seed: int):
        self._made = random.Random(seed)
        self._vocab, self._longest = vocab, longest
        self._systems = [self._words(longest // 6) for _ in range(4)]
        self._talks: list[list[int]] = []
        self._count = 0

    def _words(self, n: int) -> list[int]:
        return [self._made.randrange(20, self._vocab) for _ in range(n)]

    def request(self) -> Request:
        made = self._made
        if self._talks and made.random() < 0.7:
            prompt = made.choice(self._talks) + self._words(made.randrange(1, 40))
        else:
            prompt = made.choice(self._systems) + self._words(made.randrange(1, self._longest // 3))
        if len(prompt) > self._longest * 3 // 4:
            prompt = prompt[: self._longest // 3]
        self._count += 1
        params = SamplingParams(
            temperature=made.choice([0.0, 1.0]),
            top_p=made.choice([1.0, 0.9]),
            repetition_penalty=made.choice([1.0, 1.0, 1.0, 1.1]),
            logprobs=made.choice([None, None, None, 2]),
            max_tokens=made.randrange(1, self._longest // 4),
            seed=self._count,
        )
        return Request(
            id=f"r{self._count}",
            prompt=prompt,
            params=params,
            priority=made.randrange(3),
            arrival=time.monotonic(),
            cache_salt=made.choice(["", "", "", f"tenant {self._count}"]),
            marks=[len(prompt) * 2 // 3] if made.random() < 0.5 else [],
        )

    def answered(self, request: Request, tokens: list[int]) -> None:
        """The client has the answer, and may go on from there."""
        self._talks.append(request.prompt + tokens)
        if len(self._talks) > 40:
            self._talks.pop(self._made.randrange(len(self._talks)))


def soak(engine: Engine, load: Load, seconds: float, seed: int = 0) -> Figures:
    """Run the load, then end it. Raises AssertionError if a sum of the cache does not hold."""
    made = random.Random(seed)
    figures = Figures()
    alive: dict[str, tuple[Request, list[int]]] = {}
    started = time.monotonic()
    seqs = engine.split.seqs
    while (now := time.monotonic() - started) < seconds:
        while len(alive) < 3 * seqs:
            request = load.request()
            engine.submit(request)
            alive[request.id] = request, []
            figures.requests += 1
        if made.random() < 0.1:
            engine.abort(made.choice(list(alive)))
            figures.aborted += 1
        _take(engine.step(), alive, load)
        figures.steps += 1
        if figures.steps % _CHECK_EVERY == 0:
            engine.check()
        if now >= seconds * len(figures.memory) / _LOOKS:
            figures.memory.append((now, resident()))
    for request_id in list(alive):
        engine.abort(request_id)
    while engine.busy:
        engine.step()
    engine.check()
    return figures


def _take(deltas: list[Delta], alive: dict[str, tuple[Request, list[int]]], load: Load) -> None:
    for delta in deltas:
        request, tokens = alive[delta.request_id]
        tokens += delta.token_ids
        if delta.finish_reason:
            del alive[delta.request_id]
            if delta.finish_reason == "error":
                raise AssertionError(f"a request failed: {delta.error}")
            load.answered(request, tokens)


def leaks(engine: Engine) -> list[str]:
    """What is missing once the cache is emptied; nothing may run."""
    cache = engine.scheduler.cache
    cache.clear()
    engine.check()
    totals = {"slots": (cache.free_slots, cache.slots), "pages": (cache.free_pages, cache.pages)}
    if cache.tier is not None:
        tier = cache.tier
        totals |= {
            "host slots": (len(tier.free_slots), tier.slots),
            "host pages": (len(tier.free_pages), tier.pages),
        }
    return [f"{total - free} of {total} {what}" for what, (free, total) in totals.items() if free != total]


def resident() -> int:
    """Bytes of main memory that this process holds."""
    with open("/proc/self/status") as lines:
        (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def main(argv: Sequence[str]) -> int:
    """`leyden bench soak`: run the load, print what came of it."""
    parser = argparse.ArgumentParser("leyden bench soak", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder of a checkpoint; a small one shakes the cache most")
    parser.add_argument("--minutes", type=float, default=30, help="of load (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the load (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--async-scheduling", action="store_true", help="plan a step while the one before runs")
    given = parser.parse_args(argv)
    engine = sized(
        given.model,
        seqs=8,
        snapshots=12,
        pages=80,
        max_model_len=480,
        step_tokens=128,
        host=(40, 400),
        device=given.device,
        overlap=given.async_scheduling,
        policy="priority",
    )
    load = Load(engine.config.vocab_size, engine.max_model_len, given.seed)
    figures = soak(engine, load, given.minutes * 60, given.seed)
    stats, cache = engine.stats(), engine.scheduler.cache
    missing = leaks(engine)
    print(
        f"{given.minutes:g} minutes, {figures.steps:,} steps, {figures.requests:,} requests, "
        f"{figures.aborted:,} aborts, {stats.preemptions:,} preemptions"
    )
    print(
        f"{stats.prompt_tokens:,} prompt tokens, {stats.cached_tokens:,} of them cached; {stats.generated_tokens:,} "
        f"generated; {cache.evicted_snapshots:,} states and {cache.evicted_pages:,} pages left the device"
    )
    first, last = figures.memory[len(figures.memory) // 10][1], figures.memory[-1][1]
    print(
        f"memory of the process {first / 2**20:.1f} MiB after the first tenth, {last / 2**20:.1f} MiB in the end, "
        f"trend {figures.trend() * 3600 / 2**20:+.1f} MiB an hour"
    )
    print(f"leaked: {', '.join(missing) or 'nothing'}")
    return 1 if missing else 0
