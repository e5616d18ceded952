"""Rows of drafts: what they start from, and how far they are right; the small steps of a drafter network."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.triton.launch import OPTIONS, release, wait

_BLOCK = 1024


@triton.jit
def _begin_drafts(
    slots, last, drafts, committed, tokens, past, positions, places, T, drafts_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """WIDTH tokens of each row."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < T
    row, i = t // WIDTH, t % WIDTH
    wait()
    release()
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    known = tl.load(committed + slot, mask=inside, other=0)
    newest = tl.load(last + slot, mask=inside & (i == 0), other=0)
    guess = tl.load(drafts + slot * drafts_stride + i - 1, mask=inside & (i > 0), other=0)
    tl.store(tokens + t, tl.where(i == 0, newest, tl.maximum(guess, 0)), mask=inside)
    tl.store(past + row, known, mask=inside & (i == 0))
    tl.store(positions + t, known + i, mask=inside)
    tl.store(places + t, (known + i).to(tl.int64) + 1, mask=inside)


@triton.jit
def _accept(
    drawn, guesses, before, positions, stops, open_at, kept, counts, newest, ends, at,
    guesses_stride, positions_stride, stops_stride, E,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0)
    i, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    wait()
    release()
    inside = i <= WIDTH
    said = tl.load(drawn + row * (WIDTH + 1) + i, mask=inside, other=-1)
    guess = tl.load(guesses + row * guesses_stride + i, mask=i < WIDTH, other=-2)
    first, opens = tl.load(positions + row * positions_stride), tl.load(open_at + row)
    stop = tl.load(stops + row * stops_stride + e, mask=e < E, other=-3)
    over = (tl.max((stop == tl.load(before + row)).to(tl.int32), 0) > 0) & (first - 1 >= opens)
    end = (tl.max((said[:, None] == stop[None, :]).to(tl.int32), 1) > 0) & (first + i >= opens)
    right = (said == guess) & (i < WIDTH) & (end == 0) & (over == 0)
    accepted = tl.min(tl.where(right, WIDTH, i), 0)
    tl.store(kept + row * (WIDTH + 1) + i, tl.where(i <= accepted, said, -1), mask=inside)
    tl.store(counts + row, accepted + 1)
    tl.store(newest + row, tl.sum(tl.where(i == accepted, said, 0), 0))
    tl.store(ends + row, row * (WIDTH + 1) + accepted)
    tl.store(at + row, (first + accepted).to(tl.int32))


@triton.jit
def _angles(positions, frequencies, cos, sin, scale, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """One position."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    inside = i < HALF
    frequency = tl.load(frequencies + i, mask=inside, other=0.0)
    wait()
    release()
    angle = tl.load(positions + row).to(tl.float32) * frequency
    tl.store(cos + row * HALF + i, tl.cos(angle) * scale, mask=inside)
    tl.store(sin + row * HALF + i, tl.sin(angle) * scale, mask=inside)


@triton.jit
def _rotate(
    x, cos, sin, out, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One token, all of its heads."""
    row = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK)
    inside = (head < HEADS) & (i < HALF)[None, :]
    cell = (row * HEADS + head) * (2 * HALF) + i[None, :]
    wait()
    release()
    c = tl.load(cos + row * HALF + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + i, mask=i < HALF, other=0.0)[None, :]
    a = tl.load(x + cell, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + cell + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + cell, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + cell + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated(gate, up, out, N, BLOCK: tl.constexpr):
    """silu(gate) * up, rounded as the reference rounds."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    wait()
    release()
    value = tl.load(gate + at, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(value.dtype).to(tl.float32)
    made = opened * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, made.to(value.dtype), mask=inside)


def begin_drafts(
    slots: Tensor, last: Tensor, drafts: Tensor, committed: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ops.begin_drafts."""
    total, device = len(slots) * (count + 1), slots.device
    tokens, places = (torch.empty(total, dtype=torch.int64, device=device) for _ in range(2))
    past, positions = (torch.empty(n, dtype=torch.int32, device=device) for n in (len(slots), total))
    if total:
        block = min(_BLOCK, triton.next_power_of_2(total))
        _begin_drafts[(triton.cdiv(total, block),)](
            slots, last, drafts, committed, tokens, past, positions, places, total, drafts.stride(0),
            count + 1, block, num_warps=1 if block < 128 else 4, **OPTIONS,
        )  # fmt: skip
    return tokens, past, positions, places


def accept(
    drawn: Tensor, guesses: Tensor, before: Tensor, positions: Tensor, stops: Tensor, open_at: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ops.accept."""
    (count, width), device = guesses.shape, drawn.device
    assert drawn.is_contiguous() and (not width or guesses.stride(1) == 1) and stops.stride(1) == 1
    kept, newest = torch.empty_like(drawn), torch.empty_like(before)
    counts, ends, at = torch.empty(3, count, dtype=torch.int32, device=device)
    if count:
        _accept[(count,)](
            drawn, guesses, before, positions, stops, open_at, kept, counts, newest, ends, at,
            guesses.stride(0), positions.stride(0), stops.stride(0), stops.shape[1],
            width, triton.next_power_of_2(width + 1), triton.next_power_of_2(stops.shape[1]), num_warps=1, **OPTIONS,
        )  # fmt: skip
    return kept, counts, newest, ends, at


def angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See ops.angles."""
    positions, half = positions.contiguous(), len(frequencies)
    cos, sin = (torch.empty(*positions.shape, half, dtype=torch.float32, device=positions.device) for _ in range(2))
    if count := positions.numel():
        block = triton.next_power_of_2(half)
        _angles[(count,)](positions, frequencies, cos, sin, scale, half, block, num_warps=1, **OPTIONS)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ops.rotate."""
    heads, dim = x.shape[-2:]
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    assert cos.shape == sin.shape == (*x.shape[:-2], dim // 2)
    out = torch.empty_like(x)
    if count := x.numel() // (heads * dim):
        blocks = triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2)
        _rotate[(count,)](x, cos, sin, out, heads, dim // 2, *blocks, num_warps=4, **OPTIONS)
    return out


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """See ops.silu_times."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(up)
    if size := out.numel():
        _gated[(triton.cdiv(size, _BLOCK),)](gate, up, out, size, _BLOCK, num_warps=4, **OPTIONS)
    return out
