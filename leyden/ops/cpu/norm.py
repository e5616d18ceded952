"""RMS norms."""

from torch import Tensor

from leyden.ops.cpu.program import Kernel, empty, has_rows, run, types
from leyden.ops.reference import norm as reference

_NORM = Kernel("rms_norm", "tttttiiiid")
_GATED_NORM = Kernel("gated_norm", "ttttiiiiiiid")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not (x.dtype in types and x.is_contiguous() and weight.dtype in types):
        return reference.rms_norm(x, weight, eps)
    width, out = x.shape[-1], empty(*x.shape, dtype=x.dtype)
    rows = x.numel() // width
    step = _NORM(x, None, weight, None, out, rows, width, types[x.dtype], types[weight.dtype], eps)
    run(step, work=2 * x.numel())
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    alike = x.dtype == residual.dtype and x.is_contiguous() and residual.is_contiguous()
    if not (alike and x.dtype in types and weight.dtype in types):
        return reference.add_rms_norm(x, residual, weight, eps)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    total, out = empty(*x.shape, dtype=x.dtype), empty(*x.shape, dtype=x.dtype)
    step = _NORM(x, residual, weight, total, out, rows, width, types[x.dtype], types[weight.dtype], eps)
    run(step, work=2 * x.numel())
    return out, total


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    if not (has_rows(y) and has_rows(z) and y.dtype == z.dtype and weight.dtype in types):
        return reference.gated_norm(y, z, weight, groups, eps)
    out = empty(*y.shape, dtype=y.dtype)
    (rows, width), type, weight_type = y.shape, types[y.dtype], types[weight.dtype]
    step = _GATED_NORM(y, z, weight, out, rows, width, y.stride(0), z.stride(0), groups, type, weight_type, eps)
    run(step, work=20 * y.numel())
    return out
