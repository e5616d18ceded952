"""The selective scan of long rows, in chunks, in two launches.

_scores   C B^T within each chunk, once per group of heads, all chunks at once
_scan     one program walks the chunks of one row for a part of one head; the state stays in its registers and goes to
          the row's slot in the end. Between chunks it never sees memory, where it would cost more than all else here.

The decay between two tokens is always the exponential of a difference that is not positive, so nothing overflows. With
activations in 16 bits the operands of the products are rounded to them, the state that enters a chunk included; sums
and the state itself are fp32. (Dao and Gu, "Transformers are SSMs" (2024), section 6.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.rows import Rows
from leyden.ops.triton.launch import OPTIONS, release, wait
from leyden.ops.triton.ssm import time_step

_CHUNK = 64


@triton.jit
def _scores(
    B, C, scores, starts, B_stride, C_stride,
    N: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """scores[t, g, s] = C[t, g] . B[the s-th token of t's chunk, g]"""
    chunk, row, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    wait()
    release()
    start, end = tl.load(starts + row) + chunk * CHUNK, tl.load(starts + row + 1)
    if start < end:
        at = (start + i).to(tl.int64)
        inside = (at < end)[:, None] & (n < N)[None, :]
        c = tl.load(C + at[:, None] * C_stride + group * N + n[None, :], mask=inside, other=0.0)
        b = tl.load(B + at[:, None] * B_stride + group * N + n[None, :], mask=inside, other=0.0)
        made = tl.dot(c, tl.trans(b), input_precision="ieee")
        cell = (at[:, None] * GROUPS + group) * CHUNK + i[None, :]
        tl.store(scores + cell, made.to(scores.dtype.element_ty), mask=(at < end)[:, None])


@triton.jit
def _scan(
    x, dt, B, C, scores, A_log, D, dt_bias, ssm_state, starts, past, slots, y,
    x_stride, dt_stride, B_stride, C_stride, ssm_stride, dt_low, dt_high,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0) // PARTS, tl.program_id(1)
    group = head // (HEADS // GROUPS)
    own = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    i, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    in_p, in_n = own < DIM, n < N
    p = head * DIM + own
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    skip, bias = tl.load(D + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    wait()
    release()
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    state = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    if STATE:
        tile = ssm_state + tl.load(slots + row).to(tl.int64) * ssm_stride + p[:, None] * N + n[None, :]
        known = (in_p[:, None] & in_n[None, :]) & (tl.load(past + row) > 0)
        state += tl.load(tile, mask=known, other=0.0).to(tl.float32)
    half = x.dtype.element_ty
    for first in tl.range(start, end, CHUNK, num_stages=STAGES):
        at = (first + i).to(tl.int64)
        inside = at < end
        delta = time_step(tl.load(dt + at * dt_stride + head, mask=inside, other=0.0), bias, dt_low, dt_high)
        delta = tl.where(inside, delta, 0.0)  # what is behind the row neither decays the state nor adds to it
        decay = tl.cumsum(-rate * delta, 0)  # log of the decay from the chunk's start through i
        whole = tl.sum(-rate * delta, 0)
        value = tl.load(x + at[:, None] * x_stride + p[None, :], mask=inside[:, None] & in_p[None, :], other=0.0)
        cell = (at[:, None] * GROUPS + group) * CHUNK + i[None, :]
        score = tl.load(scores + cell, mask=inside[:, None], other=0.0).to(tl.float32)
        since = tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], float("-inf"))
        weight = (score * tl.exp(since) * delta[None, :]).to(half)
        made = tl.dot(weight, value, input_precision="ieee")
        c = tl.load(
            C + at[:, None] * C_stride + group * N + n[None, :], mask=inside[:, None] & in_n[None, :], other=0.0
        )
        carried = tl.dot(c, tl.trans(state.to(half)), input_precision="ieee")
        made += carried * tl.exp(decay)[:, None] + value.to(tl.float32) * skip
        target = y + at[:, None] * (HEADS * DIM) + p[None, :]
        tl.store(target, made.to(half), mask=inside[:, None] & in_p[None, :])
        b = tl.load(
            B + at[:, None] * B_stride + group * N + n[None, :], mask=inside[:, None] & in_n[None, :], other=0.0
        )
        added = (value.to(tl.float32) * (tl.exp(whole - decay) * delta)[:, None]).to(half)
        state = tl.dot(tl.trans(added), b, state * tl.exp(whole), input_precision="ieee")
    if STATE:
        tl.store(tile, state.to(ssm_state.dtype.element_ty), mask=in_p[:, None] & in_n[None, :])


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
    shape: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """See ops.ssd_scan. shape: tokens of a chunk (`chunk` is not asked), rows of a head's state in a program, stages,
    warps."""
    (count, heads, dim), (_, groups, n) = x.shape, B.shape
    assert all(t[0].is_contiguous() for t in (x, dt, B, C)) and (state is None or state[0].is_contiguous())
    y = torch.empty(count, heads, dim, dtype=x.dtype, device=x.device)
    if not count:
        return y
    longest, number = max(rows.lens), len(rows.lens)
    # few rows: two programs for a head, so that every multiprocessor has one
    size, block_p, stages, warps = shape or (_CHUNK, 64 if number > 1 else 32, 2, 4)
    block_p = max(16, min(block_p, triton.next_power_of_2(dim)))
    block_n, parts = max(16, triton.next_power_of_2(n)), triton.cdiv(dim, block_p)
    scores = torch.empty(count, groups, size, dtype=x.dtype, device=x.device)
    _scores[(triton.cdiv(longest, size), number, groups)](
        B, C, scores, rows.starts, B.stride(0), C.stride(0), n, groups, size, block_n, num_warps=4, **OPTIONS
    )
    _scan[(heads * parts, number)](
        x, dt, B, C, scores, A_log, D, dt_bias, state, rows.starts, rows.past, rows.slots, y,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), 0 if state is None else state.stride(0),
        dt_limit[0], min(dt_limit[1], 3e38),
        heads, dim, n, groups, parts, state is not None, size, block_p, block_n, stages, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return y
