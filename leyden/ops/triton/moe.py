"""Mixture of experts for few rows, where the time is that of reading each chosen expert once.

route     products with the gate in fp32, on tensor cores in three times 8 bits; the program that finishes last for some
          rows chooses their experts.
experts   one row: two matrix-vector products over its k experts. Up to 16 rows: for each expert chosen by any row, one
          product with all rows on the tensor cores, of which the rows that chose it are kept: no sorting. More rows:
          lists of rows per expert. The shared expert, if given, runs in the same launches.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.ops import fused
from leyden.ops.triton import grouped
from leyden.ops.triton.fragments import mma, values
from leyden.ops.triton.grouped import relu_squared
from leyden.ops.triton.launch import INTERPRETED, OPTIONS, arrive, counters, prefetch, release, wait

DENSE_ROWS = 16  # up to here no sorting
TILED_ROWS = 24  # for an expert, on average: from here on bound by arithmetic
VECTOR_ROWS = 4  # up to here the router does without tensor cores
ROUTE_ROWS = 256  # up to here the gate's product is ours
_WHOLE = 4096  # the longest row that a program of the router holds

# Two words of fp32 -> pairs of their upper halves, of those of what is left, of what is left then.
_THIRDS = tl.constexpr(
    "{ .reg .b32 x, y, a, b; mov.b32 x, $3; mov.b32 y, $4; prmt.b32 $0, x, y, 0x7632;"
    " and.b32 a, x, 0xFFFF0000; and.b32 b, y, 0xFFFF0000; sub.f32 x, x, a; sub.f32 y, y, b;"
    " prmt.b32 $1, x, y, 0x7632;"
    " and.b32 a, x, 0xFFFF0000; and.b32 b, y, 0xFFFF0000; sub.f32 x, x, a; sub.f32 y, y, b;"
    " prmt.b32 $2, x, y, 0x7632; }"
)


@triton.jit
def _choose(
    logits, bias, ids, weights, row, end, row_stride, part_stride, scale,
    PARTS: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """CHOICES largest of sigmoid(sum of the parts of a row's logits) + bias [BLOCK_E] for BLOCK_M rows up to `end`,
    lower index first among equals. With as many rows as warps a row lies within one, and no warp waits for others."""
    e, c = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    in_row, row = row < end, row.to(tl.int64)
    inside = in_row[:, None] & (e < E)[None, :]
    place = logits + row[:, None] * row_stride + e[None, :]
    total = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        total += tl.load(place + part * part_stride, mask=inside, other=0.0, cache_modifier=".cg")
    scores = tl.sigmoid(total)
    lowest = float("-inf")
    keys = tl.where((e < E)[None, :], scores + bias[None, :], lowest)
    if GROUPS > 1:
        # how many groups beat a group: those with a larger sum of two best keys, or an equal sum and a lower index
        SIZE: tl.constexpr = E // GROUPS
        of = e // SIZE
        sums = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.float32)
        for group in tl.static_range(GROUPS):
            member = (of == group)[None, :]
            best = tl.where(member, keys, lowest)
            first = tl.max(best, 1)
            total = first
            if SIZE > 1:
                place = tl.argmax(best, 1)
                total += tl.max(tl.where(e[None, :] == place[:, None], lowest, best), 1)
            sums = tl.where(member, total[:, None], sums)
        beaten = tl.zeros((BLOCK_M, BLOCK_E), dtype=tl.int32)
        for group in tl.static_range(GROUPS):
            other = tl.max(tl.where((of == group)[None, :], sums, lowest), 1)[:, None]
            beaten += ((other > sums) | ((other == sums) & (group < of)[None, :])).to(tl.int32)
        keys = tl.where(beaten < KEPT, keys, lowest)
    # As integers in the same order, of which a warp finds the largest in one instruction.
    bits = (keys + 0.0).to(tl.int32, bitcast=True)  # there are two zeros, which are equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = scores.to(tl.int32, bitcast=True)  # no score is negative
    chosen = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.int32)
    values = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.min(tl.where(order == tl.max(order, 1)[:, None], e[None, :], BLOCK_E), 1)
        taken = e[None, :] == best[:, None]
        value = tl.max(tl.where(taken, bits, 0), 1).to(tl.float32, bitcast=True)
        chosen = tl.where(c[None, :] == choice, best[:, None], chosen)
        values = tl.where(c[None, :] == choice, value[:, None], values)
        order = tl.where(taken, -(2**31), order)
    if NORMALIZE:
        values = values / (tl.sum(values, 1)[:, None] + 1e-20)
    at = row[:, None] * CHOICES + c[None, :]
    inside = in_row[:, None] & (c < CHOICES)[None, :]
    tl.store(ids + at, chosen.to(tl.int64), mask=inside)
    tl.store(weights + at, values * scale, mask=inside)


@triton.jit
def _added(x, residual, weight, hidden, total, h, eps, H: tl.constexpr):
    """The norm of the sum of one row as add_rms_norm rounds it; the first program leaves both for others."""
    inside = h < H
    value = tl.load(x + h, mask=inside, other=0.0).to(tl.float32)
    value = (value + tl.load(residual + h, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    made = (wide * scale * tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)).to(hidden.dtype.element_ty)
    here = inside & (tl.program_id(0) == 0)
    tl.store(total + h, value, mask=here)
    tl.store(hidden + h, made, mask=here)
    return made


@triton.jit
def _route(
    x, gate, bias, logits, arrived, ids, weights, M, x_stride, scale, residual, norm, hidden, total, eps,
    H: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, EACH: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One program: EACH experts, BLOCK_M rows. With a residual x is what is added to it: one row, in one block."""
    e = tl.program_id(0) * EACH + tl.arange(0, EACH)
    h = tl.arange(0, BLOCK_H)
    in_e = e < E
    first = tl.program_id(1) * BLOCK_M
    tile = gate + e[:, None] * H + h[None, :]
    w = tl.load(tile, mask=in_e[:, None] & (h < H)[None, :], other=0.0)
    every = tl.arange(0, BLOCK_E)
    added = tl.load(bias + every, mask=every < E, other=0.0)
    if residual is not None:
        bytes_each = norm.dtype.element_ty.primitive_bitwidth // 8
        prefetch(norm, H * bytes_each, (tl.arange(0, THREADS) == 0) & (tl.program_id(0) == 0))
    wait()
    release()
    acc = tl.zeros((BLOCK_M, EACH, BLOCK_H), dtype=tl.float32)
    rows = first + tl.arange(0, BLOCK_M)
    for start in range(0, H, BLOCK_H):
        at = start + h
        if residual is not None:
            value = _added(x, residual, norm, hidden, total, h, eps, H)[None, :]
        else:
            value = tl.load(
                x + rows[:, None] * x_stride + at[None, :], mask=(rows < M)[:, None] & (at < H)[None, :], other=0.0
            )
        following = tl.load(tile + start + BLOCK_H, mask=in_e[:, None] & (at + BLOCK_H < H)[None, :], other=0.0)
        acc += value.to(tl.float32)[:, None, :] * w[None, :, :]
        w = following
    total = tl.sum(acc, 2)
    tl.store(logits + rows[:, None] * E + e[None, :], total, mask=(rows < M)[:, None] & in_e[None, :])
    if arrive(arrived + tl.program_id(1), tl.num_programs(0)):
        ROWS: tl.constexpr = BLOCK_M if BLOCK_M > 4 else 4
        _choose(
            logits, added, ids, weights, first + tl.arange(0, ROWS), tl.minimum(first + BLOCK_M, M), E, 0, scale,
            1, E, CHOICES, GROUPS, KEPT, NORMALIZE, ROWS, BLOCK_E, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _thirds(first, second):
    """Two words of fp32 -> three pairs of bfloat16 of which it is the sum: its 24 bits are three times 8."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(
            _THIRDS, "=r,=r,=r,r,r", [first, second], dtype=(tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        pairs = ()  # type: tuple[object, ...]
        for _ in tl.static_range(3):
            low, high = (word.to(tl.uint32, bitcast=True) & 0xFFFF0000 for word in (first, second))
            pairs = pairs + (((low >> 16) | high).to(tl.int32, bitcast=True),)
            first = first.to(tl.float32, bitcast=True) - low.to(tl.float32, bitcast=True)
            second = second.to(tl.float32, bitcast=True) - high.to(tl.float32, bitcast=True)
        return pairs


@triton.jit
def _split(gate, parts, size, BLOCK: tl.constexpr):
    """See _in_thirds."""
    at = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, BLOCK) * 2
    first, second = tl.load(gate + at, mask=at < size, other=0.0), tl.load(gate + at + 1, mask=at < size, other=0.0)
    pairs = _thirds(first, second)
    wait()
    release()
    for i in tl.static_range(3):
        place = (parts + (i * size + at)).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(place, pairs[i], mask=at < size)


@triton.jit
def _mma(c, a, FIRST: tl.constexpr, b0, b1):
    """A third of an operand, from FIRST on: rows g, their next columns, rows g + 8, their next columns."""
    return mma(c[0], c[1], c[2], c[3], a[FIRST], a[FIRST + 6], a[FIRST + 3], a[FIRST + 9], b0, b1)


@triton.jit
def _route_tile(
    x, gate, bias, parts, arrived, ids, weights, M, x_stride, scale,
    H: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    NORMALIZE: tl.constexpr, EIGHTS: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, THREADS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """On tensor cores (see fragments.py) one program: 16 experts, EIGHTS times eight rows, one of SPLITS parts of the
    columns, of which its warps take 16 at a time in turns. Its part of the gate is on its way before the wait, and all
    its rows at once after it. The last program of some rows adds up the parts."""
    WARPS: tl.constexpr = THREADS // 32
    EVEN: tl.constexpr = H == SPLITS * STEPS * WARPS * 16
    BLOCK_M: tl.constexpr = 8 * EIGHTS
    thread = tl.arange(0, THREADS)
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    expert, part, first = tl.program_id(0) // SPLITS * 16, tl.program_id(0) % SPLITS, tl.program_id(1) * BLOCK_M
    column = (part * (STEPS * WARPS) + warp) * 16 + t * 4  # four columns of each step are this thread's
    source = gate.to(tl.pointer_type(tl.int32), bitcast=True) + (expert + g) * H + column
    words = ()  # type: tuple[object, ...]
    for i in tl.static_range(STEPS):
        inside = column + i * (WARPS * 16) < H
        words = words + values(source + i * (WARPS * 16), inside, EVEN)
        words = words + values(source + (8 * H + i * (WARPS * 16)), inside, EVEN)
    every = tl.arange(0, BLOCK_E)
    added = tl.load(bias + every, mask=every < E, other=0.0)
    wait()
    release()
    v = ()  # type: tuple[object, ...]
    for j in tl.static_range(EIGHTS):
        row = tl.minimum(first + j * 8 + g, M - 1).to(tl.int64)  # beyond the last row that one again
        four = (x + row * x_stride + column).to(tl.pointer_type(tl.int64), bitcast=True)
        for i in tl.static_range(STEPS):
            inside = column + i * (WARPS * 16) < H
            v = v + (tl.load(four + i * (WARPS * 4), mask=None if EVEN else inside),)
    a = ()  # type: tuple[object, ...]
    for i in tl.static_range(4 * STEPS):
        a = a + _thirds(words[2 * i], words[2 * i + 1])
    sums = ()  # type: tuple[object, ...]
    for j in tl.static_range(EIGHTS):
        zero = tl.zeros((THREADS,), dtype=tl.float32)
        large, small = (zero, zero, zero, zero), (zero, zero, zero, zero)
        for i in tl.static_range(STEPS):
            b0, b1 = v[j * STEPS + i].to(tl.int32), (v[j * STEPS + i] >> 32).to(tl.int32)
            large = _mma(large, a, 12 * i, b0, b1)
            small = _mma(_mma(small, a, 12 * i + 1, b0, b1), a, 12 * i + 2, b0, b1)
        even, odd = (large[0] + small[0], large[2] + small[2]), (large[1] + small[1], large[3] + small[3])
        sums = sums + (tl.join(tl.join(even[0], even[1]), tl.join(odd[0], odd[1])),)
    if EIGHTS == 1:
        total = sums[0]
    elif EIGHTS == 2:
        total = tl.join(sums[0], sums[1])
    else:
        total = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    total = tl.sum(tl.reshape(total, (WARPS, 8, 4, 2, 2, EIGHTS)), 0)  # g, t, half of the experts, even or odd row, j
    total = tl.reshape(tl.permute(total, (4, 1, 3, 2, 0)), (BLOCK_M, 16))
    rows, n = first + tl.arange(0, BLOCK_M), expert + tl.arange(0, 16)
    place = (part * M + rows).to(tl.int64) * E
    tl.store(parts + place[:, None] + n[None, :], total, mask=(rows < M)[:, None])
    if arrive(arrived + tl.program_id(1), tl.num_programs(0)):
        _choose(
            parts, added, ids, weights, rows, M, E, M * E, scale,
            SPLITS, E, CHOICES, GROUPS, KEPT, NORMALIZE, BLOCK_M, BLOCK_E, BLOCK_C,
        )  # fmt: skip


@triton.jit
def _select(
    logits, bias, ids, weights, M, row_stride, part_stride, scale,
    PARTS: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The choice alone, from logits that are there already."""
    every = tl.arange(0, BLOCK_E)
    added = tl.load(bias + every, mask=every < E, other=0.0)
    wait()
    release()
    _choose(
        logits, added, ids, weights, tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), M, row_stride, part_stride,
        scale, PARTS, E, CHOICES, GROUPS, KEPT, NORMALIZE, BLOCK_M, BLOCK_E, BLOCK_C,
    )  # fmt: skip


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    k: int,
    groups: int = 1,
    kept: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See ops.route."""
    return _routed(x, gate, bias, k, groups, kept, normalize, scale)


def add_norm_route(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor,
    bias: Tensor,
    k: int,
    groups: int = 1,
    kept: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ops.add_norm_route. Of one row every program makes the norm for itself, which is quicker than to wait."""
    rows = x.shape[1] <= _WHOLE and x.is_contiguous() and residual.is_contiguous()
    if len(x) != 1 or not rows:
        return fused.add_norm_route(x, residual, weight, eps, gate, bias, k, groups, kept, normalize, scale)
    hidden, total = torch.empty_like(x), torch.empty_like(x)
    added = residual, weight, hidden, total, eps
    return hidden, total, *_routed(x, gate, bias, k, groups, kept, normalize, scale, added)


def _routed(
    x: Tensor, gate: Tensor, bias: Tensor, k: int, groups: int, kept: int, normalize: bool, scale: float,
    added: tuple[Any, ...] = (None, None, None, None, 0.0), shape: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """added: residual, weight of the norm, where norm and sum go, eps. shape: see _tile_shape."""
    (count, hidden), experts = x.shape, len(gate)
    ids = torch.empty(count, k, dtype=torch.int64, device=x.device)
    weights = torch.empty(count, k, dtype=torch.float32, device=x.device)
    block_e, block_c = triton.next_power_of_2(experts), triton.next_power_of_2(k)
    if count == 0:
        return ids, weights
    choice = experts, k, groups, kept, normalize
    if count > ROUTE_ROWS:
        logits = _many_logits(x, gate)  # [T, parts * E]
        _select[(triton.cdiv(count, 4),)](
            logits, bias, ids, weights, count, logits.shape[1], experts, scale, logits.shape[1] // experts, *choice,
            4, block_e, block_c, num_warps=4, **OPTIONS,
        )  # fmt: skip
        return ids, weights
    if count > VECTOR_ROWS and _fits(x, gate):
        eights, warps, splits = shape or _tile_shape(count, hidden, experts)
        blocks = triton.cdiv(count, 8 * eights)
        parts = torch.empty(splits, count, experts, dtype=torch.float32, device=x.device)
        _route_tile[(experts // 16 * splits, blocks)](
            x, gate, bias, parts, counters(x.device, blocks), ids, weights, count, x.stride(0), scale, hidden, *choice,
            eights, splits, triton.cdiv(hidden, 16 * warps * splits), 32 * warps, block_e, block_c,
            num_warps=warps, **OPTIONS,
        )  # fmt: skip
        return ids, weights
    block_m = min(8, triton.next_power_of_2(count))
    each = 1 if count <= 8 else 4
    block_h = 512 if block_m * each <= 8 else 128
    if count == 1:  # a whole row of the gate is on its way before the wait
        block_h = min(_WHOLE, triton.next_power_of_2(hidden))
    blocks = triton.cdiv(count, block_m)
    logits = torch.empty(count, experts, dtype=torch.float32, device=x.device)
    _route[(triton.cdiv(experts, each), blocks)](
        x, gate, bias, logits, counters(x.device, blocks), ids, weights, count, x.stride(0), scale, *added,
        hidden, *choice, block_m, each, block_h, block_e, block_c, 128, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return ids, weights


def _fits(x: Tensor, gate: Tensor) -> bool:
    """Operands as _route_tile loads them."""
    aligned = x.data_ptr() % 8 == 0 and x.stride(0) % 4 == 0 and x.stride(1) == 1 and gate.data_ptr() % 16 == 0
    return x.dtype == torch.bfloat16 and aligned and x.shape[1] % 16 == 0 and len(gate) % 16 == 0


def _tile_shape(count: int, hidden: int, experts: int) -> tuple[int, int, int]:
    """Eights of rows, warps, splits. Seven times 16 columns of the gate are what fits in the registers of a warp, and
    256 logits to choose from."""
    return 1 if count <= 32 or experts > 128 else 2, 8, triton.cdiv(hidden, 16 * 8 * 7)


def _many_logits(x: Tensor, gate: Tensor) -> Tensor:
    """x gate^T, fp32 [T, E] or three parts of it, [T, 3 E], as in _route_tile: with the gate in three parts of 8 bits
    each operand is one of the tensor cores, and the sums are fp32, as they are in a product of fp32 operands."""
    if x.dtype != torch.bfloat16 or not x.is_cuda:
        return F.linear(x.float(), gate)
    return torch.mm(x, _in_thirds(gate).flatten(0, 1).t(), out_dtype=torch.float32)


def _in_thirds(gate: Tensor) -> Tensor:
    """[3, E, H] bfloat16, of which the gate is the sum."""
    parts = torch.empty(3, *gate.shape, dtype=torch.bfloat16, device=gate.device)
    _split[(triton.cdiv(gate.numel(), 2048),)](gate, parts, gate.numel(), 1024, num_warps=4, **OPTIONS)
    return parts


@triton.jit
def _relu_squared(acc, dtype: tl.constexpr):
    """Rounded as the reference rounds: after the product and after the square."""
    acc = tl.maximum(acc.to(dtype).to(tl.float32), 0.0)
    return (acc * acc).to(dtype)


@triton.jit
def _up_one(
    x, ids, up, shared, h, hs,
    K: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row: the shared expert's tiles first (they do not depend on the routing), then those of the k experts."""
    TILES: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    AHEAD: tl.constexpr = (SHARED + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    own = tl.arange(0, BLOCK_N)
    is_shared = pid < AHEAD
    n = tl.where(is_shared, pid, (pid - AHEAD) % TILES) * BLOCK_N + own
    in_n = n < tl.where(is_shared, SHARED, INNER)
    w = tl.zeros((BLOCK_N, BLOCK_K), dtype=up.dtype.element_ty)
    if SHARED:
        w = tl.load(
            shared + n[:, None] * K + k[None, :], mask=(in_n & is_shared)[:, None] & (k < K)[None, :], other=0.0
        )
    wait()
    release()
    choice = tl.where(is_shared, 0, (pid - AHEAD) // TILES)
    matrix = up + tl.load(ids + choice).to(tl.int64) * (INNER * K)
    if SHARED:
        matrix = tl.where(is_shared, shared, matrix)
    tile = matrix + n[:, None] * K + k[None, :]
    routed = tl.load(tile, mask=(in_n & (pid >= AHEAD))[:, None] & (k < K)[None, :], other=0.0)
    w = tl.where(is_shared, w, routed)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        value = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        following = tl.load(tile + start + BLOCK_K, mask=in_n[:, None] & (start + BLOCK_K + k < K)[None, :], other=0.0)
        acc += value[None, :] * w.to(tl.float32)
        w = following
    total = _relu_squared(tl.sum(acc, 1), h.dtype.element_ty)
    tl.store(h + choice * INNER + n, total, mask=in_n & (pid >= AHEAD))
    if SHARED:
        tl.store(hs + n, total, mask=in_n & is_shared)


@triton.jit
def _down_tile(
    step, ids, down, shared, n, in_n, k,
    N: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
    CHOICES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The weights of one step of _down_one: AHEAD steps of the shared expert, then STEPS for each choice."""
    choice = tl.maximum(step - AHEAD, 0) // STEPS
    at = (step - AHEAD) % STEPS * BLOCK_K + k
    here = (step >= AHEAD) & (choice < CHOICES)
    expert = tl.load(ids + choice, mask=here, other=0)
    tile = down + expert * (N * INNER) + n[:, None] * INNER + at[None, :]
    inside = (at < INNER) & here
    if SHARED:
        own = step * BLOCK_K + k
        is_shared = step < AHEAD
        tile = tl.where(is_shared, shared + n[:, None] * SHARED + own[None, :], tile)
        inside = tl.where(is_shared, own < SHARED, inside)
    return tl.load(tile, mask=in_n[:, None] & inside[None, :], other=0.0)


@triton.jit
def _down_one(
    h, hs, ids, weights, down, shared, out,
    N: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row: BLOCK_N outputs, summed over all experts; nothing to join afterwards. The next tile is on its way."""
    STEPS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    AHEAD: tl.constexpr = (SHARED + BLOCK_K - 1) // BLOCK_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = n < N
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    if SHARED:
        own = n[:, None] * SHARED + k[None, :]
        w = tl.load(shared + own, mask=in_n[:, None] & (k < SHARED)[None, :], other=0.0)
        wait()
        release()
    else:
        wait()
        release()
        w = _down_tile(0, ids, down, shared, n, in_n, k, N, INNER, SHARED, STEPS, AHEAD, CHOICES, BLOCK_K)
    for step in range(AHEAD + CHOICES * STEPS):
        following = _down_tile(
            step + 1, ids, down, shared, n, in_n, k, N, INNER, SHARED, STEPS, AHEAD, CHOICES, BLOCK_K
        )
        choice = tl.maximum(step - AHEAD, 0) // STEPS
        at = tl.where(step < AHEAD, step, (step - AHEAD) % STEPS) * BLOCK_K + k
        source = h + choice * INNER
        if SHARED:
            source = tl.where(step < AHEAD, hs, source)
        factor = tl.where(step < AHEAD, 1.0, tl.load(weights + choice))
        value = tl.load(source + at, mask=at < tl.where(step < AHEAD, SHARED, INNER), other=0.0).to(tl.float32)
        acc += (value * factor)[None, :] * w.to(tl.float32)
        w = following
    tl.store(out + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=in_n)


@triton.jit
def _members(ids, expert, M, CHOICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """(which rows chose the expert, the index of that choice among all rows' choices), both [BLOCK_M]."""
    m, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    at = m[:, None] * CHOICES + c[None, :]
    inside = (m < M)[:, None] & (c < CHOICES)[None, :]
    match = inside & (tl.load(ids + at, mask=inside, other=-1) == expert)
    return tl.max(match.to(tl.int32), 1) > 0, tl.sum(tl.where(match, at, 0), 1)


@triton.jit
def leads(ids, pair, expert, BLOCK_P: tl.constexpr):
    """Whether no choice before `pair` is of the same expert: then this program does the expert's work."""
    before = tl.arange(0, BLOCK_P)
    same = tl.load(ids + before, mask=before < pair, other=-1) == expert
    return tl.sum(same.to(tl.int32)) == 0


@triton.jit
def _up_dense(
    x, ids, up, shared, h, hs, M, x_stride,
    K: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, CHOICES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All rows times one tile of one expert; the rows that chose the expert are kept."""
    TILES: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    AHEAD: tl.constexpr = (SHARED + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    k, m = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    wait()
    release()
    is_shared = pid < AHEAD
    pair = tl.where(is_shared, 0, (pid - AHEAD) // TILES)
    expert = tl.load(ids + pair)
    if is_shared | leads(ids, pair, expert, BLOCK_P):
        n = tl.where(is_shared, pid, (pid - AHEAD) % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < tl.where(is_shared, SHARED, INNER)
        matrix = up + expert * (INNER * K)
        if SHARED:
            matrix = tl.where(is_shared, shared, matrix)
        left = matrix + n[:, None] * K + k[None, :]
        right = x + m[None, :] * x_stride + k[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            inside = start + k < K
            w = tl.load(left + start, mask=in_n[:, None] & inside[None, :], other=0.0)
            value = tl.load(right + start, mask=(m < M)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(w, value, acc, input_precision="ieee")
        made = _relu_squared(tl.trans(acc), h.dtype.element_ty)
        member, at = _members(ids, expert, M, CHOICES, BLOCK_M, BLOCK_C)
        member = member & (pid >= AHEAD)
        tl.store(h + at[:, None] * INNER + n[None, :], made, mask=member[:, None] & in_n[None, :])
        if SHARED:
            tl.store(hs + m[:, None] * SHARED + n[None, :], made, mask=((m < M) & is_shared)[:, None] & in_n[None, :])


@triton.jit
def _down_dense(
    h, hs, ids, down, shared, done, M,
    N: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, CHOICES: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """done[choice] = h[choice] down[expert]^T; the shared expert's K is cut in SPLITS parts, kept after the choices."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PART: tl.constexpr = (SHARED + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K if SHARED else BLOCK_K
    pid = tl.program_id(0)
    item = pid // TILES
    n = pid % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    k, m = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    wait()
    release()
    if item < SPLITS:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in tl.range(item * PART, item * PART + PART, BLOCK_K, num_stages=STAGES):
            inside = start + k < SHARED
            w = tl.load(
                shared + n[:, None] * SHARED + (start + k)[None, :], mask=in_n[:, None] & inside[None, :], other=0.0
            )
            value = tl.load(
                hs + m[None, :] * SHARED + (start + k)[:, None], mask=(m < M)[None, :] & inside[:, None], other=0.0
            )
            acc = tl.dot(w, value, acc, input_precision="ieee")
        place = M * CHOICES + item * M + m
        tl.store(
            done + place[:, None] * N + n[None, :],
            tl.trans(acc).to(done.dtype.element_ty),
            mask=(m < M)[:, None] & in_n[None, :],
        )
    else:
        pair = item - SPLITS
        expert = tl.load(ids + pair)
        if leads(ids, pair, expert, BLOCK_P):
            member, at = _members(ids, expert, M, CHOICES, BLOCK_M, BLOCK_C)
            left = down + expert * (N * INNER) + n[:, None] * INNER + k[None, :]
            right = h + at[None, :] * INNER + k[:, None]
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
                inside = start + k < INNER
                w = tl.load(left + start, mask=in_n[:, None] & inside[None, :], other=0.0)
                value = tl.load(right + start, mask=member[None, :] & inside[:, None], other=0.0)
                acc = tl.dot(w, value, acc, input_precision="ieee")
            tl.store(
                done + at[:, None] * N + n[None, :],
                tl.trans(acc).to(done.dtype.element_ty),
                mask=member[:, None] & in_n[None, :],
            )


@triton.jit
def _combine(
    done, weights, out, M,
    N: tl.constexpr, CHOICES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = sum of weight * done over a row's choices, plus the parts of the shared expert."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    wait()
    release()
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        value = tl.load(done + (row * CHOICES + choice) * N + n, mask=inside, other=0.0).to(tl.float32)
        acc += tl.load(weights + row * CHOICES + choice) * value
    for part in tl.static_range(SPLITS):
        acc += tl.load(done + (M * CHOICES + part * M + row) * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _lists(ids, order, offsets, P, E: tl.constexpr, BLOCK_P: tl.constexpr):
    """order: the choices of expert 0, then those of expert 1, ..., ascending; offsets [E + 1]: where each begins."""
    expert = tl.program_id(0)
    p = tl.arange(0, BLOCK_P)
    wait()
    release()
    chosen = tl.load(ids + p, mask=p < P, other=E + 1)
    mine = (chosen == expert).to(tl.int32)
    first = tl.sum((chosen < expert).to(tl.int32))
    tl.store(order + first + tl.cumsum(mine, 0) - 1, p, mask=mine > 0)
    tl.store(offsets + expert, first)
    if expert == E - 1:
        tl.store(offsets + E, P)


@triton.jit
def _grouped(
    x, matrix, out, order, offsets, x_stride,
    K: tl.constexpr, N: tl.constexpr, CHOICES: tl.constexpr, UP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's matrix times the rows on its list, BLOCK_M at a time.

    UP reads row order[i] // CHOICES of x and writes relu^2 to row i; otherwise row i is read and row order[i] written.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(1)
    k, m = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    in_n = n < N
    wait()
    release()
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    left = matrix + expert.to(tl.int64) * (N * K) + n[:, None] * K + k[None, :]
    for block in range(first + tl.program_id(2) * BLOCK_M, end, tl.num_programs(2) * BLOCK_M):
        at = block + m
        in_m = at < end
        listed = tl.load(order + at, mask=in_m, other=0).to(tl.int64)
        source = listed // CHOICES if UP else at.to(tl.int64)
        right = x + source[None, :] * x_stride + k[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            inside = start + k < K
            w = tl.load(left + start, mask=in_n[:, None] & inside[None, :], other=0.0)
            value = tl.load(right + start, mask=in_m[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(w, value, acc, input_precision="ieee")
        acc = tl.trans(acc)
        made = _relu_squared(acc, out.dtype.element_ty) if UP else acc.to(out.dtype.element_ty)
        target = at.to(tl.int64) if UP else listed
        tl.store(out + target[:, None] * N + n[None, :], made, mask=in_m[:, None] & in_n[None, :])


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.experts."""
    return _mixed(x, ids, weights, up.dense(), down.dense(), None, None)


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    """See ops.moe."""
    if len(x) > DENSE_ROWS:
        routed = _mixed(x, ids, weights, up.dense(), down.dense(), None, None)
        hidden = relu_squared(F.linear(x, shared_up.dense()))
        return routed.addmm_(hidden, shared_down.dense().t())
    return _mixed(x, ids, weights, up.dense(), down.dense(), shared_up.dense(), shared_down.dense())


def _mixed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
) -> Tensor:
    count = len(x)
    if count == 0:
        return x.new_empty(0, down.shape[1])
    if x.stride(1) != 1:
        x = x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    if count == 1:
        return one_row(x, ids, weights, up, down, shared_up, shared_down)
    if count <= DENSE_ROWS:
        return few_rows(x, ids, weights, up, down, shared_up, shared_down)
    return many_rows(x, ids, weights, up, down)


def one_row(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor,
    shared_up: Tensor | None, shared_down: Tensor | None,
    up_shape: tuple[int, int, int] = (4, 1024, 4), down_shape: tuple[int, int, int] = (2, 1024, 4),
) -> Tensor:  # fmt: skip
    """shapes: rows and columns of a tile, warps."""
    choices, (_, inner, k), size = ids.shape[1], up.shape, down.shape[1]
    shared = len(shared_up) if shared_up is not None else 0
    h = torch.empty(choices, inner, dtype=x.dtype, device=x.device)
    hs = torch.empty(max(1, shared), dtype=x.dtype, device=x.device)
    block_n, block_k, warps = up_shape
    programs = triton.cdiv(shared, block_n) + choices * triton.cdiv(inner, block_n)
    _up_one[(programs,)](
        x, ids, up, up if shared_up is None else shared_up, h, hs, k, inner, shared, block_n, block_k,
        num_warps=warps, **OPTIONS,
    )  # fmt: skip
    out = torch.empty(1, size, dtype=x.dtype, device=x.device)
    block_n, block_k, warps = down_shape
    _down_one[(triton.cdiv(size, block_n),)](
        h, hs, ids, weights, down, down if shared_down is None else shared_down, out,
        size, inner, shared, choices, block_n, block_k, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return out


def few_rows(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor,
    shared_up: Tensor | None, shared_down: Tensor | None,
    shape: tuple[int, int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """shape: rows and columns of a tile, stages, warps."""
    (count, choices), (_, inner, k), size = ids.shape, up.shape, down.shape[1]
    shared = len(shared_up) if shared_up is not None else 0
    block_n, block_k, stages, warps = shape or ((64, 64, 3, 4) if count <= 3 else (64, 128, 4, 4))
    block_m, block_c = max(16, triton.next_power_of_2(count)), triton.next_power_of_2(choices)
    block_p = triton.next_power_of_2(count * choices)
    splits = triton.cdiv(shared, inner)
    h = torch.empty(count * choices, inner, dtype=x.dtype, device=x.device)
    hs = torch.empty(count, max(1, shared), dtype=x.dtype, device=x.device)
    programs = triton.cdiv(shared, block_n) + count * choices * triton.cdiv(inner, block_n)
    _up_dense[(programs,)](
        x, ids, up, up if shared_up is None else shared_up, h, hs, count, x.stride(0),
        k, inner, shared, choices, block_m, block_n, block_k, block_c, block_p, stages, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    done = torch.empty(count * (choices + splits), size, dtype=x.dtype, device=x.device)
    _down_dense[((count * choices + splits) * triton.cdiv(size, block_n),)](
        h, hs, ids, down, down if shared_down is None else shared_down, done, count,
        size, inner, shared, choices, splits, block_m, block_n, block_k, block_c, block_p, stages,
        num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return combined(done, weights, count, size, splits)


def many_rows(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    shape: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """shape: rows of x, rows and columns of a tile, stages, warps."""
    (count, choices), (total, inner, k), size = ids.shape, up.shape, down.shape[1]
    pairs = count * choices
    order, offsets = listed(ids, total)
    mean = pairs / total
    if mean > TILED_ROWS and shape is None and grouped.fits(x, up, down):
        h = grouped.product(grouped.gathered(x, order, choices), up, order, offsets, True)
        return combined(grouped.product(h, down, order, offsets, False), weights, count, size, 0)
    block_m, block_n, block_k, stages, warps = shape or _grouped_shape(mean)
    h = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    done = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    groups = max(1, round(mean / block_m))  # programs that share the rows of an expert
    _grouped[(triton.cdiv(inner, block_n), total, groups)](
        x, up, h, order, offsets, x.stride(0),
        k, inner, choices, True, block_m, block_n, block_k, stages, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    _grouped[(triton.cdiv(size, block_n), total, groups)](
        h, down, done, order, offsets, h.stride(0),
        inner, size, choices, False, block_m, block_n, block_k, stages, num_warps=warps, **OPTIONS,
    )  # fmt: skip
    return combined(done, weights, count, size, 0)


def _grouped_shape(mean: float) -> tuple[int, int, int, int, int]:
    """As measured on an H200 up to 12 rows per expert, where some have more than 16 of them; beyond, as expected."""
    if mean <= 8:
        return 16, 64, 128, 3, 4
    return (32, 64, 64, 5, 4) if mean <= 20 else (64, 128, 64, 4, 4) if mean <= 64 else (128, 128, 64, 4, 8)


def listed(ids: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(choices by expert int32 [P], offsets int32 [E + 1])"""
    pairs = ids.numel()
    if pairs > 4096:
        # as bytes, where they are: a third of the time
        kind = torch.uint8 if total < 256 else torch.int64
        chosen, order = ids.flatten().to(kind).sort(stable=True)
        bounds = torch.arange(total + 1, device=ids.device).to(kind)
        return order.int(), torch.searchsorted(chosen, bounds).int()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    offsets = torch.empty(total + 1, dtype=torch.int32, device=ids.device)
    block = triton.next_power_of_2(pairs)
    _lists[(total,)](ids, order, offsets, pairs, total, block, num_warps=4, **OPTIONS)
    return order, offsets


def combined(done: Tensor, weights: Tensor, count: int, size: int, splits: int) -> Tensor:
    out = torch.empty(count, size, dtype=done.dtype, device=done.device)
    block = 1024 if count <= 128 else triton.next_power_of_2(size)
    grid = (triton.cdiv(size, block), count)
    _combine[grid](done, weights, out, count, size, weights.shape[1], splits, block, num_warps=4, **OPTIONS)
    return out
