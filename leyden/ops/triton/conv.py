"""The short causal convolution of rows of any length; reads nothing from the device on the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.rows import Rows
from leyden.ops.triton.launch import OPTIONS, release, wait


@triton.jit
def _convolve(
    x, weight, bias, state, starts, ends, past, slots, out, ring, x_stride, state_stride, ring_stride, C,
    REACH: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, MOVE: tl.constexpr,
    RING: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of one row, BLOCK_C channels; each column is read once. Who has a row's first tokens also moves
    its window (MOVE): nobody else reads that. RING: x has so many tokens for each slot, of which `ends` says how many
    count. KEPT: x is also left in a ring like that, whose tokens are so wide: what stands behind x's channels, too."""
    first, row = tl.program_id(0) * BLOCK_T, tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < C
    wait()
    release()
    if RING:
        start, length = row * RING, tl.load(ends + row)
        read = tl.load(slots + row).to(tl.int64) * RING
    else:
        start = tl.load(starts + row)
        length, read = tl.load(ends + row) - start, start.to(tl.int64)
    if first < length:
        line = x + read * x_stride
        at, target = line + first.to(tl.int64) * x_stride, out + (start + first).to(tl.int64) * C + c
        window, fresh = state, True
        if STATE:
            window += tl.load(slots + row).to(tl.int64) * state_stride
            fresh = tl.load(past + row) == 0
        columns = tl.tuple([])
        for k in tl.static_range(REACH):
            value = tl.load(at + (k - REACH) * x_stride + c, mask=in_c & (first + k >= REACH), other=0.0)
            if STATE:
                old = tl.load(window + k * C + c, mask=in_c & (first == 0) & (fresh == 0), other=0.0)
                value = tl.where(first == 0, old.to(value.dtype), value)
            columns += (value,)
        before = tl.zeros((BLOCK_C,), dtype=tl.float32)
        if BIAS:
            before += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)
        taps = tl.tuple([])
        for tap in tl.static_range(REACH + 1):
            taps += (tl.load(weight + c * (REACH + 1) + tap, mask=in_c, other=0.0).to(tl.float32),)
        for k in tl.static_range(BLOCK_T):  # all on their way before the first store
            columns += (tl.load(at + k * x_stride + c, mask=in_c & (first + k < length), other=0.0),)
        for k in tl.static_range(BLOCK_T):
            inside = in_c & (first + k < length)
            if KEPT:
                kept = ring + tl.load(slots + row).to(tl.int64) * ring_stride + (first + k) * KEPT
                tl.store(kept + c, columns[k + REACH], mask=inside)
                if tl.program_id(2) == 0:
                    e = C + tl.arange(0, BLOCK_E)
                    more = (e < KEPT) & (first + k < length)
                    tl.store(kept + e, tl.load(at + k * x_stride + e, mask=more), mask=more)
            acc = before
            for tap in tl.static_range(REACH + 1):
                acc += columns[k + tap].to(tl.float32) * taps[tap]
            tl.store(target + k * C, (acc * tl.sigmoid(acc)).to(out.dtype.element_ty), mask=inside)
        if STATE and MOVE:  # noqa: SIM102, the inner condition is the device's
            if first == 0:
                i = tl.arange(0, TAPS)
                newer = length - REACH + i
                kept = in_c[None, :] & (i < REACH)[:, None]
                known = kept & (newer < 0)[:, None] & (fresh == 0)
                shifted = tl.load(window + (i + length)[:, None] * C + c[None, :], mask=known, other=0.0)
                own = kept & (newer >= 0)[:, None]
                seen = tl.load(line + newer[:, None] * x_stride + c[None, :], mask=own, other=0.0)
                column = tl.where((newer < 0)[:, None], shifted, seen.to(shifted.dtype))
                tl.debug_barrier()  # the old window is read
                tl.store(window + i[:, None] * C + c[None, :], column, mask=kept)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, rows: Rows) -> Tensor:
    """See ops.causal_conv."""
    ends = rows.starts[1:]
    return convolve(x, weight, bias, state, rows.starts, ends, rows.past, rows.slots, max(rows.lens, default=0))


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    past: Tensor,
    slots: Tensor | None,
    longest: int,
    move: bool = True,
    ring: bool = False,
    kept: Tensor | None = None,
) -> Tensor:
    """causal_conv of the tokens starts[r] .. ends[r] - 1 of x for each row r; what is between the rows stays undefined.

    move: whether the states move on; if not, they are only read. ring: x has `longest` tokens for each slot, of which
    the first ends[r] are those of the row; the result has as many for each row. kept [S, longest, > channels]: where x
    is left for that, with the columns behind it that belong to the same tokens.
    """
    (count, channels), reach = x.shape, weight.shape[1] - 1
    count = len(ends) * longest if ring else count
    assert x.stride(1) == 1 and weight.is_contiguous() and (state is None or state[0].is_contiguous())
    out = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    if count and longest:
        block_t = min(16, triton.next_power_of_2(longest))
        block_c = min(triton.next_power_of_2(channels), 256 if 1 < block_t < 16 else 512)
        grid = (triton.cdiv(longest, block_t), len(ends), triton.cdiv(channels, block_c))
        width = 0 if kept is None else kept.shape[2]
        _convolve[grid](
            x, weight, bias, state, starts, ends, past, slots, out, kept,
            x.stride(0), 0 if state is None else state.stride(0), 0 if kept is None else kept.stride(0), channels,
            reach, triton.next_power_of_2(reach), bias is not None, state is not None, move, longest if ring else 0,
            width, block_t, block_c, triton.next_power_of_2(max(1, width - channels)),
            num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out
