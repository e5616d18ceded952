"""Mamba-2 for rows of one token: convolution, time step, state update, gate and group norm.

One program computes one head (or a part of its rows) of one row of the batch. Then each group of heads is normalised
and the convolution's window moves on, which has to wait until all heads have read it: with few rows the program that
finishes last in its group does that, with many a launch of its own, so that programs do not wait for each other's
arrival. A state of fp16 may be rounded at random, so that what a step adds is not lost where it is smaller than the
state's last bit; the random bits belong to the position, the layer and the element, not to the place in the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.rows import Rows
from leyden.ops.triton.launch import OPTIONS, arrive, counters, release, wait

_FUSED_ROWS = 4  # up to here one launch


@triton.jit
def _earlier(
    weight, bias, window, channel, inside, fresh,
    CHANNELS: tl.constexpr, REACH: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What the convolution at `channel` has before the newest column: bias, and taps of the REACH columns before."""
    tap = tl.arange(0, TAPS)[:, None]
    known = inside[None, :] & (tap < REACH)
    w = tl.load(weight + channel[None, :] * (REACH + 1) + tap, mask=known, other=0.0)
    column = tl.load(window + tap * CHANNELS + channel[None, :], mask=known & (fresh == 0), other=0.0)
    out = tl.sum(w.to(tl.float32) * column.to(tl.float32), 0)
    if BIAS:
        out += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return out


@triton.jit
def _convolved(earlier, new, weight, channel, inside, REACH: tl.constexpr):
    """SiLU of the convolution, rounded as `new` is."""
    w = tl.load(weight + channel * (REACH + 1) + REACH, mask=inside, other=0.0).to(tl.float32)
    out = earlier + w * tl.load(new + channel, mask=inside, other=0.0).to(tl.float32)
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
def _rounded(state, seed, position, first, P: tl.constexpr, N: tl.constexpr, ROUNDS: tl.constexpr):
    """fp32 [P, N] -> fp16, up or down at random: 13 random bits are added below the last bit that stays.

    One Philox call makes the bits of eight elements; the reference draws the same ones (ops.reference.mamba.at_random).
    """
    eights = tl.arange(0, P)[:, None] * (N // 8) + tl.arange(0, N // 8)[None, :] + first * (N // 8)
    zero = tl.zeros_like(eights)
    w0, w1, w2, w3 = tl.philox(seed, eights, zero + position, zero, zero, ROUNDS)
    i = tl.arange(0, 8)[None, None, :]
    low = tl.where(i < 2, w0[:, :, None], w1[:, :, None])
    high = tl.where(i < 6, w2[:, :, None], w3[:, :, None])
    noise = (tl.where(i < 4, low, high) >> ((i & 1) * 16)) & 0x1FFF
    bits = tl.reshape(state, (P, N // 8, 8)).to(tl.int32, bitcast=True) + noise.to(tl.int32)
    value = (bits & ~0x1FFF).to(tl.float32, bitcast=True)
    value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    return tl.reshape(value.to(tl.float16), (P, N))


@triton.jit
def _column(new, window, channel, inside, fresh, CHANNELS: tl.constexpr, REACH: tl.constexpr, TAPS: tl.constexpr):
    """The window after this step: without its oldest column, with `new` as the last one."""
    tap = tl.arange(0, TAPS)[None, :]
    kept = inside[:, None] & (tap + 1 < REACH) & (fresh == 0)
    old = tl.load(window + (tap + 1) * CHANNELS + channel[:, None], mask=kept, other=0.0)
    newest = tl.load(new + channel[:, None] + tap * 0, mask=inside[:, None] & (tap + 1 == REACH), other=0.0)
    return tl.where(tap + 1 == REACH, newest.to(old.dtype), old)


@triton.jit
def _finish(
    gated, norm_weight, new, window, out, group, fresh, eps,
    WIDTH: tl.constexpr, INNER: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, REACH: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Norm of one group of one row; the window of its channels moves on."""
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * N
    at, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    in_x, in_n = at < WIDTH, n < N
    to_x, to_b = group * WIDTH + at, INNER + group * N + n
    to_c = to_b + GROUPS * N
    x = _column(new, window, to_x, in_x, fresh, CHANNELS, REACH, TAPS)
    b = _column(new, window, to_b, in_n, fresh, CHANNELS, REACH, TAPS)
    c = _column(new, window, to_c, in_n, fresh, CHANNELS, REACH, TAPS)
    g = tl.load(gated + to_x, mask=in_x, other=0.0, cache_modifier=".cg")
    w = tl.load(norm_weight + to_x, mask=in_x, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(g * g) / WIDTH + eps)
    tl.store(out + to_x, (g * scale * w).to(out.dtype.element_ty), mask=in_x)
    tl.debug_barrier()  # all of the window is read
    tap = tl.arange(0, TAPS)[None, :]
    tl.store(window + tap * CHANNELS + to_x[:, None], x, mask=in_x[:, None] & (tap < REACH))
    tl.store(window + tap * CHANNELS + to_b[:, None], b, mask=in_n[:, None] & (tap < REACH))
    tl.store(window + tap * CHANNELS + to_c[:, None], c, mask=in_n[:, None] & (tap < REACH))


@triton.jit
def _step(
    projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state, past, slots,
    gated, arrived, out,
    row_stride, conv_stride, ssm_stride, dt_low, dt_high, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, REACH: tl.constexpr,
    TAPS: tl.constexpr, BIAS: tl.constexpr, FUSED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, ROUNDS: tl.constexpr,
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
    to_x, to_b = head * DIM + p, INNER + group * N + n
    to_c = to_b + GROUPS * N
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(past + row)
    fresh = position == 0
    tile = ssm_state + slot * ssm_stride + (head * DIM + p)[:, None] * N + n[None, :]
    inside = in_p[:, None] & in_n[None, :]
    old = tl.load(tile, mask=inside & (fresh == 0), other=0.0).to(tl.float32)
    window = conv_state + slot * conv_stride
    x = _earlier(conv_weight, conv_bias, window, to_x, in_p, fresh, CHANNELS, REACH, TAPS, BIAS)
    b = _earlier(conv_weight, conv_bias, window, to_b, in_n, fresh, CHANNELS, REACH, TAPS, BIAS)
    c = _earlier(conv_weight, conv_bias, window, to_c, in_n, fresh, CHANNELS, REACH, TAPS, BIAS)
    log_rate = tl.load(A_log + head).to(tl.float32)
    skip, bias = tl.load(D + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    wait()
    release()

    z = projected + row * row_stride
    new = z + INNER
    delta = _time_step(tl.load(new + CHANNELS + head), bias, dt_low, dt_high)
    gate = tl.load(z + to_x, mask=in_p, other=0.0).to(tl.float32)
    x = _convolved(x, new, conv_weight, to_x, in_p, REACH)
    b = _convolved(b, new, conv_weight, to_b, in_n, REACH)
    c = _convolved(c, new, conv_weight, to_c, in_n, REACH)
    state = tl.exp(-tl.exp(log_rate) * delta) * old + (delta * x)[:, None] * b[None, :]
    if ROUNDS:
        seed = log_rate.to(tl.int32, bitcast=True)
        first = head * DIM + tl.program_id(0) % PARTS * BLOCK_P
        tl.store(tile, _rounded(state, seed, position, first, BLOCK_P, BLOCK_N, ROUNDS), mask=inside)
    else:
        tl.store(tile, state.to(ssm_state.dtype.element_ty), mask=inside)
    y = (tl.sum(state * c[None, :], 1) + skip * x).to(out.dtype.element_ty).to(tl.float32)
    tl.store(gated + row * INNER + to_x, y * (gate * tl.sigmoid(gate)), mask=in_p)
    if FUSED:
        last = arrive(arrived + row * GROUPS + group, SHARE * PARTS)
        if last:
            _finish(
                gated + row * INNER, norm_weight, new, window, out + row * INNER, group, fresh, eps,
                SHARE * DIM, INNER, N, GROUPS, REACH, TAPS, BLOCK_G, BLOCK_N,
            )  # fmt: skip


@triton.jit
def _after(
    projected, norm_weight, conv_state, past, slots, gated, out, row_stride, conv_stride, eps,
    WIDTH: tl.constexpr, INNER: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, REACH: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    group, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    window = conv_state + tl.load(slots + row).to(tl.int64) * conv_stride
    fresh = tl.load(past + row) == 0
    wait()
    release()
    _finish(
        gated + row * INNER, norm_weight, projected + row * row_stride + INNER, window, out + row * INNER, group, fresh,
        eps, WIDTH, INNER, N, GROUPS, REACH, TAPS, BLOCK_G, BLOCK_N,
    )  # fmt: skip


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
    rounds: int = 0,
    shape: tuple[int, int, bool] | None = None,
) -> Tensor:
    """See ops.mamba_step. The states of the rows must be older than the kernel launched just before.

    shape: rows of a head's state in one program, warps, whether one launch does it all.
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
    block_p, warps, fused = shape or (min(32, triton.next_power_of_2(dim)), 4, count <= _FUSED_ROWS)
    parts = triton.cdiv(dim, block_p)
    taps, block_n, block_g = (triton.next_power_of_2(size) for size in (reach, n, inner // groups))
    _step[(heads * parts, count)](
        projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state, rows.past, rows.slots,
        gated, counters(projected.device, count * groups), out,
        projected.stride(0), conv_state.stride(0), ssm_state.stride(0), dt_limit[0], min(dt_limit[1], 3e38), eps,
        heads, dim, n, groups, reach, taps, conv_bias is not None, fused, parts, block_p, max(8, block_n), block_g,
        rounds if ssm_state.dtype == torch.float16 else 0, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    if not fused:
        _after[(groups, count)](
            projected, norm_weight, conv_state, rows.past, rows.slots, gated, out,
            projected.stride(0), conv_state.stride(0), eps,
            inner // groups, inner, n, groups, reach, taps, block_g, block_n, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out
