"""How fast every op of the network runs by itself, and how far from what the memory and the arithmetic would allow.

Each op is called as a decode step calls it, at the shapes of the 30B-A3B releases, with weights, states, keys and
experts in turn, so that nothing is in a cache from the call before. On CUDA a round of calls is one graph: what is
measured is the device, not Python. The roof of an op is the larger of two times: its bytes, each read or written once,
at the speed at which memory was read just before, and its operations at the speed of a large matrix product.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from leyden import ops
from leyden.bench import middling
from leyden.cache.pool import DraftShape, Pool, PoolShape
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.model.checkpoint import build, dummy
from leyden.ops.rows import Rows

_COLD = {"cuda": 256 * 2**20, "cpu": 96 * 2**20}  # bytes that calls in turn should touch: more than any cache
_MOST = 32  # calls of a round
_LAYERS = "MMMM****EE"  # of the model whose weights are used: enough of each to be read in turn
_DRAFTS = 3  # of the rows of mamba_verify and mamba_replay
_PAGE = 16


@dataclass(slots=True)
class Case:
    """One op with its arguments in turn. bytes and flops: of one call; each: calls of it in a decode step."""

    name: str
    calls: list[Callable[[], object]]
    bytes: float
    flops: float = 0.0
    each: int = 0


@dataclass(slots=True)
class Found:
    """What a call takes, in microseconds, and the share of the roof that it reaches."""

    op: str
    batch: int
    us: float
    roof_us: float
    share: float
    bound: str  # memory or arithmetic
    bytes: float
    flops: float
    each: int


@dataclass(frozen=True, slots=True)
class Roof:
    """bandwidth in bytes/s, arithmetic in operations/s, as this device had them when they were measured."""

    bandwidth: float
    arithmetic: float

    @classmethod
    def measured(cls, device: str, dtype: torch.dtype) -> "Roof":
        size = 8192 if device == "cuda" else 1024
        memory = torch.ones((2048 if device == "cuda" else 256) << 18, device=device)
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        copied = torch.empty_like(memory)
        reading = memory.nbytes / seconds([memory.sum], device)
        copying = 2 * memory.nbytes / seconds([partial(copied.copy_, memory)], device)
        return cls(max(reading, copying), 2 * size**3 / seconds([lambda: a @ b], device))


def graph(run: Callable[[], object], prepare: int = 2) -> Any:
    """A CUDA graph of `run`, after it ran `prepare` times."""
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


def replay(made: Any, warm: int = 3, timed: int = 10, rounds: int = 3) -> float:
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
    return median(times)


def seconds(calls: Sequence[Callable[[], object]], device: str, least: float = 0.02) -> float:
    """Of one of `calls`, which run in turn: median of five rounds of at least `least` seconds on the CPU."""
    if device == "cuda":
        return replay(graph(lambda: [call() for call in calls])) * 1e-3 / len(calls)
    for call in calls:
        call()
    times: list[float] = []
    while len(times) < 5:
        started, done = time.perf_counter(), 0
        while done == 0 or time.perf_counter() - started < least:
            for call in calls:
                call()
            done += len(calls)
        times.append((time.perf_counter() - started) / done)
    return median(times)


class Bench:
    """Weights, a pool and random inputs for the cases of one batch size."""

    def __init__(self, config: ModelConfig, pattern: str, batch: int, context: int, device: str, ssm: torch.dtype):
        """`pattern` is that of the whole model; `config` has fewer layers."""
        self.config, self.pattern, self.batch, self.context, self.device = config, pattern, batch, context, device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.model: Any = build(config, self.dtype, device).eval().requires_grad_(False)
        dummy(self.model)
        self.ssm = ssm

    def at(self, batch: int) -> "Bench":
        """The same weights for another batch size, and a pool for it."""
        made = object.__new__(Bench)
        made.__dict__ |= self.__dict__ | {"batch": batch}
        state = self.config.mamba_num_heads * self.config.mamba_head_dim * self.config.ssm_state_size
        made.turns = max(2, min(_MOST // 2, _COLD[self.device] // (batch * state * self.ssm.itemsize)))
        slots, per = made.turns * batch, -(-(self.context + 16) // _PAGE)
        shape = PoolShape(
            slots=slots + 1, pages=batch * per * 2 + 1, page=_PAGE, max_model_len=per * _PAGE, kv_dtype=self.dtype,
            conv_dtype=self.dtype, ssm_dtype=self.ssm, draft=DraftShape(_DRAFTS),
        )  # fmt: skip
        small = replace(self.config, pattern=self.config.pattern.replace("MMMM", "M", 1))
        made.pool = Pool(small, shape, self.device)
        for array in (made.pool.kv, made.pool.conv, made.pool.ssm, made.pool.ring):
            array.normal_()
        order = torch.randperm(batch * per * 2, device=self.device).add(1).int()
        made.tables = order.view(2, batch, per)
        return made

    turns: int
    pool: Pool
    tables: Tensor

    def mixers(self, letter: str) -> list[Any]:
        return [layer.mixer for i, layer in enumerate(self.model.backbone.layers) if self.config.pattern[i] == letter]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def rows(self, turn: int, each: int = 1) -> Rows:
        """The rows of one turn: other slots than those of the turn before, and other pages."""
        count, device = self.batch, self.device
        starts = torch.arange(0, count * each + 1, each, dtype=torch.int32, device=device)
        past = torch.full((count,), self.context, dtype=torch.int32, device=device)
        slots = torch.arange(1 + turn * count, 1 + (turn + 1) * count, dtype=torch.int32, device=device)
        return Rows((each,) * count, starts, past, slots, self.tables[turn % 2])

    def product(self, name: str, weights: list[Weight], each: int, dtype: torch.dtype | None = None) -> Case:
        size, k = weights[0].shape
        x = self.normal(self.batch, k)
        moved = _stored(weights[0]) + self.batch * (k * x.itemsize + size * (dtype or self.dtype).itemsize)
        turns = max(1, min(_MOST, len(weights) * -(-_COLD[self.device] // (len(weights) * _stored(weights[0])))))
        calls = [partial(ops.linear, x, weight, dtype) for weight in islice(cycle(weights), turns)]
        return Case(name, list(calls), moved, 2 * self.batch * size * k, each)

    def cases(self) -> Iterator[Case]:
        """Every op of a decode step, in its order."""
        config, batch = self.config, self.batch
        mamba, attention, experts = (self.mixers(letter) for letter in "M*E")
        count = {letter: self.pattern.count(letter) for letter in "M*E"}
        layers, hidden, wide = len(self.pattern), config.hidden_size, self.dtype.itemsize

        tokens = [torch.randint(config.vocab_size, (batch,), device=self.device) for _ in range(8)]
        table = self.model.backbone.embeddings
        yield Case("embed", [partial(ops.embed, t, table) for t in tokens], 2 * batch * hidden * wide, 0, 1)
        norm = self.model.backbone.norm_f
        pairs = [(self.normal(batch, hidden), self.normal(batch, hidden)) for _ in range(8)]
        calls: list[Callable[[], object]] = [partial(ops.add_rms_norm, *pair, norm.weight, norm.eps) for pair in pairs]
        yield Case("add_rms_norm", calls, 4 * batch * hidden * wide, 0, layers - count["E"])

        yield self.product("in_proj", [m.in_proj for m in mamba], count["M"])
        yield from self.mamba(mamba[0], count["M"])
        yield self.product("out_proj", [m.out_proj for m in mamba], count["M"])

        cache, kv = self.pool.kv, (config.num_key_value_heads, config.head_dim)
        x, q = self.normal(batch, hidden), self.normal(batch, config.num_attention_heads, config.head_dim)
        turns = [(cache[turn % len(cache)], self.rows(turn % self.turns)) for turn in range(2 * len(cache))]
        one = 2 * batch * kv[0] * kv[1] * wide
        matrices = [(m.q_proj, m.k_proj, m.v_proj) for m in islice(cycle(attention), len(turns))]
        calls = [partial(ops.qkv_write, x, *three, *turn) for three, turn in zip(matrices, turns, strict=True)]
        size = sum(weight.shape[0] for weight in matrices[0])
        moved = sum(map(_stored, matrices[0])) + batch * (hidden + size) * wide
        yield Case("qkv_write", calls, moved, 2 * batch * hidden * size, count["*"])
        seen = one * (self.context + 1)
        flops = 4 * q.numel() * (self.context + 1)
        yield Case("attention", [partial(ops.attention, q, *turn) for turn in turns], seen, flops, count["*"])
        yield self.product("o_proj", [m.o_proj for m in attention], count["*"])

        yield from self.experts(experts, count["E"])
        yield self.product("head", [self.model.lm_head], 1, torch.float32)
        yield self.sample()

    def mamba(self, mixer: Any, each: int) -> Iterator[Case]:
        """The step of one token, and of rows with drafts."""
        config, batch, pool = self.config, self.batch, self.pool
        layer = (*mixer._recurrence, mixer.norm.weight, config.n_groups, mixer.norm.eps, pool.conv[0], pool.ssm[0])
        inner, channels, heads = config.mamba_inner, config.conv_dim, config.mamba_num_heads
        state, window = pool.ssm[0, 0].nbytes, pool.conv[0, 0].nbytes
        moving = batch * (inner + channels + heads + inner) * self.dtype.itemsize
        flops = batch * 6 * pool.ssm[0, 0].numel()
        x = self.normal(batch, inner + channels + heads)
        calls = [partial(ops.mamba_step, x, *layer, self.rows(turn)) for turn in range(self.turns)]
        yield Case("mamba_step", list(calls), 2 * batch * (state + window) + moving, flops, each)
        few = 1 + _DRAFTS
        x = self.normal(few * batch, inner + channels + heads)
        verify = [
            partial(ops.mamba_verify, x, *layer, pool.ring[0], self.rows(turn, few)) for turn in range(self.turns)
        ]
        ring = batch * pool.ring[0, 0].nbytes
        yield Case(
            f"mamba_verify, {few} tokens", list(verify), batch * (state + window) + few * moving + ring, few * flops
        )
        counts = torch.full((batch,), few, dtype=torch.int32, device=self.device)
        replays: list[Callable[[], object]] = []
        for turn in range(self.turns):
            rows = self.rows(turn)
            states = (pool.conv[0], pool.ssm[0], pool.ring[0], rows.slots, rows.past, counts)
            replays.append(partial(ops.mamba_replay, *mixer._recurrence, config.n_groups, *states))
        yield Case(f"mamba_replay, {few} tokens", replays, 2 * batch * (state + window) + ring, few * flops)

    def experts(self, mixers: list[Any], each: int) -> Iterator[Case]:
        """The router, and the experts of other tokens each time."""
        config, batch, k = self.config, self.batch, self.config.num_experts_per_tok
        total, wide, x = config.n_routed_experts, self.dtype.itemsize, self.normal(self.batch, config.hidden_size)
        turns, norm = list(islice(cycle(mixers), _MOST // 2)), self.model.backbone.norm_f
        sums: list[Callable[[], object]] = [
            partial(ops.add_norm_route, x, x, norm.weight, norm.eps, *m._router) for m in turns
        ]
        moved = mixers[0].gate.weight.nbytes + 4 * x.nbytes
        yield Case("add_norm_route", sums, moved, 2 * batch * total * config.hidden_size, each)
        calls: list[Callable[[], object]] = []
        touched = 0
        for mixer in turns:
            ids = torch.rand(batch, total, device=self.device).topk(k).indices
            weights = torch.rand(batch, k, device=self.device)
            touched += ids.unique().numel()
            up, down, shared = mixer.experts.up_proj, mixer.experts.down_proj, mixer.shared_experts
            calls.append(partial(ops.moe, x, ids, weights, up, down, shared.up_proj, shared.down_proj))
        one = (_stored(up) + _stored(down)) / total
        moved = one * touched / len(turns) + _stored(shared.up_proj) + _stored(shared.down_proj)
        inner = k * config.moe_intermediate_size + config.shared_expert_width
        yield Case(
            "moe", calls, moved + 2 * batch * config.hidden_size * wide, 4 * batch * config.hidden_size * inner, each
        )

    def sample(self) -> Case:
        """Temperature 1 and top_p 0.95."""
        batch, vocabulary = self.batch, self.config.vocab_size
        logits = [self.normal(batch, vocabulary, dtype=torch.float32) for _ in range(4)]
        one, none = torch.ones(batch, device=self.device), torch.zeros(batch, dtype=torch.int64, device=self.device)
        at = torch.arange(batch, device=self.device)
        calls = [partial(ops.sample, z, one, none, one * 0.95, one * 0, at, at) for z in logits]
        return Case("sample", list(calls), batch * vocabulary * 4, 0, 1)


def _stored(weight: Weight) -> int:
    return sum(part.nbytes for part in weight.parts.values())


def measure(bench: Bench, roof: Roof, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Found]:
    """Each case of the bench whose op is `wanted`, one after the other."""
    for case in bench.cases():
        if wanted(case.name):
            took = seconds(case.calls, bench.device)
            memory, arithmetic = case.bytes / roof.bandwidth, case.flops / roof.arithmetic
            best, bound = max(memory, arithmetic), "memory" if memory >= arithmetic else "arithmetic"
            yield Found(
                case.name, bench.batch, took * 1e6, best * 1e6, best / took, bound, case.bytes, case.flops, case.each
            )


def main(argv: Sequence[str]) -> int:
    """`leyden bench kernels`: print the table."""
    parser = argparse.ArgumentParser(
        "leyden bench kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", metavar="NAMES", help="only ops whose names begin so, with commas: moe,mamba")
    parser.add_argument("--batch", default="1,8,64", help="sequences of a step, with commas (default 1,8,64)")
    parser.add_argument("--context", type=int, default=1024, help="keys that attention sees (default 1024)")
    parser.add_argument(
        "--layout", choices=["bf16", "nvfp4"], default="bf16", help="formats of the weights, as released"
    )
    parser.add_argument("--mamba-ssm-cache-dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--middling", action="store_true", help="shapes of a model of 1.6 billion (default on the CPU)")
    parser.add_argument("--release", action="store_true", help="shapes of 30B-A3B (default on CUDA; takes 9 GB)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="shapes of the model whose config.json is there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args(argv)
    try:
        batches = [int(word) for word in given.batch.split(",")]
        assert min(batches) > 0
    except (ValueError, AssertionError):
        raise ConfigError(f"--batch: expected whole numbers from 1 on, with commas, got {given.batch!r}") from None
    names = tuple(given.ops.split(",")) if given.ops else ("",)
    big = given.release or (given.device == "cuda" and not given.middling)
    dtype = getattr(torch, given.mamba_ssm_cache_dtype)
    with torch.inference_mode():
        whole = bench(given.device, big, given.layout == "nvfp4", given.context, dtype, given.model)
        roof = Roof.measured(given.device, whole.dtype)
        found = [line for batch in batches for line in measure(whole.at(batch), roof, lambda n: n.startswith(names))]
    if not found:
        raise ConfigError(f"--ops: no op begins with {given.ops!r}; there are {', '.join(_names(whole))}")
    if given.json:
        print(json.dumps({"roof": asdict(roof), "ops": [asdict(line) for line in found]}))
    else:
        print(table(found, roof))
    return 0


def bench(
    device: str, release: bool, mixed: bool, context: int, ssm: torch.dtype = torch.float32, folder: Path | None = None
) -> Bench:
    """With weights in place. mixed: in the formats of the NVFP4 releases. folder: of another model's config.json."""
    sizes = middling.RELEASE if release else {}
    with TemporaryDirectory() as made:
        full = ModelConfig.from_folder(folder or middling.describe(Path(made, "whole"), **sizes))
    few = replace(full, pattern=_LAYERS, quantization=None, intermediate_sizes=())
    if mixed:
        few = replace(few, quantization=middling.mixed(few))
    return Bench(few, full.pattern, 1, context, device, ssm)


def _names(whole: Bench) -> list[str]:
    return [case.name for case in whole.at(1).cases()]


def table(found: Sequence[Found], roof: Roof) -> str:
    """One line for each op, and for each batch size what a decode step of all layers comes to."""
    lines = [f"roofs: {roof.bandwidth / 1e12:.3f} TB/s, {roof.arithmetic / 1e12:.2f} TFLOP/s"]
    for batch in dict.fromkeys(line.batch for line in found):
        lines.append(f"{f'batch {batch}':24s} {'us':>9} {'roof':>9} {'share':>6} {'bound':>11} {'calls a step':>13}")
        here = [line for line in found if line.batch == batch]
        lines += [
            f"{line.op:24s} {line.us:9.1f} {line.roof_us:9.1f} {line.share:6.0%} {line.bound:>11} {line.each or '':>13}"
            for line in here
        ]
        took, least = (sum(getattr(line, what) * line.each for line in here) for what in ("us", "roof_us"))
        if took:
            lines.append(f"{'all calls of a step':24s} {took:9.0f} {least:9.0f} {least / took:6.0%}")
    return "\n".join(lines)


_EXAMPLES = """examples:
  leyden bench kernels                                  everything, on the GPU if there is one
  leyden bench kernels --ops moe,add_norm --batch 1,2,4    the experts of few tokens
  leyden bench kernels --layout nvfp4 --json            in 4 bits, for a program to read

share is roof / us: 100 % cannot be had, 85 % is good. An op that is far below at batch 1 waits for something else than
bytes: its launch takes 1 to 2 us whatever it does. mamba_verify and mamba_replay belong to steps with drafts."""
