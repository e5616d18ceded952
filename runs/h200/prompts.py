"""Sections of check_and_time.py that time whole prompts, and the kernels of prompts."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from checks import GATHERED, SCANS, check_eight, check_wide
from compare import error
from gpu import (
    BF,
    CHANNELS,
    CHOICES,
    CONFIG,
    EXPERT,
    EXPERTS,
    INNER,
    KV,
    MODEL,
    PROJECTED,
    SHARED,
    STATE,
    VERDICTS,
    H,
    Q,
    awaited,
    each,
    eighth,
    four_bits,
    in_few_bits,
    mixers,
    prompt,
    randn,
    record,
    rows,
    say,
    show,
    tried,
    verdict,
)
from torch import Tensor

from leyden import ops
from leyden.formats.nvfp4 import NVFP4, Tiled, arrange
from leyden.model.context import Context
from leyden.ops import eight as products
from leyden.ops.triton import attention, conv, eight, grouped, moe, nvfp4, scan
from leyden.ops.triton import wide as codes

LISTED = (128, 128, 4, 8), (32, 64, 5, 4)  # rows of x and of the matrix, stages, warps: of rows that are fetched


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
            for how, least in (("as without", inf), ("8 bits", 512), ("as without", inf), ("8 bits", 512)):
                eighth(least)
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
