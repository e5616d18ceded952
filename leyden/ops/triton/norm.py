"""RMS norms: a program has a whole row in its registers, or whole groups of one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.ops.triton.launch import OPTIONS, release, wait

_MANY_ROWS = 512  # from here on a program takes several groups: enough work to be worth its start, and wider loads


@triton.jit
def _norm(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    eps,
    H: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait()
    release()
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    if ADD:
        value = value.to(tl.float32) + tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(
            tl.float32
        )
        value = value.to(total.dtype.element_ty)
        tl.store(total + row * H + at, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / H + eps)
    tl.store(out + row * H + at, (value * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm(
    y, z, weight, out, y_stride, z_stride, eps,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group, at = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (group < GROUPS) & (at < WIDTH)
    channel = group * WIDTH + at
    w = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    wait()
    release()
    gate = tl.load(z + row * z_stride + channel, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(y + row * y_stride + channel, mask=inside, other=0.0).to(tl.float32) * (gate * tl.sigmoid(gate))
    scale = tl.rsqrt(tl.sum(g * g, 1) / WIDTH + eps)[:, None]
    tl.store(out + row * (WIDTH * GROUPS) + channel, (g * scale * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ops.rms_norm."""
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        _launch(rows, rows, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ops.add_rms_norm."""
    rows, others = _rows(x), _rows(residual)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if len(rows):
        _launch(rows, others, weight, out, total, eps, add=True)
    return out, total


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """See ops.gated_norm."""
    y, z = _rows(y), _rows(z)
    count, size = y.shape
    out = torch.empty(count, size, dtype=y.dtype, device=y.device)
    if count:
        width = size // groups
        block = triton.next_power_of_2(width)
        each = min(4, triton.next_power_of_2(groups)) if count >= _MANY_ROWS else 1
        _gated_norm[count, triton.cdiv(groups, each)](
            y, z, weight, out, y.stride(0), z.stride(0), eps, width, groups, each, block, num_warps=4, **OPTIONS
        )
    return out


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, add: bool) -> None:
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    warps = min(8, max(1, block // 512))
    _norm[(len(x),)](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        size,
        add,
        block,
        num_warps=warps,
        **OPTIONS,
    )


def _rows(x: Tensor) -> Tensor:
    """x [..., H] as rows of contiguous elements."""
    x = x.flatten(0, -2)
    return x if x.stride(-1) == 1 else x.contiguous()
