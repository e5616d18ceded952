"""Mamba-2 for rows of one token: convolution, time step, state update, gate and group norm in one kernel.

One program computes one head (or a part of its rows, when there are few rows in the batch) of one row. The program
that finishes last in a group of heads normalises the group and moves the convolution's window: by then all others have
read it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.rows import Rows
from leyden.ops.triton.launch import OPTIONS, arrive, counters, release, wait


@triton.jit
def _convolved(
    new, weight, bias, window, channel, inside, fresh,
    CHANNELS: tl.constexpr, REACH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution at `channel`, rounded as `new` is; `window` holds the REACH columns before, or zeros."""
    out = tl.load(new + channel, mask=inside, other=0.0).to(tl.float32)
    out *= tl.load(weight + channel * (REACH + 1) + REACH, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(REACH):
        column = tl.load(window + tap * CHANNELS + channel, mask=inside & (fresh == 0), other=0.0)
        out += column.to(tl.float32) * tl.load(weight + channel * (REACH + 1) + tap, mask=inside, other=0.0).to(
            tl.float32
        )
    if BIAS:
        out += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return (out * tl.sigmoid(out)).to(new.dtype.element_ty).to(tl.float32)


@triton.jit
def _time_step(dt, bias, low, high):
    """clamp(softplus(dt + bias)); log1p by Kahan's correction, which keeps small steps exact."""
    value = dt.to(tl.float32) + bias
    grown = tl.exp(tl.minimum(value, 20.0))
    one_more = 1.0 + grown
    log1p = tl.where(
        one_more == 1.0, grown, tl.log(one_more) * (grown / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    )
    return tl.minimum(tl.maximum(tl.where(value > 20.0, value, log1p), low), high)


@triton.jit
def _move_window(new, window, channel, inside, fresh, CHANNELS: tl.constexpr, REACH: tl.constexpr):
    """Drop the oldest column, append `new`. One column after the other: each is read before it is written."""
    for tap in tl.static_range(REACH - 1):
        column = tl.load(window + (tap + 1) * CHANNELS + channel, mask=inside & (fresh == 0), other=0.0)
        tl.debug_barrier()  # threads may hold copies of each other's channels
        tl.store(window + tap * CHANNELS + channel, column, mask=inside)
    newest = tl.load(new + channel, mask=inside, other=0.0).to(window.dtype.element_ty)
    tl.debug_barrier()
    tl.store(window + (REACH - 1) * CHANNELS + channel, newest, mask=inside)


@triton.jit
def _step(
    projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state, past, slots,
    gated, arrived, out,
    row_stride, conv_stride, ssm_stride, dt_low, dt_high, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, REACH: tl.constexpr,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    INNER: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * N
    SHARE: tl.constexpr = HEADS // GROUPS  # heads of a group
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // PARTS
    group = head // SHARE
    p = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < DIM, n < N
    slot = tl.load(slots + row).to(tl.int64)
    fresh = tl.load(past + row) == 0
    tile = ssm_state + slot * ssm_stride + (head * DIM + p)[:, None] * N + n[None, :]
    inside = in_p[:, None] & in_n[None, :]
    old = tl.load(tile, mask=inside & (fresh == 0), other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    skip, bias = tl.load(D + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    window = conv_state + slot * conv_stride
    wait()
    release()

    z = projected + row * row_stride
    new = z + INNER
    to_x, to_b = head * DIM + p, INNER + group * N + n
    to_c = to_b + GROUPS * N
    x = _convolved(new, conv_weight, conv_bias, window, to_x, in_p, fresh, CHANNELS, REACH, BIAS)
    b = _convolved(new, conv_weight, conv_bias, window, to_b, in_n, fresh, CHANNELS, REACH, BIAS)
    c = _convolved(new, conv_weight, conv_bias, window, to_c, in_n, fresh, CHANNELS, REACH, BIAS)
    delta = _time_step(tl.load(new + CHANNELS + head), bias, dt_low, dt_high)
    state = tl.exp(rate * delta) * old + (delta * x)[:, None] * b[None, :]
    tl.store(tile, state.to(ssm_state.dtype.element_ty), mask=inside)
    y = (tl.sum(state * c[None, :], 1) + skip * x).to(out.dtype.element_ty).to(tl.float32)
    gate = tl.load(z + to_x, mask=in_p, other=0.0).to(tl.float32)
    tl.store(gated + row * INNER + to_x, y * (gate * tl.sigmoid(gate)), mask=in_p)

    if arrive(arrived + row * GROUPS + group, SHARE * PARTS):
        at = tl.arange(0, BLOCK_G)
        in_group = at < SHARE * DIM
        channel = group * (SHARE * DIM) + at
        g = tl.load(gated + row * INNER + channel, mask=in_group, other=0.0, cache_modifier=".cg")
        w = tl.load(norm_weight + channel, mask=in_group, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(g * g) / (SHARE * DIM) + eps)
        tl.store(out + row * INNER + channel, (g * scale * w).to(out.dtype.element_ty), mask=in_group)
        _move_window(new, window, channel, in_group, fresh, CHANNELS, REACH)
        _move_window(new, window, to_b, in_n, fresh, CHANNELS, REACH)
        _move_window(new, window, to_c, in_n, fresh, CHANNELS, REACH)


def mamba_step(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    norm_weight: Tensor,
    groups: int,
    eps: float,
    conv_state: Tensor,
    ssm_state: Tensor,
    rows: Rows,
    shape: tuple[int, int] | None = None,
) -> Tensor:
    """See ops.mamba_step. The states of the rows must be older than the kernel launched just before.

    shape: rows of a head's state in one program, warps.
    """
    count = len(projected)
    _, heads, dim, n = ssm_state.shape
    inner, reach = heads * dim, conv_state.shape[1]
    assert rows.slots is not None and projected.stride(1) == 1 and conv_weight.is_contiguous()
    assert conv_state[0].is_contiguous() and ssm_state[0].is_contiguous()
    out = torch.empty(count, inner, dtype=projected.dtype, device=projected.device)
    if not count:
        return out
    gated = torch.empty(count, inner, dtype=torch.float32, device=projected.device)
    block_p, warps = shape or (min(32, triton.next_power_of_2(dim)), 4)
    parts = triton.cdiv(dim, block_p)
    _step[(heads * parts, count)](
        projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state, rows.past, rows.slots,
        gated, counters(projected.device, count * groups), out,
        projected.stride(0), conv_state.stride(0), ssm_state.stride(0), dt_limit[0], min(dt_limit[1], 3e38), eps,
        heads, dim, n, groups, reach, conv_bias is not None, parts, block_p,
        triton.next_power_of_2(n), triton.next_power_of_2(inner // groups),
        num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return out
