"""Kernels of FlashInfer and Humming against the references and against ours, on real shapes; then engines with them.

usage: python3 runs/h200/foreign.py [step] [experts] [humming] [engines]      (without arguments all of them)

A package that is not there is said to be missing, and what needs it is left out. The first call of a kernel compiles
it: FlashInfer's with nvcc and ninja (the state update in a minute or two for each type of state, the experts in many),
Humming's with NVRTC in seconds. Errors are those of the results against fp32 references, beside those of our kernels;
times are microseconds of CUDA graphs, with weights or states of several layers in turn.
"""

import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from compare import error, stored, wide
from gpu import BF, CHANNELS, CONFIG, INNER, PROJECTED, STATE, each, randn, rows, say
from torch import Tensor

from leyden import ops
from leyden.config.engine import EngineConfig
from leyden.engine.engine import Engine
from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.formats.nvfp4 import NVFP4
from leyden.ops import flashinfer, humming
from leyden.testing.checkpoints import tiny
from leyden.types import Request, SamplingParams

LAYERS = 4  # in turn
H, EXPERTS, CHOICES = CONFIG.hidden_size, CONFIG.n_routed_experts, CONFIG.num_experts_per_tok
EXPERT, SHARED = CONFIG.moe_intermediate_size, CONFIG.shared_expert_width


def compared(name: str, run: Callable[[], Tensor], ours: Callable[[], Tensor], exact: Tensor) -> None:
    theirs, mine = error(run(), exact), error(ours(), exact)
    verdict = "ok" if theirs < max(2 * mine, 1e-6) else "FAIL"
    say(f"  {verdict:4s} {name:44s} error {theirs:.2e}, ours {mine:.2e}")


def step() -> None:
    heads, dim, n = STATE
    layer = (
        randn(CHANNELS, 4, scale=0.5), randn(CHANNELS, scale=0.1), torch.linspace(0, 2.7, heads).cuda(),
        randn(heads, dtype=torch.float32), randn(heads, dtype=torch.float32) - 4, (0.0, float("inf")),
        1 + randn(INNER, scale=0.1), CONFIG.n_groups, 1e-5,
    )  # fmt: skip
    kernels = {name: flashinfer.step("step", name) for name in flashinfer.ALGORITHMS}
    for dtype in (torch.float32, torch.float16):
        for count in (1, 8, 64, 256):
            batch = rows([1024 * (i % 7 != 3) for i in range(count)])
            x = randn(count, PROJECTED)
            states = [
                (randn(count + 1, 3, CHANNELS), randn(count + 1, heads, dim, n, dtype=dtype)) for _ in range(LAYERS)
            ]

            kept = states[0][0].clone(), states[0][1].clone()

            def one(op: Callable[..., Tensor], x: Tensor = x, batch: Any = batch, kept: Any = kept) -> Tensor:
                conv, ssm = kept[0].clone(), kept[1].clone()
                y = op(x, *layer, conv, ssm, batch)
                return torch.cat([y.float().flatten(), ssm[batch.slots].float().flatten() * 0.1])

            with ops.using("reference"):
                exact = kept[1].to(torch.float32, copy=True)
                made = ops.mamba_step(wide(x), *(wide(v) for v in layer), kept[0].float(), exact, batch)
            wanted = torch.cat([made.flatten(), exact[batch.slots].flatten() * 0.1])
            label = f"{count:3d} rows {str(dtype)[6:]}"
            for name, op in (("ours", ops.mamba_step), *kernels.items()):
                try:
                    if name != "ours":
                        compared(f"{label} {name}", lambda op=op: one(op), lambda: one(ops.mamba_step), wanted)
                    each(f"{label} {name}", [partial(op, x, *layer, *both, batch) for both in states])
                except Exception as problem:
                    say(f"  FAIL {label} {name}: {type(problem).__name__}: {str(problem)[:300]}")


def chosen(count: int) -> tuple[Tensor, Tensor, Tensor]:
    x = randn(count, H)
    ids = torch.rand(count, EXPERTS, device="cuda").topk(CHOICES).indices
    return x, ids, torch.rand(count, CHOICES, device="cuda")


def experts() -> None:
    flashinfer.register_experts("experts")
    stacks = [(randn(EXPERTS, EXPERT, H, scale=0.02), randn(EXPERTS, H, EXPERT, scale=0.02)) for _ in range(LAYERS)]
    ours = [(stored(up), stored(down)) for up, down in stacks]
    theirs = [(stored(up), stored(down)) for up, down in stacks]
    for weight in (weight for pair in theirs for weight in pair):
        weight.format = flashinfer.Cutlass()
    for count in (1, 8, 64, 256, 2048):
        chose = chosen(count)
        with ops.using("reference"):
            wanted = ops.experts(*(wide(v) for v in chose), *(wide(w) for w in ours[0]))
        label = f"{count:4d} rows"
        compared(label, lambda c=chose: ops.experts(*c, *theirs[0]), lambda c=chose: ops.experts(*c, *ours[0]), wanted)
        for name, pairs in (("ours", ours), ("cutlass", theirs)):
            each(f"{label} {name}", [lambda c=chose, pair=pair: ops.experts(*c, *pair) for pair in pairs])


def quantised(*shape: int) -> tuple[Weight, Weight, Tensor]:
    """The same random matrix in NVFP4 for our kernels and for Humming's, and its values."""
    made, values = [], None
    parts = NVFP4().quantize(randn(*shape, scale=shape[-1] ** -0.5).float())
    for _ in range(2):
        with torch.device("meta"):
            weight = Weight(*shape, dtype=BF).requires_grad_(False)
        weight.allot(NVFP4(), torch.device("cuda"))
        for name, part in parts.items():
            weight.parts[name].copy_(part)
        values = weight.dense().float()
        made.append(weight)
    humming.lay(made[1], humming.find_layer("humming"))
    assert values is not None
    return made[0], made[1], values


def with_humming() -> None:
    humming.register()
    for rows_of, columns in ((SHARED, H), (H, SHARED), (16384, H)):
        pairs = [quantised(rows_of, columns) for _ in range(LAYERS)]
        for count in (1, 8, 64, 256, 2048):
            x = randn(count, columns)
            label = f"{rows_of} x {columns}, {count:4d} rows"
            with ops.using("reference"):
                wanted = ops.linear(x.float(), stored(pairs[0][2]))
            compared(
                label, lambda x=x, p=pairs: ops.linear(x, p[0][1]), lambda x=x, p=pairs: ops.linear(x, p[0][0]), wanted
            )
            for name, i in (("ours", 0), ("humming", 1)):
                each(f"{label} {name}", [lambda x=x, w=pair[i]: ops.linear(x, w) for pair in pairs])
    pairs = [(quantised(EXPERTS, EXPERT, H), quantised(EXPERTS, H, EXPERT)) for _ in range(2)]
    for count in (1, 8, 64, 256, 2048):
        chose = chosen(count)
        with ops.using("reference"):
            wanted = ops.experts(*(wide(v) for v in chose), *(stored(w[2]) for w in pairs[0]))
        compared(
            f"experts, {count:4d} rows",
            lambda c=chose: ops.experts(*c, pairs[0][0][1], pairs[0][1][1]),
            lambda c=chose: ops.experts(*c, pairs[0][0][0], pairs[0][1][0]),
            wanted,
        )
        for name, i in (("ours", 0), ("humming", 1)):
            each(
                f"experts, {count:4d} rows {name}",
                [lambda c=chose, up=up[i], down=down[i]: ops.experts(*c, up, down) for up, down in pairs],
            )


def answers(folder: str, **options: Any) -> list[list[int]]:
    made = Engine.load(EngineConfig(model=folder, device="cuda", max_model_len=256, max_num_seqs=8, **options))
    texts: dict[str, list[int]] = {str(i): [] for i in range(8)}
    for name in texts:
        prompt = [(7 * int(name) + j) % 512 for j in range(1 + 5 * int(name))]
        made.submit(Request(id=name, prompt=prompt, params=SamplingParams(temperature=0, max_tokens=48)))
    while made.busy:
        for delta in made.step():
            texts[delta.request_id] += delta.token_ids
    return list(texts.values())


def engines() -> None:
    """A small model of real shapes where the packages want them: answers with their kernels, against ours."""
    shapes = {
        "torch_dtype": "bfloat16", "hidden_size": 256, "mamba_num_heads": 8, "mamba_head_dim": 64,
        "ssm_state_size": 128, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 128,
    }  # fmt: skip
    for options in (
        {"mamba_backend": "flashinfer"},
        {"mamba_backend": "flashinfer", "mamba_ssu_algorithm": "horizontal", "mamba_ssm_cache_dtype": "float16",
         "enable_mamba_cache_stochastic_rounding": True, "mamba_cache_philox_rounds": 5},
        {"moe_backend": "flashinfer_cutlass"},
        {"moe_backend": "humming", "linear_backend": "humming", "quantization": "nvfp4"},
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            tiny(Path(folder), **shapes)
            plain = {key: value for key, value in options.items() if not key.endswith(("backend", "algorithm"))}
            try:
                theirs, ours = answers(folder, **options), answers(folder, **plain)
            except ConfigError as problem:
                say(f"  {problem}")
                continue
            same = [sum(a == b for a, b in zip(t, o, strict=False)) for t, o in zip(theirs, ours, strict=True)]
            first = sum(t[:4] == o[:4] for t, o in zip(theirs, ours, strict=True))
            say(f"  {options}: {sum(same)} of {sum(map(len, ours))} tokens, {first} of {len(ours)} beginnings alike")


SECTIONS = {"step": step, "experts": experts, "humming": with_humming, "engines": engines}


def main() -> None:
    for name in sys.argv[1:] or SECTIONS:
        say(f"{name}:")
        try:
            SECTIONS[name]()
        except ConfigError as problem:
            say(f"  {problem}")
        except Exception:
            say(traceback.format_exc(limit=-4))


if __name__ == "__main__":
    main()
