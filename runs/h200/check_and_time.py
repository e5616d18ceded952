"""Checks every CUDA kernel against its reference, then times kernels and whole decode steps on real shapes.

usage: python3 runs/h200/check_and_time.py [SECTION ...]      (all sections without arguments; under six minutes)

Fresh random inputs each time; weights of 23 layers in rotation, so that nothing is measured out of the L2 cache; each
figure is a CUDA graph replayed. A section that fails prints its error and the next one runs. With $OUT set, the results
also go to $OUT/results.json.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from leyden import ops
from leyden.cache.pool import Pool, PoolShape
from leyden.config.model import ModelConfig
from leyden.formats import Weight
from leyden.model import checkpoint
from leyden.model.context import Context
from leyden.ops.rows import Rows
from leyden.ops.triton import attention, launch, linear, moe, ssm

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
VLLM = {1: 297, 8: 1144, 32: 2378, 64: 3702, 128: 6288}  # tok/s, the peer's BF16 row
READ = 4.46e12  # bytes/s
BF = torch.bfloat16
RESULTS: dict[str, Any] = {}
START = time.monotonic()


def say(*words: object) -> None:
    print(*words, flush=True)


def record(name: str, value: object) -> None:
    RESULTS[name] = value
    if out := os.environ.get("OUT"):
        Path(out, "results.json").write_text(json.dumps(RESULTS, indent=1))


def graph(run: Callable[[], object], prepare: int = 2) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(prepare):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        run()
    return made


def replay(made: torch.cuda.CUDAGraph, warm: int = 3, timed: int = 10, rounds: int = 3) -> float:
    """Milliseconds of one replay: median of `rounds`."""
    for _ in range(warm):
        made.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(timed):
            made.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / timed)
    return sorted(times)[len(times) // 2]


def each(name: str, runs: list[Callable[[], object]], bytes_each: float = 0) -> float:
    """Microseconds of one of `runs`, all of them in one graph, one after the other."""
    us = replay(graph(lambda: [run() for run in runs])) * 1e3 / len(runs)
    rate = f"  {bytes_each / us / 1e6:5.2f} TB/s" if bytes_each else ""
    say(f"  {name:44s} {us:8.2f} us{rate}")
    record(name, us)
    return us


def error(got: Tensor, wanted: Tensor) -> float:
    wanted = wanted.float()
    return float((got.float() - wanted).norm() / wanted.norm())


def verdict(name: str, value: float, bound: float) -> None:
    say(f"  {'ok  ' if value <= bound else 'FAIL'} {name:52s} {value:.2e} (bound {bound:.0e})")
    record(f"error {name}", value)


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def stored(matrix: Tensor) -> Weight:
    made = Weight(*matrix.shape, dtype=matrix.dtype, format=None).requires_grad_(False)
    made.weight = torch.nn.Parameter(matrix, requires_grad=False)
    return made


def wide(weight: Weight) -> Weight:
    return stored(weight.dense().float())


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


def check() -> None:
    hidden = H
    for count in (1, 3, 8, 16, 40, 300):
        x, residual, w = randn(count, hidden), randn(count, hidden), randn(hidden)
        got, total = ops.add_rms_norm(x, residual, w, 1e-5)
        with ops.using("reference"):
            wanted, _ = ops.add_rms_norm(x, residual, w, 1e-5)
        verdict(f"add_rms_norm {count}", error(got, wanted), 2e-3)
        matrix = stored(randn(PROJECTED, hidden, scale=0.02))
        verdict(f"linear {count}", error(ops.linear(x, matrix), x.float() @ matrix.dense().float().t()), 4e-3)
        gate, bias = (
            randn(EXPERTS, hidden, scale=0.02, dtype=torch.float32),
            randn(EXPERTS, scale=0.1, dtype=torch.float32),
        )
        ids, weights = ops.route(x, gate, bias, CHOICES, 1, 1, True, 2.5)
        with ops.using("reference"):
            wanted_ids, wanted_weights = ops.route(x, gate, bias, CHOICES, 1, 1, True, 2.5)
        verdict(f"route ids {count}", float((ids.sort().values != wanted_ids.sort().values).float().mean()), 1e-2)
        verdict(f"route weights {count}", error(weights.sort().values, wanted_weights.sort().values), 1e-4)
        up, down = (
            stored(randn(EXPERTS, EXPERT, hidden, scale=0.02)),
            stored(randn(EXPERTS, hidden, EXPERT, scale=0.02)),
        )
        shared_up, shared_down = stored(randn(SHARED, hidden, scale=0.02)), stored(randn(hidden, SHARED, scale=0.02))
        got = ops.moe(x, ids, weights, up, down, shared_up, shared_down)
        again = ops.moe(x, ids, weights, up, down, shared_up, shared_down)
        with ops.using("reference"):
            wanted = ops.moe(x.float(), ids, weights, wide(up), wide(down), wide(shared_up), wide(shared_down))
        verdict(f"moe {count}", error(got, wanted), 8e-3)
        verdict(f"moe {count} twice the same bits", float((got != again).float().mean()), 0)
        del up, down, wanted
        torch.cuda.empty_cache()

    for count in (1, 7, 64):
        for dtype in (torch.float32, torch.float16):
            conv, state = randn(count + 1, 3, CHANNELS), randn(count + 1, *STATE, dtype=dtype)
            batch = rows([0] + [1000] * (count - 1))
            small = dict(dtype=torch.float32)
            arguments = (
                randn(count, PROJECTED), randn(CHANNELS, 4), randn(CHANNELS),
                randn(STATE[0], **small).abs(), randn(STATE[0], **small),
                randn(STATE[0], **small), (0.0, float("inf")), randn(INNER), CONFIG.n_groups, 1e-5,
            )  # fmt: skip
            states = [(conv.clone(), state.clone()) for _ in range(3)]
            got = ops.mamba_step(*arguments, *states[0], batch)
            again = ops.mamba_step(*arguments, *states[2], batch)
            with ops.using("reference"):
                wanted = ops.mamba_step(*arguments, *states[1], batch)
            verdict(f"mamba_step {count} {dtype}", error(got, wanted), 4e-3)
            verdict("  state", error(states[0][1][1:], states[1][1][1:]), 1e-3)
            verdict("  window", error(states[0][0][1:], states[1][0][1:]), 0)
            verdict("  twice the same bits", float((got != again).float().mean()), 0)

    for past, lens in (([0, 5, 1100, 64, 63], None), ([1100], None), ([0, 300], [700, 129]), ([17, 0, 3], [1, 1, 90])):
        batch = rows(past, lens)
        tokens = batch.tokens
        q, k, v = randn(tokens, *Q), randn(tokens, *KV), randn(tokens, *KV)
        cache = randn(2, len(past) * 72 + 1, 16, *KV)
        other = cache.clone()
        ops.kv_write(k, v, cache, batch)
        got = ops.attention(q, cache, batch)
        with ops.using("reference"):
            ops.kv_write(k, v, other, batch)
            wanted = ops.attention(q.float(), other.float(), batch)
        verdict(f"kv_write {past} {lens}", float((cache != other).float().mean()), 0)
        verdict(f"attention {past} {lens}", error(got, wanted), 8e-3)

    for scale in (1.0, 6.0):
        for heat, k, p, least in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 0, 0.95, 0.0), (0.7, 50, 0.9, 0.02)):
            logits = randn(16, VOCABULARY, scale=scale).float()
            seed = torch.randint(1 << 40, (16,), device="cuda")
            columns = [torch.full((16,), value, device="cuda") for value in (heat, k, p, least)]
            at = torch.arange(16, device="cuda")
            got = ops.sample(logits, *columns, seed, at)
            with ops.using("reference"):
                wanted = ops.sample(logits, *columns, seed, at)
            verdict(
                f"sample scale {scale} T {heat} k {k} p {p}: differing", float((got != wanted).float().mean()), 0.07
            )


MODEL: list[Any] = []


def build() -> None:
    started = time.monotonic()
    model = checkpoint.build(CONFIG, BF, "cuda")
    checkpoint.dummy(model)
    MODEL.append(model.eval().requires_grad_(False))
    torch.cuda.synchronize()
    say(f"  model filled in {time.monotonic() - started:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB")


class Step:
    """One decode step of `count` rows at `context` tokens, sampling included, as the engine's graph will hold it."""

    def __init__(self, count: int, context: int = 1024, ssm_dtype: torch.dtype = torch.float32, steps: int = 400):
        self.model = MODEL[0]
        per = -(-(context + steps) // 16)
        shape = PoolShape(
            slots=count + 1, pages=count * per + 1, page=16, max_model_len=per * 16,
            kv_dtype=BF, conv_dtype=BF, ssm_dtype=ssm_dtype,
        )  # fmt: skip
        self.pool = pool = Pool(CONFIG, shape, "cuda")
        pool.kv.normal_()
        pool.conv.normal_()
        pool.ssm.normal_().mul_(0.1)
        pool.tables[1:] = torch.randperm(count * per, device="cuda").add(1).view(count, per)
        pool.committed[1:] = context
        self.slots = torch.arange(1, count + 1, device="cuda").int()
        self.last = torch.randint(CONFIG.vocab_size, (count + 1,), device="cuda")
        self.starts = torch.arange(count + 1, device="cuda").int()
        self.none = Rows((), self.starts[:1], self.starts[:0])
        self.heat, self.top_p = torch.ones(count, device="cuda"), torch.full((count,), 0.95, device="cuda")
        self.zero = torch.zeros(count, device="cuda")
        self.seed = torch.arange(count, device="cuda")
        self.ones = torch.ones(count, device="cuda").int()
        self.lens = (1,) * count
        self.out: Tensor | None = None

    def __call__(self) -> Tensor:
        slots, pool = self.slots, self.pool
        past = pool.committed[slots]
        narrow = Rows(self.lens, self.starts, past, slots, pool.tables[slots])
        context = Context(narrow, self.none, past, pool)
        hidden, _ = self.model(self.last[slots], context)
        self.out = logits = self.model.logits(hidden)
        tokens = ops.sample(logits, self.heat, self.zero.int(), self.top_p, self.zero, self.seed, past.long() + 1)
        self.last[slots] = tokens
        pool.commit(slots.long(), self.ones)
        return logits


def distinct(step: Step) -> float:
    """Experts that a step touches, mean over the layers."""
    counts = []
    before = moe.moe

    def counting(x: Tensor, ids: Tensor, *rest: Any) -> Tensor:
        counts.append(ids.unique().numel())
        return before(x, ids, *rest)

    ops.moe.register("cuda", counting)
    step()
    ops.moe.register("cuda", before)
    return sum(counts) / len(counts)


def floor(count: int, experts: float, context: int, state_bytes: int) -> float:
    """Milliseconds to read what a step needs once."""
    layers = {letter: CONFIG.pattern.count(letter) for letter in "ME*"}
    weights = layers["M"] * (PROJECTED + INNER) * H + layers["*"] * (QUERIES + 2 * KEYS + QUERIES) * H + VOCABULARY * H
    weights += layers["E"] * (2 * H * SHARED + experts * 2 * H * EXPERT + 2 * EXPERTS * H)
    state = layers["M"] * count * prod(STATE) * state_bytes * 2
    kv = layers["*"] * count * context * 2 * KEYS * 2
    return (2 * weights + state + kv) / READ * 1e3


def whole(counts: tuple[int, ...] = (1, 8, 32, 64, 128, 2, 4, 16, 256)) -> None:
    for count in counts:
        try:
            step = Step(count)
            experts = distinct(step)
            started = time.monotonic()
            made = graph(step)
            took = time.monotonic() - started
            ms = replay(made, 20, 50, 3)
            assert step.out is not None and bool(step.out.isfinite().all()), "logits are not finite"
            least = floor(count, experts, 1200, 4)
            rate = count / ms * 1e3
            peer = f" {rate / VLLM[count]:.2f} x vLLM" if count in VLLM else ""
            say(
                f"  B {count:3d}: {ms:7.3f} ms/step {rate:8.0f} tok/s, {experts:5.1f} experts, "
                f"{least / ms:.2f} of the floor{peer}; first capture {took:.1f} s"
            )
            record(f"step {count}", {"ms": ms, "tok/s": rate, "experts": experts, "floor share": least / ms})
            del made, step
            torch.cuda.empty_cache()
        except Exception:
            say(f"  B {count}: {traceback.format_exc(limit=-3)}")


def parity() -> None:
    """The whole step by kernels, twice, and by the references."""
    for count in (1, 5, 24):
        step = Step(count)
        names = ("conv", "ssm", "committed", "kv")
        before = {name: getattr(step.pool, name).clone() for name in names}
        last = step.last.clone()

        def again(step: Step = step, before: dict[str, Tensor] = before, last: Tensor = last) -> Tensor:
            for name, value in before.items():
                getattr(step.pool, name).copy_(value)
            step.last.copy_(last)
            return step().clone()

        first, second = again(), again()
        made = graph(step)
        again()
        for name, value in before.items():
            getattr(step.pool, name).copy_(value)
        step.last.copy_(last)
        made.replay()
        torch.cuda.synchronize()
        third = step.out
        assert third is not None
        with ops.using("reference"):
            wanted = again()
        verdict(f"step {count} eager twice the same bits", float((first != second).float().mean()), 0)
        verdict(f"step {count} graph and eager the same bits", float((first != third).float().mean()), 0)
        verdict(f"step {count} against the reference", error(first, wanted), 2e-2)


def without_pdl() -> None:
    kept = dict(launch.OPTIONS)
    launch.OPTIONS.clear()
    try:
        for count in (1, 8):
            step = Step(count)
            ms = replay(graph(step), 20, 50, 3)
            say(f"  B {count}: {ms:.3f} ms without dependent launch")
            record(f"step {count} without PDL", ms)
    finally:
        launch.OPTIONS.update(kept)


def mixers(letter: str) -> list[Any]:
    return [layer.mixer for layer in MODEL[0].backbone.layers if type(layer.mixer).__name__ == letter]


def time_small() -> None:
    x = randn(1, H)
    for count in (1, 8, 64):
        x, w, bias = randn(count, H), randn(H), torch.zeros(EXPERTS, device="cuda")
        each(f"add_rms_norm M={count}", [partial(ops.add_rms_norm, x, x, w, 1e-5)] * 50)
        gates = [m.gate.weight for m in mixers("MoE")]
        each(f"route M={count}", [partial(ops.route, x, gate, bias, CHOICES, 1, 1, True, 2.5) for gate in gates])
    for count in (1, 8, 64, 256):
        logits = randn(count, VOCABULARY).float()
        one, zero, at = torch.ones(count, device="cuda"), torch.zeros(count, device="cuda"), torch.arange(count).cuda()
        for name, top_p in (("plain", 1.0), ("top_p .95", 0.95)):
            p = torch.full((count,), top_p, device="cuda")
            each(f"sample R={count} {name}", [partial(ops.sample, logits, one, zero.int(), p, zero, at, at)] * 4)


def time_linear() -> None:
    into, out = [m.in_proj.dense() for m in mixers("Mamba")], [m.out_proj.dense() for m in mixers("Mamba")]
    for name, matrices in (("in_proj", into), ("out_proj", out), ("head", [MODEL[0].lm_head.dense()])):
        size, k = matrices[0].shape

        def timed(
            label: str, product: Any, count: int, *shape: Any, matrices: Any = matrices, name: str = name
        ) -> None:
            x = randn(count, matrices[0].shape[1])
            runs = [partial(product, x, matrix, *shape) for matrix in matrices]
            each(f"{name} M={count} {label}", runs, matrices[0].numel() * 2)

        for tile in ((4, 1024, 4), (8, 1024, 8), (2, 1024, 4), (8, 512, 4), (4, 512, 4), (16, 512, 8), (4, 2048, 8)):
            timed(f"vector {tile}", linear.vector, 1, False, tile)
        for count in (1, 8, 32, 64):
            timed("cuBLAS", torch.nn.functional.linear, count)
        splits = linear._narrow_shape(size, k)[2]
        for count in (8, 64):
            for tile, cut in (((64, 64), 1), ((64, 128), 1), ((64, 64), 2), ((128, 64), 1)):
                shape = (*tile, splits * cut, 4, 4)
                timed(f"narrow {shape}", linear.narrow, count, False, shape)
        timed(f"narrow 6 stages {splits}", linear.narrow, 8, False, (64, 64, splits, 6, 4))


def time_moe() -> None:
    layers = mixers("MoE")
    both = [(m.experts, m.shared_experts) for m in layers]
    parts = [[w.dense() for part in pair for w in (part.up_proj, part.down_proj)] for pair in both]

    def timed(label: str, run: Any, count: int, shared: bool, *shape: Any) -> None:
        ids = [torch.rand(count, EXPERTS, device="cuda").topk(CHOICES).indices for _ in layers]
        experts = sum(i.unique().numel() for i in ids) / len(ids)
        x, w = randn(count, H), torch.rand(count, CHOICES, device="cuda")
        size = 2 * (experts * EXPERT + SHARED * shared) * H * 2
        runs = [partial(run, x, i, w, *(p if shared else p[:2]), *shape) for p, i in zip(parts, ids, strict=True)]
        each(f"moe M={count} {label} {shape} ({experts:.0f})", runs, size)

    for up, down in (
        ((4, 1024, 4), (8, 512, 4)), ((8, 1024, 8), (8, 512, 4)), ((2, 1024, 4), (4, 512, 4)),
        ((4, 512, 4), (4, 1024, 4)), ((8, 512, 4), (8, 1024, 8)), ((4, 1024, 4), (2, 1024, 4)),
        ((4, 1024, 4), (16, 256, 4)),
    ):  # fmt: skip
        timed("one", moe.one_row, 1, True, up, down)
    for count in (2, 8, 16, 32):
        for shape in ((64, 64, 5, 4), (64, 64, 3, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 4, 8)):
            timed("dense", moe.few_rows, count, True, shape)
    for count in (16, 32, 64, 128, 256):
        for tile in (
            (16, 64, 64, 5, 4),
            (16, 128, 64, 4, 4),
            (16, 64, 128, 3, 4),
            (32, 64, 64, 5, 4),
            (16, 64, 64, 8, 4),
        ):
            timed("lists", moe.many_rows, count, False, tile)


def time_mamba() -> None:
    layers = mixers("Mamba")
    for count in (1, 8, 64, 256):
        for dtype in (torch.float32, torch.float16):
            conv = randn(23, count + 1, 3, CHANNELS)
            state = torch.empty(23, count + 1, *STATE, dtype=dtype, device="cuda").normal_()
            p, batch = randn(count, PROJECTED), rows([1000] * count)
            for shape in ((64, 4), (32, 4), (16, 4), (16, 2), (32, 8)):
                runs = [
                    partial(
                        ssm.mamba_step, p, m.conv1d.weight[:, 0], m.conv1d.bias, m.A_log, m.D, m.dt_bias,
                        (0.0, float("inf")), m.norm.weight, CONFIG.n_groups, 1e-5,
                        conv[m.index], state[m.index], batch, shape,
                    )
                    for m in layers
                ]  # fmt: skip
                size = count * prod(STATE) * dtype.itemsize * 2
                each(f"mamba_step M={count} {str(dtype)[6:]} {shape}", runs, size)
            del conv, state
            torch.cuda.empty_cache()


def time_attention() -> None:
    for count, context in ((1, 1024), (8, 1024), (64, 1024), (1, 32768), (8, 32768), (64, 32768)):
        batch = rows([context - 1] * count, tokens=context)
        caches = [randn(2, count * context // 16 + 1, 16, *KV) for _ in range(6 if count * context < 100_000 else 2)]
        q = randn(count, *Q)
        runs = [partial(attention.attention, q, cache, batch) for cache in caches]
        each(f"attention M={count} context {context}", runs, count * context * 4 * KEYS)
        k = randn(count, *KV)
        if context == 1024:
            each(f"kv_write M={count}", [partial(attention.kv_write, k, k, cache, batch) for cache in caches])
        del caches
        torch.cuda.empty_cache()


SECTIONS = {
    "info": (info, 30), "check": (check, 120), "build": (build, 60), "parity": (parity, 60), "whole": (whole, 120),
    "moe": (time_moe, 100), "linear": (time_linear, 80), "mamba": (time_mamba, 60), "pdl": (without_pdl, 30),
    "small": (time_small, 40), "attention": (time_attention, 40),
}  # fmt: skip


def late(*_: object) -> None:
    raise TimeoutError("the section's time is up")


def main(names: list[str]) -> None:
    signal.signal(signal.SIGALRM, late)
    for name, (section, limit) in SECTIONS.items():
        if names and name not in names and name not in ("info", "build"):
            continue
        left = 420 - (time.monotonic() - START)
        if left < 10:
            say(f"== {name}: no time left")
            continue
        say(f"== {name} ({time.monotonic() - START:.0f} s)")
        signal.alarm(int(min(limit, left)))
        try:
            with torch.inference_mode():
                section()
        except Exception:
            say(traceback.format_exc(limit=-4))
            record(f"failed {name}", traceback.format_exc(limit=-4))
        finally:
            signal.alarm(0)
    say(f"== done after {time.monotonic() - START:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
