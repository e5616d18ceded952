"""How fast the engine decodes and reads prompts, over a grid of batch sizes and contexts, and how far from the floor.

The floor of a decode step is what it must read, weights and states, at the speed at which memory delivers just then:
that is probed around every measurement, for on shared machines it moves by a factor. Without a model, random weights in
the proportions of a release are measured (leyden.bench.middling), about 1.6 billion of them, or all 30 billion.

With drafts tokens per second depend on how many of them are kept. Random weights keep none: --synthetic-acceptance says
how many count as kept, and the step is real.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from leyden import ops
from leyden.bench import grid, middling
from leyden.config.engine import EngineConfig
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.engine.engine import Engine
from leyden.errors import ConfigError
from leyden.model.nemotron import Nemotron
from leyden.types import Request, SamplingParams

# Steps of decoding in one measurement, and before it: on CUDA the first ones capture graphs.
_STEPS = {"cpu": 24, "cuda": 100}
_WARM = {"cpu": 0, "cuda": 20}
_DRAFTS = (
    'as of leyden serve, such as {"method": "mtp", "num_speculative_tokens": 3}; without a model in it dflash and '
    "dspark have random weights in the size and the layout of a release (--layout, or the key quantization)"
)
_KEPT = "tokens of a sequence per step by decree, its drafts among them, such as 2.9 (with --speculative-config)"


@dataclass(slots=True)
class Cell:
    """One place of the grid; medians over the repeats."""

    batch: int
    context: int
    tokens_per_s: float
    floor_share: float | None  # None: the floor of this device, or of steps with drafts, is not known here
    bandwidth: float | None  # bytes/s
    tokens_per_step: float  # of one sequence


def floor_bytes(model: Nemotron, engine: Engine, batch: int, context: int) -> float:
    """What one decode step must read and write: weights once, as many experts as `batch` tokens that choose on their
    own come upon, the states of every sequence twice (those that are seldom written: as often as they are), its keys
    and values once."""
    config, pool = model.config, engine.runner.pool
    experts = config.n_routed_experts
    chosen = 1 - (1 - config.num_experts_per_tok / experts) ** batch if experts else 0
    read = 0.0
    for name, parameter in model.named_parameters():
        if name.startswith(("backbone.embeddings", "mtp.")) and model.lm_head is not model.backbone.embeddings:
            continue
        read += parameter.nbytes * (chosen if ".experts." in name else 1)
    written = 1 / pool.shape.period
    states = 2 * pool.conv[:, 0].nbytes + (1 + written) * pool.ssm[:, 0].nbytes + pool.recent[:, 0].nbytes / 2
    keys = pool.kv[:, :, 0, 0].nbytes * context
    return read + batch * (states + keys)


class DeviceProbe:
    """How fast a GPU reads its memory."""

    def __init__(self, megabytes: int = 2048):
        self._memory = torch.ones(megabytes << 18, device="cuda")

    @property
    def bytes(self) -> int:
        return self._memory.nbytes

    def bandwidth(self, times: int = 5) -> float:
        """Bytes read per second, the best of some readings."""
        best = 0.0
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._memory.sum()
            end.record()
            end.synchronize()
            best = max(best, self._memory.nbytes / (begin.elapsed_time(end) * 1e-3))
        return best


class Ladder:
    """An engine and the sequences that it is measured with."""

    def __init__(
        self,
        folder: Path,
        quantization: str | None,
        load_format: str,
        batches: list[int],
        most: int,
        device: str = "cpu",
        params: SamplingParams | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **settings: Any,
    ):
        """`settings` are further fields of EngineConfig."""
        self._clock = clock
        drafts = settings.get("speculative_config") or {}
        self._each = 1 + int(drafts.get("num_speculative_tokens", 7 if drafts else 0))  # most tokens of a step
        started = time.monotonic()
        self._steps, self._warm = _STEPS[device], _WARM[device]
        self._params = params or SamplingParams(temperature=0)
        self.engine = Engine.load(
            EngineConfig(
                model=str(folder),
                load_format=load_format,
                quantization=quantization,
                max_num_seqs=max(batches),
                max_model_len=most + (self._steps + self._warm + 16) * self._each,
                device=device,
                # with a cache of prefixes a prompt would stop where its state is kept
                **{"enable_prefix_caching": False, "kv_cache_memory_bytes": 4 * 2**30 if device == "cpu" else None}
                | settings,
            )
        )
        self.model = self.engine.runner.model
        self._count = 0
        self._random = torch.Generator().manual_seed(0)
        self.generate(1, 16)
        self.load_s, self.loaded = self._first_at - started, time.time() - (time.monotonic() - self._first_at)
        self.probe: Any = None
        if device == "cuda":
            self.probe = DeviceProbe()
        elif not ops.forced():
            from leyden.ops.cpu.program import available  # compiled by now; where a GPU does the work never

            if available:
                from leyden.ops.cpu.probe import Probe

                self.probe = Probe()

    def generate(self, batch: int, context: int, steps: int = 1) -> tuple[float, list[float], int]:
        """(seconds until every sequence has its first token, seconds of each decode step after that, their tokens)"""
        vocabulary = self.model.config.vocab_size
        prompts = torch.randint(0, vocabulary, (batch, context), generator=self._random).tolist()
        apart = min(context, self.engine.runner.pool.shape.period)  # so that states are written in turn
        for prompt in (prompt[: context - i % apart] for i, prompt in enumerate(prompts)):
            self._count += 1
            most = (steps + self._warm + 8) * self._each
            params = replace(self._params, max_tokens=most, ignore_eos=True, seed=self._count)
            self.engine.submit(Request(id=str(self._count), prompt=prompt, params=params))
        names = {str(self._count - i) for i in range(batch)}
        waiting, tokens, started = set(names), 0, self._clock()
        while waiting:
            waiting -= {delta.request_id for delta in self.engine.step() if delta.token_ids}
        first, seconds, self._first_at = self._clock() - started, [], time.monotonic()
        for _ in range(self._warm if steps > 1 else 0):
            self.engine.step()
        for _ in range(steps if steps > 1 else 0):
            began = self._clock()
            deltas = self.engine.step()
            seconds.append(self._clock() - began)
            tokens += sum(len(delta.token_ids) for delta in deltas)
        for name in names:
            self.engine.abort(name)
        while self.engine.busy:
            self.engine.step()
        return first, seconds, tokens

    def decode(self, batch: int, context: int, repeats: int) -> Cell:
        rates, shares, speeds, kept = [], [], [], []
        floor = floor_bytes(self.model, self.engine, batch, context)
        for _ in range(repeats):
            before = self.probe.bandwidth() if self.probe else None
            _, seconds, tokens = self.generate(batch, context, self._steps)
            step = median(seconds)
            kept.append(tokens / batch / len(seconds))
            rates.append(batch * kept[-1] / step)
            if self.probe and before and self._each == 1:
                speeds.append((before + self.probe.bandwidth()) / 2)
                shares.append(floor / speeds[-1] / step)
        share, speed = (median(shares), median(speeds)) if shares else (None, None)
        return Cell(batch, context, median(rates), share, speed, median(kept))

    def prefill(self, tokens: int, repeats: int) -> float:
        """Tokens of a prompt read per second, its first token sampled."""
        return median(tokens / self.generate(1, tokens)[0] for _ in range(repeats))


def main(argv: Sequence[str]) -> int:
    """`leyden bench ladder`: print the grid."""
    parser = argparse.ArgumentParser("leyden bench ladder", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", help="folder of a checkpoint (default: random weights, 1.6 billion)")
    parser.add_argument("--release", action="store_true", help="random weights of a release's size, 30 billion")
    parser.add_argument(
        "--layout", choices=middling.LAYOUTS, default="bf16", help="formats of random weights, as released"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to measure")
    parser.add_argument("--sample", action="store_true", help="draw with temperature 1 and top_p 0.95")
    parser.add_argument("--mamba-ssm-cache-dtype", default="auto", help="float32, float16 or bfloat16")
    parser.add_argument("--enable-mamba-cache-stochastic-rounding", action="store_true", help="as of leyden serve")
    parser.add_argument("--use-replayssm", action="store_true", help="as of leyden serve")
    parser.add_argument("--quantization", help="int8, int4, nvfp4 or fp8: quantise while loading")
    parser.add_argument("--speculative-config", metavar="JSON", default="{}", help=_DRAFTS)
    parser.add_argument("--synthetic-acceptance", type=float, metavar="LENGTH", help=_KEPT)
    grid.add(parser)
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; medians count (default 3)")
    parser.add_argument("--threads", type=int, help="default: as torch chooses, which OMP_NUM_THREADS changes")
    parser.add_argument("--cpu-affinity", metavar="LIST", help="processors to keep to, such as 0-3,8")
    parser.add_argument("--reference", action="store_true", help="run the reference ops instead of the kernels")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made, ops.using("reference") if given.reference else nullcontext():
        drafts = _drafts(given)
        sizes = middling.RELEASE if given.release else {}
        if drafts.get("method") == "mtp":
            sizes = sizes | {"num_nextn_predict_layers": 1}
        folder = resolve(given.model) if given.model else middling.describe(Path(made), given.layout, **sizes)
        if _is_random(drafts):
            target, layout = ModelConfig.from_folder(folder), drafts.pop("quantization", given.layout)
            network = middling.drafter(Path(made) / "drafter", target, drafts["method"], layout, device=given.device)
            drafts["model"] = str(network)
        ladder = Ladder(
            folder,
            given.quantization,
            "auto" if given.model else "dummy",
            given.batches,
            max(given.contexts + given.prefill),
            given.device,
            SamplingParams(temperature=1.0, top_p=0.95) if given.sample else None,
            time.process_time if given.processor_time else time.perf_counter,
            mamba_ssm_cache_dtype=given.mamba_ssm_cache_dtype,
            enable_mamba_cache_stochastic_rounding=given.enable_mamba_cache_stochastic_rounding,
            use_replayssm=given.use_replayssm,
            threads=given.threads,
            cpu_affinity=given.cpu_affinity,
            speculative_config=drafts,
        )
        load_s = ladder.loaded - given.since if given.since else ladder.load_s
        cells = [ladder.decode(batch, context, given.repeats) for context in given.contexts for batch in given.batches]
        reading = {tokens: ladder.prefill(tokens, given.repeats) for tokens in given.prefill}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    probe = ladder.probe.bytes if ladder.probe else 0
    if given.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    if given.json:
        found = {"decode": [asdict(cell) for cell in cells], "prefill": reading}
        print(json.dumps(found | {"peak": peak, "probe": probe, "load": load_s}))
        return 0
    if drafts:
        print(f"drafts: {ladder.engine.describe()['drafting']}")
    print(f"{'batch':>6} {'context':>8} {'tokens/s':>9} {'a step':>7} {'of the floor':>13} {'GB/s then':>10}")
    for cell in cells:
        share = "" if cell.floor_share is None else f"{cell.floor_share:.0%}"
        speed = "" if cell.bandwidth is None else f"{cell.bandwidth / 1e9:.1f}"
        kept = f"{cell.tokens_per_step:.2f}"
        print(f"{cell.batch:>6} {cell.context:>8} {cell.tokens_per_s:>9.1f} {kept:>7} {share:>13} {speed:>10}")
    for tokens, rate in reading.items():
        print(f"prompt of {tokens}: {rate:.0f} tokens/s")
    print(f"loaded in {load_s:.1f} s, {(peak - probe) / 2**30:.2f} GiB at most")
    return 0


def _is_random(drafts: dict[str, Any]) -> bool:
    """Whether the drafter is a network that has yet to be made."""
    return drafts.get("method") in ("dflash", "dspark") and "model" not in drafts


def _drafts(given: argparse.Namespace) -> dict[str, Any]:
    """What the engine is told about drafts."""
    try:
        drafts = json.loads(given.speculative_config)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config: expected a JSON object, got {error}") from None
    if not isinstance(drafts, dict):
        raise ConfigError(f"--speculative-config: expected a JSON object, got {given.speculative_config}")
    layout = drafts.get("quantization", given.layout)
    if _is_random(drafts) and layout not in middling.LAYOUTS:
        accepted = ", ".join(middling.LAYOUTS)
        raise ConfigError(
            f"--speculative-config.quantization of random weights must be one of {accepted}; got {layout!r}"
        )
    if given.synthetic_acceptance is None:
        return drafts
    if not drafts:
        raise ConfigError("--synthetic-acceptance needs --speculative-config: which drafter, and how many drafts")
    decree = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": given.synthetic_acceptance}
    return drafts | decree


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
