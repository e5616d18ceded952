"""The same weights through other engines, one after the other and again: decoding, prompts, memory, start.

Measured are transformers, where it is installed, and llama.cpp, given the folder of its programs and a GGUF file. Every
measurement is a process of its own, and the engines take turns, so that whatever else the machine does hits all of
them. Medians count, and the ratios of this engine to each other one.

They do not suffer alike from what else runs: llama.cpp's threads wait for each other in a loop, and where one of them
has no processor it falls to a tenth. So a turn waits for a quiet machine (--patience), and the processors that others
used meanwhile are a line of the table: with much more than zero there, the ratios mean nothing. --processor-time, with
one thread, counts what the engines themselves used, and so bears company; for llama.cpp that is the difference between
two runs, one of them longer.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from leyden.bench import grid
from leyden.config import cores
from leyden.errors import ConfigError

_STEPS = 24  # of decoding in one measurement, as in leyden.bench.ladder
OTHERS = "others, processors"

Figures = dict[str, float]  # what was measured -> tokens/s, seconds or bytes


def _ours(given: argparse.Namespace) -> Figures:
    command = [sys.executable, "-m", "leyden.bench.ladder", given.model, "--json", "--repeats", "1", *grid.words(given)]
    if given.quantization:
        command += ["--quantization", given.quantization]
    said, peak, _ = _child([*command, "--since", str(time.time())])
    made = json.loads(said.splitlines()[-1])
    figures = {_decoding(cell["batch"], cell["context"]): cell["tokens_per_s"] for cell in made["decode"]}
    figures |= {_reading(tokens): rate for tokens, rate in made["prefill"].items()}
    return figures | {"load, s": made["load"], "peak, GiB": (peak - made["probe"]) / 2**30}


def _transformers(given: argparse.Namespace) -> Figures:
    command = [sys.executable, "-m", "leyden.bench.peers", given.model, "--measure-transformers", *grid.words(given)]
    said, peak, _ = _child([*command, "--since", str(time.time())])
    figures: Figures = json.loads(said.splitlines()[-1])
    return figures | {"peak, GiB": peak / 2**30}


def _llama(given: argparse.Namespace) -> Figures:
    """By its own programs: llama-bench for one sequence, llama-batched-bench for several."""
    programs, common = Path(given.llama), ["-m", given.gguf, "-t", str(given.threads)]
    bench = [str(programs / "llama-bench"), *common, "-r", "1", "-o", "json"]
    figures: Figures = {}
    said, peak, seconds = _child([*bench, "-p", "0", "-n", "1", "--no-warmup"])
    figures["load, s"] = seconds
    if given.prefill:
        said, _, _ = _child([*bench, "-p", grid.listed(given.prefill), "-n", "0"])
        figures |= {_reading(run["n_prompt"]): run["avg_ts"] for run in json.loads(said)}
    if 1 in given.batches:
        said, more, _ = _child([*bench, "-p", "0", "-n", str(_STEPS), "-d", grid.listed(given.contexts)])
        figures |= {_decoding(1, run["n_depth"]): run["avg_ts"] for run in json.loads(said)}
        peak = max(peak, more)
    for context in given.contexts:
        for batch in [batch for batch in given.batches if batch > 1]:
            size = ["-npp", str(context), "-ntg", str(_STEPS), "-npl", str(batch), "-c", str(batch * (context + 64))]
            said, more, _ = _child([str(programs / "llama-batched-bench"), *common, *size, "--output-format", "jsonl"])
            run = next(json.loads(line) for line in said.splitlines() if line.startswith("{"))
            figures[_decoding(batch, context)] = run["speed_tg"]
            peak = max(peak, more)
    return figures | {"peak, GiB": peak / 2**30}


def _llama_processor_time(given: argparse.Namespace) -> Figures:
    """Tokens per second of processor."""
    programs, common = Path(given.llama), ["-m", given.gguf, "-t", str(given.threads)]
    bench = [str(programs / "llama-bench"), *common, "-r", "1", "--no-warmup"]
    _, peak, seconds = _child([*bench, "-p", "0", "-n", "1"])
    figures: Figures = {"load, s": seconds, "peak, GiB": peak / 2**30}

    def rate(command: list[str], option: str, short: int, long: int, each: int = 1) -> float:
        used = []
        for length in (short, long):
            before = os.times()
            _child([*command, option, str(length)])
            after = os.times()
            used.append(after.children_user + after.children_system - before.children_user - before.children_system)
        return each * (long - short) / (used[1] - used[0])

    for tokens in given.prefill:
        figures[_reading(tokens)] = rate([*bench, "-n", "0"], "-p", 8, tokens)
    for context in given.contexts:
        for batch in given.batches:
            size = ["-npp", str(context), "-npl", str(batch), "-c", str(batch * (context + 64))]
            several = [str(programs / "llama-batched-bench"), *common, *size]
            figures[_decoding(batch, context)] = rate(several, "-ntg", 4, 4 + _STEPS, batch)
    return figures


def _child(command: list[str]) -> tuple[str, int, float]:
    """(what it printed, its peak of resident bytes, seconds); ConfigError with its last words if it failed."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=out, stderr=errors)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if child.returncode:
            raise ConfigError(f"{' '.join(command[:4])} ... failed: {errors.read()[-500:].strip()}")
        return out.read(), used.ru_maxrss * 1024, time.perf_counter() - started


class Others:
    """How many processors processes use that are neither this one nor its children, since the last time it was asked.

    Of Linux's /proc/stat; 0 on other systems.
    """

    def __init__(self) -> None:
        self._last = self._now()

    def used(self) -> float:
        (then, busy), (now, busier) = self._last, self._now()
        self._last = now, busier
        return max(0.0, busier - busy) / max(now - then, 1e-9)

    def wait_for_quiet(self, seconds: float) -> None:
        """Until others use less than a tenth of a processor for a second, or so many seconds have passed."""
        end = time.monotonic() + seconds
        self.used()
        while time.monotonic() < end:
            time.sleep(1)
            if self.used() < 0.1:
                return

    @staticmethod
    def _now() -> tuple[float, float]:
        """(seconds, seconds of processors that others have used)"""
        own = sum(os.times()[:4])
        try:
            first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
        except OSError:
            return time.monotonic(), 0.0
        user, nice, system, _, _, irq, softirq, steal = map(int, first[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy - own


def _decoding(batch: int, context: int) -> str:
    return f"decode, {batch} x {context}"


def _reading(tokens: int | str) -> str:
    return f"prompt, {tokens}"


def measure_transformers(given: argparse.Namespace) -> Figures:
    """In this process: transformers' own generation loop, spelled out so that steps can be timed."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(given.threads)
    clock = time.process_time if given.processor_time else time.perf_counter
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval()
    random = torch.Generator().manual_seed(0)

    def run(batch: int, context: int, steps: int) -> Iterator[float]:
        """Seconds of the prompt, then of each step."""
        tokens = torch.randint(0, model.config.vocab_size, (batch, context), generator=random)
        cache = None
        for _ in range(1 + steps):
            started = clock()
            made = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, tokens = made.past_key_values, made.logits[:, -1:].argmax(-1)
            yield clock() - started

    figures: Figures = {}
    with torch.inference_mode():
        list(run(1, 16, 1))
        figures["load, s"] = time.time() - given.since
        for context in given.contexts:
            for batch in given.batches:
                figures[_decoding(batch, context)] = batch / median(list(run(batch, context, _STEPS))[1:])
        for tokens in given.prefill:
            figures[_reading(tokens)] = tokens / next(run(1, tokens, 0))
    return figures


def main(argv: Sequence[str]) -> int:
    """`leyden bench peers`: print the table, and draw it."""
    parser = argparse.ArgumentParser("leyden bench peers", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--llama", metavar="DIR", help="folder with llama-bench and llama-batched-bench")
    parser.add_argument("--gguf", metavar="FILE", help="the same weights for llama.cpp")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--quantization", help="int8, int4, nvfp4 or fp8, of this engine alone")
    grid.add(parser)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every engine (default: all)")
    parser.add_argument("--cpu-affinity", metavar="LIST", help="processors for every engine, such as 0-3,8")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every engine (default 3)")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds that a turn waits for a quiet machine (default 60)"
    )
    parser.add_argument("--chart", metavar="FILE", help="draw the figures into a .png or .svg")
    parser.add_argument("--json", metavar="FILE", help="keep every figure of every turn")
    parser.add_argument("--measure-transformers", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.measure_transformers:
        print(json.dumps(measure_transformers(given)))
        return 0
    if bool(given.llama) != bool(given.gguf):
        raise ConfigError("llama.cpp needs both --llama (its programs) and --gguf (the weights)")
    engines: dict[str, Callable[[argparse.Namespace], Figures]] = {"leyden": _ours}
    if given.llama:
        engines["llama.cpp"] = _llama_processor_time if given.processor_time else _llama
    if not given.no_transformers and importlib.util.find_spec("transformers"):
        engines["transformers"] = _transformers
    if given.cpu_affinity:
        cores.confine(cores.parse(given.cpu_affinity))  # and so its children
    turns: dict[str, list[Figures]] = defaultdict(list)
    others = Others()
    for turn in range(given.repeats):
        for name, measure in engines.items():
            print(f"turn {turn + 1} of {given.repeats}: {name}", file=sys.stderr)
            others.wait_for_quiet(given.patience)
            made = measure(given)
            turns[name].append(made | {OTHERS: others.used()})
    figures = {name: _medians(made) for name, made in turns.items()}
    print(table(figures))
    if given.json:
        Path(given.json).write_text(json.dumps(turns, indent=2) + "\n", encoding="utf-8")
    if given.chart:
        draw(figures, Path(given.chart))
    return 0


def _medians(turns: list[Figures]) -> Figures:
    return {what: median(turn[what] for turn in turns if what in turn) for what in turns[0]}


def table(figures: dict[str, Figures]) -> str:
    """What was measured, one engine a column, and beside every other engine how many times of it the first one does."""
    (first, ours), *others = figures.items()
    head = f"{'':<20}{first:>12}" + "".join(f"{name:>14}{'':>8}" for name, _ in others)
    lines = [head]
    for what, value in ours.items():
        line = f"{what:<20}{value:>12.4g}"
        for _, theirs in others:
            other = theirs.get(what)
            ratio = f"x {value / other:.2f}" if other and what != OTHERS else ""
            line += f"{'':>22}" if other is None else f"{other:>14.4g}{ratio:>8}"
        lines.append(line)
    return "\n".join(lines)


def draw(figures: dict[str, Figures], file: Path) -> None:
    """Bars of tokens per second, one group for each measurement."""
    from matplotlib.figure import Figure

    measured = [what for what in next(iter(figures.values())) if what.startswith(("decode", "prompt"))]
    chart = Figure(figsize=(1.6 * len(measured) + 2, 4), layout="constrained")
    axes = chart.subplots()
    width = 0.8 / len(figures)
    for i, (name, values) in enumerate(figures.items()):
        places = [at + (i - (len(figures) - 1) / 2) * width for at in range(len(measured))]
        bars = axes.bar(places, [values.get(what, 0) for what in measured], width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(measured)), measured)
    axes.set_ylabel("tokens/s")
    axes.legend()
    chart.savefig(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
