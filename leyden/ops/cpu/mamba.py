"""Mamba-2. A row of one token takes the same way as a longer one."""

from torch import Tensor

from leyden.ops.cpu.norm import gated_norm
from leyden.ops.cpu.program import Kernel, empty, has_rows, run, types
from leyden.ops.reference import mamba as reference
from leyden.ops.rows import Rows

_CONV = Kernel("causal_conv", "ttttt" + "ttti" + "iiiii")
_SCAN = Kernel("ssd_scan", "ttttttttt" + "ttti" + "iiiiiiiiiidd")
_MOST_TAPS, _MOST_N = 8, 256  # as in mamba.c


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
        _CONV(x, weight, bias, state, out, *places, *form, types[x.dtype], state_type),
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
) -> Tensor:
    """`chunk` does not matter: tokens are taken one by one, a part of the state at a time."""
    (_, heads, dim), (_, groups, n) = x.shape, B.shape
    flat = all(t.dtype == x.dtype and t.stride(-1) == 1 for t in (x, dt, B, C))
    flat = flat and x.stride(1) == dim and B.stride(1) == C.stride(1) == n
    if not (flat and x.dtype in types and _kept(state) and n <= _MOST_N):
        return reference.ssd_scan(x, dt, B, C, A_log, D, dt_bias, dt_limit, chunk, state, rows)
    out = empty(*x.shape, dtype=x.dtype)
    state_type = types[x.dtype if state is None else state.dtype]
    strides = (x.stride(0), dt.stride(0), B.stride(0), C.stride(0))
    places, form = _places(rows, state), (heads, dim, groups, n, *strides, types[x.dtype], state_type, *dt_limit)
    run(_SCAN(x, dt, B, C, A_log, D, dt_bias, state, out, *places, *form), work=4 * x.numel() * n)
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
) -> Tensor:
    heads, n, inner = len(A_log), ssm_state.shape[-1], len(norm_weight)
    z, xBC, dt = projected.split([inner, inner + 2 * groups * n, heads], dim=-1)
    x, B, C = causal_conv(xBC, conv_weight, conv_bias, conv_state, rows).split([inner, groups * n, groups * n], dim=-1)
    x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
    y = ssd_scan(x, dt, B, C, A_log, D, dt_bias, dt_limit, 1, ssm_state, rows)
    return gated_norm(y.flatten(1), z, norm_weight, groups, eps)
