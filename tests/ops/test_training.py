"""Training's versions against the references: values and every gradient, on rows of mixed lengths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.formats import Weight
from leyden.model.context import Context
from leyden.ops import Op
from leyden.ops.rows import Rows
from tests.batches import weight

LENS = [1, 5, 130, 2, 64, 65, 7, 200]
TOKENS = sum(LENS)
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rows() -> Rows:
    return Context.packed(LENS).wide


def gradients(run: Callable[..., Any], args: tuple[Any, ...], version: str) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, gradients of every floating-point argument), of the sum of the outputs times fixed random numbers."""
    args = tuple(a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    for arg in args:
        if isinstance(arg, Weight):
            arg.requires_grad_().zero_grad()
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    leaves += [p for a in args if isinstance(a, Weight) for p in a.parameters()]
    with ops.using(version):
        outputs = run(*args)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    loss = sum((out * randn(*out.shape, seed=9 + i)).sum() for i, out in enumerate(outputs))
    return outputs, list(torch.autograd.grad(loss, leaves))


CASES = {
    "rms_norm": (ops.rms_norm, lambda: (randn(TOKENS, 32), randn(32, seed=1), 1e-5)),
    "add_rms_norm": (ops.add_rms_norm, lambda: (randn(TOKENS, 32), randn(TOKENS, 32, seed=1), randn(32, seed=2), 1e-5)),
    "gated_norm": (
        ops.gated_norm,
        lambda: (randn(TOKENS, 24), randn(TOKENS, 24, seed=1), randn(24, seed=2), 2, 1e-5),
    ),
    "conv": (ops.causal_conv, lambda: (randn(TOKENS, 12), randn(12, 4, seed=1), randn(12, seed=2), None, rows())),
    "conv of 3 without bias": (ops.causal_conv, lambda: (randn(TOKENS, 12), randn(12, 3, seed=1), None, None, rows())),
    "attention": (
        ops.attention_packed,
        lambda: (randn(TOKENS, 6, 8), randn(TOKENS, 2, 8, seed=1), randn(TOKENS, 2, 8, seed=2), rows()),
    ),
    "all experts": (ops.experts, lambda: expert_args(8, 3)),
    "few of many experts": (ops.experts, lambda: expert_args(32, 2)),
}


def expert_args(count: int, k: int) -> tuple[Any, ...]:
    ids = randn(TOKENS, count).argsort(-1)[:, :k]
    return randn(TOKENS, 16, seed=1), ids, randn(TOKENS, k).sigmoid(), weight(count, 8, 16), weight(count, 16, 8)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str) -> None:
    op, args = CASES[case]
    check(op, args())


def check(op: Op, args: tuple[Any, ...]) -> None:
    got, wanted = gradients(op, args, "training"), gradients(op, args, "reference")
    torch.testing.assert_close(got[0], wanted[0], **CLOSE)
    for a, b in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(a / b.abs().max(), b / b.abs().max(), **CLOSE)


@pytest.mark.parametrize("chunk", [3, 8, 128])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.01, 0.5)])
def test_scan_equals_the_reference(chunk: int, limit: tuple[float, float]) -> None:
    heads, dim, groups, state = 6, 4, 2, 12
    args = (randn(TOKENS, heads, dim), randn(TOKENS, heads, seed=1))
    args += tuple(randn(TOKENS, groups, state, seed=i) for i in (2, 3))
    args += (torch.linspace(-3, 3, heads), randn(heads, seed=4), randn(heads, seed=5), limit, chunk, None, rows())
    check(ops.ssd_scan, args)


def test_scan_keeps_small_decays_apart_in_a_long_batch() -> None:
    """The decays of all chunks are summed before they are subtracted: the last row must not suffer from the first."""
    heads, lens = 2, [3000, 40, 40]
    args = (randn(sum(lens), heads, 4), randn(sum(lens), heads, seed=1) + 5)
    args += tuple(randn(sum(lens), 1, 4, seed=i) for i in (2, 3))
    args += (torch.tensor([3.0, -6.0]), randn(heads), randn(heads), (0.0, float("inf")), 8, None)
    got, wanted = (
        gradients(ops.ssd_scan, (*args, Context.packed(lens).wide), v)[0][0] for v in ("training", "reference")
    )
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
