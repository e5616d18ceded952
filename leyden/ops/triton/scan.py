"""The selective scan of long rows: chunks of tokens, and segments of chunks.

_chunks   once per chunk and group of heads: C B^T, the time steps, and the decay since the chunk's start
_scan     a program walks the chunks of one segment for a part of one head, the state in its registers. Between chunks
          it never sees memory, where it would cost more than all else here.

Few long rows are cut into segments, so that every multiprocessor has several programs; the state between them goes
through memory, in two launches more:

_states   what each segment but the last makes of a state of zero, and how much is left of one that enters it
_pass     from these, element by element: the state that enters each segment

A row's last chunk and last segment may be shorter. No table says where those of a row are: a row from token t on has
the chunks from t // CHUNK + row on, which no other row has. The state that enters a segment at token t is the second of
the two at t // segment if its row begins there, else the first: in as many tokens as a segment has, at most one row of
several segments begins, and at most one other segment of such a row.

The decay between two tokens is always the exponential of a difference that is not positive, so nothing overflows. With
activations in 16 bits the operands of the products are rounded to them, the state that enters a chunk included; sums
and the state itself are fp32. (Dao and Gu, "Transformers are SSMs" (2024), section 6.)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.rows import Rows
from leyden.ops.triton.launch import OPTIONS, complete, release, wait
from leyden.ops.triton.ssm import time_step

_LOG2E = tl.constexpr(1.4426950408889634)
_PROGRAMS = 1024  # heads times segments, about; for each there are two states of a head in memory
_SHORTEST = 128  # tokens: what shorter segments gain in programs they lose in launches and states


class Shape(NamedTuple):
    """How a scan is cut. The two walks over a segment: rows of a head's state in a program, stages, warps, registers of
    a thread."""

    segment: int | None = None  # tokens, whole chunks; None: as few as give _PROGRAMS
    chunk: int = 64  # tokens
    states: tuple[int, int, int, int] = (64, 2, 4, 128)
    scan: tuple[int, int, int, int] = (64, 2, 4, 255)


@triton.jit
def _chunks(
    B, C, dt, A_log, dt_bias, scores, steps, starts, B_stride, C_stride, dt_stride, dt_low, dt_high,
    HEADS: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Of each chunk: scores[group, t, s] = C[t] . B[s], zero where s is behind t; steps[head, 0] = the time steps;
    steps[head, 1, t] = log2 of the decay from the chunk's start through t."""
    chunk, row, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, n, h = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_H)
    head, in_h = group * (HEADS // GROUPS) + h, h < HEADS // GROUPS
    rate = tl.exp(tl.load(A_log + head, mask=in_h, other=0.0).to(tl.float32)) * _LOG2E
    bias = tl.load(dt_bias + head, mask=in_h, other=0.0).to(tl.float32)
    wait()
    release()
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    place, first = (start // CHUNK + row + chunk).to(tl.int64), start + chunk * CHUNK
    if first < end:
        at = (first + i).to(tl.int64)
        known = (at < end)[:, None] & (n < N)[None, :]
        c = tl.load(C + at[:, None] * C_stride + group * N + n[None, :], mask=known, other=0.0)
        b = tl.load(B + at[:, None] * B_stride + group * N + n[None, :], mask=known, other=0.0)
        made = tl.where(i[:, None] >= i[None, :], tl.dot(c, tl.trans(b), input_precision="ieee"), 0.0)
        cell = (place * GROUPS + group) * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
        tl.store(scores + cell, made.to(scores.dtype.element_ty))
        known = in_h[:, None] & (at < end)[None, :]
        delta = tl.load(dt + at[None, :] * dt_stride + head[:, None], mask=known, other=0.0)
        # what is behind the row neither decays the state nor adds to it
        delta = tl.where(known, time_step(delta, bias[:, None], dt_low, dt_high), 0.0)
        cell = (place * HEADS + head[:, None]) * (2 * CHUNK) + i[None, :]
        tl.store(steps + cell, delta, mask=in_h[:, None])
        tl.store(steps + cell + CHUNK, tl.cumsum(-rate[:, None] * delta, 1), mask=in_h[:, None])


@triton.jit
def _states(
    x, B, steps, states, decays, starts, x_stride, B_stride, segment,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backwards, so that the state need not be decayed at each chunk: what is added has its decay already."""
    head, row = tl.program_id(0) // PARTS, tl.program_id(2)
    own = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    i, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    in_p, in_n = own < DIM, n < N
    group = head // (HEADS // GROUPS)
    p, to_n = head * DIM + own, group * N + n
    wait()
    release()
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    chunk = start // CHUNK + row + tl.program_id(1) * (segment // CHUNK)
    start += tl.program_id(1) * segment
    if start + segment < end:
        count = segment // CHUNK
        state = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
        behind = 0.0  # log2 of the decay from the chunk's end through the segment's
        for back in tl.range(1, count + 1, num_stages=STAGES):
            at = (start + (count - back) * CHUNK).to(tl.int64)
            step = steps + ((chunk + count - back).to(tl.int64) * HEADS + head) * (2 * CHUNK)
            delta, decay, whole = tl.load(step + i), tl.load(step + CHUNK + i), tl.load(step + 2 * CHUNK - 1)
            value = tl.load(x + at * x_stride + i[:, None] * x_stride + p[None, :], mask=in_p[None, :], other=0.0)
            b = tl.load(B + at * B_stride + i[:, None] * B_stride + to_n[None, :], mask=in_n[None, :], other=0.0)
            added = (value.to(tl.float32) * (tl.exp2(behind + (whole - decay)) * delta)[:, None]).to(value.dtype)
            state = complete(tl.dot(tl.trans(added), b, state, input_precision="ieee"))
            behind += whole
        place = (start // segment + 1).to(tl.int64) * (2 * HEADS) + head
        tl.store(states + place * (DIM * N) + own[:, None] * N + n[None, :], state, mask=in_p[:, None] & in_n[None, :])
        tl.store(decays + place, behind)


@triton.jit
def _pass(
    states, decays, ssm_state, starts, past, slots, ssm_stride, segment,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In place: from the state that the segment before makes of zero to the one that enters a segment."""
    at, head, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    inside = at < SIZE
    wait()
    release()
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if start + segment < end:
        state = tl.zeros((BLOCK,), dtype=tl.float32)
        if STATE:
            tile = ssm_state + tl.load(slots + row).to(tl.int64) * ssm_stride + head * SIZE + at
            state += tl.load(tile, mask=inside & (tl.load(past + row) > 0), other=0.0).to(tl.float32)
        place = (start // segment).to(tl.int64) * (2 * HEADS) + head
        tl.store(states + (place + HEADS) * SIZE + at, state, mask=inside)
        for next in tl.range(1, tl.cdiv(end - start, segment), num_stages=4):
            cell = place + next * (2 * HEADS)
            made = tl.load(states + cell * SIZE + at, mask=inside, other=0.0)
            state = state * tl.exp2(tl.load(decays + cell)) + made
            tl.store(states + cell * SIZE + at, state, mask=inside)


@triton.jit
def _scan(
    x, B, C, scores, steps, D, states, ssm_state, starts, past, slots, y,
    x_stride, B_stride, C_stride, ssm_stride, segment,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    STATE: tl.constexpr, CUT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row of one segment has its state from its slot, if there is one (STATE), others from `states` (CUT); after the
    last segment it goes to the slot. A row's first segment must not read the slot that its last one writes."""
    head, row = tl.program_id(0) // PARTS, tl.program_id(2)
    own = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    i, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    in_p, in_n = own < DIM, n < N
    group = head // (HEADS // GROUPS)
    p, to_n = head * DIM + own, group * N + n
    skip = tl.load(D + head).to(tl.float32)
    wait()
    release()
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    alone = end - start <= segment
    chunk = start // CHUNK + row + tl.program_id(1) * (segment // CHUNK)
    start += tl.program_id(1) * segment
    last = (start < end) & (end - start <= segment)
    state = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    index = (head * DIM + own[:, None]) * N + n[None, :]
    in_state = in_p[:, None] & in_n[None, :]
    if CUT:
        place = start // segment * 2 + (tl.program_id(1) == 0)
        entering = states + place.to(tl.int64) * (HEADS * DIM * N) + index
        state += tl.load(entering, mask=in_state & (start < end) & (alone == 0), other=0.0)
    if STATE:
        tile = ssm_state + tl.load(slots + row).to(tl.int64) * ssm_stride + index
        state += tl.load(tile, mask=in_state & last & alone & (tl.load(past + row) > 0), other=0.0).to(tl.float32)
    end = tl.minimum(end, start + segment)
    half = x.dtype.element_ty
    for next in tl.range(tl.cdiv(end - start, CHUNK), num_stages=STAGES):
        first = start.to(tl.int64) + next * CHUNK
        at = tl.minimum(i, (end - first - 1).to(tl.int32))  # behind the end: the last, for no time
        cell = (chunk + next).to(tl.int64)
        step = steps + (cell * HEADS + head) * (2 * CHUNK)
        delta, decay, whole = tl.load(step + i), tl.load(step + CHUNK + i), tl.load(step + 2 * CHUNK - 1)
        value = tl.load(x + first * x_stride + at[:, None] * x_stride + p[None, :], mask=in_p[None, :], other=0.0)
        score = tl.load(scores + (cell * GROUPS + group) * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
        since = tl.minimum(decay[:, None] - decay[None, :], 0.0)  # of a later token, whose score is zero: no infinity
        weight = (score.to(tl.float32) * tl.exp2(since) * delta[None, :]).to(half)
        made = tl.dot(weight, value, input_precision="ieee")
        c = tl.load(C + first * C_stride + at[:, None] * C_stride + to_n[None, :], mask=in_n[None, :], other=0.0)
        carried = tl.dot(c, tl.trans(state.to(half)), input_precision="ieee")
        made += carried * tl.exp2(decay)[:, None] + value.to(tl.float32) * skip
        target = y + first * (HEADS * DIM) + i[:, None] * (HEADS * DIM) + p[None, :]
        tl.store(target, made.to(half), mask=(first + i < end)[:, None] & in_p[None, :])
        b = tl.load(B + first * B_stride + at[:, None] * B_stride + to_n[None, :], mask=in_n[None, :], other=0.0)
        added = (value.to(tl.float32) * (tl.exp2(whole - decay) * delta)[:, None]).to(half)
        state = tl.dot(tl.trans(added), b, state * tl.exp2(whole), input_precision="ieee")
    if STATE:
        tl.store(tile, state.to(ssm_state.dtype.element_ty), mask=in_state & last)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    chunk: int,
    state: Tensor | None,
    rows: Rows,
    shape: Shape = Shape(),  # noqa: B008
) -> Tensor:
    """See ops.ssd_scan; `chunk` is not asked, shape.chunk is."""
    (count, heads, dim), (_, groups, n) = x.shape, B.shape
    assert all(t[0].is_contiguous() for t in (x, dt, B, C)) and (state is None or state[0].is_contiguous())
    y = torch.empty(count, heads, dim, dtype=x.dtype, device=x.device)
    if not count:
        return y
    longest, number, size = max(rows.lens), len(rows.lens), shape.chunk
    segment = shape.segment or max(_SHORTEST, triton.cdiv(heads * count, _PROGRAMS * size) * size)
    assert segment % size == 0
    cut = longest > 2 * segment  # what is shorter takes no longer than the launches more
    places = count // size + number  # at most so many chunks
    scores = torch.empty(places, groups, size, size, dtype=x.dtype, device=x.device)
    steps = torch.empty(places, heads, 2, size, dtype=torch.float32, device=x.device)
    block_n, most = max(16, triton.next_power_of_2(n)), max(16, triton.next_power_of_2(dim))
    strides = x.stride(0), B.stride(0), C.stride(0), 0 if state is None else state.stride(0)
    _chunks[(triton.cdiv(longest, size), number, groups)](
        B, C, dt, A_log, dt_bias, scores, steps, rows.starts, B.stride(0), C.stride(0), dt.stride(0),
        dt_limit[0], min(dt_limit[1], 3e38),
        heads, n, groups, size, block_n, triton.next_power_of_2(heads // groups), num_warps=4, **OPTIONS,
    )  # fmt: skip
    states, segments = None, 1
    if not cut:
        segment = 1 << 30
    else:
        segments, places = triton.cdiv(longest, segment), count // segment + 1
        states = torch.empty(places, 2, heads, dim, n, dtype=torch.float32, device=x.device)
        decays = torch.empty(places, 2, heads, dtype=torch.float32, device=x.device)
        block_p, stages, warps, registers = shape.states
        block_p = min(block_p, most)
        parts = triton.cdiv(dim, block_p)
        _states[(heads * parts, segments - 1, number)](
            x, B, steps, states, decays, rows.starts, x.stride(0), B.stride(0), segment,
            heads, dim, n, groups, parts, size, block_p, block_n, stages,
            num_warps=warps, maxnreg=registers, **OPTIONS,
        )  # fmt: skip
        block = min(1024, triton.next_power_of_2(dim * n))
        _pass[(triton.cdiv(dim * n, block), heads, number)](
            states, decays, state, rows.starts, rows.past, rows.slots, strides[3], segment,
            heads, dim * n, state is not None, block, num_warps=4, **OPTIONS,
        )  # fmt: skip
    block_p, stages, warps, registers = shape.scan
    block_p = min(block_p, most)
    parts = triton.cdiv(dim, block_p)
    _scan[(heads * parts, segments, number)](
        x, B, C, scores, steps, D, states, state, rows.starts, rows.past, rows.slots, y, *strides, segment,
        heads, dim, n, groups, parts, state is not None, cut, size, block_p, block_n, stages,
        num_warps=warps, maxnreg=registers, **OPTIONS,
    )  # fmt: skip
    return y
