"""The steps of a drafter network that the target does not have."""

import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.ops import fused
from leyden.ops.cpu.attention import ROWS, places
from leyden.ops.cpu.linear import product
from leyden.ops.cpu.matrix import fits, matrix
from leyden.ops.cpu.program import Kernel, apart, empty, run, types
from leyden.ops.reference import draft as reference
from leyden.ops.rows import Rows

_ANGLES = Kernel("angles", "ttttiid")
_ROTATE = Kernel("rotate", "ttttiiii")
_SILU_TIMES = Kernel("silu_times", "tttii")
_EXPECT = Kernel("expect", "ttttttt" + "iii")
_LEARN = Kernel("learn", "tt" + ROWS + "tttt" + "ii")
_CONFIDENCE = Kernel("confidence", "tttttiiii")


def angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    known = positions.dtype == torch.int32 and frequencies.dtype == torch.float32
    if not (known and positions.is_contiguous() and frequencies.is_contiguous()):
        return reference.angles(positions, frequencies, scale)
    rows, half = positions.numel(), len(frequencies)
    cos, sin = (empty(*positions.shape, half, dtype=torch.float32) for _ in range(2))
    run(_ANGLES(positions, frequencies, cos, sin, rows, half, scale), work=40 * cos.numel())
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    *_, heads, dim = x.shape
    angles = x.shape[:-2] == cos.shape[:-1] == sin.shape[:-1] and cos.dtype == sin.dtype == torch.float32
    if not (angles and x.dtype in types and all(t.is_contiguous() for t in (x, cos, sin))):
        return reference.rotate(x, cos, sin)
    out = empty(*x.shape, dtype=x.dtype)
    run(_ROTATE(x, cos, sin, out, x.numel() // (heads * dim), heads, dim // 2, types[x.dtype]), work=4 * x.numel())
    return out


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    alike = gate.shape == up.shape and gate.dtype == up.dtype and up.dtype in types
    if not (alike and gate.is_contiguous() and up.is_contiguous()):
        return reference.silu_times(gate, up)
    out = empty(*up.shape, dtype=up.dtype)
    run(_SILU_TIMES(gate, up, out, out.numel(), types[up.dtype]), work=20 * out.numel())
    return out


def swiglu(x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    rows, (first, second, third) = x.flatten(0, -2), (matrix(w) for w in (gate, up, down))
    if first is None or second is None or third is None or not fits(rows, first, second, third):
        return fused.swiglu(x, gate, up, down)
    gated, hidden = (empty(len(rows), first.rows, dtype=x.dtype) for _ in range(2))
    out = empty(*x.shape[:-1], third.rows, dtype=x.dtype)
    *before, gate_step = product(rows, first, gated)
    *between, up_step = product(rows, second, hidden)
    run(
        *before,
        *between,
        *apart(gate_step, up_step),
        _SILU_TIMES(gated, hidden, hidden, hidden.numel(), types[x.dtype]),
        *product(hidden, third, out),
        work=3 * len(rows) * first.rows * first.columns,
    )
    return out


def confidence(hidden: Tensor, also: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    read = [t for t in (hidden, also) if t is not None]
    alike = all(t.dtype in types and t.dtype == hidden.dtype and t.is_contiguous() for t in read)
    if not (alike and weight.dtype == bias.dtype == torch.float32 and weight.is_contiguous()):
        return reference.confidence(hidden, also, weight, bias)
    *shape, width = hidden.shape
    out, more = empty(*shape, dtype=torch.float32), 0 if also is None else also.shape[-1]
    form = (out.numel(), width, more, types[hidden.dtype])
    run(_CONFIDENCE(hidden, also, weight, bias, out, *form), work=out.numel() * (width + more))
    return out


def expect(scores: Tensor, weights: Tensor, open: Tensor, made_at: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    whole = slots.dtype == places.dtype == made_at.dtype == torch.int32
    known = whole and scores.dtype == open.dtype == torch.float32 and weights.dtype == torch.float64
    if not (known and all(t.is_contiguous() for t in (scores, weights, open, slots, places))):
        return reference.expect(scores, weights, open, made_at, slots, places)
    out = empty(*scores.shape, dtype=torch.float32)
    run(_EXPECT(scores, weights, open, made_at, slots, places, out, *scores.shape, open.shape[1]), work=0)
    return out


def learn(
    tokens: Tensor, following: Tensor, rows: Rows, open: Tensor, made_at: Tensor, memory: Tensor, at: Tensor
) -> None:
    assert rows.slots is not None
    whole = tokens.dtype == following.dtype == at.dtype == torch.int64
    whole = whole and rows.slots.dtype == rows.past.dtype == made_at.dtype == torch.int32
    known = whole and open.dtype == torch.float32 and memory.dtype == torch.float64
    if not (known and all(t.is_contiguous() for t in (tokens, following, open, memory))):
        return reference.learn(tokens, following, rows, open, made_at, memory, at)
    run(_LEARN(tokens, following, *places(rows), open, made_at, memory, at, *memory.shape[1:]), work=0)
    return None
