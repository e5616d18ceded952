"""Steps with drafts on the device: the same text by graphs, without graphs and without drafts; and what they cost.

A section of check_and_time.py. By itself on a machine without a GPU, with small models and steps done again in place of
graphs: PYTHONPATH=. python runs/h200/speculation.py
"""

import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from compare import error
from torch import Tensor
from torch.nn.functional import silu

from leyden import ops
from leyden.bench import middling
from leyden.bench.ladder import Ladder
from leyden.cache.pool import NO_DRAFTER, DraftShape, PoolShape
from leyden.config.model import ModelConfig
from leyden.config.speculative import SpeculativeConfig
from leyden.engine.engine import Engine
from leyden.engine.memory import Split
from leyden.formats import Weight
from leyden.formats.nvfp4 import NVFP4
from leyden.model.checkpoint import build
from leyden.model.nemotron import Nemotron
from leyden.spec.drafter import Draft, Drafter, Heads, Pick, Seen
from leyden.spec.load import load, room
from leyden.testing import checkpoints, drafters
from leyden.testing.again import Again
from leyden.types import Request, SamplingParams

Say = Callable[..., None]
Verdict = Callable[[str, float, float], None]
Record = Callable[[str, object], None]
METHODS = ("mtp", "ngram", "dflash", "dspark", "dspark nvfp4")  # what drafts, and the layout of its network
WIDTH, TOKENS = 3, 40
# (method, drafts, tokens per step by decree)
SPEEDS = (("", 0, 1.0), ("mtp", 3, 2.9), ("dspark", 7, 3.69))


class Told:
    """Knows the text of all sequences, and proposes 0, 1, 2 ... right tokens of it, as the position has it."""

    taps: tuple[int, ...] = ()
    lookahead = 0
    steady = True

    def __init__(self, width: int, text: Tensor):
        self.width, self._text = width, text

    def observe(self, seen: Seen) -> None:
        pass

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        i, positions = torch.arange(count, device=self._text.device), heads.positions.long()[:, None]
        right = self._text[(positions + 1 + i).clamp(max=len(self._text) - 1)]
        return Draft(torch.where(i < positions % (count + 1), right, (right + 1) % 500))


def _engine(model: Nemotron, drafts: Sequence[Drafter], shape: DraftShape, eager: bool) -> Engine:
    """A small engine."""
    single = torch.float32
    pages = PoolShape(
        slots=9, pages=400, page=16, max_model_len=512, kv_dtype=single, conv_dtype=single, ssm_dtype=single,
        draft=shape,
    )  # fmt: skip
    sizes: dict[str, Any] = {"capture_sizes": ()} if eager else {}
    split = Split(pages, 8, 256, 0, 0)
    made = Engine(model, split, drafters=drafts, overlap=True, **sizes)
    pool = made.runner.pool
    for array in (pool.kv, pool.draft, pool.conv, pool.ssm, pool.ring):
        array.fill_(1e3)  # what nobody wrote must not be read
    return made


def _run(engine: Engine, one: bool = False) -> dict[str, list[int]]:
    """Greedy and drawn answers of different lengths, up to eight at once; `one`: greedy ones to the same prompt."""
    for i in range(10):
        prompt = [(7 * i + 5 * j) % 500 for j in range(3 + 9 * i)] if not one else [(5 * j) % 500 for j in range(30)]
        heat = {"temperature": 0.0} if one or i % 3 < 2 else {"temperature": 0.9, "top_p": 0.95}
        params = SamplingParams(max_tokens=TOKENS - 2 * i, ignore_eos=True, seed=i, **heat)
        engine.submit(Request(id=str(i), prompt=prompt, params=params))
    found: dict[str, list[int]] = {}
    steps = 0
    while engine.busy:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    engine.check()
    return found


def products(device: str, verdict: Verdict, hidden: int = 2688, vocabulary: int = 131072) -> None:
    """What a drafter in the four-bit layout multiplies with, against the matrices that the codes stand for."""
    inner, rank, random = hidden * 16 // 7 // 64 * 64, 512, torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=random)

    def stored(*shape: int) -> Weight:
        made = Weight(*shape, dtype=torch.bfloat16, format=NVFP4()).requires_grad_(False).to(device)
        for name, part in NVFP4().quantize(draw(*shape) * shape[1] ** -0.5).items():
            made.parts[name].copy_(part)
        return made

    fc, w2 = stored(hidden, 6 * hidden), stored(vocabulary, rank)
    mlp = [stored(inner, hidden), stored(inner, hidden), stored(hidden, inner)]
    exact = {one: one.dense().float().t() for one in (fc, w2, *mlp)}
    for rows in (1, 8, 64):
        taps, x, few = (draw(rows, size).bfloat16() for size in (6 * hidden, hidden, rank))
        verdict(f"nvfp4 drafter, {rows} rows: fc", error(ops.linear(taps, fc), taps.float() @ exact[fc]), 4e-3)
        gate, up, down = (exact[one] for one in mlp)
        between = silu(x.float() @ gate) * (x.float() @ up)
        verdict("  its MLP", error(ops.swiglu(x, *mlp), between @ down), 1e-2)
        to = draw(rows, 7, vocabulary)[:, 3]
        bound = 1e-5 if device == "cuda" else 2e-3  # kernels for the CPU round a few rows of x
        verdict("  its Markov head", error(ops.add_linear(few, w2, to), to + few.float() @ exact[w2]), bound)


@torch.inference_mode(False)  # weights are loaded by threads, which know nothing of it
def texts(device: str, say: Say, verdict: Verdict) -> None:
    """A small random model in fp32, where rounding decides over nothing."""
    config = ModelConfig.from_dict(checkpoints.PRESETS["mtp"], {})
    model = build(config, torch.float32, mtp=True)
    checkpoints.randomise(model)
    model = model.to(device).eval().requires_grad_(False)
    plain = _run(_engine(model, (), NO_DRAFTER, eager=True))
    graphs = _run(_engine(model, (), NO_DRAFTER, eager=False))
    total = sum(len(text) for text in plain.values())
    verdict("no drafts: tokens that graphs change", _other(plain, graphs) / total, 0)
    same = _run(_engine(model, (), NO_DRAFTER, eager=True), one=True)
    text = torch.tensor([(5 * j) % 500 for j in range(30)] + same["0"], device=device)
    for eager in (True, False):
        told = _engine(model, [Told(WIDTH, text)], DraftShape(WIDTH), eager)
        found, kept = _run(told, one=True), told.stats().accepted_tokens
        verdict(f"told: tokens that drafts change, {'without' if eager else 'with'} graphs", _other(same, found), 0)
        verdict("told: depths at which nothing is kept", sum(not n for n in kept), 0)
        say(f"  told: kept {kept} of {told.stats().drafted_tokens}, {told.stats().recorded_steps} steps by graphs")
    with tempfile.TemporaryDirectory() as made:
        for method in METHODS:
            kind, _, layout = method.partition(" ")
            keys: dict[str, Any] = {"method": kind, "num_speculative_tokens": WIDTH}
            if kind in ("dflash", "dspark"):
                folder = Path(made, method)
                drafters.tiny(folder, config, kind, layout=layout or "bf16")
                keys["model"] = str(folder)
            if kind == "ngram":
                keys |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
            settled = SpeculativeConfig.from_dict(keys).settle(config, "")
            eager, captured = (
                _engine(model, load(settled, model), room(settled, config), eager) for eager in (True, False)
            )
            one, other = _run(eager), _run(captured)
            verdict(f"{method}: tokens that drafts change, without graphs", _other(plain, one) / total, 0)
            verdict(f"{method}: with graphs", _other(plain, other) / total, 0)
            a, b = eager.stats(), captured.stats()
            verdict(f"{method}: drafters that failed", a.failed_drafts + b.failed_drafts, 0)
            apart = sum(abs(x - y) for x, y in zip(a.accepted_tokens, b.accepted_tokens, strict=True))
            verdict(f"{method}: drafts kept with graphs and without, apart", apart / max(1, a.drafted_tokens), 0.02)
            made_graphs: Any = captured.runner.draft_graphs
            verdict(f"{method}: steps without a graph", float(not b.recorded_steps), 0)
            verdict(f"{method}: drafters outside of the graphs", float(not made_graphs._drafts), 0)
            kept = f"{b.accepted_tokens} of {b.drafted_tokens} drafts ({a.accepted_tokens} of {a.drafted_tokens})"
            say(f"  {method}: {len(made_graphs._programs)} graphs, {b.recorded_steps} steps by graphs, kept {kept}")


def _other(texts: dict[str, list[int]], others: dict[str, list[int]]) -> int:
    """Tokens behind the first one that is another."""
    count = 0
    for name, text in texts.items():
        found = others.get(name, [])
        pairs = enumerate(zip(text, found, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(found)))
        count += max(len(text), len(found)) - same
    return count


@torch.inference_mode(False)
def speeds(
    device: str, say: Say, record: Record, layouts: tuple[str, ...], release: bool,
    profile: Callable[[Callable[[], object], str], None] | None = None,
) -> None:  # fmt: skip
    """Tokens per second of one sequence with synthetic acceptance. profile: shows the kernels of a step."""
    sizes = middling.RELEASE if release else {"hidden_size": 256, "vocab_size": 4096, "n_routed_experts": 8}
    with tempfile.TemporaryDirectory() as made:
        for layout in layouts:
            folder, alone = middling.describe(Path(made, layout), layout, **sizes, num_nextn_predict_layers=1), 0.0
            target = ModelConfig.from_folder(folder)
            network = middling.drafter(Path(made, f"drafter {layout}"), target, "dspark", layout, device=device)
            for method, drafts, kept in SPEEDS:
                keys: dict[str, Any] = {}
                if method:
                    keys = {"method": method, "num_speculative_tokens": drafts, "rejection_sample_method": "synthetic",
                            "synthetic_acceptance_length": kept}  # fmt: skip
                if method == "dspark":
                    keys["model"] = str(network)
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
                context = 1024 if release else 40
                ladder = Ladder(
                    folder, None, "dummy", [1], context, device, SamplingParams(temperature=1.0, top_p=0.95),
                    speculative_config=keys, kv_cache_memory_bytes=2**31, mamba_ssm_cache_dtype="float32",
                )  # fmt: skip
                cell = ladder.decode(1, context, 3)
                alone = alone or cell.tokens_per_s
                ms, rate = cell.tokens_per_step / cell.tokens_per_s * 1e3, cell.tokens_per_s
                name = f"{method or 'no drafts'}, {drafts} drafts, {layout}"
                say(f"  {name}: {ms:.3f} ms a step, {cell.tokens_per_step:.2f} tokens a step (synthetic), "
                    f"{rate:.0f} tok/s, {rate / alone:.2f} x without")  # fmt: skip
                record(f"speculation {name}", {"ms": ms, "tok/s": rate, "tokens a step": cell.tokens_per_step})
                if profile is not None:
                    waits = _profiled(ladder, context, profile, name)
                    say(f"    waits for the device in eight steps: {waits or 'none'}")
                    record(f"speculation {name}, waits", waits)
                del ladder


def _profiled(ladder: Ladder, context: int, profile: Callable[[Callable[[], object], str], None], name: str) -> str:
    """Steps in the middle of an answer -> what of them waited for the device."""
    engine, waits = ladder.engine, ""
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=400, ignore_eos=True, seed=1)
    engine.submit(Request(id="profiled", prompt=[5] * (context // 2), params=params))
    for _ in range(12):
        engine.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            engine.step()
    except RuntimeError as error:
        waits = str(error)[:300]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    profile(engine.step, name)
    engine.abort("profiled")
    while engine.busy:
        engine.step()
    return waits


def main() -> None:
    """Everything but the graphs, on the CPU."""
    from leyden.engine import draft_capture, runner
    from leyden.engine.draft_capture import CapturedDraftGraphs

    def check(name: str, value: float, bound: float) -> None:
        print(f"  {'ok  ' if value <= bound else 'FAIL'} {name}: {value:.3g}")

    setattr(draft_capture, "Captured", Again)  # noqa: B010
    setattr(runner, "draft_graphs", CapturedDraftGraphs)  # noqa: B010
    products("cpu", check, 128, 512)
    texts("cpu", print, check)
    speeds("cpu", print, lambda name, value: None, ("bf16", "nvfp4"), False)


if __name__ == "__main__":
    main()
