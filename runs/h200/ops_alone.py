"""Sections of check_and_time.py that time ops by themselves, in several cuts."""

import faulthandler
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from checks import check_attention, check_narrow
from compare import error, stored
from gpu import (
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
    READ,
    SHARED,
    STATE,
    VOCABULARY,
    H,
    Q,
    before_attention,
    called,
    each,
    mixers,
    randn,
    record,
    rows,
    say,
    verdict,
)
from torch import Tensor

from leyden import ops
from leyden.bench.kernels import graph, replay
from leyden.cache.pool import recent_width
from leyden.ops.rows import Rows
from leyden.ops.triton import attention, linear, moe, qkv, sample, ssm


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
