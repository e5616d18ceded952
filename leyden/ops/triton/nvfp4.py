"""Products with matrices in NVFP4 (formats/nvfp4.py).

The first product with a matrix brings it into the order of formats/nvfp4.Tiled, in place of the checkpoint's. Few rows
are multiplied with the codes (packed.py), many rows of a stack, too (wide.py). Many rows of one matrix are multiplied
with it as a dense one: with its twin, if there is one, else it is decoded to memory. So are matrices that are not made
of whole tiles, and activations that are not bfloat16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyden.formats import Weight
from leyden.formats.nvfp4 import Tiled, arrange
from leyden.ops.triton import linear, moe, packed, wide
from leyden.ops.triton.launch import HOPPER, OPTIONS, release, wait

WIDE_ROWS = 256  # for one matrix without a twin
EXPERT_ROWS = 8  # for one of a stack, on average
UNSORTED_ROWS = 8  # up to here every chosen expert multiplies all rows
JOINT_ROWS = 16  # up to here the shared expert is one of the others


@triton.jit
def _decode(codes, scales, whole, out, N, K: tl.constexpr, WORDS: tl.constexpr):
    """The matrix as the network computes with it, two columns as one int32."""
    matrix = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tile, g, t, word = place // 128, place % 128 // 16, place % 16 // 4, place % 4
    row = tile // (K // 64) * 16 + word // 2 * 8 + g
    column = tile % (K // 64) * 64 + word % 2 * 32 + t * 8
    inside = row < N
    size = N.to(tl.int64) * K
    wait()
    release()
    q = tl.load(codes + matrix * (size // 8) + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    scale = tl.load(scales + matrix * (size // 16) + tile * 64 + g * 8 + t // 2 * 4 + word, mask=inside, other=0)
    scale = ((scale.to(tl.uint32) * 16 + 0x7600) << 16).to(tl.float32, bitcast=True) * 1.504632769052528e-36  # 2^-119
    scale *= tl.load(whole + matrix)
    first = _pair(q & 0x81C081C0, scale)
    second = _pair((q << 3) & 0x81C081C0, scale)
    third = _pair(((q << 6) & 0x01C001C0) | ((q << 1) & 0x80008000), scale)
    fourth = _pair(((q >> 3) & 0x01C001C0) | ((q << 2) & 0x80008000), scale)
    four = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (WORDS, 4))
    at = matrix * (size // 2) + row.to(tl.int64) * (K // 2) + column // 2
    tl.store(out + at[:, None] + tl.arange(0, 4)[None, :], four, mask=inside[:, None])


@triton.jit
def _pair(bits, scale):
    """Two codes as in fragments.py, by way of fp16, where they are not too small for a conversion."""
    half = (bits & 0x80008000) | ((bits & 0x01C001C0) << 3)
    low = (half & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0 * scale
    high = (half >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0 * scale
    low, high = low.to(tl.bfloat16).to(tl.uint16, bitcast=True), high.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    return (low.to(tl.uint32) | (high.to(tl.uint32) << 16)).to(tl.int32, bitcast=True)


def linear_nvfp4(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """See ops.linear."""
    dtype = dtype or x.dtype
    rows = x.flatten(0, -2)
    if not _ready(x.dtype, weight) or not 0 < len(rows) <= _most(weight):
        return linear.product(x, _whole(weight), False, dtype)
    out = torch.empty(len(rows), weight.shape[0], dtype=dtype, device=x.device)
    packed.product(packed.aligned(rows), weight, out, len(rows))
    return out.view(*x.shape[:-1], -1)


def add_linear_nvfp4(x: Tensor, weight: Weight, to: Tensor) -> Tensor:
    """See ops.add_linear."""
    if not _ready(x.dtype, weight) or not 0 < len(x) <= _most(weight) or to.stride(1) != 1:
        return linear.add_product(x, _whole(weight), to)
    out = torch.empty(len(x), weight.shape[0], dtype=to.dtype, device=x.device)
    packed.product(packed.aligned(x), weight, out, len(x), to=to)
    return out


def mlp_nvfp4(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.mlp."""
    rows = x.flatten(0, -2)
    if not _ready(x.dtype, up, down) or not 0 < len(rows) <= _most(up, down):
        return linear.product(linear.product(x, _whole(up), True, x.dtype), _whole(down), False, x.dtype)
    out = torch.empty(len(rows), down.shape[0], dtype=x.dtype, device=x.device)
    _mlp(packed.aligned(rows), up, down, out)
    return out.view(*x.shape[:-1], -1)


def experts_nvfp4(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    """See ops.experts."""
    if len(x) == 0:
        return x.new_empty(0, down.shape[1])
    if not _ready(x.dtype, up, down):
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        return moe.many_rows(x, ids, weights, decoded(up), decoded(down))
    if ids.numel() > EXPERT_ROWS * up.shape[0]:
        return _many(x, ids.contiguous(), weights.contiguous(), up, down)
    return _few(x, ids, weights, up, down, None, None)


def moe_nvfp4(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, shared_up: Weight, shared_down: Weight
) -> Tensor:
    """See ops.moe."""
    few = 0 < len(x) <= JOINT_ROWS and ids.numel() <= EXPERT_ROWS * up.shape[0]
    if few and shared_up.shape[0] % up.shape[1] == 0 and _ready(x.dtype, up, down, shared_up, shared_down):
        return _few(x, ids, weights, up, down, shared_up, shared_down)
    routed = experts_nvfp4(x, ids, weights, up, down)
    if len(x) > _most(shared_up, shared_down):
        hidden = linear.product(x, _whole(shared_up), True, x.dtype)
        return routed.addmm_(hidden, _whole(shared_down).t())
    return routed + mlp_nvfp4(x, shared_up, shared_down)


def _many(x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight) -> Tensor:
    (count, choices), (total, inner, _), size = ids.shape, up.shape, down.shape[1]
    pairs = count * choices
    lists = moe.listed(ids, total)
    h = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    done = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    if HOPPER and pairs > wide.GATHERED_ROWS * total:
        wide.gathered_product(wide.gathered(x, lists[0], choices), up, h, True, lists)
        wide.gathered_product(h, down, done, False, lists)
    else:
        wide.product(wide.ordered(x), up, h, True, choices, lists)
        wide.product(h, down, done, False, choices, lists)
    return moe.combined(done, weights, count, size, 0)


def _most(*matrices: Weight) -> int:
    """Rows up to which codes are multiplied with."""
    return linear.NARROW_ROWS if all(weight.twin is not None for weight in matrices) else WIDE_ROWS


def _whole(weight: Weight) -> Tensor:
    return weight.twin if weight.twin is not None else decoded(weight)


def _few(
    x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight,
    shared_up: Weight | None, shared_down: Weight | None,
) -> Tensor:  # fmt: skip
    """The shared expert as some more of the others; up to JOINT_ROWS the second product adds everything up."""
    (count, choices), (total, inner, _), size = ids.shape, up.shape, down.shape[1]
    ids, weights, pairs = ids.contiguous(), weights.contiguous(), count * choices
    parts = shared_up.shape[0] // inner if shared_up is not None else 0
    x = packed.aligned(x)
    h = torch.empty(pairs + parts * count, inner, dtype=x.dtype, device=x.device)
    done = torch.empty(pairs + parts * count, size, dtype=x.dtype, device=x.device)
    lists, few_ids = (None, ids) if count <= UNSORTED_ROWS else (moe.listed(ids, total), None)
    packed.product(x, up, h, count, True, choices, few_ids, lists, shared_up, parts, later=shared_down)
    if count > JOINT_ROWS:
        packed.product(h, down, done, count, False, choices, few_ids, lists, shared_down, parts)
        return moe.combined(done, weights, count, size, parts)
    out = torch.empty(count, size, dtype=x.dtype, device=x.device)
    packed.product(h, down, done, count, False, choices, few_ids, lists, shared_down, parts, weights, out)
    return out


def _mlp(x: Tensor, up: Weight, down: Weight, out: Tensor) -> None:
    h = torch.empty(len(x), up.shape[0], dtype=x.dtype, device=x.device)
    packed.product(x, up, h, len(x), up=True)
    packed.product(h, down, out, len(x))


def _ready(dtype: torch.dtype, *matrices: Weight) -> bool:
    """Whether the codes can be multiplied with; then they are in their tiles. All of the matrices or none: an op has
    kernels for operands of one format."""
    if any(value != torch.bfloat16 for value in (dtype, *(weight.dtype for weight in matrices))):
        return False
    if not all(Tiled.fits(weight.shape) for weight in matrices):
        return False
    for weight in matrices:
        if not isinstance(weight.format, Tiled):
            assert not (weight.parts["weight"].is_cuda and torch.cuda.is_current_stream_capturing())
            arrange(weight)
    return True


def decoded(weight: Weight) -> Tensor:
    """The matrix, or the stack of them, in the dtype of its values."""
    if not isinstance(weight.format, Tiled) or weight.dtype != torch.bfloat16:
        return weight.dense()
    *stack, size, k = weight.shape
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.parts["weight"].device)
    _decode[(triton.cdiv(size * k // 8, 1024), stack[0] if stack else 1)](
        weight.parts["weight"], weight.parts["weight_scale"], weight.parts["weight_scale_2"], out.view(torch.int32),
        size, k, 1024, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return out
