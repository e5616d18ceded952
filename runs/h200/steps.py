"""Sections of check_and_time.py that time whole decode steps, and say what they are made of."""

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import compare
import torch
from checks import check_few_bits
from compare import error
from gpu import (
    BF,
    CHOICES,
    CONFIG,
    EXPERT,
    EXPERTS,
    INNER,
    KEYS,
    MODEL,
    PROJECTED,
    QUERIES,
    READ,
    SHARED,
    STATE,
    VOCABULARY,
    H,
    Step,
    before_attention,
    each,
    in_few_bits,
    mixers,
    prompt,
    randn,
    record,
    say,
    show,
    tried,
    verdict,
)
from torch import Tensor

from leyden import ops
from leyden.bench import kernels as table_of
from leyden.bench.kernels import graph, replay
from leyden.cache.pool import Pool, PoolShape, recent_width
from leyden.formats.nvfp4 import arrange
from leyden.model.context import Context
from leyden.ops.rows import Rows
from leyden.ops.triton import attention, launch, linear, moe, nvfp4, packed

FOUR_BITS = {1: 1000, 8: 3000, 32: 5800, 64: 9300, 128: 15500, 256: 25000}  # tok/s, the bars in the release's formats
VLLM = {1: 297, 8: 1144, 32: 2378, 64: 3702, 128: 6288}  # tok/s, the peer's BF16 row


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
