"""Rows of the tables that have one row per slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.triton.launch import OPTIONS, release, wait

_BLOCK = 1024


@triton.jit
def _begin(slots, last, committed, tokens, past, positions, R, BLOCK: tl.constexpr):
    r = tl.arange(0, BLOCK)
    inside = r < R
    wait()
    release()
    slot = tl.load(slots + r, mask=inside, other=0)
    known = tl.load(committed + slot, mask=inside, other=0)
    tl.store(tokens + r, tl.load(last + slot, mask=inside, other=0), mask=inside)
    tl.store(past + r, known, mask=inside)
    tl.store(positions + r, known.to(tl.int64) + 1, mask=inside)


@triton.jit
def _copy(source, target, slots, source_stride, target_stride, WIDTH, TAKE: tl.constexpr, BLOCK: tl.constexpr):
    """Row slots[r] of the source to row r of the target (TAKE), or row r to row slots[r]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait()
    release()
    slot = tl.load(slots + row).to(tl.int64)
    read, written = (slot, row) if TAKE else (row, slot)
    value = tl.load(source + read * source_stride + at, mask=at < WIDTH)
    tl.store(target + written * target_stride + at, value, mask=at < WIDTH)


@triton.jit
def _clear(table, slots, past, stride, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait()
    release()
    fresh = tl.load(past + row) == 0
    zeros = tl.zeros((BLOCK,), dtype=table.dtype.element_ty)
    tl.store(table + tl.load(slots + row).to(tl.int64) * stride + at, zeros, mask=(at < WIDTH) & fresh)


def begin(slots: Tensor, last: Tensor, committed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ops.begin."""
    count, device = len(slots), slots.device
    tokens, positions = torch.empty(2, count, dtype=torch.int64, device=device)
    past = torch.empty(count, dtype=torch.int32, device=device)
    if count:
        block = triton.next_power_of_2(count)
        _begin[(1,)](slots, last, committed, tokens, past, positions, count, block, num_warps=1, **OPTIONS)
    return tokens, past, positions


def take(table: Tensor, slots: Tensor) -> Tensor:
    """See ops.take."""
    taken = torch.empty(len(slots), *table.shape[1:], dtype=table.dtype, device=table.device)
    _launch(table, taken, slots, True)
    return taken


def put(values: Tensor, table: Tensor, slots: Tensor) -> None:
    """See ops.put."""
    assert values.dtype == table.dtype
    _launch(values, table, slots, False)


def clear(table: Tensor, slots: Tensor, past: Tensor) -> None:
    """See ops.clear."""
    width = table[:1].numel()
    assert table[:1].is_contiguous() and slots.is_contiguous() and past.is_contiguous()
    if len(slots) and width:
        grid = (len(slots), triton.cdiv(width, _BLOCK))
        _clear[grid](table, slots, past, table.stride(0), width, _BLOCK, num_warps=4, **OPTIONS)


def _launch(source: Tensor, target: Tensor, slots: Tensor, take: bool) -> None:
    width = source[:1].numel()
    assert source[:1].is_contiguous() and target[:1].is_contiguous() and slots.is_contiguous()
    if len(slots) and width:
        block = min(_BLOCK, triton.next_power_of_2(width))
        grid = (len(slots), triton.cdiv(width, block))
        _copy[grid](
            source, target, slots, source.stride(0), target.stride(0), width, take, block,
            num_warps=1 if block < 128 else 4, **OPTIONS,
        )  # fmt: skip
