"""Measures and prints: what the sections of check_and_time.py have in common."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden import ops
from leyden.bench.kernels import graph, replay
from leyden.cache.pool import Pool, PoolShape
from leyden.config.model import ModelConfig
from leyden.formats import Weight
from leyden.formats.fp8 import FP8
from leyden.formats.nvfp4 import NVFP4
from leyden.model import checkpoint, twins
from leyden.model.context import Context
from leyden.model.eight import round_above
from leyden.ops.rows import Rows
from leyden.ops.triton import launch

CONFIG = ModelConfig(
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    hidden_size=2688,
    num_key_value_heads=2,
    mamba_num_heads=64,
    n_routed_experts=128,
    num_experts_per_tok=6,
    moe_intermediate_size=1856,
    shared_expert_width=3712,
    routed_scaling_factor=2.5,
)
H, VOCABULARY, INNER, CHANNELS = CONFIG.hidden_size, CONFIG.vocab_size, CONFIG.mamba_inner, CONFIG.conv_dim
PROJECTED = INNER + CHANNELS + CONFIG.mamba_num_heads
STATE = (CONFIG.mamba_num_heads, CONFIG.mamba_head_dim, CONFIG.ssm_state_size)
EXPERTS, CHOICES = CONFIG.n_routed_experts, CONFIG.num_experts_per_tok
EXPERT, SHARED = CONFIG.moe_intermediate_size, CONFIG.shared_expert_width
Q, KV = (CONFIG.num_attention_heads, CONFIG.head_dim), (CONFIG.num_key_value_heads, CONFIG.head_dim)
QUERIES, KEYS = Q[0] * Q[1], KV[0] * KV[1]
READ = 4.46e12  # bytes/s
BF = torch.bfloat16
RESULTS: dict[str, Any] = {}
VERDICTS: list[bool] = []  # of the section that runs
START = time.monotonic()


def say(*words: object) -> None:
    print(*words, flush=True)


def record(name: str, value: object) -> None:
    RESULTS[name] = value
    if out := os.environ.get("OUT"):
        Path(out, "results.json").write_text(json.dumps(RESULTS, indent=1))


def each(name: str, runs: Sequence[Callable[[], object]], bytes_each: float = 0) -> float:
    """Microseconds of one of `runs`, all of them in one graph, one after the other; nan if they cannot run."""
    try:
        us = replay(graph(lambda: [run() for run in runs])) * 1e3 / len(runs)
    except TimeoutError:
        raise
    except Exception as error:
        say(f"  {name:44s} {type(error).__name__}: {str(error)[:200]}")
        return float("nan")
    rate = f"  {bytes_each / us / 1e6:5.2f} TB/s" if bytes_each else ""
    say(f"  {name:44s} {us:8.2f} us{rate}")
    record(name, us)
    return us


def verdict(name: str, value: float, bound: float) -> None:
    """Only failures are printed at once; the section's end says how many there were."""
    passed = value <= bound
    VERDICTS.append(passed)
    if not passed:
        say(f"  FAIL {name:52s} {value:.2e} (bound {bound:.0e})")
    record(f"error {name}", value)


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def rows(past: list[int], lens: list[int] | None = None, page: int = 16, tokens: int = 1152) -> Rows:
    lens = lens or [1] * len(past)
    per = -(-tokens // page)
    table = torch.randperm(len(past) * per, device="cuda").add(1).view(len(past), per).int()
    starts = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    slots = torch.arange(1, len(past) + 1, device="cuda").int()
    return Rows(tuple(lens), starts, torch.tensor(past, device="cuda").int(), slots, table)


# --- sections ---------------------------------------------------------------------------------------------------------


def info() -> None:
    import triton

    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, "PDL", launch.PDL.value)
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True
    )
    say("  ", fields, done.stdout.strip())
    big = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(big)
    ms = replay(graph(lambda: other.copy_(big)))
    say(f"  copy {2 * big.numel() / ms / 1e9:.2f} TB/s")
    record("copy TB/s", 2 * big.numel() / ms / 1e9)
    a, b = randn(8192, 8192), randn(8192, 8192)
    ms = replay(graph(lambda: a @ b))
    say(f"  matrix product 8192^3 in BF16 {2 * 8192**3 / ms / 1e9:.0f} TFLOP/s")
    record("GEMM TFLOP/s", 2 * 8192**3 / ms / 1e9)


MODEL: list[Any] = []


def build() -> None:
    started = time.monotonic()
    model = checkpoint.build(CONFIG, BF, "cuda")
    checkpoint.dummy(model)
    MODEL.append(model.eval().requires_grad_(False))
    torch.cuda.synchronize()
    say(f"  model filled in {time.monotonic() - started:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB")


class Step:
    """One decode step of `count` rows at `context` tokens, sampling included, as the engine's graph will hold it. With
    a period rows are a token apart, so that each step writes as many states as the mean step does."""

    def __init__(
        self,
        count: int,
        context: int = 1024,
        ssm_dtype: torch.dtype = torch.float32,
        steps: int = 400,
        period: int = 1,
    ):
        self.model = MODEL[0]
        per = -(-(context + steps) // 16)
        shape = PoolShape(
            slots=count + 1, pages=count * per + 1, page=16, max_model_len=per * 16,
            kv_dtype=BF, conv_dtype=BF, ssm_dtype=ssm_dtype,
            rounds=5, period=period,
        )  # fmt: skip
        self.pool = pool = Pool(CONFIG, shape, "cuda")
        pool.kv.normal_()
        pool.conv.normal_()
        pool.ssm.normal_().mul_(0.1)
        pool.tables[1:] = torch.randperm(count * per, device="cuda").add(1).view(count, per)
        pool.committed[1:] = context + torch.arange(count, device="cuda") % period
        pool.recent.normal_()
        self.slots = torch.arange(1, count + 1, device="cuda").int()
        self.last = torch.randint(CONFIG.vocab_size, (count + 1,), device="cuda")
        self.starts = torch.arange(count + 1, device="cuda").int()
        self.none = Rows((), self.starts[:1], self.starts[:0])
        self.heat, self.top_p = torch.ones(count, device="cuda"), torch.full((count,), 0.95, device="cuda")
        self.zero = torch.zeros(count, device="cuda")
        self.none_k, self.wide_slots = self.zero.int(), self.slots.long()
        self.seed = torch.arange(count, device="cuda")
        self.ones = torch.ones(count, device="cuda").int()
        self.lens = (1,) * count
        self.out: Tensor | None = None

    def forward(self, taps: Collection[int] = ()) -> tuple[Tensor, list[Tensor], Tensor]:
        """(logits, residual stream after the layers of `taps`, positions of the next tokens)"""
        slots, pool = self.slots, self.pool
        pages = ops.take(pool.tables, slots)
        tokens, past, positions = ops.begin(slots, self.last, pool.committed)
        context = Context(Rows(self.lens, self.starts, past, slots, pages), self.none, past, pool)
        hidden, tapped = self.model(tokens, context, taps)
        return self.model.logits(hidden), tapped, positions

    def __call__(self) -> Tensor:
        logits, _, positions = self.forward()
        self.out = logits
        tokens = ops.sample(logits, self.heat, self.none_k, self.top_p, self.zero, self.seed, positions)
        ops.put(tokens, self.last, self.slots)
        self.pool.commit(self.wide_slots, self.ones)
        return logits

    def keep(self) -> Callable[[], None]:
        """-> a function that brings everything back to what it is now."""
        tensors = (self.pool.conv, self.pool.ssm, self.pool.committed, self.pool.kv, self.last)
        copies = [tensor.clone() for tensor in tensors]

        def back() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)

        return back


def show(run: Callable[[], object], name: str, most: int = 12) -> None:
    """The kernels that `run` launches. Their times overlap, as each becomes resident before the one before it ends."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    events = [e for e in seen.key_averages() if e.self_device_time_total]
    say(f"  {name}: {sum(e.count for e in events)} kernels")
    record(f"kernels {name}", {e.key: [e.count, e.self_device_time_total] for e in events})
    for e in sorted(events, key=lambda e: -e.self_device_time_total)[:most]:
        each_one = e.self_device_time_total / e.count
        say(f"    {e.key[:60]:60s} {e.count:4d} x {each_one:8.2f} us = {e.self_device_time_total:9.1f}")


def prompt(tokens: int) -> tuple[Tensor, Context]:
    """A prompt in an empty cache."""
    shape = PoolShape(slots=2, pages=tokens // 16 + 2, page=16, max_model_len=tokens + 16, kv_dtype=BF, conv_dtype=BF,
                      ssm_dtype=torch.float32)  # fmt: skip
    pool = Pool(CONFIG, shape, "cuda")
    pool.tables[1] = torch.arange(1, shape.pages_per_slot + 1, device="cuda")
    ids = torch.randint(VOCABULARY, (tokens,), device="cuda")
    starts = torch.tensor([0, tokens], device="cuda").int()
    slot, past = torch.ones(1, device="cuda").int(), torch.zeros(1, device="cuda").int()
    none = Rows((), starts[:1], past[:0], slot[:0], pool.tables[:0])
    wide = Rows((tokens,), starts, past, slot, pool.tables[1:2])
    return ids, Context(none, wide, torch.arange(tokens, device="cuda").int(), pool)


def mixers(letter: str) -> list[Any]:
    return [layer.mixer for layer in MODEL[0].backbone.layers if type(layer.mixer).__name__ == letter]


def four_bits(weight: Any) -> None:
    """Random codes and scales in the place of a dense matrix, of about its size."""
    weight.allot(NVFP4(), torch.device("cuda"))
    parts = weight.parts
    parts["weight"].random_(0, 256)
    parts["weight_scale"].copy_(
        torch.randint(0x30, 0x40, parts["weight_scale"].shape, device="cuda").to(torch.uint8).view(torch.float8_e4m3fn)
    )
    parts["weight_scale_2"].fill_(0.008)


def in_few_bits() -> None:
    """Experts, shared experts and head in NVFP4, Mamba in FP8, attention in BF16. The model stays so."""
    for m in mixers("MoE"):
        for pair in (m.experts, m.shared_experts):
            four_bits(pair.up_proj)
            four_bits(pair.down_proj)
    four_bits(MODEL[0].lm_head)
    for m in mixers("Mamba"):
        for weight in (m.in_proj, m.out_proj):
            weight.allot(FP8(), torch.device("cuda"))
            weight.parts["weight"].copy_(torch.randn(weight.shape, device="cuda").mul_(32).to(torch.float8_e4m3fn))
            weight.parts["weight_scale"].fill_(0.02 / 32)
    torch.cuda.empty_cache()
    say(f"  twins: {twins.keep(MODEL[:1], torch.cuda.mem_get_info()[1]) / 2**30:.2f} GiB")


def tried(name: str, run: Callable[[], None]) -> None:
    """One failure must not hide the figures after it."""
    try:
        run()
    except TimeoutError:
        raise
    except Exception as error:
        VERDICTS.append(False)
        say(f"  FAIL {name}: {type(error).__name__}: {str(error)[:300]}")


def eighth(rows: float) -> None:
    """Products of more rows than that may round them to 8 bits; inf: as ever."""
    for weight in MODEL[0].backbone.layers.modules():
        if isinstance(weight, Weight):
            weight.eight_above = rows
    if rows < inf:
        say(f"  {round_above(MODEL[0], int(rows))} matrices take part above {rows} rows")


def awaited(run: Callable[[], object], times: int = 3) -> float:
    """Milliseconds of one run; waiting for the device within is an error."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin.record()
        for _ in range(times):
            run()
        end.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def before_attention() -> Any:
    """An older leyden/ops/triton/attention.py beside this file, attention_before.py, is timed in turns with today's."""
    path = Path(__file__).with_name("attention_before.py")
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("attention_before", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def called(runs: Sequence[Callable[[], object]]) -> None:
    for run in runs:
        run()
