"""Checks every CUDA kernel against its reference, then times kernels and whole decode steps on real shapes.

usage: python3 runs/h200/check_and_time.py [SECTION ...]      (without arguments those of USUAL; some seven minutes)

Fresh random inputs each time; weights of 23 layers in rotation, so that nothing is measured out of the L2 cache; each
figure is a CUDA graph replayed. A section that fails prints its error and the next one runs. With $OUT set, the results
also go to $OUT/results.json.
"""

import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import chunks
import compare
import speculation
import torch
from compare import error, stored, wide
from torch import Tensor

from leyden import ops
from leyden.bench import kernels as table_of
from leyden.bench.kernels import graph, replay
from leyden.cache.pool import Pool, PoolShape, recent_width
from leyden.config.model import ModelConfig
from leyden.formats import Weight
from leyden.formats.fp8 import FP8
from leyden.formats.nvfp4 import NVFP4, Tiled, arrange
from leyden.model import checkpoint, twins
from leyden.model.context import Context
from leyden.model.eight import round_above
from leyden.ops import eight as products
from leyden.ops.reference import eight as exactly
from leyden.ops.rows import Rows
from leyden.ops.triton import (
    attention,
    conv,
    eight,
    grouped,
    launch,
    linear,
    moe,
    nvfp4,
    packed,
    qkv,
    sample,
    scan,
    ssm,
)
from leyden.ops.triton import wide as codes

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
WALK = 64, 2, 4, 128
SCANS = [  # tokens of a segment and of a chunk, then how states and outputs are walked over
    scan.Shape(*cut)
    for cut in (
        (), (256,), (1024,), (1 << 30,),  # the last: one segment
        (None, 64, (64, 3, 4, 168)), (None, 64, WALK, (64, 1, 4, 168)), (None, 64, WALK, (64, 2, 8, 128)),
        (None, 64, WALK, (64, 2, 8, 255)), (None, 64, WALK, (32, 2, 4, 168)),
        (None, 128, (64, 2, 8, 128), (64, 1, 8, 255)),
    )
]  # fmt: skip
GATHERED: Sequence[codes.Shape] = (  # the chosen ones first
    codes.GATHERED, codes.GATHERED_FEW, (1, 128, 128, 4, 8), (2, 128, 128, 4, 8), (2, 64, 128, 4, 4),
    (1, 256, 128, 4, 8), (2, 64, 128, 4, 8),
)  # fmt: skip
LISTED = (128, 128, 4, 8), (32, 64, 5, 4)  # rows of x and of the matrix, stages, warps: of rows that are fetched
FOUR_BITS = {1: 1000, 8: 3000, 32: 5800, 64: 9300, 128: 15500, 256: 25000}  # tok/s, the bars in the release's formats
VLLM = {1: 297, 8: 1144, 32: 2378, 64: 3702, 128: 6288}  # tok/s, the peer's BF16 row
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


def check_joined() -> None:
    """Ops that are made of others, and those of drafter networks."""
    for count in (1, 8):
        x, residual, w, bias = (
            randn(count, H),
            randn(count, H),
            randn(H),
            randn(EXPERTS, scale=0.1, dtype=torch.float32),
        )
        gate = randn(EXPERTS, H, scale=0.02, dtype=torch.float32)
        got = ops.add_norm_route(x, residual, w, 1e-5, gate, bias, CHOICES, 1, 1, True, 2.5)
        with ops.using("reference"):
            wanted = ops.add_norm_route(x, residual, w, 1e-5, gate, bias, CHOICES, 1, 1, True, 2.5)
        verdict(f"add_norm_route {count}: norm", error(got[0], wanted[0]), 2e-3)
        verdict("  sum", float((got[1] != wanted[1]).float().mean()), 0)
        verdict("  ids", float((got[2].sort().values != wanted[2].sort().values).float().mean()), 0.2)  # one near tie
        verdict("  weights", error(got[3].sort().values, wanted[3].sort().values), 1e-2)
        matrices = [stored(randn(size, H, scale=0.02)) for size in (QUERIES, KEYS, KEYS)]
        batch, cache = rows([1000] * count), randn(2, count * 72 + 1, 16, *KV)
        other = cache.clone()
        q = ops.qkv_write(x, *matrices, cache, batch)
        with ops.using("reference"):
            wanted_q = ops.qkv_write(x.float(), *map(wide, matrices), other, batch)
        verdict(f"qkv_write {count}", error(q, wanted_q), 4e-3)
        verdict("  cache", error(cache, other), 1e-3)  # most of it is what was there: a wrong cell would be 1e-2
        cos, sin, heads = randn(count, 64, dtype=torch.float32), randn(count, 64, dtype=torch.float32), randn(count, *Q)
        three = [stored(randn(*shape, scale=0.02)) for shape in ((6144, H), (6144, H), (H, 6144))]
        turned, gated = ops.rotate(heads, cos, sin), ops.swiglu(x, *three)
        angled = torch.arange(64, dtype=torch.int32, device="cuda") * 16381, 1e4 ** -(cos[0].abs().cumsum(0) / 64), 1.25
        sines = ops.angles(*angled)
        with ops.using("reference"):
            verdict(f"angles {count}", max(map(error, sines, ops.angles(*angled))), 1e-6)
            verdict(f"rotate {count}", error(turned, ops.rotate(heads.float(), cos, sin)), 4e-3)
            verdict(f"swiglu {count}", error(gated, ops.swiglu(x.float(), *map(wide, three))), 1e-2)


def check() -> None:
    check_joined()
    hidden = H
    for count in (1, 8, 40, 100, 600, 3000):
        x, residual, w = randn(count, hidden), randn(count, hidden), randn(hidden)
        got, total = ops.add_rms_norm(x, residual, w, 1e-5)
        with ops.using("reference"):
            wanted, _ = ops.add_rms_norm(x, residual, w, 1e-5)
        verdict(f"add_rms_norm {count}", error(got, wanted), 2e-3)
        matrix = stored(randn(PROJECTED, hidden, scale=0.02))
        wanted = x.float() @ matrix.dense().float().t()
        verdict(f"linear {count}", error(ops.linear(x, matrix), wanted), 4e-3)
        verdict(f"linear {count} to fp32", error(ops.linear(x, matrix, torch.float32), wanted), 1e-5)
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

    small = partial(randn, STATE[0], dtype=torch.float32)
    for count, fused in ((1, True), (1, False), (7, True), (7, False), (64, False)):
        for activations, dtype in ((BF, torch.float32), (BF, torch.float16), (torch.float32, torch.float32)):
            window, state = randn(count + 1, 3, CHANNELS, dtype=activations), randn(count + 1, *STATE, dtype=dtype)
            batch = rows([0] + [1000] * (count - 1) if count > 1 else [1000])
            arguments = (
                randn(count, PROJECTED, dtype=activations), randn(CHANNELS, 4), randn(CHANNELS),
                small().abs(), small(), small(), (0.0, float("inf")), randn(INNER), CONFIG.n_groups, 1e-5,
            )  # fmt: skip
            states = [(window.clone(), state.clone()) for _ in range(3)]
            exact = window.clone(), state.float()
            got = ssm.mamba_step(*arguments, *states[0], batch, 5, fused=fused)
            again = ssm.mamba_step(*arguments, *states[2], batch, 5, fused=fused)
            with ops.using("reference"):
                wanted = ops.mamba_step(*arguments, *exact, batch)
            name = f"mamba_step {count} {str(activations)[6:]} {str(dtype)[6:]} fused {fused}"
            verdict(name, error(got, wanted), 4e-3)
            new = exact[1][1:]
            # With activations in BF16 a convolution that is off by fp32's last bit is rounded to its neighbour once in
            # some ten thousand times, which is 4e-3 of one value, 3e-5 of all. Nothing of that without the rounding.
            bound = 6e-4 if dtype == torch.float16 else 1e-4 if activations == BF else 5e-6
            verdict(f"{name}: state", error(states[0][1][1:], new), bound)
            off = (states[0][1][1:].double() - new.double()) * new.sign()
            verdict("  state, mean of the error", abs(float(off.mean() / new.abs().mean())), 1e-5)
            verdict("  window", error(states[0][0][1:], exact[0][1:]), 0)
            verdict("  twice the same bits", float((got != again).float().mean()), 0)
            verdict("  states too", float((states[0][1] != states[2][1]).float().mean()), 0)

    for dtype, rounds in ((torch.float32, 0), (torch.float16, 5)):
        lazy(dtype, rounds)

    for lens, past, dtype in (
        ([8192], [0], torch.float32), ([8192], [500], torch.float32), ([8192], [500], torch.float16),
        ([700, 64, 2000], [0, 40, 7], torch.float32), ([300, 17, 1, 129], [0, 40, 7, 1000], torch.float16),
        ([64, 63, 65], [1, 0, 0], torch.float32), ([64], [3], torch.float32),
    ):  # fmt: skip
        batch = rows(past, lens, tokens=9216)
        tokens, count = batch.tokens, len(lens)
        xBC, window = randn(tokens, PROJECTED)[:, INNER : INNER + CHANNELS], randn(count + 1, 3, CHANNELS)
        weight, bias, other = randn(CHANNELS, 4, scale=0.5), randn(CHANNELS), window.clone()
        got = ops.causal_conv(xBC, weight, bias, window, batch)
        with ops.using("reference"):
            wanted = ops.causal_conv(xBC.float(), weight, bias, other.float().clone(), batch)
            ops.causal_conv(xBC, weight, bias, other, batch)
        verdict(f"causal_conv {lens}", error(got, wanted), 4e-3)
        verdict("  window", float((window != other).float().mean()), 0)
        x, B, C = got.split([INNER, CONFIG.n_groups * STATE[2], CONFIG.n_groups * STATE[2]], dim=-1)
        x, B, C = x.unflatten(1, STATE[:2]), B.unflatten(1, (-1, STATE[2])), C.unflatten(1, (-1, STATE[2]))
        steps = (randn(tokens, STATE[0]), small().abs(), small(), small() - 3, (0.0, float("inf")), 128)
        dt, recurrence = steps[0], steps[1:]
        state = randn(count + 1, *STATE, dtype=dtype)
        theirs = state.float().clone()
        with ops.using("reference"):
            wanted = ops.ssd_scan(x.float(), dt.float(), B.float(), C.float(), *recurrence, theirs, batch)
        for shape in (scan.Shape(), scan.Shape(64), scan.Shape(256)):
            ours, again = state.clone(), state.clone()
            got = scan.ssd_scan(x, dt, B, C, *recurrence, ours, batch, shape)
            twice = scan.ssd_scan(x, dt, B, C, *recurrence, again, batch, shape)
            name = f"ssd_scan {lens} after {past} {str(dtype)[6:]} {shape.segment}"
            verdict(name, error(got, wanted), 1e-2)
            verdict("  state", error(ours[1:], theirs[1:]), 1e-2)
            verdict("  twice the same bits", float((got != twice).float().mean()), 0)
            verdict("  state too", float((ours != again).float().mean()), 0)
        del wanted, x, B, C, xBC, got, twice

    few = [4, 1, 3, 8]
    batch, ring = rows([0, 40, 7, 1000], few), randn(5, 8, CHANNELS + STATE[0])
    window, state, kept = randn(5, 3, CHANNELS), randn(5, *STATE, dtype=torch.float32), ring.clone()
    weights_of = (randn(CHANNELS, 4), randn(CHANNELS), small().abs(), small(), small() - 3, (0.0, float("inf")))
    norm, projected = (randn(INNER), CONFIG.n_groups, 1e-5), randn(16, PROJECTED)
    got = ops.mamba_verify(projected, *weights_of, *norm, window, state, ring, batch)
    with ops.using("reference"):
        wanted = ops.mamba_verify(projected, *weights_of, *norm, window, state, kept, batch)
    verdict("mamba_verify", error(got, wanted), 8e-3)
    verdict("  ring", float((ring != kept).float().mean()), 0)
    right = torch.tensor([3, 1, 0, 8], device="cuda")
    moved, exactly = (window.clone(), state.clone()), (window.clone(), state.clone())
    ops.mamba_replay(*weights_of, CONFIG.n_groups, *moved, ring, batch.slots, batch.past, right)
    with ops.using("reference"):
        ops.mamba_replay(*weights_of, CONFIG.n_groups, *exactly, ring, batch.slots, batch.past, right)
    verdict("mamba_replay: window", float((moved[0] != exactly[0]).float().mean()), 0)
    verdict("  state", error(moved[1][1:], exactly[1][1:]), 1e-3)

    for causal, window_size, sinks in ((False, None, False), (True, 512, True)):
        batch = rows([1000, 0, 37], [16, 8, 3])
        q, k, v = randn(27, *Q), randn(27, *KV), randn(27, *KV)
        cache, sink = randn(2, 3 * 72 + 1, 16, *KV), randn(Q[0], dtype=torch.float32) if sinks else None
        got = ops.block_attention(q, k, v, cache, batch, causal, window_size, sink)
        with ops.using("reference"):
            wanted = ops.block_attention(*(t.float() for t in (q, k, v, cache)), batch, causal, window_size, sink)
        verdict(f"block_attention {causal} {window_size}", error(got, wanted), 8e-3)

    for past, some in (([0, 5, 1100, 64, 63], None), ([1100], None), ([0, 300], [700, 129]), ([17, 0, 3], [1, 1, 90]),
                       ([1090, 0, 64, 3], [8, 4, 3, 1])):  # fmt: skip
        batch = rows(past, some)
        tokens = batch.tokens
        q, k, v = randn(tokens, *Q), randn(tokens, *KV), randn(tokens, *KV)
        cache = randn(2, len(past) * 72 + 1, 16, *KV)
        other = cache.clone()
        ops.kv_write(k, v, cache, batch)
        got = ops.attention(q, cache, batch)
        with ops.using("reference"):
            ops.kv_write(k, v, other, batch)
            wanted = ops.attention(q.float(), other.float().clone(), batch)
        verdict(f"kv_write {past} {some}", float((cache != other).float().mean()), 0)
        verdict(f"attention {past} {some}", error(got, wanted), 8e-3)
        in_8_bits(past, some, q, k, v, cache, batch)

    for scale in (1.0, 6.0):
        for heat, choices, p, least in (
            (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 0, 0.95, 0.0), (1.0, 0, 0.3, 0.0), (0.7, 50, 1.0, 0.0),
            (0.7, 50, 0.9, 0.02), (1.0, 0, 1.0, 0.1), (1.0, 5000, 0.5, 0.0),
        ):  # fmt: skip
            for count in (1, 16, 200):
                logits = randn(count, VOCABULARY, scale=scale).float()  # rounded to BF16: with many ties
                seed = torch.randint(1 << 40, (count,), device="cuda")
                columns = [torch.full((count,), value, device="cuda") for value in (heat, choices, p, least)]
                at = torch.arange(count, device="cuda")
                got = ops.sample(logits, *columns, seed, at)
                again = ops.sample(logits, *columns, seed, at)
                with ops.using("reference"):
                    wanted = ops.sample(logits, *columns, seed, at)
                name = f"sample {count} scale {scale} T {heat} k {choices} p {p} min_p {least}"
                verdict(f"{name}: differing", float((got != wanted).float().mean()), 0.02)
                verdict("  twice the same", float((got != again).float().mean()), 0)


def lazy(dtype: torch.dtype, rounds: int, count: int = 20) -> None:
    """Steps that write states now and then: rows with up to 15 tokens that wait, a fresh one, one that just began."""
    batch = rows([0, 1000, *range(1000, 998 + count)])
    began = torch.tensor([7, 0, 1000, *[0] * (count - 2)], device="cuda").int()
    small, limit = partial(randn, STATE[0], dtype=torch.float32), (0.0, float("inf"))
    rates = small().abs(), small() - 3, limit
    arguments = (
        randn(count, PROJECTED), randn(CHANNELS, 4, scale=0.5), randn(CHANNELS), rates[0], small(), *rates[1:],
        randn(INNER), CONFIG.n_groups, 1e-5,
    )  # fmt: skip
    window, state = randn(count + 1, 3, CHANNELS), randn(count + 1, *STATE, dtype=dtype)
    recent = randn(count + 1, 15, recent_width(CONFIG))
    ours, again, exact = (
        [window.clone(), made, recent.clone()] for made in (state.clone(), state.clone(), state.float())
    )
    got = ops.mamba_lazy_step(*arguments, *ours, began, batch, rounds)
    twice = ops.mamba_lazy_step(*arguments, *again, began, batch, rounds)
    with ops.using("reference"):
        wanted = ops.mamba_lazy_step(*arguments, *exact, began, batch)
    name, bound = f"mamba_lazy_step {str(dtype)[6:]}", 6e-4 if dtype == torch.float16 else 1e-4
    verdict(name, error(got, wanted), 4e-3)
    verdict("  state", error(ours[1][1:], exact[1][1:]), bound)
    verdict("  states that stay", float((ours[1] == state).all((1, 2, 3)).sum() != count), 0)  # 1 of 20, and slot 0
    verdict("  what waits", error(ours[2], exact[2]), 1e-4)
    verdict("  twice the same bits", float((got != twice).float().mean()), 0)
    verdict("  states too", float((ours[1] != again[1]).float().mean()), 0)
    assert batch.slots is not None
    past, slots = batch.past + 1, batch.slots.long()
    held = torch.maximum(began[slots], past // 16 * 16)
    moved = ours[1].clone(), ours[1].float()
    ops.mamba_fold(*rates, CONFIG.n_groups, moved[0], ours[2], slots, held, past - held, rounds)
    with ops.using("reference"):
        ops.mamba_fold(*rates, CONFIG.n_groups, moved[1], ours[2], slots, held, past - held)
    verdict(f"mamba_fold {str(dtype)[6:]}", error(moved[0][1:], moved[1][1:]), bound)


def in_8_bits(
    name: list[int], lens: list[int] | None, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Rows
) -> None:
    """The reference runs on the CPU, where indexing 8-bit floats is sure to work."""
    ours, scales = cache.to(torch.float8_e4m3fn), (0.01, 0.02)
    theirs = ours.cpu()
    ops.kv_write(k, v, ours, batch, *scales)
    got = ops.attention(q, ours, batch, *scales)
    assert batch.slots is not None and batch.pages is not None
    there = Rows(batch.lens, batch.starts.cpu(), batch.past.cpu(), batch.slots.cpu(), batch.pages.cpu())
    with ops.using("reference"):
        ops.kv_write(k.cpu(), v.cpu(), theirs, there, *scales)
        wanted = ops.attention(q.cpu().float(), theirs, there, *scales)
    verdict(f"kv_write in 8 bits {name} {lens}", float((ours.cpu().float() != theirs.float()).float().mean()), 0)
    verdict(f"attention in 8 bits {name} {lens}", error(got.cpu(), wanted), 8e-3)


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


def floor(count: int, experts: float, context: int, state_bytes: int, period: int = 1) -> float:
    """Milliseconds to read what a step needs once."""
    layers = {letter: CONFIG.pattern.count(letter) for letter in "ME*"}
    weights: float = (
        layers["M"] * (PROJECTED + INNER) * H + layers["*"] * (QUERIES + 2 * KEYS + QUERIES) * H + VOCABULARY * H
    )
    weights += layers["E"] * (2 * H * SHARED + experts * 2 * H * EXPERT + 2 * EXPERTS * H)
    state = layers["M"] * count * prod(STATE) * state_bytes * (1 + 1 / period)
    if period > 1:
        state += layers["M"] * count * recent_width(CONFIG) * 2 * (period + 1) / 2
    kv = layers["*"] * count * context * 2 * KEYS * 2
    total: float = 2 * weights + state + kv
    return total / READ * 1e3


def whole(
    counts: tuple[int, ...] = (1, 8, 32, 64, 128, 256), dtype: torch.dtype = torch.float32, period: int = 1
) -> None:
    often = f", one in {period} written" if period > 1 else ""
    for count in counts:
        try:
            step = Step(count, ssm_dtype=dtype, period=period)
            experts = distinct(step)
            started = time.monotonic()
            made = graph(step)
            took = time.monotonic() - started
            ms = replay(made, 10, 25, 3)
            assert step.out is not None and bool(step.out.isfinite().all()), "logits are not finite"
            least = floor(count, experts, 1200, dtype.itemsize, period)
            rate = count / ms * 1e3
            peer = f" {rate / VLLM[count]:.2f} x vLLM" if count in VLLM else ""
            say(
                f"  B {count:3d} {str(dtype)[6:]} states{often}: {ms:7.3f} ms/step {rate:8.0f} tok/s, "
                f"{experts:5.1f} experts, {least / ms:.2f} of the floor{peer}; first capture {took:.1f} s"
            )
            figures = {"ms": ms, "tok/s": rate, "experts": experts, "floor share": least / ms}
            record(f"step {count} {str(dtype)[6:]}{often}", figures)
            del made, step
            torch.cuda.empty_cache()
        except Exception:
            say(f"  B {count}: {traceback.format_exc(limit=-3)}")


def halves() -> None:
    """FP16 states, written in each step and in one of 16."""
    whole((8, 32, 64, 128, 256), torch.float16)
    whole((8, 32, 64, 128, 256), torch.float16, 16)


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


def kernels() -> None:
    """What a step launches; each op by itself, in the formats of both releases."""
    for count, dtype in ((1, torch.float32), (64, torch.float16), (256, torch.float16)):
        step = Step(count, ssm_dtype=dtype)
        made = graph(step)
        made.replay()
        torch.cuda.synchronize()
        show(made.replay, f"step of {count} rows")
        del made, step
        torch.cuda.empty_cache()
    roof = table_of.Roof.measured("cuda", BF)
    for mixed in (False, True):
        whole = table_of.bench("cuda", True, mixed, 1024)
        found = [line for count in (1, 8, 64) for line in table_of.measure(whole.at(count), roof)]
        say(table_of.table(found, roof))
        for line in found:
            record(f"op {line.op} {line.batch} {'nvfp4' if mixed else 'bf16'}", line.us)
        del whole
        torch.cuda.empty_cache()


def bisect() -> None:
    """Who is how far from fp32: kernels and references, op by op, then through the whole model."""
    step = Step(8)
    back = step.keep()
    say(f"  {'op, on the same inputs':34s} calls  kernel to fp32 (worst)   reference to fp32   kernel to reference")
    table = compare.by_op(step)
    record("by op", table)
    for name, row in table.items():
        mark = "FAIL" if row["kernel"] > 1.3 * row["reference"] + 1e-6 and not name.startswith("route, share") else "ok"
        say(
            f"  {mark:4s} {name:29s} {row['calls']:5d}  {row['kernel']:.2e} ({row['worst']:.2e})"
            f"     {row['reference']:.2e}            {row['apart']:.2e}"
        )
    back()
    layers = range(len(CONFIG.pattern))

    def run(version: str | None, **options: Any) -> compare.Trace:
        def once() -> tuple[list[Tensor], Tensor]:
            logits, taps, _ = step.forward(layers)
            return taps, logits

        made = compare.trace(once, version, **options)
        back()
        return made

    exact = run("reference", fp32=True)
    ours, theirs = run(None), run("reference")
    ours_same, theirs_same = run(None, routing=exact.routes), run("reference", routing=exact.routes)
    traces = {"kernels": ours, "reference": theirs, "kernels, same routes": ours_same, "reference, same": theirs_same}
    say("  error of the residual stream against fp32 after a layer: " + ", ".join(traces) + "; kernels to reference")
    for i in layers:
        values = [error(t.taps[i], exact.taps[i]) for t in traces.values()]
        values.append(error(ours.taps[i], theirs.taps[i]))
        record(f"layer {i} {CONFIG.pattern[i]}", values)
        if i % 6 == 0 or i == len(layers) - 1:
            say(f"    {i:2d} {CONFIG.pattern[i]} " + "  ".join(f"{v:.2e}" for v in values))
    for name, one in traces.items():
        flips = one.flips(exact)
        say(f"  {name}: logits off by {error(one.logits, exact.logits):.2e}, choices that fp32 did not make: "
            f"{sum(flips) / len(flips):.4f} (first layer {flips[0]:.4f}, last {flips[-1]:.4f})")  # fmt: skip
    free = error(ours.logits, exact.logits) / error(theirs.logits, exact.logits)
    same = error(ours_same.logits, exact.logits) / error(theirs_same.logits, exact.logits)
    apart = error(ours_same.logits, theirs_same.logits)
    say(f"  kernels' distance from fp32 in references' distances: {free:.3f}, with the same routes {same:.3f}")
    say(f"  kernels to references: {error(ours.logits, theirs.logits):.2e}, with the same routes {apart:.2e}")
    verdict("logits: kernels' distance from fp32 in references' distances", free, 1.5)
    verdict("logits, the same routes: the same", same, 1.2)
    verdict("logits, the same routes: kernels to references", apart, 2e-2)
    first = step().clone()
    back()
    second = step().clone()
    back()
    verdict("step twice the same bits", float((first != second).float().mean()), 0)
    made = graph(step)
    back()
    made.replay()
    torch.cuda.synchronize()
    assert step.out is not None
    verdict("graph and eager the same bits", float((first != step.out).float().mean()), 0)


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


def prefill() -> None:
    """Whole prompts in one chunk; waiting for the device counts as an error."""
    model = MODEL[0]
    for tokens in (512, 2048, 8192, 32768):
        ids, context = prompt(tokens)

        def once(ids: Tensor = ids, context: Context = context) -> Tensor:
            hidden, _ = model(ids, context)
            logits: Tensor = model.logits(hidden[-1:])
            return logits

        once()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        times = []
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            for _ in range(4):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                out = once()
                end.record()
                times.append((begin, end))
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        verdict(f"prompt of {tokens}: waits for the device", len([w for w in waits if "sync" in str(w.message)]), 0)
        assert bool(out.isfinite().all())
        ms = sorted(begin.elapsed_time(end) for begin, end in times)[1]
        say(f"  prompt of {tokens}: {ms:.1f} ms, {tokens / ms * 1e3:.0f} tok/s")
        record(f"prefill {tokens}", tokens / ms * 1e3)
        if tokens == 8192:
            show(once, f"prompt of {tokens}", 16)
        del context, once
        torch.cuda.empty_cache()


def time_prefill() -> None:
    """The parts of a prompt of 8,192 tokens, TFLOP/s where products count."""
    tokens, mixer, expert = 8192, mixers("Mamba")[0], mixers("MoE")[0]
    x, batch = randn(tokens, H), rows([0], [tokens], tokens=tokens)

    def rate(what: str, us: float, flop: float) -> None:
        say(f"    {what}: {flop / us / 1e6:.0f} TFLOP/s")

    us = each("in_proj 8192", [partial(ops.linear, x, mixer.in_proj)] * 3)
    rate("in_proj", us, 2 * tokens * H * PROJECTED)
    projected, window = randn(tokens, PROJECTED), randn(2, 3, CHANNELS)
    inputs = projected[:, INNER : INNER + CHANNELS]
    weight, bias = mixer.conv1d.weight[:, 0], mixer.conv1d.bias
    each(
        "causal_conv 8192", [partial(conv.causal_conv, inputs, weight, bias, window, batch)] * 3, tokens * CHANNELS * 4
    )
    x_, B, C = randn(tokens, CHANNELS).split([INNER, CONFIG.n_groups * STATE[2], CONFIG.n_groups * STATE[2]], dim=-1)
    parts = x_.unflatten(1, STATE[:2]), projected[:, -64:], B.unflatten(1, (-1, 128)), C.unflatten(1, (-1, 128))
    state = torch.zeros(2, *STATE, device="cuda")
    outputs = []
    for shape in SCANS:
        run = partial(scan.ssd_scan, *parts, mixer.A_log, mixer.D, mixer.dt_bias, (0.0, 1e9), 128, state, batch, shape)
        name = f"ssd_scan 8192 {' '.join(map(str, shape))}"
        if each(name, [run] * 3) > 0:  # not what cannot run
            outputs.append(run())
            verdict(name, error(outputs[-1], outputs[0]), 1e-2)
    show(partial(scan.ssd_scan, *run.args[:-1]), "scan 8192")
    del outputs
    y = randn(tokens, INNER)
    each("gated_norm 8192", [partial(ops.gated_norm, y, projected[:, :INNER], mixer.norm.weight, 8, 1e-5)] * 3,
         tokens * INNER * 6)  # fmt: skip
    each("add_rms_norm 8192", [partial(ops.add_rms_norm, x, x, randn(H), 1e-5)] * 3, tokens * H * 8)
    gate, none = expert.gate.weight, torch.zeros(EXPERTS, device="cuda")
    each("route 8192", [partial(ops.route, x, gate, none, CHOICES, 1, 1, True, 2.5)] * 3)
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOICES).indices
    weights, up, down = torch.rand(tokens, CHOICES, device="cuda"), expert.experts.up_proj, expert.experts.down_proj
    matrices = up.dense(), down.dense()
    tiles = ((128, 128, 64, 4, 8), (128, 128, 64, 3, 8), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (256, 128, 64, 3, 8))
    for tile in tiles:
        us = each(f"experts 8192 {tile}", [partial(moe.many_rows, x, ids, weights, *matrices, tile)] * 3)
        rate("experts", us, 4 * tokens * CHOICES * H * EXPERT)
    shared = expert.shared_experts
    us = each("shared expert 8192", [partial(ops.mlp, x, shared.up_proj, shared.down_proj)] * 3)
    rate("shared expert", us, 4 * tokens * H * SHARED)
    cache, q = randn(2, tokens // 16 + 1, 16, *KV), randn(tokens, *Q)
    us = each("attention 8192", [partial(attention.attention, q, cache, batch)] * 3)
    rate("attention", us, 2 * Q[0] * Q[1] * tokens * tokens)


def guesses() -> None:
    """Steps of rows of four tokens, commit included, as one graph: what a verified draft costs."""
    from leyden.cache.pool import DraftShape

    for count in (1, 8, 64):
        width, per = 3, 80
        shape = PoolShape(slots=count + 1, pages=count * per + 1, page=16, max_model_len=per * 16, kv_dtype=BF,
                          conv_dtype=BF, ssm_dtype=torch.float32, draft=DraftShape(width, width))  # fmt: skip
        pool = Pool(CONFIG, shape, "cuda")
        for array in (pool.kv, pool.conv, pool.ssm):
            array.normal_()
        pool.tables[1:, :per] = torch.arange(1, count * per + 1, device="cuda").view(count, per)
        pool.committed[1:] = 1024
        slots = torch.arange(1, count + 1, device="cuda")
        starts = torch.arange(0, 4 * count + 1, 4, device="cuda").int()
        ids, right = torch.randint(VOCABULARY, (4 * count,), device="cuda"), torch.zeros_like(starts[:count])
        tables = pool.tables[1:].contiguous()

        def step(
            pool: Pool = pool, slots: Tensor = slots, starts: Tensor = starts, ids: Tensor = ids,
            right: Tensor = right, count: int = count, tables: Tensor = tables,
        ) -> Tensor:  # fmt: skip
            past = pool.committed[slots]
            narrow = Rows((4,) * count, starts, past, slots.int(), tables)
            wide = Rows((), starts[:1], past[:0], slots[:0].int(), tables[:0])
            context = Context(narrow, wide, past.repeat_interleave(4, output_size=4 * count), pool)
            hidden, _ = MODEL[0](ids, context)
            MODEL[0].commit(context, slots, right)
            logits: Tensor = MODEL[0].logits(hidden)
            return logits

        made = graph(step)
        ms = replay(made, 5, 20, 3)
        say(f"  B {count}: {ms:.3f} ms for rows of four tokens, {count / ms * 1e3:.0f} rows/s")
        record(f"guesses {count}", ms)
        del made, pool, step
        torch.cuda.empty_cache()


def engine() -> None:
    """The engine's loop: the same tokens by graphs and without, no synchronisation, and its speed."""
    from leyden.engine.engine import Engine
    from leyden.engine.memory import Split
    from leyden.types import Request, SamplingParams

    def made(records: bool = True, period: int = 1) -> Engine:
        shape = PoolShape(slots=66, pages=66 * 64, page=16, max_model_len=1024, kv_dtype=BF, conv_dtype=BF,
                          ssm_dtype=torch.float32, period=period)  # fmt: skip
        one = Engine(MODEL[0], Split(shape, 64, 8192, 0, 0), overlap=True, prefix_caching=False)
        one.runner.graphs._records = records
        return one

    def submit(one: Engine, count: int, tokens: int, heat: float) -> None:
        for i in range(count):
            prompt = torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(i)).tolist()
            params = SamplingParams(temperature=heat, top_p=0.95, max_tokens=tokens, ignore_eos=True, seed=i)
            one.submit(Request(id=str(i), prompt=prompt, params=params))

    def texts(one: Engine) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        while one.busy:
            for delta in one.step():
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
        return found

    for period in (1, 16):
        answers = []
        for records in (True, False):
            one = made(records, period)
            submit(one, 8, 40, 1.0)
            answers.append(texts(one))
        same = sum(a == b for key in answers[0] for a, b in zip(answers[0][key], answers[1][key], strict=True)) / 320
        verdict(f"engine: tokens that differ with and without graphs, period {period}", 1 - same, 0)
    one = made()
    for count in (1, 8, 64):
        submit(one, count, 220, 1.0)
        for _ in range(60):  # prompts, and the capture
            one.step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            started = time.monotonic()
            for _ in range(128):
                one.step()
            took = time.monotonic() - started
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rate = 128 * count / took
        say(f"  B {count}: {took / 128 * 1e3:.3f} ms/step {rate:.0f} tok/s through the engine, no synchronisation")
        record(f"engine {count}", rate)
        texts(one)


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
            timed(f"vector {tile}", linear.vector, 1, False, None, tile)
        for count in (1, 8, 32, 64):
            timed("cuBLAS", torch.nn.functional.linear, count)
        splits = linear._narrow_shape(size, k)[2]
        for count in (8, 64):
            for block, cut in (((64, 64), 1), ((64, 128), 1), ((64, 64), 2), ((128, 64), 1)):
                cuts = (*block, splits * cut, 4, 4)
                timed(f"narrow {cuts}", linear.narrow, count, False, None, cuts)
        timed(f"narrow 6 stages {splits}", linear.narrow, 8, False, None, (64, 64, splits, 6, 4))


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
        ((4, 1024, 4), (2, 1024, 4)), ((4, 2048, 8), (2, 1024, 4)), ((2, 1024, 4), (2, 1024, 4)),
        ((4, 1024, 4), (4, 2048, 8)), ((4, 1024, 4), (1, 2048, 4)),
    ):  # fmt: skip
        timed("one", moe.one_row, 1, True, up, down)
    for shape in ((64, 128, 4, 4), (64, 128, 3, 4), (64, 256, 2, 4)):
        timed("dense", moe.few_rows, 8, True, shape)
    for count, tiles in (
        (64, ((16, 64, 128, 3, 4), (16, 64, 128, 4, 4))),
        (256, ((32, 64, 64, 5, 4), (32, 64, 128, 3, 4), (32, 128, 64, 4, 4), (64, 64, 64, 4, 4))),
    ):
        for tile in tiles:
            timed("lists", moe.many_rows, count, False, tile)


def time_mamba() -> None:
    layers = mixers("Mamba")
    few: tuple[Any, ...] = ((None, True), (None, False))
    halves = ((64, 4, 128), (64, 8, 80), (32, 4, 80), (64, 4, 168), (32, 4, 64), (64, 8, 64))
    singles = ((64, 4, 128), (64, 8, 80), (32, 4, 80), (64, 4, 168))
    for count in (1, 8, 64, 256):
        for dtype in (torch.float32, torch.float16):
            window = randn(23, count + 1, 3, CHANNELS)
            shapes = few if count < 64 else [(one, False) for one in (halves if dtype == torch.float16 else singles)]
            state = torch.empty(23, count + 1, *STATE, dtype=dtype, device="cuda").normal_()
            p, batch = randn(count, PROJECTED), rows([1000] * count)
            for shape, fused in shapes:
                runs = [
                    partial(
                        ssm.mamba_step, p, m.conv1d.weight[:, 0], m.conv1d.bias, m.A_log, m.D, m.dt_bias,
                        (0.0, float("inf")), m.norm.weight, CONFIG.n_groups, 1e-5,
                        window[m.index], state[m.index], batch, 5, shape, fused,
                    )
                    for m in layers
                ]  # fmt: skip
                size = count * prod(STATE) * dtype.itemsize * 2
                each(f"mamba_step M={count} {str(dtype)[6:]} {shape} {fused}", runs, size)
            recent = randn(23, count + 1, 15, recent_width(CONFIG))
            began, apart = torch.zeros(count + 1, device="cuda").int(), rows([1000 + i % 16 for i in range(count)])
            streams = (None, *((heads, 64, stages, 4, 128) for heads in (1, 2, 4, 8) for stages in (3, 4)))
            for one in streams if count > 8 else (None,):
                runs = [
                    partial(
                        ssm.mamba_lazy_step, p, m.conv1d.weight[:, 0], m.conv1d.bias, m.A_log, m.D, m.dt_bias,
                        (0.0, float("inf")), m.norm.weight, CONFIG.n_groups, 1e-5,
                        window[m.index], state[m.index], recent[m.index], began, apart, 5, one,
                    )
                    for m in layers
                ]  # fmt: skip
                inputs = 17 * recent_width(CONFIG)  # half a ring, in two bytes each, and what is written
                each(f"mamba_lazy_step M={count} {str(dtype)[6:]} {one}", runs, count * inputs + size * 17 / 32)
            del window, state, recent
            torch.cuda.empty_cache()


def choosing(way: tuple[int, int, tuple[int, int, int] | None], run: Callable[[], Any]) -> Any:
    """run() with routers cut as given: rows without tensor cores, rows without cuBLAS, a tile's shape."""
    kept = moe.VECTOR_ROWS, moe.ROUTE_ROWS, moe._tile_shape
    moe.VECTOR_ROWS, moe.ROUTE_ROWS, shape = way
    if shape:
        moe._tile_shape = lambda *_: shape
    try:
        return run()
    finally:
        moe.VECTOR_ROWS, moe.ROUTE_ROWS, moe._tile_shape = kept


def router() -> None:
    """The gate's product with and without tensor cores: how far from the truth, how fast behind a norm."""
    gates = [randn(EXPERTS, H, scale=0.02, dtype=torch.float32) for _ in range(48)]  # more than any cache holds
    bias = randn(EXPERTS, scale=0.1, dtype=torch.float32)
    far = 1 << 20
    tiles = [(1, 8, 3), (2, 8, 3), (1, 8, 7), (2, 8, 7), (4, 8, 7)]
    for count in (1, 2, 8, 9, 16, 31, 64, 100, 256, 512, 600, 3000):
        x, gate = randn(count, H), gates[0]
        keys = (x.double() @ gate.double().t()).sigmoid() + bias.double()
        best = keys.topk(CHOICES + 1)
        apart = best.values[:, CHOICES - 1] - best.values[:, CHOICES] > 2e-6
        ids, weights = moe.route(x, gate, bias, CHOICES, 1, 1, True, 2.5)
        again = moe.route(x, gate, bias, CHOICES, 1, 1, True, 2.5)
        with ops.using("reference"):
            theirs, wanted = ops.route(x, gate, bias, CHOICES, 1, 1, True, 2.5)
        same = (ids.sort().values == theirs.sort().values).all(1)  # near ties fall either way
        other = (ids.sort().values != best.indices[:, :CHOICES].sort().values).any(1) & apart
        verdict(f"route {count}: other experts than in fp64", float(other.float().mean()), 0)
        verdict("  weights", error(weights[same].sort().values, wanted[same].sort().values), 3e-6)
        verdict("  twice the same bits", float((ids != again[0]).any() | (weights != again[1]).any()), 0)

    # Where a score is small its logarithm is the logit. Whom to look at, the bias says.
    x, gate, scattered = randn(512, H), gates[0] * 10, randn(EXPERTS, scale=1e3, dtype=torch.float32)
    logits = x.double() @ gate.double().t()

    def off(ids: Tensor, scores: Tensor) -> float:
        true = torch.nn.functional.logsigmoid(logits.gather(1, ids))
        return float((scores.double().log() - true)[(true < -2) & (true > -10)].square().mean().sqrt())

    def score(*way: Any) -> float:
        return off(*choosing(way, lambda: moe.route(x, gate, scattered, CHOICES, 1, 1, False, 1.0)))

    ids = torch.arange(EXPERTS, device="cuda").expand(512, -1)
    vector, plain = score(far, far, None), off(ids, (x.float() @ gate.t()).sigmoid())
    found = {str(tile): score(0, far, tile) for tile in tiles} | {"cuBLAS": score(0, 0, None)}
    say(f"  error of a logit: without tensor cores {vector:.2e}, torch {plain:.2e}, "
        + ", ".join(f"{name} {value:.2e}" for name, value in found.items()))  # fmt: skip
    for name, value in found.items():
        # cuBLAS' tensor cores cut off what does not fit into a sum; near ties are nearer than that
        verdict(f"route {name}: error of a logit", value, 4e-5 if name == "cuBLAS" else 1.5 * max(vector, plain))

    w = randn(H)
    for count in (64, 256, 1, 8, 16, 32, 128, 512, 1024, 2048, 8192):
        x, residual = randn(count, H), randn(count, H)
        ways: dict[str, tuple[int, int, tuple[int, int, int] | None]] = {}
        if count <= 512:
            ways["no tensor cores"] = far, far, None
        if count >= 256:
            ways["cuBLAS"] = 0, 0, None
        if count > 1:
            ways |= {
                str(tile): (0, far, tile) for tile in (tiles if count <= 512 else tiles[1::3]) if tile[0] * 8 <= count
            }
        some = gates if count <= 2048 else gates[:12]

        def norms(x: Tensor = x, residual: Tensor = residual, some: list[Tensor] = some) -> None:
            for _ in some:
                ops.add_rms_norm(x, residual, w, 1e-5)

        def routes(x: Tensor = x, residual: Tensor = residual, some: list[Tensor] = some) -> None:
            for gate in some:
                ops.add_norm_route(x, residual, w, 1e-5, gate, bias, CHOICES, 1, 1, True, 2.5)

        graphs = {name: choosing(way, partial(graph, routes)) for name, way in ways.items()}
        graphs["the norm alone"] = graph(norms)
        took: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(3):
            for name, one in graphs.items():
                took[name].append(replay(one, 1, 4, 1) * 1e3 / len(some))
        alone = sorted(took.pop("the norm alone"))[1]
        results = sorted((sorted(times)[1], name) for name, times in took.items())
        say(f"  norm and route M={count:4d} us (norm alone {alone:.1f}): "
            + ", ".join(f"{name} {us:.1f}" for us, name in results))  # fmt: skip
        record(f"route {count}", [(alone, "norm"), *results])


def time_sample() -> None:
    for count, scale in ((1, 1.0), (64, 6.0), (256, 1.0), (256, 6.0)):
        rough, at = randn(count, VOCABULARY, scale=scale, dtype=torch.float32), torch.arange(count, device="cuda")
        for heat, k, top_p in ((1.0, 0, 1.0), (1.0, 0, 0.95), (0.7, 50, 0.95)):
            columns = [torch.full((count,), value, device="cuda") for value in (heat, k, top_p, 0.0)]
            got, again = (ops.sample(rough, *columns, at + 5, at) for _ in range(2))
            with ops.using("reference"):
                wanted = ops.sample(rough, *columns, at + 5, at)
            name = f"sample {count} scale {scale} T {heat} k {k} p {top_p}"
            verdict(f"{name}: differing", float((got != wanted).float().mean()), 0.0 if top_p == 1 else 0.02)
            verdict("  twice the same", float((got != again).float().mean()), 0)
    kept = sample._TILE
    for count in (1, 8, 64, 256):
        logits = [randn(count, VOCABULARY, dtype=torch.float32) for _ in range(4)]
        one, zero = torch.ones(count, device="cuda"), torch.zeros(count, device="cuda")
        at = torch.arange(count, device="cuda")
        for tile in (kept, 2 * kept) if count > 8 else (kept,):
            sample._TILE = tile
            for name, k, top_p in (("plain", 0, 1.0), ("top_p .95", 0, 0.95), ("top_k 50 top_p .95", 50, 0.95)):
                p, few = torch.full((count,), top_p, device="cuda"), torch.full((count,), k, device="cuda")
                runs = [partial(ops.sample, row, one, few, p, zero, at, at) for row in logits]
                each(f"sample R={count} {name} tile {tile}", runs)
        sample._TILE = kept


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


def check_few_bits() -> None:
    one, mamba, head = mixers("MoE")[0], mixers("Mamba")[0], MODEL[0].lm_head
    up, down, shared = one.experts.up_proj, one.experts.down_proj, one.shared_experts
    matrices = up, down, shared.up_proj, shared.down_proj

    def dequantized(weight: Any) -> Tensor:
        values: Tensor = weight.format.dequantize(weight.parts, torch.float32)
        return values

    exact = [stored(dequantized(w)) for w in matrices]

    def decoding() -> None:
        wanted = up.dense()
        assert all([arrange(weight) for weight in matrices])  # an op with some in tiles and some not has no kernel
        verdict("nvfp4 decoded", float((nvfp4.decoded(up) != wanted).float().mean()), 0)
        verdict("nvfp4 in tiles", float((up.dense() != wanted).float().mean()), 0)

    def layer(count: int) -> None:
        x, w = randn(count, H), torch.rand(count, CHOICES, device="cuda")
        ids = torch.rand(count, EXPERTS, device="cuda").topk(CHOICES).indices
        if count == 200:  # more rows for one expert than a program takes at once
            ids[:, 0] = torch.where((ids[:, 1:] == 5).any(1), ids[:, 0], 5)
        got, again = ops.moe(x, ids, w, *matrices), ops.moe(x, ids, w, *matrices)
        with ops.using("reference"):
            wanted = ops.moe(x.float(), ids, w, *exact)
        verdict(f"nvfp4 moe {count}", error(got, wanted), 8e-3)
        verdict(f"nvfp4 moe {count} twice the same bits", float((got != again).float().mean()), 0)

    def product(count: int, weight: Any, name: str) -> None:
        x = randn(count, weight.shape[1])
        wanted = x.float() @ dequantized(weight).t()
        verdict(name, error(ops.linear(x, weight, torch.float32), wanted), 1e-4 if count <= 16 else 4e-3)

    tried("decoding", decoding)
    for count in (1, 2, 5, 8, 9, 16, 17, 40, 200, 400, 900, 2000, 8192):
        tried(f"nvfp4 moe {count}", partial(layer, count))
    for count in (1, 8, 40, 256, 300):
        for name, weight in (("up", shared.up_proj), ("down", shared.down_proj), ("head", head)):
            tried(f"nvfp4 {name} {count}", partial(product, count, weight, f"nvfp4 {name} {count}"))
        for name, weight in (("in_proj", mamba.in_proj), ("out_proj", mamba.out_proj)):
            tried(f"fp8 {name} {count}", partial(product, count, weight, f"fp8 {name} {count}"))


def few_bits(count: int) -> list[tuple[str, list[Callable[[], object]], float]]:
    """(name, runs, bytes of one of them) of the products of a step of `count` rows."""
    experts, mamba, head = mixers("MoE"), mixers("Mamba"), MODEL[0].lm_head
    drawn = [torch.rand(count, EXPERTS, device="cuda").topk(CHOICES).indices for _ in experts]
    touched = sum(i.unique().numel() for i in drawn) / len(drawn)
    x, inner, pairs = randn(count, H), randn(count, INNER), count * CHOICES
    joined = SHARED // EXPERT if count <= nvfp4.JOINT_ROWS else 0
    h = randn(pairs + joined * count, EXPERT)
    done = torch.empty(pairs + 2 * count, H, dtype=BF, device="cuda")
    made: list[tuple[str, list[Callable[[], object]], float]] = []
    for name, source, out, is_up in (("up", x, h, True), ("down", h, done, False)):
        runs: list[Callable[[], object]] = []
        for m, ids in zip(experts, drawn, strict=True):
            pair, shared = (m.experts.up_proj, m.shared_experts.up_proj) if is_up else (
                m.experts.down_proj, m.shared_experts.down_proj)  # fmt: skip
            few = count <= nvfp4.UNSORTED_ROWS
            lists = None if few else moe.listed(ids, EXPERTS)
            runs.append(partial(packed.product, source, pair, out, count, is_up, CHOICES, ids if few else None,
                                lists, shared if joined else None, joined))  # fmt: skip
            arrange(pair)
            arrange(shared)
        made.append((f"nvfp4 {name} M={count} ({touched:.0f})", runs, (touched + joined) * EXPERT * H * 9 / 16))
    if not joined:
        runs = [partial(ops.mlp, x, m.shared_experts.up_proj, m.shared_experts.down_proj) for m in experts]
        made.append((f"nvfp4 shared M={count}", runs, 2 * SHARED * H * 9 / 16))
    made.append((f"nvfp4 head M={count}", [partial(ops.linear, x, head, torch.float32)] * 4, VOCABULARY * H * 9 / 16))
    made.append((f"fp8 in_proj M={count}", [partial(ops.linear, x, m.in_proj) for m in mamba], PROJECTED * H))
    made.append((f"fp8 out_proj M={count}", [partial(ops.linear, inner, m.out_proj) for m in mamba], INNER * H))
    return made


def ladder_few_bits(label: str, counts: tuple[int, ...] = (1, 8, 32, 64, 128, 256), period: int = 1) -> None:
    for count in counts:
        try:
            step = Step(count, ssm_dtype=torch.float16, period=period)
            made = graph(step)
            ms = replay(made, 10, 25, 3)
            assert step.out is not None and bool(step.out.isfinite().all()), "logits are not finite"
            bar = FOUR_BITS[count]
            rate = count / ms * 1e3
            say(f"  B {count:3d}: {ms:.3f} ms/step {rate:6.0f} tok/s in the formats of the release, {label};"
                f" bar {bar}: {rate / bar:.2f}")  # fmt: skip
            record(f"step {count} nvfp4 {label}", ms)
            del made, step
            torch.cuda.empty_cache()
        except TimeoutError:
            raise
        except Exception:
            say(f"  B {count}: {traceback.format_exc(limit=-3)}")


def four() -> None:
    """Checks first; then whole steps, the products of a step, and the layer's experts as a whole."""
    in_few_bits()
    check_few_bits()
    ladder_few_bits("as chosen")
    ladder_few_bits("one state in 16 written", (32, 64, 128, 256), 16)
    for count in (1, 8, 32, 64, 128, 256):
        for one in few_bits(count):
            each(*one)
        drawn = [torch.rand(count, EXPERTS, device="cuda").topk(CHOICES).indices for _ in mixers("MoE")]
        x, w = randn(count, H), torch.rand(count, CHOICES, device="cuda")
        runs = [
            partial(ops.moe, x, i, w, m.experts.up_proj, m.experts.down_proj, m.shared_experts.up_proj,
                    m.shared_experts.down_proj)
            for m, i in zip(mixers("MoE"), drawn, strict=True)
        ]  # fmt: skip
        touched = sum(i.unique().numel() for i in drawn) / len(drawn)
        each(f"nvfp4 moe M={count} ({touched:.0f})", runs, 2 * (touched * EXPERT + SHARED) * H * 9 / 16)
    each("nvfp4 experts decoded", [partial(nvfp4.decoded, m.experts.up_proj) for m in mixers("MoE")[:4]],
         EXPERTS * EXPERT * H * (9 / 16 + 2))  # fmt: skip
    step = Step(8, ssm_dtype=torch.float16)
    show(graph(step).replay, "step of 8 rows in the formats of the release")
    for tokens in (2048, 8192, 32768):
        ids, context = prompt(tokens)

        def once(ids: Tensor = ids, context: Context = context) -> Tensor:
            hidden, _ = MODEL[0](ids, context)
            logits: Tensor = MODEL[0].logits(hidden[-1:])
            return logits

        def timed(once: Callable[[], Tensor] = once, tokens: int = tokens) -> None:
            once()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            once()
            once()
            end.record()
            torch.cuda.synchronize()
            ms = begin.elapsed_time(end) / 2
            say(f"  prompt of {tokens}: {ms:.1f} ms, {tokens / ms * 1e3:.0f} tok/s in the formats of the release")
            record(f"prefill {tokens} nvfp4", tokens / ms * 1e3)

        tried(f"prompt of {tokens}", timed)


def eighth(rows: float) -> None:
    """Products of more rows than that may round them to 8 bits; inf: as ever."""
    for weight in MODEL[0].backbone.layers.modules():
        if isinstance(weight, Weight):
            weight.eight_above = rows
    if rows < inf:
        say(f"  {round_above(MODEL[0], int(rows))} matrices take part above {rows} rows")


def check_eight() -> None:
    """Each op against its arithmetic in plain PyTorch, and how far it is from products in BF16."""
    mamba, one = mixers("Mamba")[0], mixers("MoE")[0]
    up, down, shared = one.experts.up_proj, one.experts.down_proj, one.shared_experts

    def both(name: str, got: Tensor, again: Tensor, wanted: Tensor, plain: Tensor) -> None:
        # Between two products a value that falls to its neighbour in BF16 may fall to its neighbour in E4M3.
        verdict(f"8 bits {name}", error(got, wanted), 1e-2 if "proj" in name else 2e-2)
        verdict("  twice the same bits", float((got != again).float().mean()), 0)
        say(f"  {name:24s} to its arithmetic {error(got, wanted):.1e}, to BF16 {error(got, plain):.1e}")
        record(f"8 bits against BF16 {name}", error(got, plain))

    def activations() -> None:
        for size in (H, EXPERT, INNER):
            x = randn(3000, size)
            for square in (False, True):
                got, wanted = eight.rounded(x, square), exactly.rounded(x.float().relu().square() if square else x)
                verdict(f"8 bits rounded {size}", float((got[0].float() != wanted[0].float()).float().mean()), 1e-3)
                verdict("  scales", error(got[1], wanted[1]), 1e-6)

    def matrices() -> None:
        for weight in (up, down, shared.up_proj, shared.down_proj, mamba.in_proj):
            got, wanted = eight.operand(weight), exactly.operand(weight)
            verdict(f"8 bits {weight}: codes", float((got[0].float() != wanted[0].float()).float().mean()), 0)
            verdict("  scales", error(got[1], wanted[1]), 1e-6)
            torch.cuda.empty_cache()

    def single(count: int) -> None:
        for name, weight in (("in_proj", mamba.in_proj), ("out_proj", mamba.out_proj)):
            x = randn(count, weight.shape[1])
            got, again = eight.linear(x, weight), eight.linear(x, weight)
            both(f"{name} {count}", got, again, exactly.linear(x, weight), ops.linear(x, weight))
        x, pair = randn(count, H), (shared.up_proj, shared.down_proj)
        both(f"shared {count}", eight.mlp(x, *pair), eight.mlp(x, *pair), exactly.mlp(x, *pair), ops.mlp(x, *pair))

    def layer(count: int, uneven: bool) -> None:
        x, w = randn(count, H), torch.rand(count, CHOICES, device="cuda")
        likely = torch.rand(count, EXPERTS, device="cuda")
        if uneven:  # one expert for nobody, one for everybody, some for a few rows
            likely[:, 3], likely[:, 5], likely[7:, 64:90] = -1, 2, -1
        arguments = x, likely.topk(CHOICES).indices, w, up, down, shared.up_proj, shared.down_proj
        got, again = eight.moe(*arguments), eight.moe(*arguments)
        both(f"moe {count} {'uneven' if uneven else ''}", got, again, exactly.moe(*arguments), ops.moe(*arguments))
        torch.cuda.empty_cache()

    tried("activations", activations)
    tried("matrices", matrices)
    for count in (513, 1000, 8192):
        tried(f"single {count}", partial(single, count))
    for count, uneven in ((600, False), (600, True), (2048, True), (8192, False)):
        tried(f"moe {count}", partial(layer, count, uneven))


def time_eight() -> None:
    """What a layer takes for 8,192 tokens, in 8 bits and as without, and with sums in fp32 every 128 columns."""
    tokens, mamba, one = 8192, mixers("Mamba"), mixers("MoE")
    x, inner = randn(tokens, H), randn(tokens, INNER)
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOICES).indices
    w = torch.rand(tokens, CHOICES, device="cuda")
    wide, flop = randn(tokens * CHOICES, EXPERT), 2 * tokens * H
    order, offsets = moe.listed(ids, EXPERTS)
    stacks = [eight.operand(m.experts.up_proj) for m in one[:3]]
    gathered = eight.rounded(x, False, order, CHOICES)

    def rate(name: str, runs: Sequence[Callable[[], object]], flop: float) -> None:
        us = each(name, runs)
        say(f"    {flop / us / 1e6:.0f} TFLOP/s")

    routed = 2 * CHOICES * flop * EXPERT
    for name, version in (("8 bits", eight.moe), ("as without", ops.moe)):
        runs = [partial(version, x, ids, w, m.experts.up_proj, m.experts.down_proj, m.shared_experts.up_proj,
                        m.shared_experts.down_proj) for m in one[:4]]  # fmt: skip
        rate(f"moe {tokens}, {name}", runs, routed + 2 * flop * SHARED)
    for name, call in (("8 bits", eight.linear), ("as without", ops.linear)):
        rate(f"in_proj {tokens}, {name}", [partial(call, x, m.in_proj) for m in mamba[:6]], flop * PROJECTED)
        rate(f"out_proj {tokens}, {name}", [partial(call, inner, m.out_proj) for m in mamba[:6]], flop * INNER)
    each("experts' up_proj recoded", [partial(eight.operand, m.experts.up_proj) for m in one[:4]],
         EXPERTS * EXPERT * H * (9 / 16 + 1))  # fmt: skip
    each("x rounded and gathered", [partial(eight.rounded, x, False, order, torch.empty_like(order), CHOICES)] * 4,
         tokens * H * (2 + CHOICES))  # fmt: skip
    each("relu^2 rounded", [partial(eight.rounded, wide, True)] * 4, tokens * CHOICES * EXPERT * 3)
    each("listed", [partial(moe.listed, ids, EXPERTS)] * 4)
    for shape in ((128, 256, 128, 4, 8), (128, 256, 128, 3, 8), (128, 128, 128, 4, 4), (128, 256, 64, 4, 8)):
        runs = [partial(grouped.product, gathered[0], m[0], None, offsets, False, shape, (gathered[1], m[1]))
                for m in stacks]  # fmt: skip
        rate(f"grouped product alone {shape}", runs, routed / 2)
    into, rounded = [products.as_stored(m.in_proj) for m in mamba[:6]], eight.rounded(x)
    for fast in (True, False):
        products.FAST, kept = fast, products.FAST
        rate(f"product alone, fast {fast}", [partial(products.product, rounded, m) for m in into], flop * PROJECTED)
        exact = (rounded[0][:64].float() * rounded[1][:64, None]) @ (into[0][0].float() * into[0][1][:, None]).t()
        off = error(products.product((rounded[0][:64], rounded[1][:64]), into[0]), exact)
        say(f"    a product is {off:.2e} from exact sums, of which 1.7e-03 is BF16")
        record(f"8 bits, fast {fast}: off", off)
        products.FAST = kept


def check_wide(layer: Any) -> None:
    """Both products of experts in four bits, tile by tile and as a whole, and the same bits twice."""
    up, down = layer.experts.up_proj, layer.experts.down_proj
    exact = [weight.format.dequantize(weight.parts, torch.float32) for weight in (up, down)]
    assert all([arrange(weight) for weight in (up, down)])
    count = 1100  # 52 rows for an expert, on average
    x, w = randn(count, H), torch.rand(count, CHOICES, device="cuda")
    likely = torch.rand(count, EXPERTS, device="cuda")
    likely[:, 3], likely[:, 5], likely[7:, 64:90] = -1, 2, -1  # one for nobody, one for everybody, some for a few rows
    ids = likely.topk(CHOICES).indices
    lists = order, offsets = moe.listed(ids, EXPERTS)
    rows, bounds = codes.gathered(x, order, CHOICES), offsets.tolist()
    plain = x[(order // CHOICES).long()]
    verdict("wide: gathered", float((rows != codes.ordered(plain)).float().mean()), 0)
    hidden = torch.cat([plain[a:b].float() @ m.t() for m, a, b in zip(exact[0], bounds, bounds[1:], strict=False)])
    hidden = hidden.to(BF).float().relu().square().to(BF)
    wanted = torch.cat([hidden[a:b].float() @ m.t() for m, a, b in zip(exact[1], bounds, bounds[1:], strict=False)])
    h = codes.ordered(hidden)

    expected = h.float(), torch.empty_like(wanted).index_copy_(0, order.long(), wanted)

    def products(shape: codes.Shape | None) -> None:
        """None: by the kernel of fewer rows, as chosen."""
        for name, matrix, is_up, result in (("up", up, True, expected[0]), ("down", down, False, expected[1])):
            made = [torch.full_like(result, torch.nan, dtype=BF) for _ in range(2)]
            for out in made:
                if shape:
                    codes.gathered_product(rows if is_up else h, matrix, out, is_up, lists, shape)
                else:
                    codes.product(codes.ordered(x) if is_up else h, matrix, out, is_up, CHOICES, lists)
            verdict(f"wide {name} {shape}", error(made[0], result), 4e-3)
            verdict("  twice the same bits", float((made[0] != made[1]).float().mean()), 0)

    def whole() -> None:
        got, again = (ops.experts(x, ids, w, up, down) for _ in range(2))
        with ops.using("reference"):
            result = ops.experts(x.float(), ids, w, *map(stored, exact))
        verdict("wide experts", error(got, result), 8e-3)
        verdict("  twice the same bits", float((got != again).float().mean()), 0)

    for shape in (*GATHERED, None):
        tried(f"wide {shape}", partial(products, shape))
    tried("wide experts", whole)


def time_wide_prompt(tokens: int, layers: Sequence[Any], dense: Sequence[Tensor]) -> None:
    pairs, flop = tokens * CHOICES, 2 * tokens * CHOICES * H * EXPERT
    x, w = randn(tokens, H), torch.rand(tokens, CHOICES, device="cuda")
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOICES).indices
    lists = order, offsets = moe.listed(ids, EXPERTS)
    rows, h = codes.gathered(x, order, CHOICES), randn(pairs, EXPERT)
    hidden, done = torch.empty_like(h), torch.empty_like(rows)
    ups, downs = [m.experts.up_proj for m in layers], [m.experts.down_proj for m in layers]

    def rated(label: str, up: Sequence[Callable[[], object]], down: Sequence[Callable[[], object]]) -> None:
        took = each(f"{tokens} {label}, up", up), each(f"{tokens} {label}, down", down)
        rates = [flop / took[0] / 1e6, flop / took[1] / 1e6, 2 * flop / sum(took) / 1e6]
        say("    up, down and both:", *(f"{rate:.0f}" for rate in rates), "TFLOP/s")
        record(f"{tokens} {label}, TFLOP/s", rates)

    for shape in GATHERED:
        rated(f"gathered {shape}", [partial(codes.gathered_product, rows, m, hidden, True, lists, shape) for m in ups],
              [partial(codes.gathered_product, h, m, done, False, lists, shape) for m in downs])  # fmt: skip
    for few in LISTED:
        rated(f"listed {few}", [partial(codes.product, x, m, hidden, True, CHOICES, lists, few) for m in ups],
              [partial(codes.product, h, m, done, False, CHOICES, lists, few) for m in downs])  # fmt: skip
    rated("16 bits", [partial(grouped.product, rows, dense[0], order, offsets, True)] * len(ups),
          [partial(grouped.product, h, dense[1], order, offsets, False)] * len(ups))  # fmt: skip
    us = each(f"{tokens} experts", [partial(ops.experts, x, ids, w, *pair) for pair in zip(ups, downs, strict=True)])
    say(f"    {2 * flop / us / 1e6:.0f} TFLOP/s")
    each(f"{tokens} listed", [partial(moe.listed, ids, EXPERTS)] * 2)
    each(f"{tokens} gathered, ordered", [partial(codes.gathered, x, order, CHOICES)] * 2, (tokens + pairs) * H * 2)
    each(f"{tokens} gathered", [partial(grouped.gathered, x, order, CHOICES)] * 2, (tokens + pairs) * H * 2)
    each(f"{tokens} ordered", [partial(codes.ordered, x)] * 2, 2 * tokens * H * 2)
    each(f"{tokens} relu^2 ordered", [partial(codes.ordered, h)] * 2, 2 * pairs * EXPERT * 2)
    each(f"{tokens} added up", [partial(moe.combined, done, w, tokens, H, 0)] * 2, (tokens + pairs) * H * 2)


def time_wide() -> None:
    """Experts in four bits for prompts: checks; their products cut in several ways; what is around them."""
    layers = mixers("MoE")[:4]
    for weight in [w for m in layers for w in (m.experts.up_proj, m.experts.down_proj)]:
        if not isinstance(weight.format, NVFP4 | Tiled):
            four_bits(weight)
    check_wide(layers[0])
    say(f"  {VERDICTS.count(True)} checks passed, {VERDICTS.count(False)} failed so far")
    assert all([arrange(w) for m in layers for w in (m.experts.up_proj, m.experts.down_proj)])
    dense = [nvfp4.decoded(weight) for weight in (layers[0].experts.up_proj, layers[0].experts.down_proj)]
    for tokens in (8192, 2048, 32768, 1024):
        torch.cuda.empty_cache()
        tried(f"prompt of {tokens}", partial(time_wide_prompt, tokens, layers[: 4 if tokens < 10000 else 1], dense))
    each("a stack decoded", [partial(nvfp4.decoded, m.experts.up_proj) for m in layers],
         EXPERTS * EXPERT * H * (9 / 16 + 2))  # fmt: skip


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


def prefill_eight() -> None:
    """Prompts in the formats of the release with activations in 8 bits and without; checks, and what it takes apart."""
    if MODEL[0].lm_head.format.name == "dense":
        in_few_bits()
    products.check(torch.device("cuda"), BF)
    check_eight()
    for tokens in (8192, 2048):
        ids, context = prompt(tokens)

        def once(ids: Tensor = ids, context: Context = context) -> Tensor:
            hidden, _ = MODEL[0](ids, context)
            logits: Tensor = MODEL[0].logits(hidden[-256:])
            return logits

        def compare(once: Callable[[], Tensor] = once, tokens: int = tokens) -> None:
            logits = []
            for how, rows in (("as without", inf), ("8 bits", 512), ("as without", inf), ("8 bits", 512)):
                eighth(rows)
                logits.append(once())
                ms = awaited(once)
                say(f"  prompt of {tokens}, {how}: {ms:.1f} ms, {tokens / ms * 1e3:.0f} tok/s")
                record(f"prefill {tokens} nvfp4 {how}", tokens / ms * 1e3)
            apart = error(logits[1], logits[0])
            same = float((logits[1].argmax(-1) == logits[0].argmax(-1)).float().mean())
            say(f"  logits of the last 256 tokens: {apart:.1e} apart, the same token first in {same:.3f} of them")
            record(f"prefill {tokens} nvfp4, 8 bits: apart", apart)

        tried(f"prompt of {tokens}", compare)
    eighth(512)
    tried("what is launched", partial(show, once, "prompt of 2048 in 8 bits", 16))
    eighth(inf)
    tried("parts", time_eight)


def ahead() -> None:
    """What it is worth to ask for weights in advance, and to have more of them on their way: whole steps, in turns."""

    def compared(label: str, ways: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        for count in (1, 8):
            made, times = [], [[] for _ in ways]  # type: list[Any], list[list[float]]
            for megabytes, depth in ways:
                launch.AHEAD, packed.DEPTH = megabytes << 20, depth
                step = Step(count, ssm_dtype=dtype)
                made.append((graph(step), step))
            for _ in range(5):
                for (one, _step), seen in zip(made, times, strict=True):
                    seen.append(replay(one, 5, 20, 1))
            for (megabytes, depth), seen in zip(ways, times, strict=True):
                ms = sorted(seen)[2]
                say(f"  B {count} {label}: {megabytes:2d} MB ahead, depth {depth}: {ms:.3f} ms, {count / ms * 1e3:.0f}")
                record(f"step {count} {label} ahead {megabytes} MB depth {depth}", seen)
            del made
            torch.cuda.empty_cache()

    kept = launch.AHEAD, packed.DEPTH
    try:
        if MODEL[0].lm_head.format.name == "dense":
            compared("bf16", [(megabytes, 1) for megabytes in (0, 16, 32)], torch.float32)
            in_few_bits()
        compared("few bits", [(0, 1), (0, 3), (32, 1), (32, 2), (32, 3)], torch.float16)
    finally:
        launch.AHEAD, packed.DEPTH = kept


def tune(seconds: float = 110) -> None:
    """Other ways of cutting the products, while there is time: the most used first; then whole steps with the best."""
    if MODEL[0].lm_head.format.name == "dense":
        in_few_bits()
    ended, before = time.monotonic() + seconds, packed.chosen
    forced: list[packed.Shape] = []
    keys: list[tuple[float, int, int, int, int]] = []
    best: dict[tuple[float, int, int, int, int], packed.Shape] = {}

    def chosen(*key: Any) -> packed.Shape:
        keys.append(key)
        return forced[0] if forced else best.get(key) or before(*key)

    def timed(runs: Sequence[Callable[[], object]], *shape: packed.Shape) -> float:
        forced[:] = shape
        try:
            return replay(graph(lambda: [run() for run in runs]), 2, 5, 3) * 1e3 / len(runs)
        except TimeoutError:
            raise
        except Exception as error:
            say(f"  {shape}: {type(error).__name__}: {str(error)[:120]}")
            return float("inf")
        finally:
            forced.clear()

    packed.chosen = chosen  # type: ignore[assignment]
    for count in (1, 8, 64, 256, 32, 128):
        for name, runs, size in few_bits(count):
            if time.monotonic() > ended:
                break
            keys.clear()
            results = [(timed(runs), "as chosen")]
            key = keys[0]
            groups = min(4, -(-int(key[0]) // 8))
            shapes = [(1, 1, 4, 4), (1, 1, 8, 8), (1, 1, 2, 4), (2, 1, 4, 4), (2, 1, 2, 4), (2, 1, 1, 4)]
            if key[0] > 4:
                near = sorted({max(1, groups - 1), groups, min(4, groups + 1)})
                cuts = (2, 1, 4), (2, 1, 8), (2, 2, 4), (2, 2, 8), (2, 4, 4), (1, 1, 8), (1, 2, 8), (1, 4, 4)
                shapes = [(tiles, g, split, warps) for g in near for tiles, split, warps in cuts]
            if key[0] > 32:
                shapes = [(1, 8, 1, 4), (1, 8, 2, 4), *shapes]
            for shape in shapes:
                if time.monotonic() > ended:
                    break
                cut = packed.Shape(*shape, packed.DEPTH if shape[1] == 1 else 1)
                us = timed(runs, cut)
                results.append((us, str(shape)))
                if us < results[0][0] * 0.99 and us == min(results)[0]:
                    best[key] = cut
            for start, module, limit in (("nvfp4 head", nvfp4, "WIDE_ROWS"), ("fp8 in_proj", linear, "FP8_ROWS")):
                if name.startswith(start) and count >= 32:  # where dense products are faster, decoding included
                    kept = getattr(module, limit)
                    setattr(module, limit, 0)
                    results.append((timed(runs), "dense"))
                    setattr(module, limit, min(kept, count - 1) if min(results)[1] == "dense" else kept)
            results.sort()
            say(f"  {name:28s} {size / results[0][0] / 1e6:5.2f} TB/s: "
                + ", ".join(f"{shape} {us:.1f}" for us, shape in results[:6]))  # fmt: skip
            record(f"tune {name}", results)
    say(f"  decoded in registers up to {nvfp4.WIDE_ROWS} and {linear.FP8_ROWS} rows")
    say(f"  better than chosen: { {key: tuple(vars(shape).values()) for key, shape in best.items()} }")
    try:
        ladder_few_bits("with the best")
    finally:
        packed.chosen = before


def attends(past: list[int], lens: list[int] | None, dtype: torch.dtype, page: int = 16, tokens: int = 32_784) -> None:
    """Decode attention against the reference in fp32, twice."""
    batch, scales = rows(past, lens, page, tokens), (0.5, 0.25) if dtype != BF else (1.0, 1.0)
    q, k, v = (randn(batch.tokens, *shape) for shape in (Q, KV, KV))
    cache = randn(2, len(past) * -(-tokens // page) + 1, page, *KV).to(dtype)
    ops.kv_write(k, v, cache, batch, *scales)
    got, again = (ops.attention(q, cache, batch, *scales) for _ in range(2))
    assert batch.pages is not None
    factors, wanted = torch.tensor(scales, device="cuda").view(2, 1, 1, 1, 1), []
    for r, part in enumerate(q.float().split(batch.lens)):  # a row at a time: its keys in fp32 may be 67 MB
        pages = batch.pages[r].long()
        bits = cache.view(torch.uint8 if dtype != BF else torch.int16)[:, pages]  # 8-bit floats cannot be indexed
        one = Rows((len(part),), batch.starts[:2], batch.past[r : r + 1], None, torch.arange(len(pages)).cuda()[None])
        with ops.using("reference"):
            wanted.append(ops.attention(part, bits.view(dtype).float() * factors, one))
    name = f"attention {str(dtype)[6:]} page {page} {past if len(past) < 6 else len(past)} {lens or ''}"
    verdict(name, error(got, torch.cat(wanted)), 8e-3)
    verdict("  twice the same bits", float((got != again).float().mean()), 0)


def same_bits(count: int, context: int) -> None:
    """200 times, with other work of other lengths before it, and one right after the other."""
    batch, q = rows([context - 1] * count, tokens=32_784), randn(count, *Q)
    cache, other = randn(2, count * 2049 + 1, 16, *KV), randn(1024, 1024)
    first, differing = attention.attention(q, cache, batch).clone(), torch.zeros((), device="cuda")
    made: list[Tensor] = []

    def many() -> None:
        made.clear()
        for i in range(10):
            for _ in range(i % 4):
                other[: 64 << i % 5].mm(other)
            made.append(attention.attention(q, cache, batch))

    captured = graph(many)
    for _ in range(20):
        captured.replay()
        for out in made:
            differing += (out != first).sum()
    verdict(f"attention {count} x {context}: 200 times the same bits", float(differing), 0)


def check_attention() -> None:
    faulthandler.dump_traceback_later(120, exit=True)  # should programs wait for each other for ever
    edges = [1, 15, 16, 17, 64, 65, 100, 1023, 1024, 1025, 5000, 32768]
    for dtype, page in ((BF, 16), (torch.float8_e4m3fn, 16), (BF, 64)):
        for length in edges:
            attends([length - 1], None, dtype, page)
    attends([0, 15, 16, 63, 1023, 1024, 5000, 32767], None, BF)  # eight programs for each row and head
    attends([length for length in edges[:11] for _ in range(7)], None, BF, 16, 5024)  # one: nothing to join
    for lens in ([2], [4], [8]):
        for length in (1, 60, 63, 1023, 32760):
            attends([length], lens, BF)
    attends([0, 1100, 62, 5000], [8, 4, 3, 1], BF)
    attends([0, 1100, 62, 5000], [4, 1, 3, 2], torch.float8_e4m3fn)
    for count, context in ((1, 1024), (1, 32768), (8, 1024)):
        same_bits(count, context)
    for cells in attention._cells.values():
        verdict("cells that are not empty", float((cells != -1).sum()), 0)
    faulthandler.cancel_dump_traceback_later()


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


def check_narrow() -> None:
    for size, k in ((PROJECTED, H), (H, INNER), (H, SHARED)):
        matrix, cut = randn(size, k, scale=0.02), linear.cut_of(size)
        cuts = cut, replace(cut, early=True), linear.Cut(4, 8, 3)
        for count in (2, 5, 8, 9, 16):
            x = randn(count, k + 64)[:, 64:]
            wanted = x.double() @ matrix.double().t()
            exact = linear.few(x, matrix, dtype=torch.float32)
            verdict(f"few {count} x {size}", error(linear.few(x, matrix), wanted), 4e-3)
            verdict("  to fp32", error(exact, wanted), 1e-5)
            if k == SHARED:
                verdict("  relu^2", error(linear.few(x, matrix, True), wanted.clamp(min=0).square()), 1e-2)
            again = [linear.few(x, matrix, False, torch.float32, one) for one in cuts * 2]
            verdict("  other cuts", max(error(one, wanted) for one in again), 1e-5)
            verdict(
                "  the same bits", float(not all(torch.equal(exact, one) for one in (again[0], again[1], again[3]))), 0
            )
        x = randn(5, k + 1)[:, 1:]
        verdict(f"few, rows not aligned, {size}", error(linear.few(x, matrix), x.double() @ matrix.double().t()), 4e-3)
    matrices = [stored(randn(size, H, scale=0.02)) for size in (QUERIES, KEYS, KEYS)]
    cases = ([1, 4], [1] * 8, [4, 1, 3], [4] * 4), ([1] * 8, [4, 5], [1] * 16)
    for dtype, bound, each_lens in ((BF, 4e-3, cases[0]), (torch.float8_e4m3fn, 3e-2, cases[1])):
        for lens in each_lens:
            batch, x = rows([1000 - 7 * i for i in range(len(lens))], lens), randn(sum(lens), H)
            empty = torch.zeros(2, len(lens) * 72 + 1, 16, *KV, device="cuda").to(dtype)
            cache, twice, other = empty.clone(), empty.clone(), empty.clone()
            got, again = (qkv.qkv_write(x, *matrices, one, batch, 0.5, 0.25) for one in (cache, twice))
            with ops.using("reference"):
                wanted = ops.qkv_write(x.float(), *map(wide, matrices), other, batch, 0.5, 0.25)
            verdict(f"qkv_write {lens} {dtype}", error(got, wanted), 4e-3)
            for part, what in enumerate(("keys", "values")):
                verdict(f"  {what}", error(cache[part], other[part]), bound)
            same = torch.equal(got, again) and torch.equal(cache.view(torch.uint8), twice.view(torch.uint8))
            verdict("  the same bits", float(not same), 0)


def few_rows(name: str, count: int, size: int, k: int, cuts: Sequence[tuple[int, int, int]]) -> None:
    """One product by _narrow, cuBLAS and _few in several cuts, in turns. A norm comes before each, as in a step, or
    attention over 1,024 tokens; both in the figure, what comes before by itself as "nothing"."""
    turns = range(2 if size == VOCABULARY else 14)
    x, gain, matrices = randn(count, k), randn(k), [randn(size, k, scale=0.02) for _ in turns]
    batch, caches = rows([1000] * count), [randn(2, count * 72 + 1, 16, *KV) for _ in range(6)]
    shapes = [linear.Cut(*cut) for cut in cuts]
    shapes.append(replace(shapes[0], early=True))

    def before(i: int) -> Tensor:
        if name.endswith("attention"):
            return attention.attention(x.view(count, *Q), caches[i % 6], batch).flatten(1)
        return ops.add_rms_norm(x, x, gain, 1e-5)[0]

    def old(x: Tensor, i: int) -> None:
        if name != "qkv":
            linear.narrow(x, matrices[i])
            return
        _, keys, values = (linear.narrow(x, one.dense()).unflatten(1, (-1, KV[1])) for one in threes[i])
        attention.kv_write(keys, values, caches[i % 6], batch)

    def new(x: Tensor, i: int, shape: linear.Cut) -> None:
        if name == "qkv":
            qkv.qkv_write(x, *threes[i], caches[i % 6], batch, cut=shape)
        else:
            linear.few(x, matrices[i], shape=shape)

    cut_as = [QUERIES, KEYS, KEYS] if name == "qkv" else [size]
    threes: list[Any] = [[stored(part) for part in one.split(cut_as)] for one in matrices]
    ways: dict[str, Callable[[Tensor, int], object]] = {"nothing": lambda x, i: None, "old": old}
    ways["cuBLAS"] = lambda x, i: torch.nn.functional.linear(x, matrices[i])
    for shape in shapes:
        label = f"{shape.split} {shape.warps} {shape.depth}" + " early" * shape.early
        ways[label] = partial(new, shape=shape)

    def run(way: Callable[[Tensor, int], object]) -> None:
        for i in turns:
            way(before(i), i)

    made = [graph(partial(run, way)) for way in ways.values()]
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(5):
        for one, seen in zip(made, times, strict=True):
            seen.append(replay(one, 1, 5, 1) * 1e3 / len(turns))
    us = sorted((sorted(seen)[2], way) for way, seen in zip(ways, times, strict=True))
    floor = size * k * 2 / READ * 1e6
    say(f"  {name} M={count} (bytes {floor:.1f}): " + ", ".join(f"{way} {took:.2f}" for took, way in us))
    record(f"few rows {name} M={count}", us)


def narrow(seconds: float = 46) -> None:
    """Products of 2 to 16 rows in BF16: against fp64, then the figures of few_rows()."""
    ended = time.monotonic() + seconds
    check_narrow()
    products = {
        "out_proj": (H, INNER, [(8, 8, 4), (8, 8, 3), (8, 8, 5), (4, 4, 4), (8, 16, 4)]),
        "in_proj": (PROJECTED, H, [(2, 4, 4), (2, 4, 3), (4, 4, 4), (4, 8, 4), (1, 4, 5), (2, 8, 4)]),
        "qkv": (QUERIES + 2 * KEYS, H, [(4, 4, 4), (4, 4, 3), (8, 8, 4), (2, 4, 4)]),
        "out_proj after attention": (H, INNER, [(8, 8, 4), (8, 8, 3), (4, 4, 4)]),
        "head": (VOCABULARY, H, [(1, 4, 4), (1, 4, 3), (2, 4, 4), (1, 8, 4)]),
        "shared up": (SHARED, H, [(8, 8, 4), (4, 4, 4), (8, 8, 3)]),
        "shared down": (H, SHARED, [(8, 8, 4), (4, 4, 4)]),
    }
    for count in (8, 16, 4, 2):
        for name, (size, k, cuts) in products.items():
            if time.monotonic() > ended:
                say("  no time for the rest")
                return
            few_rows(name, count, size, k, cuts)


def time_attention() -> None:
    """A layer (q, k, v; attention; o), which finds nothing in L2, and attention alone, which finds short caches: chains
    of six, in turns with other cuts: (keys of a tile, stages, warps), the most programs for a row."""
    check_attention()
    faulthandler.dump_traceback_later(120, exit=True)
    before, layers, kept = before_attention(), mixers("Attention"), (attention.CUT, attention.SPLITS)
    for count, contexts, others in (
        (1, (1024, 8192, 32768), (((32, 5, 8), 64), ((64, 7, 8), 64), ((64, 5, 4), 64), ((64, 5, 8), 32))),
        (8, (1024, 32768), (((64, 7, 8), 64),)),
        (40, (1024,), ()),
        (64, (1024,), (((64, 7, 8), 64), ((64, 3, 4), 64))),
        (256, (1024,), (((64, 5, 4), 64), ((64, 3, 4), 64))),
    ):
        tokens = 32_784 if count <= 8 else 1040
        caches = [randn(2, count * tokens // 16 + 1, 16, *KV) for _ in layers]
        q, x = randn(count, *Q), randn(count, H)
        ways = [("now", attention.attention, kept), *((str(cut), attention.attention, cut) for cut in others)]
        if before:
            ways.insert(0, ("before", before.attention, kept))
        for context in contexts:
            batch, chains = rows([context - 1] * count, tokens=tokens), []

            def layer(mixer: Any, cache: Tensor, attend: Any, x: Tensor = x, batch: Rows = batch) -> Tensor:
                heads = ops.qkv_write(x, mixer.q_proj, mixer.k_proj, mixer.v_proj, cache, batch)
                return ops.linear(attend(heads, cache, batch).flatten(-2), mixer.o_proj)

            for _, attend, (attention.CUT, attention.SPLITS) in ways:
                layered = [partial(layer, *pair, attend) for pair in zip(layers, caches, strict=True)]
                alone = [partial(attend, q, cache, batch) for cache in caches]
                chains.append([graph(partial(called, runs)) for runs in (layered, alone)])
            times = [[sorted(replay(one, 2, 20, 1) for _ in range(3))[1] for one in pair] for pair in chains]
            again = [[sorted(replay(one, 2, 20, 1) for _ in range(3))[1] for one in pair] for pair in chains]
            read = count * context * 4 * KEYS / READ * 1e6
            say(f"  {count} x {context}: us of a layer, of attention alone; {read:.1f} to read the cache")
            for (name, *_), *seen in zip(ways, times, again, strict=True):
                us = [[ms * 1e3 / len(layers) for ms in pair] for pair in seen]
                say(f"    {name:22s}" + "".join(f"  {first:8.2f} {second:8.2f}" for first, second in us))
                record(f"attention {count} x {context} {name}", us)
            del chains
        del caches
        torch.cuda.empty_cache()
    attention.CUT, attention.SPLITS = kept
    faulthandler.cancel_dump_traceback_later()


def called(runs: Sequence[Callable[[], object]]) -> None:
    for run in runs:
        run()


def time_long() -> None:
    """One row, whole steps with 1,024 and with 32,768 tokens of context, in turns."""
    ways = {"now": attention.attention}
    if before := before_attention():
        ways["before"] = before.attention
    for name, attend in ways.items():
        ops.attention.register("cuda", attend)
        steps = [Step(1, context, steps=33168 - context) for context in (1024, 32768)]
        made = [graph(step) for step in steps]
        took = [
            sorted(times)[1] for times in zip(*([replay(one, 5, 20, 1) for one in made] for _ in range(3)), strict=True)
        ]
        say(f"  {name}: {took[0]:.3f} and {took[1]:.3f} ms, {took[0] / took[1]:.3f} of the speed (bar 0.95)")
        record(f"context 32768 {name}", took)
        del made, steps
        torch.cuda.empty_cache()
    ops.attention.register("cuda", attention.attention)


def speculate() -> None:
    """Steps with drafts as graphs: see speculation.py. The model of the other sections makes room."""
    MODEL.clear()
    speculation.products("cuda", verdict)
    speculation.texts("cuda", say, verdict)
    speculation.speeds("cuda", say, record, ("nvfp4", "bf16"), True, show)


def chunked() -> None:
    """Chunks of prompts as graphs: see chunks.py. Most of the time goes into compiling kernels for fp32."""
    chunks.texts("cuda", say, verdict)


def turns() -> None:
    """What chunks of prompts take by graphs and without."""
    chunks.times(MODEL[0], "cuda", say, record, show)


SECTIONS = {
    "info": (info, 30), "check": (check, 80), "build": (build, 30), "bisect": (bisect, 40), "whole": (whole, 40),
    "halves": (halves, 60), "prefill": (prefill, 50), "parts": (time_prefill, 40), "kernels": (kernels, 60),
    "engine": (engine, 80), "guesses": (guesses, 30), "sample": (time_sample, 40),
    "router": (router, 40),
    "mamba": (time_mamba, 80), "moe": (time_moe, 100), "linear": (time_linear, 80), "pdl": (without_pdl, 30),
    "small": (time_small, 40), "narrow": (narrow, 50), "attention": (time_attention, 100), "long": (time_long, 40),
    "four": (four, 160), "tune": (tune, 150),
    "wide": (time_wide, 90), "ahead": (ahead, 240), "prefill8": (prefill_eight, 120),
    "chunks": (chunked, 120), "turns": (turns, 100), "speculation": (speculate, 150),
}  # fmt: skip
USUAL = (
    "info", "check", "build", "whole", "halves", "prefill", "parts", "kernels", "engine", "guesses", "sample", "mamba",
    "moe", "four", "tune", "speculation",
)  # fmt: skip


def late(*_: object) -> None:
    raise TimeoutError("the section's time is up")


def main(names: list[str]) -> None:
    signal.signal(signal.SIGALRM, late)
    for name, (section, limit) in SECTIONS.items():
        if name not in (*(names or USUAL), "info", "build"):
            continue
        left = 540 - (time.monotonic() - START)
        if left < 10:
            say(f"== {name}: no time left")
            continue
        say(f"== {name} ({time.monotonic() - START:.0f} s)")
        VERDICTS.clear()
        signal.alarm(int(min(limit, left)))
        try:
            with torch.inference_mode():
                section()
        except Exception:
            say(traceback.format_exc(limit=-4))
            record(f"failed {name}", traceback.format_exc(limit=-4))
        finally:
            signal.alarm(0)
        if VERDICTS:
            say(f"  {VERDICTS.count(True)} checks passed, {VERDICTS.count(False)} failed")
    say(f"== done after {time.monotonic() - START:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
