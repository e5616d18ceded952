"""Mamba-2. A row of one token takes the same way as a longer one; rows of guesses have kernels of their own."""

import torch
from torch import Tensor

from leyden.ops.cpu.norm import gated_norm
from leyden.ops.cpu.program import Kernel, apart, empty, has_rows, run, types
from leyden.ops.reference import mamba as reference
from leyden.ops.rows import Rows

_CONV = Kernel("causal_conv", "ttttt" + "ttti" + "iiiii" + "iti")
_SCAN_LAYOUT = "ttttttttt" + "ttti" + "iiiiiiiiiidd" + "tii"
_SCAN = Kernel("ssd_scan", _SCAN_LAYOUT)
_VERIFY = Kernel("verify", _SCAN_LAYOUT)
_REPLAY = Kernel("replay", _SCAN_LAYOUT)
_RING = Kernel("ring_write", "tt" + "ttti" + "iiiii")
_MOST_TAPS, _MOST_N, _MOST_WIDTH = 8, 256, 16  # as in mamba.c


def _places(rows: Rows, state: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    return rows.starts, rows.past, None if state is None else rows.slots, len(rows.lens)


def _kept(state: Tensor | None) -> bool:
    return state is None or (state.dtype in types and state.is_contiguous())


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, rows: Rows) -> Tensor:
    taps = weight.shape[1]
    plain = weight.dtype == x.dtype and weight.is_contiguous() and (bias is None or bias.dtype == x.dtype)
    if not (plain and has_rows(x) and _kept(state) and taps <= _MOST_TAPS):
        return reference.causal_conv(x, weight, bias, state, rows)
    out = empty(*x.shape, dtype=x.dtype)
    state_type = types[x.dtype if state is None else state.dtype]
    places, form = _places(rows, state), (x.shape[1], taps, x.stride(0))
    run(
        _CONV(x, weight, bias, state, out, *places, *form, types[x.dtype], state_type, 0, None, 0),
        work=20 * x.numel(),
    )
    return out


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
    rounds: int = 0,
) -> Tensor:
    """`chunk` does not matter: tokens are taken one by one, a part of the state at a time. rounds: as in a step."""
    (_, heads, dim), (_, groups, n) = x.shape, B.shape
    flat = all(t.dtype == x.dtype and t.stride(-1) == 1 for t in (x, dt, B, C))
    flat = flat and x.stride(1) == dim and B.stride(1) == C.stride(1) == n
    if not (flat and x.dtype in types and _kept(state) and n <= _MOST_N):
        assert not rounds, "for the reference to round at random it takes the whole step"
        return reference.ssd_scan(x, dt, B, C, A_log, D, dt_bias, dt_limit, chunk, state, rows)
    out = empty(*x.shape, dtype=x.dtype)
    state_type = types[x.dtype if state is None else state.dtype]
    strides = (x.stride(0), dt.stride(0), B.stride(0), C.stride(0))
    places, form = _places(rows, state), (heads, dim, groups, n, *strides, types[x.dtype], state_type, *dt_limit)
    run(_SCAN(x, dt, B, C, A_log, D, dt_bias, state, out, *places, *form, None, 0, rounds), work=4 * x.numel() * n)
    return out


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
) -> Tensor:
    rounds *= ssm_state.dtype == torch.float16
    if rounds and not (has_rows(projected) and _kept(ssm_state) and ssm_state.shape[-1] <= _MOST_N):
        parameters = (conv_weight, conv_bias, A_log, D, dt_bias, dt_limit, norm_weight, groups, eps)
        return reference.mamba_step(projected, *parameters, conv_state, ssm_state, rows, rounds)
    heads, n, inner = len(A_log), ssm_state.shape[-1], len(norm_weight)
    z, xBC, dt = projected.split([inner, inner + 2 * groups * n, heads], dim=-1)
    x, B, C = causal_conv(xBC, conv_weight, conv_bias, conv_state, rows).split([inner, groups * n, groups * n], dim=-1)
    x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
    y = ssd_scan(x, dt, B, C, A_log, D, dt_bias, dt_limit, 1, ssm_state, rows, rounds)
    return gated_norm(y.flatten(1), z, norm_weight, groups, eps)


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
    parameters = (conv_weight, conv_bias, A_log, D, dt_bias)
    known = _guesses_fit(projected, conv_weight, conv_bias, conv_state, ssm_state, ring)
    if not (known and max(rows.lens) <= ring.shape[1]):
        states = (conv_state, ssm_state, ring)
        return reference.mamba_verify(projected, *parameters, dt_limit, norm_weight, groups, eps, *states, rows)
    (_, heads, dim, n), inner, tokens = ssm_state.shape, len(norm_weight), len(projected)
    channels, places, type = inner + 2 * groups * n, _places(rows, ssm_state), types[projected.dtype]
    z, inputs = projected.split([inner, channels + heads], dim=-1)
    mixed, y = empty(tokens, channels, dtype=projected.dtype), empty(tokens, inner, dtype=projected.dtype)
    x, B, C = mixed.split([inner, groups * n, groups * n], dim=-1)
    dt, stride = inputs[:, channels:], projected.stride(0)
    conv_form = (channels, conv_weight.shape[1], stride, type, types[conv_state.dtype], 1, None, 0)
    form = (heads, dim, groups, n, channels, stride, channels, channels, type, types[ssm_state.dtype])
    run(
        *apart(
            _RING(inputs, ring, *places, channels + heads, stride, ring.shape[1], type, types[ring.dtype]),
            _CONV(inputs, conv_weight, conv_bias, conv_state, mixed, *places, *conv_form),
        ),
        _VERIFY(x, dt, B, C, A_log, D, dt_bias, ssm_state, y, *places, *form, *dt_limit, None, 0, 0),
        work=4 * y.numel() * n,
    )
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
    parameters = (conv_weight, conv_bias, A_log, D, dt_bias)
    rounds *= ssm_state.dtype == torch.float16
    if not _guesses_fit(ring[0], conv_weight, conv_bias, conv_state, ssm_state, ring):
        states = (conv_state, ssm_state, ring, slots, past, counts)
        return reference.mamba_replay(*parameters, dt_limit, groups, *states, rounds)
    (_, heads, dim, n), (_, width, columns), rows = ssm_state.shape, ring.shape, len(slots)
    channels, type = columns - heads, types[ring.dtype]
    slots, past, counts = slots.to(torch.int32), past.to(torch.int32), counts.to(torch.int32)
    mixed = empty(rows * width, channels, dtype=ring.dtype)
    x, B, C = mixed.split([heads * dim, groups * n, groups * n], dim=-1)
    dt, places = ring[0, :, channels:], (None, past, slots, rows)
    conv_form = (channels, conv_weight.shape[1], columns, type, types[conv_state.dtype], 0, counts, width)
    form = (heads, dim, groups, n, channels, columns, channels, channels, type, types[ssm_state.dtype])
    run(
        _CONV(ring, conv_weight, conv_bias, conv_state, mixed, *places, *conv_form),
        _REPLAY(x, dt, B, C, A_log, D, dt_bias, ssm_state, None, *places, *form, *dt_limit, counts, width, rounds),
        work=4 * rows * width * heads * dim * n,
    )
    return None


def _guesses_fit(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, ssm_state: Tensor, ring: Tensor
) -> bool:
    plain = weight.dtype == inputs.dtype and weight.is_contiguous() and (bias is None or bias.dtype == inputs.dtype)
    kept = all(_kept(t) for t in (conv_state, ssm_state, ring))
    sizes = weight.shape[1] <= _MOST_TAPS and ssm_state.shape[-1] <= _MOST_N and ring.shape[1] <= _MOST_WIDTH
    return plain and has_rows(inputs) and kept and sizes
