"""Counts what a step launches on a GPU, on a machine without one: the shapes of 30B-A3B, tensors without memory.

usage: python runs/h200/launches.py

Kernels of this project are counted where Triton would launch them, PyTorch's where an operation that makes new values
is dispatched. A step that would have to read a number from the device does not get through at all: there is none.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from leyden import ops
from leyden.bench import middling
from leyden.cache.pool import NO_DRAFTER, DraftShape, Pool, PoolShape
from leyden.config.drafter import DrafterConfig
from leyden.config.model import ModelConfig
from leyden.engine import draft_capture
from leyden.engine.capture import CapturedGraphs
from leyden.engine.chunk_capture import CapturedChunks
from leyden.engine.draft_capture import CapturedDraftGraphs
from leyden.engine.drafting import Drafting
from leyden.engine.sampler import Sampler
from leyden.formats.nvfp4 import NVFP4, Tiled
from leyden.model.checkpoint import build, matrices
from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.spec.dflash import DFlash
from leyden.spec.mtp import MTP
from leyden.types import Plan, Row

COUNTS: Counter[str] = Counter()
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view"}


class Operations(TorchDispatchMode):
    """Counts what PyTorch would launch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func._schema.name.split("::")[1], func(*args, **(kwargs or {}))
        # "to" and "contiguous" are views by their schemas, but for those that are none
        copied = func.is_view and isinstance(out, Tensor) and not _shared(out, args[0])
        if (copied or not func.is_view) and name not in FREE:
            COUNTS[f"torch {name}"] += 1
        return out


def _shared(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def launched(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
    COUNTS[f"{self.fn.__module__.rsplit('.', 1)[-1]}.{self.fn.__name__}"] += 1


class Once:
    """In place of a graph: the step, once."""

    def __init__(self, step: Callable[[], Tensor], memory: Any):
        COUNTS.clear()
        self.out = step()

    def __call__(self) -> None:
        pass


def pool_of(config: ModelConfig, slots: int, draft: DraftShape) -> Pool:
    half = torch.bfloat16
    return Pool(config, PoolShape(slots + 1, 1000, 16, 4096, half, half, torch.float32, draft), "meta")


def report(name: str, most: int = 40) -> None:
    print(f"{name}: {sum(COUNTS.values())} launches")
    for what, count in COUNTS.most_common(most):
        print(f"    {count:4d} {what}")


def single(config: ModelConfig, model: Any, rows: int, layout: str) -> None:
    pool = pool_of(config, rows, NO_DRAFTER)
    graphs = CapturedGraphs(model, pool, Sampler(rows + 1, config.vocab_size, "meta"), (rows,))
    graphs._size, graphs._width = rows, 64

    def once(what: str, count: int, step: Callable[[], Tensor]) -> Tensor:
        COUNTS.clear()
        return step()

    graphs._run = once  # type: ignore
    graphs.tokens(rows)
    COUNTS["torch clone"] -= 1  # of what is given out
    report(f"{rows} rows of one token, {layout}")


def drafted(config: ModelConfig, model: Any, rows: int, drafter: Any, draft: DraftShape, name: str) -> None:
    pool = pool_of(config, rows, draft)
    sampler = Sampler(rows + 1, config.vocab_size, "meta", draft.width)
    drafting = Drafting([drafter], model, pool, sampler, False)
    graphs = CapturedDraftGraphs(model, pool, sampler, drafting, (rows,))
    plan = Plan(rows=[Row(i + 1, 100, 1 + draft.width, [], True) for i in range(rows)], drafts=draft.width)
    for row in plan.rows:
        row.drafts = draft.width
    form = graphs._load(plan)
    assert form is not None and graphs._whole(plan, form) is not None
    report(f"{rows} rows with {draft.width} drafts of {name}")


def chunk(config: ModelConfig, model: Any, tokens: int, beside: int, layout: str) -> None:
    graphs = CapturedChunks(model, pool_of(config, 32, NO_DRAFTER), (), None)
    COUNTS.clear()
    graphs._forward((beside, tokens))
    report(f"{tokens} tokens of a prompt beside {beside} rows of one, {layout}")


def tiled(network: nn.Module) -> None:
    """Bring matrices in NVFP4 into the order in which the first product leaves them."""
    for _, weight in matrices(network):
        if isinstance(weight.format, NVFP4) and Tiled.fits(weight.shape):
            weight.allot(Tiled(weight.format), torch.device("meta"))


def made(layout: str) -> tuple[ModelConfig, Nemotron, DrafterNetwork]:
    """A release's target and its drafter, without memory."""
    with TemporaryDirectory() as folder:
        described = middling.describe(Path(folder), layout, **middling.RELEASE, num_nextn_predict_layers=1)
        config = ModelConfig.from_folder(described)
    model = build(config, torch.bfloat16, "meta", True).eval().requires_grad_(False)
    network = DrafterNetwork(DrafterConfig.from_dict(middling.drafter_keys(config, "dspark")), torch.bfloat16, "meta")
    if layout == "nvfp4":
        middling.allot(network)
    for one in (model, network):
        tiled(one)
    return config, model, network


def main() -> None:
    JITFunction.run = launched  # type: ignore
    setattr(draft_capture, "Captured", Once)  # noqa: B010
    for layout in middling.LAYOUTS:
        config, model, network = made(layout)
        layers = (6, config.num_key_value_heads, config.head_dim)
        with torch.inference_mode(), ops.standing_for("cuda"), Operations():
            for rows in (1, 8):
                single(config, model, rows, layout)
            for tokens, beside in ((6, 0), (512, 0), (1024, 8)):
                chunk(config, model, tokens, beside, layout)
            drafted(config, model, 1, MTP(model, 3), DraftShape(3, 2, 1), f"mtp, {layout}")
            drafted(config, model, 1, DFlash(network, model, 7), DraftShape(7, 0, 0, layers), f"dspark, {layout}")


if __name__ == "__main__":
    main()
