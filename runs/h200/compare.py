"""Where the kernels and the references part: op by op on the same inputs, then layer by layer through the whole model.

The measure is a third computation, the references with every weight and activation widened to fp32. Kernels and BF16
references are right if they are equally far from it. Routing is the one step that rounding can flip: the table counts
flips, and the whole comparison is also done with the fp32 run's routing forced on both.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from leyden import ops
from leyden.formats import Weight
from leyden.ops.registry import Op

Call = Callable[..., Any]
HALVES = torch.bfloat16, torch.float16
ROUTES = "route", "add_norm_route"
WRITES = {"mamba_step", "causal_conv", "ssd_scan", "kv_write", "qkv_write", "put"}  # ops that change their arguments


def error(got: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm())


def stored(matrix: Tensor) -> Weight:
    with torch.device("meta"):
        made = Weight(*matrix.shape, dtype=matrix.dtype, format=None).requires_grad_(False)
    made.weight = torch.nn.Parameter(matrix, requires_grad=False)
    return made


def wide(value: Any) -> Any:
    """In fp32, if it is a matrix or activations in 16 bits."""
    if isinstance(value, Weight):
        return stored(value.dense().float())
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


@contextmanager
def calling(instead: Callable[[Op, Call, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within the block every op is instead(op, its own call, arguments)."""
    own = Op.__call__
    inside = False

    def call(op: Op, *args: Any, **options: Any) -> Any:
        nonlocal inside
        if inside:
            return own(op, *args, **options)
        inside = True
        try:
            return instead(op, lambda *a: own(op, *a, **options), args)
        finally:
            inside = False

    Op.__call__ = call  # type: ignore
    try:
        yield
    finally:
        Op.__call__ = own  # type: ignore


def by_op(step: Callable[[], object]) -> dict[str, dict[str, Any]]:
    """Each op of a step by its kernel, its reference and its reference in fp32, on what the references made so far."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)

    def instead(op: Op, run: Call, args: tuple[Any, ...]) -> Any:
        def copied() -> list[Any]:
            return [a.clone() if isinstance(a, Tensor) and op.name in WRITES else a for a in args]

        got = run(*copied())
        with ops.using("reference"):
            exact = run(*(wide(a) for a in copied()))
            wanted = run(*args)
        if op.name in ROUTES:  # whose last two results are ids and weights
            flips = float((got[-2].sort().values != wanted[-2].sort().values).float().mean())
            found["route, share of ids"].append((flips, 0.0, flips))
            got, exact = got[-1].sort().values, exact[-1].sort().values
            near = wanted[-1].sort().values
            found["route, weights"].append((error(got, exact), error(near, exact), error(got, near)))
            return wanted
        for i, parts in enumerate(
            zip(*(v if isinstance(v, tuple) else (v,) for v in (got, exact, wanted)), strict=True)
        ):
            a, b, c = parts
            if isinstance(b, Tensor) and b.dtype == torch.float32 and b.numel():
                name = op.name if i == 0 else f"{op.name}, part {i}"
                if op.name == "linear":
                    name = f"linear {list(args[1].shape)}"
                found[name].append((error(a, b), error(c, b), error(a, c)))
        return wanted

    with calling(instead):
        step()
    table = {}
    for name, entries in found.items():
        kernel, reference, apart = zip(*entries, strict=True)
        table[name] = {
            "calls": len(entries),
            "kernel": sum(kernel) / len(kernel),
            "worst": max(kernel),
            "reference": sum(reference) / len(reference),
            "apart": sum(apart) / len(apart),
        }
    return table


class Trace:
    """What a run of the model left: the residual stream after each layer, the experts of each MoE layer, the logits."""

    def __init__(self, taps: list[Tensor], routes: list[tuple[Tensor, Tensor]], logits: Tensor):
        self.taps, self.routes, self.logits = taps, routes, logits

    def flips(self, other: "Trace") -> list[float]:
        """Share of the choices that the other run did not make, for each MoE layer."""
        shares = []
        for (mine, _), (theirs, _) in zip(self.routes, other.routes, strict=True):
            same = (mine[:, :, None] == theirs[:, None, :]).any(-1)
            shares.append(1 - float(same.float().mean()))
        return shares


def trace(
    step: Callable[[], tuple[list[Tensor], Tensor]],
    version: str | None,
    fp32: bool = False,
    routing: list[tuple[Tensor, Tensor]] | None = None,
) -> Trace:
    """Run `step` by kernels (version None) or references, perhaps in fp32, perhaps with a routing that is given."""
    routes: list[tuple[Tensor, Tensor]] = []

    def instead(op: Op, run: Call, args: tuple[Any, ...]) -> Any:
        if op.name == "route" and routing is not None:
            out = routing[len(routes)]
        else:
            weights = [stored(a.dense().float()) if fp32 and isinstance(a, Weight) else a for a in args]
            if version is None:
                out = run(*args)
            else:
                with ops.using("reference"):
                    out = run(*weights)
        if op.name == "add_norm_route" and routing is not None:
            out = *out[:-2], *routing[len(routes)]
        if op.name in ROUTES:
            routes.append(out[-2:])
        return out

    with calling(instead):
        taps, logits = step()
    return Trace(taps, routes, logits)
