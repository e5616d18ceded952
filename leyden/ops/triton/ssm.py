"""Mamba-2 for rows of few tokens: the step of one token, the check of guesses, and the replay of what was right.
The step that writes its state only now and then has kernels of its own: one reads states and the tokens that wait
beside them, one writes the states of rows for which it is time.

A program keeps a part of one head's state in registers and takes it over the tokens of one row. Up to _FUSED_ROWS rows
of one token are one launch: the program that finishes last in its group of heads also normalises it and moves the
convolution's window. Otherwise convolution, recurrence and norm are a launch each, so that nobody repeats the
convolution of B and C for every head, and the recurrence has the registers for itself.

A state of fp16 may be rounded at random, so that what a step adds is not lost where it is smaller than the state's last
bit; the random bits belong to the position, the layer and the element, not to the place in the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.rows import Rows
from leyden.ops.triton.conv import convolve
from leyden.ops.triton.launch import INTERPRETED, OPTIONS, arrive, counters, prefetch, release, wait
from leyden.ops.triton.norm import gated_norm

_FUSED_ROWS = 4  # steps of up to so many rows are one launch
# Rows of a head's state in a program, warps, registers of a thread, for states of 16 and of 32 bits: as many bytes as
# possible on their way at once, without a spill. Eight rows that share random bits are to be in one thread: half as
# many warps then, so that a column of a head has as many threads as calls of Philox.
_SHAPES = {2: (64, 8, 80), 4: (64, 4, 128)}
_AT_RANDOM = (64, 4, 128)
# Of steps that seldom write, through whose programs states stream: heads, rows of a tile, tiles on their way and in
# work, warps, registers.
_STREAMS, _FEW_STREAMS = (8, 64, 3, 4, 128), (8, 64, 3, 2, 168)


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
def time_step(dt, bias, low, high):
    """clamp(softplus(dt + bias)); log1p by Kahan's correction, which keeps small steps exact."""
    value = dt.to(tl.float32) + bias
    grown = tl.exp(tl.minimum(value, 20.0))
    one_more = 1.0 + grown
    log1p = tl.where(
        one_more == 1.0, grown, tl.log(one_more) * (grown / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    )
    return tl.minimum(tl.maximum(tl.where(value > 20.0, value, log1p), low), high)


@triton.jit
def _stored(state, dtype: tl.constexpr, log_rate, position, calls, ROUNDS: tl.constexpr):
    """The state [P, N] as it is stored, its rows in the order of _rows(); with ROUNDS as at_random() in
    ops.reference.mamba rounds it. `calls` (int32 [P / 8, N]): which call of Philox serves an element and the seven
    others in its column. They are in one thread, so that nothing asks for another layout than that of the state."""
    if ROUNDS:
        key = log_rate.to(tl.uint32, bitcast=True).to(tl.uint64) | (position.to(tl.uint64) << 32)
        zero = tl.zeros_like(calls)
        w0, w1, w2, w3 = tl.philox(key, calls, zero, zero, zero, ROUNDS)
        k = tl.arange(0, 8)[:, None, None]
        word = tl.where(k < 4, tl.where(k < 2, w0, w1), tl.where(k < 6, w2, w3))  # [8, P / 8, N]
        noise = tl.reshape((word >> (k % 2 * 16).to(tl.uint32)) & 0x1FFF, state.shape)
        state = (state.to(tl.uint32, bitcast=True) + noise).to(tl.float32, bitcast=True)
        if INTERPRETED:  # whose conversion makes infinities
            state = tl.minimum(tl.maximum(state, -65504.0), 65504.0)
        return state.to(dtype, fp_downcast_rounding="rtz")  # cuts the bits off, and what is too large to the largest
    return state.to(dtype)


@triton.jit
def _rows(first, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """The BLOCK rows of a head's state from `first` on. With ROUNDS those come first that are 0 modulo 8, then those
    that are 1, and so on: the eight that share random bits end up in the same thread."""
    i = tl.arange(0, BLOCK)
    if ROUNDS:
        i = i % (BLOCK // 8) * 8 + i // (BLOCK // 8)
    return first + i


@triton.jit
def _calls(first, head, n, DIM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Of the same rows, which calls of Philox serve them, int32 [BLOCK / 8, N]."""
    q = first // 8 + tl.arange(0, BLOCK // 8)
    return (head * ((DIM + 7) // 8) + q)[:, None] * N + n[None, :]


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
    TAPS: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """All of a step for BLOCK_P rows of one head's state, and for a group if this program is its last."""
    INNER: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * N
    SHARE: tl.constexpr = HEADS // GROUPS  # heads of a group
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // PARTS
    group = head // SHARE
    start = tl.program_id(0) % PARTS * BLOCK_P
    p = _rows(start, BLOCK_P, ROUNDS)
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
    WIDTH: tl.constexpr = SHARE * DIM
    bytes_each = norm_weight.dtype.element_ty.primitive_bitwidth // 8
    prefetch(norm_weight + group * WIDTH, WIDTH * bytes_each, tl.arange(0, THREADS) == 0)  # for _finish
    wait()
    release()

    z = projected + row * row_stride
    new = z + INNER
    delta = time_step(tl.load(new + CHANNELS + head), bias, dt_low, dt_high)
    gate = tl.load(z + to_x, mask=in_p, other=0.0).to(tl.float32)
    x = _convolved(x, new, conv_weight, to_x, in_p, REACH)
    b = _convolved(b, new, conv_weight, to_b, in_n, REACH)
    c = _convolved(c, new, conv_weight, to_c, in_n, REACH)
    state = tl.exp(-tl.exp(log_rate) * delta) * old + (delta * x)[:, None] * b[None, :]
    calls = _calls(start, head, n, DIM, N, BLOCK_P)
    tl.store(tile, _stored(state, ssm_state.dtype.element_ty, log_rate, position, calls, ROUNDS), mask=inside)
    y = (tl.sum(state * c[None, :], 1) + skip * x).to(out.dtype.element_ty).to(tl.float32)
    tl.store(gated + row * INNER + to_x, y * (gate * tl.sigmoid(gate)), mask=in_p)
    if arrive(arrived + row * GROUPS + group, SHARE * PARTS):
        _finish(
            gated + row * INNER, norm_weight, new, window, out + row * INNER, group, fresh, eps,
            WIDTH, INNER, N, GROUPS, REACH, TAPS, BLOCK_G, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _advance(
    x, B, C, dt, A_log, D, dt_bias, ssm_state, starts, ends, past, slots, y,
    x_stride, B_stride, C_stride, dt_stride, ssm_stride, dt_low, dt_high,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    ONE: tl.constexpr, MOVE: tl.constexpr, OUT: tl.constexpr, ROUNDS: tl.constexpr, RING: tl.constexpr,
    MIXED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The recurrence over the tokens of one row (ONE: it has one), for BLOCK_P rows of one head's state. MOVE: the
    state is stored in the end; OUT: so is what each token reads from it. RING: dt has so many tokens for each slot, x,
    B and C for each row (MIXED: for each slot, too), and `ends` says how many of them count."""
    row, head = tl.program_id(1), tl.program_id(0) // PARTS
    group = head // (HEADS // GROUPS)
    start = tl.program_id(0) % PARTS * BLOCK_P
    p = _rows(start, BLOCK_P, ROUNDS)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < DIM, n < N
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(past + row)
    index = (head * DIM + p)[:, None] * N + n[None, :]
    tile = ssm_state + slot * ssm_stride + index
    inside = in_p[:, None] & in_n[None, :]
    old = tl.load(tile, mask=inside & (position > 0), other=0.0)
    log_rate = tl.load(A_log + head).to(tl.float32)
    skip, bias = tl.load(D + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    wait()
    release()
    state = old.to(tl.float32)
    first = row
    end = row + 1
    if RING:
        first = row * RING
        end = first + tl.load(ends + row)
        dt += (slot - row) * RING * dt_stride
        if MIXED:
            x += (slot - row) * RING * x_stride
            B += (slot - row) * RING * B_stride
    elif not ONE:
        first, end = tl.load(starts + row), tl.load(ends + row)
    for token in range(first, end):
        at = tl.full((), 0, dtype=tl.int64) + token
        delta = time_step(tl.load(dt + at * dt_stride + head), bias, dt_low, dt_high)
        value = tl.load(x + at * x_stride + head * DIM + p, mask=in_p, other=0.0).to(tl.float32)
        b = tl.load(B + at * B_stride + group * N + n, mask=in_n, other=0.0).to(tl.float32)
        state = tl.exp(-tl.exp(log_rate) * delta) * state + (delta * value)[:, None] * b[None, :]
        if OUT:
            c = tl.load(C + at * C_stride + group * N + n, mask=in_n, other=0.0).to(tl.float32)
            made = tl.sum(state * c[None, :], 1) + skip * value
            tl.store(y + (at * HEADS + head) * DIM + p, made.to(y.dtype.element_ty), mask=in_p)
    if MOVE:
        moved = position + (end - first) - 1
        calls = _calls(start, head, n, DIM, N, BLOCK_P)
        stored = _stored(state, ssm_state.dtype.element_ty, log_rate, moved, calls, ROUNDS)
        tl.store(tile, stored, mask=inside & (end > first))


@triton.jit
def _times(matrix, vector):
    """[M, K] by fp32 [K] -> fp32 [M]. A matrix of 16 bits meets the vector on tensor cores: rounded to 16 bits in
    every other column, and what is missing then in those between."""
    if matrix.dtype.primitive_bitwidth == 16:
        high = vector.to(matrix.dtype)
        low = (vector - high.to(tl.float32)).to(matrix.dtype)
        columns = tl.where(tl.arange(0, 8)[None, :] % 2 == 0, high[:, None], low[:, None])
        return tl.sum(tl.dot(matrix, columns), 1) * 0.25
    else:
        return tl.sum(matrix.to(tl.float32) * vector[None, :], 1)


@triton.jit
def _recall(
    projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state, recent, began, past,
    slots, gated, factors, spare, arrived, out,
    row_stride, conv_stride, ssm_stride, recent_stride, dt_low, dt_high, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
    REACH: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, PERIOD: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, STAGES: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """All of a step for EACH heads of one row, which reads their states S, the tokens that wait beside them, and
    itself; and for their group if this program is its last. With t(i) the time since token i and
    w(i) = dt(i) exp(-A t(i)), y = exp(-A t) S C + sum of w(i) (B(i) C) x(i) + D x. Then the token waits, too; at every
    PERIOD-th position it is left in `spare`, for _settle, which makes of S exp(-A t) S + sum of w(i) x(i) B(i).

    What states are not needed for comes first. Then nothing but states passes by, a tile of BLOCK_P rows after the
    other, with those of the next STAGES - 1 on their way."""
    INNER: tl.constexpr = HEADS * DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * N
    SHARE: tl.constexpr = HEADS // GROUPS  # heads of a group
    WIDTH: tl.constexpr = EACH * DIM
    LINE: tl.constexpr = INNER + GROUPS * N + HEADS  # of a token that waits
    first, row = tl.program_id(0) * EACH, tl.program_id(1).to(tl.int64)
    group = first // SHARE
    n, i, h, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    at = tl.arange(0, BLOCK_H * BLOCK_D)
    in_x, in_n, in_h = at < WIDTH, n < N, h < EACH
    to_x, to_b, to_dt = first * DIM + at, INNER + group * N + n, INNER + GROUPS * N + first + h
    to_c = to_b + GROUPS * N
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(past + row)
    states = ssm_state + slot * ssm_stride + first * (DIM * N)
    bytes_each = ssm_state.dtype.element_ty.primitive_bitwidth // 8
    prefetch(states, tl.minimum(BLOCK_P * STAGES, WIDTH) * N * bytes_each, tl.arange(0, THREADS) == 0)
    line_bytes = WIDTH * (recent.dtype.element_ty.primitive_bitwidth // 8)
    held = tl.maximum(tl.load(began + slot), position // PERIOD * PERIOD)
    count, fresh = position - held, position == 0
    window = conv_state + slot * conv_stride
    x = _earlier(conv_weight, conv_bias, window, to_x, in_x, fresh, CHANNELS, REACH, TAPS, BIAS)
    b = _earlier(conv_weight, conv_bias, window, to_b, in_n, fresh, CHANNELS, REACH, TAPS, BIAS)
    c = _earlier(conv_weight, conv_bias, window, to_c, in_n, fresh, CHANNELS, REACH, TAPS, BIAS)
    waiting = recent + slot * recent_stride
    lines, newest = waiting + i * LINE, (i == count)[:, None]
    there = (i < PERIOD - 1)[:, None]  # not all of it counts: to know what does would take a load before these
    prefetch(lines + first * DIM, line_bytes, i < PERIOD - 1)
    bs = tl.load(lines[:, None] + to_b[None, :], mask=there & in_n[None, :], other=0.0)
    raw = tl.load(lines[:, None] + to_dt[None, :], mask=there & in_h[None, :], other=0.0)
    rate = -tl.exp(tl.load(A_log + first + h, mask=in_h, other=0.0).to(tl.float32))
    skip = tl.load(D + first + h, mask=in_h, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + first + h, mask=in_h, other=0.0).to(tl.float32)
    wait()
    release()

    z = projected + row * row_stride
    new = z + INNER
    own_dt = tl.load(new + CHANNELS + first + h, mask=in_h, other=0.0)
    mine = (first + h)[:, None] * DIM + d[None, :]
    inside = in_h[:, None] & (d < DIM)[None, :]
    gate = tl.load(z + mine, mask=inside, other=0.0)
    x = _convolved(x, new, conv_weight, to_x, in_x, REACH)
    b = _convolved(b, new, conv_weight, to_b, in_n, REACH)
    c = _convolved(c, new, conv_weight, to_c, in_n, REACH)
    own = tl.where((position + 1) % PERIOD == 0, spare + row * LINE, waiting + count * LINE)
    tl.store(own + to_x, x.to(recent.dtype.element_ty), mask=in_x)
    tl.store(own + to_b, b.to(recent.dtype.element_ty), mask=in_n)
    tl.store(own + to_dt, own_dt, mask=in_h)
    times = time_step(tl.where(newest, own_dt[None, :], raw), bias[None, :], dt_low, dt_high)
    times = tl.where((i <= count)[:, None], times, 0.0)
    clock = tl.cumsum(times, 0)
    passed = tl.max(clock, 0)  # the last one: exactly no time since this token
    weights = times * tl.exp(rate[None, :] * (passed[None, :] - clock))
    bs = tl.where((i < count)[:, None], bs.to(tl.float32), tl.where(newest, b[None, :], 0.0))
    meets = tl.sum(bs * c[None, :], 1)
    factors += (row * HEADS + first) * (2 * BLOCK_L + 1)
    cell = i[:, None] * EACH + h[None, :]
    own_skip = tl.where(newest, skip[None, :], 0.0)
    tl.store(factors + cell, weights * meets[:, None] + own_skip, mask=in_h[None, :])
    tl.store(factors + BLOCK_L * EACH + cell, weights, mask=in_h[None, :])
    tl.store(factors + 2 * BLOCK_L * EACH + h, tl.exp(rate * passed), mask=in_h)
    tl.debug_barrier()  # each thread reads what others have written

    remembered = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    for token in tl.static_range(PERIOD):
        line = tl.where(token == count, own, waiting + token * LINE)
        value = tl.load(line + mine, mask=inside & (token <= count), other=0.0).to(tl.float32)
        remembered += tl.load(factors + token * EACH + h, mask=in_h, other=0.0)[:, None] * value
    gated += row * INNER
    for tile in tl.range(0, EACH * PARTS, num_stages=STAGES):
        p = tile % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
        channel, in_p = tile // PARTS * DIM + p, p < DIM
        old = _whole(states + channel[:, None] * N + n[None, :], in_p, in_n, DIM % BLOCK_P == 0 and N == BLOCK_N)
        tl.store(gated + first * DIM + channel, _times(old, c), mask=in_p)
    tl.debug_barrier()
    decay = tl.load(factors + 2 * BLOCK_L * EACH + h, mask=in_h, other=0.0)[:, None]
    made = tl.load(gated + mine, mask=inside & (held > 0), other=0.0, cache_modifier=".cg") * decay + remembered
    made, gate = made.to(out.dtype.element_ty).to(tl.float32), gate.to(tl.float32)
    tl.debug_barrier()  # all of it is read
    tl.store(gated + mine, made * (gate * tl.sigmoid(gate)), mask=inside)
    last = True
    if EACH < SHARE:
        last = arrive(arrived + row * GROUPS + group, SHARE // EACH)
    else:
        tl.debug_barrier()
    if last:
        _finish(
            gated, norm_weight, new, window, out + row * INNER, group, fresh, eps,
            SHARE * DIM, INNER, N, GROUPS, REACH, TAPS, BLOCK_G, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _settle(
    A_log, ssm_state, recent, began, past, slots, factors, spare, R, ssm_stride, recent_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, PERIOD: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """After _recall: BLOCK_P rows of a head's state for those of the R rows that have come to a PERIOD-th position, as
    many as there are, in turns. Few rows have, but for a program that has other things to do it would be long."""
    INNER: tl.constexpr = HEADS * DIM
    LINE: tl.constexpr = INNER + GROUPS * N + HEADS
    head, start = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * BLOCK_P
    group, r = head // (HEADS // GROUPS), tl.arange(0, BLOCK_R)
    written = (tl.load(past + r, mask=r < R, other=0) + 1) % PERIOD == 0
    place = tl.cumsum(written.to(tl.int32), 0)
    log_rate = tl.load(A_log + head).to(tl.float32)
    n, i, p = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_L), _rows(start, BLOCK_P, ROUNDS)
    in_p, in_n = p < DIM, n < N
    inside = in_p[:, None] & in_n[None, :]
    calls = _calls(start, head, n, DIM, N, BLOCK_P)
    wait()
    release()
    for turn in range(tl.program_id(1) + 1, tl.max(place) + 1, tl.num_programs(1)):
        row = tl.sum(tl.where(written & (place == turn), r, 0)).to(tl.int64)
        slot, position = tl.load(slots + row).to(tl.int64), tl.load(past + row)
        held = tl.maximum(tl.load(began + slot), position // PERIOD * PERIOD)
        count = position - held
        cells = ssm_state + slot * ssm_stride + (head * DIM + p)[:, None] * N + n[None, :]
        state = tl.load(cells, mask=inside & (held > 0), other=0.0).to(tl.float32)
        lines = tl.where(i == count, spare + row * LINE, recent + slot * recent_stride + i * LINE)[:, None]
        known = (i <= count)[:, None]
        values = tl.load(lines + (head * DIM + p)[None, :], mask=known & in_p[None, :], other=0.0).to(tl.float32)
        others = tl.load(lines + (INNER + group * N + n)[None, :], mask=known & in_n[None, :], other=0.0)
        own = factors + (row * HEADS + head // EACH * EACH) * (2 * BLOCK_L + 1) + head % EACH
        weight = tl.load(own + (BLOCK_L + i) * EACH)
        state = state * tl.load(own + 2 * BLOCK_L * EACH) + _spread(values * weight[:, None], others)
        stored = _stored(state, ssm_state.dtype.element_ty, log_rate, position, calls, ROUNDS)
        tl.store(cells, stored, mask=inside)


@triton.jit
def _spread(a, b):
    """fp32 [L, M] and [L, N] -> fp32 [M, N], the sum over L; with b of 16 bits on tensor cores, a in two parts."""
    if INTERPRETED or b.dtype.primitive_bitwidth == 32:
        return tl.dot(tl.trans(a), b.to(tl.float32), input_precision="ieee")
    else:
        high = a.to(b.dtype)
        low = (a - high.to(tl.float32)).to(b.dtype)
        return tl.dot(tl.trans(low), b, tl.dot(tl.trans(high), b))


@triton.jit
def _whole(pointers, in_p, in_n, ALL: tl.constexpr):
    """A tile of a state; a mask costs, so it is there only where something is left out."""
    if ALL:
        return tl.load(pointers)
    return tl.load(pointers, mask=in_p[:, None] & in_n[None, :], other=0.0)


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
    shape: tuple[int, int, int] | None = None,
    fused: bool | None = None,
) -> Tensor:
    """See ops.mamba_step. The states of the rows must be older than the kernel launched just before.

    shape: rows of a head's state in one program (at least 8), warps, registers of a thread; fused: whether one launch
    does it all.
    """
    count = len(projected)
    _, heads, dim, n = ssm_state.shape
    inner, reach = heads * dim, conv_state.shape[1]
    assert rows.slots is not None and projected.stride(1) == 1 and conv_weight.is_contiguous()
    assert conv_state[0].is_contiguous() and ssm_state[0].is_contiguous()
    out = torch.empty(count, inner, dtype=projected.dtype, device=projected.device)
    if not count:
        return out
    if not (count <= _FUSED_ROWS if fused is None else fused):
        z, inputs = projected[:, :inner], projected[:, inner:]
        y = _mixed(
            inputs, conv_weight, conv_bias, A_log, D, dt_bias, dt_limit, groups, conv_state, ssm_state,
            rows.starts, rows.starts[1:], rows.past, rows.slots, 1, rounds=rounds, shape=shape,
        )  # fmt: skip
        return gated_norm(y, z, norm_weight, groups, eps)
    gated = torch.empty(count, inner, dtype=torch.float32, device=projected.device)
    block_p, warps, registers = shape or (min(32, max(8, triton.next_power_of_2(dim))), 4, 255)
    parts = triton.cdiv(dim, block_p)
    taps, block_n, block_g = (triton.next_power_of_2(size) for size in (reach, n, inner // groups))
    _step[(heads * parts, count)](
        projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state, rows.past, rows.slots,
        gated, counters(projected.device, count * groups), out,
        projected.stride(0), conv_state.stride(0), ssm_state.stride(0), dt_limit[0], min(dt_limit[1], 3e38), eps,
        heads, dim, n, groups, reach, taps, conv_bias is not None, parts,
        rounds * (ssm_state.dtype == torch.float16), block_p, block_n, block_g, 32 * warps,
        num_warps=warps, maxnreg=registers, **OPTIONS,
    )  # fmt: skip
    return out


def mamba_lazy_step(
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
    recent: Tensor,
    began: Tensor,
    rows: Rows,
    rounds: int = 0,
    shape: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """See ops.mamba_lazy_step. States and waiting tokens must be older than the kernel launched just before.

    shape: heads of a program, rows of a head's state in a tile, tiles on their way and in work, warps, registers of a
    thread.
    """
    _, heads, dim, n = ssm_state.shape
    count, inner, reach, period = len(projected), heads * dim, conv_state.shape[1], recent.shape[1] + 1
    share = heads // groups
    assert rows.slots is not None and projected.stride(1) == 1 and conv_weight.is_contiguous()
    assert conv_state[0].is_contiguous() and ssm_state[0].is_contiguous()
    assert recent[0].is_contiguous() and recent.dtype == projected.dtype
    out = torch.empty(count, inner, dtype=projected.dtype, device=projected.device)
    most, block_p, stages, warps, registers = shape or (_FEW_STREAMS if count <= 32 else _STREAMS)
    block_p = min(block_p, max(8, triton.next_power_of_2(dim)))
    each = most if share % most == 0 else share
    taps, block_n, block_h, block_d, block_g = (
        triton.next_power_of_2(size) for size in (reach, n, each, dim, inner // groups)
    )
    block_l = max(16, triton.next_power_of_2(period))
    gated = torch.empty(count, inner, dtype=torch.float32, device=projected.device)
    factors = torch.empty(count, heads, 2 * block_l + 1, dtype=torch.float32, device=projected.device)
    spare = torch.empty(count, recent.shape[2], dtype=recent.dtype, device=projected.device)
    if count:
        _recall[(heads // each, count)](
            projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, conv_state, ssm_state, recent, began,
            rows.past, rows.slots, gated, factors, spare, counters(projected.device, count * groups), out,
            projected.stride(0), conv_state.stride(0), ssm_state.stride(0), recent.stride(0), dt_limit[0],
            min(dt_limit[1], 3e38), eps,
            heads, dim, n, groups, each, reach, taps, conv_bias is not None, triton.cdiv(dim, block_p), period,
            block_l, block_h, block_p, block_d, block_n, block_g, stages, 32 * warps,
            num_warps=warps, maxnreg=registers, **OPTIONS,
        )  # fmt: skip
        block_p = min(block_p, 32)
        parts = triton.cdiv(dim, block_p)
        _settle[(heads * parts, triton.cdiv(count, period))](
            A_log, ssm_state, recent, began, rows.past, rows.slots, factors, spare, count, ssm_state.stride(0),
            recent.stride(0),
            heads, dim, n, groups, each, parts, period, rounds * (ssm_state.dtype == torch.float16), block_l, block_p,
            block_n, triton.next_power_of_2(count), num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out


def mamba_fold(
    A_log: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    groups: int,
    ssm_state: Tensor,
    recent: Tensor,
    slots: Tensor,
    held: Tensor,
    counts: Tensor,
    rounds: int = 0,
) -> None:
    """See ops.mamba_fold. Not launched ahead of its turn: slots, held and counts may be the newest there is."""
    (_, heads, dim, n), waiting = ssm_state.shape, recent.shape[1]
    x, B, dt = recent.view(-1, recent.shape[2]).split([heads * dim, groups * n, heads], dim=-1)
    rounds *= ssm_state.dtype == torch.float16
    block_p, warps, registers = _shape(ssm_state, rounds)
    parts = triton.cdiv(dim, block_p)
    if len(slots):
        _advance[(heads * parts, len(slots))](
            x, B, B, dt, A_log, A_log, dt_bias, ssm_state, counts, counts, held, slots, x,
            x.stride(0), B.stride(0), B.stride(0), dt.stride(0), ssm_state.stride(0), dt_limit[0],
            min(dt_limit[1], 3e38),
            heads, dim, n, groups, parts, False, True, False, rounds, waiting, True, block_p,
            triton.next_power_of_2(n),
            num_warps=warps, maxnreg=registers,
        )  # fmt: skip


def _shape(
    ssm_state: Tensor,
    rounds: int,
    shape: tuple[int, int, int] | None = None,
    shapes: dict[int, tuple[int, int, int]] = _SHAPES,
) -> tuple[int, int, int]:
    """Rows of a head's state in one program, warps, registers of a thread; at least 8 rows, which share random bits."""
    block_p, warps, registers = shape or (_AT_RANDOM if rounds else shapes[ssm_state.dtype.itemsize])
    return min(block_p, max(8, triton.next_power_of_2(ssm_state.shape[2]))), warps, registers


def mamba_verify(
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
    ring: Tensor,
    rows: Rows,
) -> Tensor:
    """See ops.mamba_verify."""
    inner, longest = len(norm_weight), max(rows.lens, default=0)
    assert rows.slots is not None and projected.stride(1) == 1 and ring[0].is_contiguous()
    assert longest <= ring.shape[1], f"rows of at most {ring.shape[1]} tokens, got {longest}"
    z, inputs, ends = projected[:, :inner], projected[:, inner:], rows.starts[1:]
    y = _mixed(
        inputs, conv_weight, conv_bias, A_log, D, dt_bias, dt_limit, groups, conv_state, ssm_state,
        rows.starts, ends, rows.past, rows.slots, longest, move=False, kept=ring,
    )  # fmt: skip
    return gated_norm(y, z, norm_weight, groups, eps)


def mamba_replay(
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    groups: int,
    conv_state: Tensor,
    ssm_state: Tensor,
    ring: Tensor,
    slots: Tensor,
    past: Tensor,
    counts: Tensor,
    rounds: int = 0,
) -> None:
    """See ops.mamba_replay. Nobody waits for anything here: the counts stay on the device."""
    inputs = ring.view(-1, ring.shape[2])
    _mixed(
        inputs, conv_weight, conv_bias, A_log, D, dt_bias, dt_limit, groups, conv_state, ssm_state,
        counts, counts, past, slots, ring.shape[1], out=False, rounds=rounds, ring=True,
    )  # fmt: skip


def _mixed(
    inputs: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    groups: int,
    conv_state: Tensor,
    ssm_state: Tensor,
    starts: Tensor,
    ends: Tensor,
    past: Tensor,
    slots: Tensor,
    longest: int,
    move: bool = True,
    out: bool = True,
    rounds: int = 0,
    shape: tuple[int, int, int] | None = None,
    ring: bool = False,
    kept: Tensor | None = None,
) -> Tensor:
    """Convolution and recurrence of [xBC, dt] -> y [T, inner], if `out`; the states of the rows move on, if `move`.
    ring: the tokens are those of the slots; kept: they are left there; see convolve()."""
    _, heads, dim, n = ssm_state.shape
    inner, width = heads * dim, groups * n
    convolved = inputs[:, : inner + 2 * width]
    xBC = convolve(convolved, conv_weight, conv_bias, conv_state, starts, ends, past, slots, longest, move, ring, kept)
    x, B, C = xBC.split([inner, width, width], dim=-1)
    dt = inputs[:, inner + 2 * width :]
    y = torch.empty(len(inputs), inner, dtype=inputs.dtype, device=inputs.device) if out else inputs
    rounds *= ssm_state.dtype == torch.float16
    block_p, warps, registers = _shape(ssm_state, rounds, shape)
    parts = triton.cdiv(dim, block_p)
    if len(inputs):
        _advance[(heads * parts, len(ends))](
            x, B, C, dt, A_log, D, dt_bias, ssm_state, starts, ends, past, slots, y,
            x.stride(0), B.stride(0), C.stride(0), dt.stride(0), ssm_state.stride(0), dt_limit[0],
            min(dt_limit[1], 3e38),
            heads, dim, n, groups, parts, longest == 1 and out, move, out,
            rounds, longest if ring else 0, False, block_p, triton.next_power_of_2(n),
            num_warps=warps, maxnreg=registers, **OPTIONS,
        )  # fmt: skip
    return y
