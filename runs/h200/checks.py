"""Sections of check_and_time.py that compare kernels with their references, on fresh random inputs, each twice."""

import faulthandler
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from compare import error, stored, wide
from gpu import (
    BF,
    CHANNELS,
    CHOICES,
    CONFIG,
    EXPERT,
    EXPERTS,
    INNER,
    KEYS,
    KV,
    MODEL,
    PROJECTED,
    QUERIES,
    SHARED,
    STATE,
    VOCABULARY,
    H,
    Q,
    mixers,
    randn,
    record,
    rows,
    say,
    tried,
    verdict,
)
from torch import Tensor

from leyden import ops
from leyden.bench.kernels import graph
from leyden.cache.pool import recent_width
from leyden.formats.nvfp4 import arrange
from leyden.ops.reference import eight as exactly
from leyden.ops.rows import Rows
from leyden.ops.triton import attention, eight, linear, moe, nvfp4, qkv, scan, ssm
from leyden.ops.triton import wide as codes

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
