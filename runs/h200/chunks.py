"""Chunks of prompts on the device: the same text by graphs and without, no synchronisation, and what either takes.

Two sections of check_and_time.py, chunks and turns. By itself on a machine without a GPU, with small models and steps
done again in place of graphs: PYTHONPATH=. python runs/h200/chunks.py
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from leyden.cache.pool import PoolShape
from leyden.config.model import ModelConfig
from leyden.engine.engine import Engine
from leyden.engine.memory import Split
from leyden.model.checkpoint import build
from leyden.model.nemotron import Nemotron
from leyden.testing import checkpoints
from leyden.testing.again import Again
from leyden.types import Request, SamplingParams

Say = Callable[..., None]
Verdict = Callable[[str, float, float], None]
Record = Callable[[str, object], None]
LENGTHS = (2, 14, 40, 100, 129, 300, 506, 700, 1030, 1000)  # of what is new in a turn
HEADER = 6  # tokens behind the place where a turn's state is kept, as a chat template has them


def engine(model: Nemotron, dtype: torch.dtype, state: torch.dtype, length: int, **options: Any) -> Engine:
    shape = PoolShape(
        slots=41, pages=5 * length // 16, page=16, max_model_len=length, kv_dtype=dtype, conv_dtype=dtype,
        ssm_dtype=state,
    )  # fmt: skip
    made = Engine(model, Split(shape, 16, 8192, 0, 0), overlap=True, paced=False, **options)
    if dtype == torch.float32:
        for array in (made.runner.pool.kv, made.runner.pool.conv, made.runner.pool.ssm):
            array.fill_(1e3)  # what nobody wrote must not be read
    return made


def words(number: int, seed: int, vocabulary: int) -> list[int]:
    made: list[int] = torch.randint(vocabulary, (number,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


def ask(engine: Engine, requests: list[Request], apart: int = 0) -> dict[str, list[int]]:
    """The answers; each request comes `apart` steps after the one before."""
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    steps, queue = 0, list(requests)
    while queue or engine.busy:
        if queue and steps % max(1, apart) == 0:
            for _ in range(1 if apart else len(queue)):
                engine.submit(queue.pop(0))
        for delta in engine.step():
            if delta.request_id in found:
                found[delta.request_id] += delta.token_ids
        steps += 1
        assert steps < 20_000, "the engine does not come to an end"
    return found


def request(name: str, prompt: list[int], tokens: int, marked: bool = True) -> Request:
    """`marked`: its state is kept before the header, so that there are two chunks; otherwise nowhere."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(id=name, prompt=prompt, params=params, marks=[max(1, len(prompt) - HEADER) if marked else 1])


def conversations(engine: Engine, vocabulary: int) -> list[list[int]]:
    """Turns of every length behind what is cached, one conversation after the other; then some side by side."""
    answers = []
    for seed in range(3):  # the second meets every form again, the third runs by graphs
        text: list[int] = []
        for turn, new in enumerate(LENGTHS):
            text = text + words(new, 100 * seed + turn, vocabulary)
            answers.append(ask(engine, [request("a", text, 5)])["a"])
            text = text + answers[-1]
    for apart in (0, 2, 7):
        for seed in range(2):
            some = [
                request(f"{i}", words(new, 1000 + 17 * apart + 5 * seed + i, vocabulary), 24)
                for i, new in enumerate((300, 7, 40, 200, 90, 33))
            ]
            answers += ask(engine, some, apart).values()
    engine.check()
    return answers


@contextmanager
def unsynchronised() -> Iterator[list[str]]:
    """-> what waited for the device in the block; the first wait ends it."""
    waits: list[str] = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield waits
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        waits.append(str(error)[:300])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@torch.inference_mode(False)  # weights are loaded by threads, which know nothing of it
def texts(device: str, say: Say, verdict: Verdict) -> None:
    """A small random model in fp32, where rounding decides over nothing."""
    model = build(ModelConfig.from_dict(checkpoints.PRESETS["tiny"], {}), torch.float32)
    checkpoints.randomise(model)
    model = model.to(device).eval().requires_grad_(False)
    single, vocabulary = torch.float32, model.config.vocab_size
    plain, made = (engine(model, single, single, 8192) for _ in range(2))
    plain.runner.chunks = None
    wanted, found = conversations(plain, vocabulary), conversations(made, vocabulary)
    others = sum(a != b for one, other in zip(wanted, found, strict=True) for a, b in zip(one, other, strict=True))
    verdict("chunks: tokens that graphs change", others / sum(map(len, wanted)), 0)
    chunks: Any = made.runner.chunks
    forms = sorted(chunks._graphs)
    sizes = {2, HEADER, 16, 48, 128, 384, 512, 768, 1024}
    verdict("chunks: sizes of graphs that never ran", float(len(sizes - {size for _, size in forms})), 0)
    verdict("chunks: answers beside them that never ran", float(not any(beside for beside, _ in forms)), 0)
    more = made.stats().recorded_steps - plain.stats().recorded_steps
    say(f"  {len(wanted)} answers, {len(forms)} graphs, {more} of {made.stats().steps} steps were chunks by graphs")
    verdict("chunks: length of the padding slot", float(made.runner.pool.committed[0]), 0)
    for one, name in ((plain, "one by one"), (made, "by graphs")) if device == "cuda" else ():
        verdict(f"chunks {name}: a turn waits for the device {(waits := turn(one, vocabulary))}", len(waits), 0)


def turn(engine: Engine, vocabulary: int) -> list[str]:
    """What of a turn behind a cached prefix waits for the device."""
    text, new = words(400, 7, vocabulary), words(200, 8, vocabulary)
    for i in range(3):  # what is met for the first time, and captured
        ask(engine, [request("a", [i, *text], 1)])
        ask(engine, [request("b", [i, *text, *new], 4)])
    ask(engine, [request("a", text, 1)])
    with unsynchronised() as waits:
        engine.submit(request("b", text + new, 4))
        for _ in range(3):  # the turn, its header, a token
            engine.step()
    ask(engine, [])
    return waits


def first(engine: Engine, new: int, known: int, seed: int, marked: bool, vocabulary: int) -> float:
    """Seconds from a turn of `new` tokens behind `known` cached ones to its first token."""
    prompt = words(known, 1, vocabulary) + words(new, 1000 + seed, vocabulary)
    started = time.perf_counter()
    engine.submit(request("t", prompt, 1, marked))
    got = False
    while not got:
        got = any(delta.request_id == "t" and delta.token_ids for delta in engine.step())
    took = time.perf_counter() - started
    for _ in range(2):
        engine.step()
    return took


def times(
    model: Nemotron, device: str, say: Say, record: Record, profile: Callable[[Callable[[], object], str], None] | None,
    lengths: tuple[int, ...] = (100, 512, 1000), known: int = 2048,
) -> None:  # fmt: skip
    """Time to first token of whole prompts, of turns behind a cached prefix, and of turns beside four answers."""
    dtype, vocabulary = torch.bfloat16 if device == "cuda" else torch.float32, model.config.vocab_size
    made, seeds = engine(model, dtype, torch.float32, 16384), count()
    graphs, room = made.runner.chunks, torch.cuda.memory_reserved() if device == "cuda" else 0
    ask(made, [request("k", words(known + 1, 1, vocabulary)[:known] + [0] * HEADER, 1)])

    def compared(name: str, new: int, cached: int, marked: bool) -> None:
        medians = []
        for chunks in (None, graphs):
            made.runner.chunks = chunks
            seen = [first(made, new, cached, next(seeds), marked, vocabulary) for _ in range(10)][3:]  # behind captures
            medians.append(sorted(seen)[3] * 1e3)
        say(f"  {name}: {medians[0]:.1f} ms one by one, {medians[1]:.1f} ms by graphs")
        record(f"chunks {name}", medians)

    for new in lengths:
        compared(f"prompt of {new} in one chunk", new, 0, False)
        compared(f"turn of {new} behind {known}, its last {HEADER} apart", new, known, True)
    for i in range(4):
        prompt = words(50, 50 + i, vocabulary)
        params = SamplingParams(temperature=1.0, max_tokens=4000, ignore_eos=True, seed=i)
        made.submit(Request(id=f"b{i}", prompt=prompt, params=params))
    for _ in range(12):
        made.step()
    for new in lengths:
        compared(f"turn of {new} beside 4 answers", new, known, True)
    for i in range(4):
        made.abort(f"b{i}")
    ask(made, [])
    if device == "cuda" and graphs is not None:
        for form, one in sorted(graphs._graphs.items()):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                one()
            end.record()
            torch.cuda.synchronize()
            say(f"  {form[1]} tokens beside {form[0]}: {begin.elapsed_time(end) / 3:.2f} ms on the device")
            record(f"chunks {form} on the device", begin.elapsed_time(end) / 3)
        more = (torch.cuda.memory_reserved() - room) / 2**20
        say(f"  {len(graphs._graphs)} graphs, reserved memory {more:.0f} MiB more than before")
        if profile is not None and (0, 512) in graphs._graphs:
            profile(graphs._graphs[0, 512], "a chunk of 512")


def main() -> None:
    """Everything but the graphs, on the CPU."""
    from leyden.engine import chunk_capture, runner

    class Runner(runner.Runner):
        def __init__(self, model: Nemotron, pool: Any, *rest: Any):
            super().__init__(model, pool, *rest)
            self.chunks = chunk_capture.CapturedChunks(model, pool, self._taps, None)

    def check(name: str, value: float, bound: float) -> None:
        print(f"  {'ok  ' if value <= bound else 'FAIL'} {name}: {value:.3g}")

    setattr(chunk_capture, "Captured", Again)  # noqa: B010
    sys.modules["leyden.engine.engine"].Runner = Runner  # type: ignore[attr-defined]
    with torch.inference_mode():
        texts("cpu", print, check)
        model = build(ModelConfig.from_dict(checkpoints.PRESETS["tiny"], {}), torch.float32)
        checkpoints.randomise(model)
        times(model.eval().requires_grad_(False), "cpu", print, lambda name, value: None, None, (100, 512), 200)


if __name__ == "__main__":
    main()
