"""What one thread of a warp holds of a product on tensor cores, where Triton's own `dot` would take the long way.

Tensors here are [threads], one element for each thread of a program: what is written once is what each thread does,
and the warps' own instruction mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16") can be used as it is. Thread
4 g + t of a warp holds rows g and g + 8 of a 16 x 16 matrix A, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; column g of
B, the same rows; columns 2 t and 2 t + 1 of the result. Which column of a matrix stands in which column of A is ours to
choose, as long as B has the same order: so weights are decoded in the registers into which they were loaded, and
nothing passes through shared memory.

Each function has a twin in plain Triton, for the interpreter, which has no inline assembly. Pairs of bfloat16 are int32
with the even column in the low half.

e2m1   sign, two bits of exponent, one of mantissa: with the sign in front and the others where exponent and mantissa of
       a bfloat16 meet it is the value times 2^-126, subnormals included. A word of formats/nvfp4.Tiled has the bits
       where four pairs take six masks and five shifts. Scales there are bfloat16 without the bits that are always the
       same; the product of both, the value times 2^-7, is exact.
e4m3   sign in front, the other seven bits four places lower than in the high byte: the value times 2^-120.
"""

import triton
import triton.language as tl

from leyden.ops.triton.launch import INTERPRETED

# Weights are read once. Where there are none to be read they are whatever was there. A load without .nc stays before
# wait(); ptxas 12.8 moves the others behind it.
_WEIGHTS = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)
# Numbers of 16 bits that are nowhere must be zeros. Zeroing also ends the life that a register had before, with which a
# load that may not happen goes on.
_WEIGHTS_OR_ZEROS = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)
_VALUES = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
_VALUES_OR_ZEROS = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)

# (q, scales) -> four pairs; the byte of `scales` that is this word's is spread over both halves.
_FOUR = (
    "{ .reg .b32 q, a, b, s, z; mov.b32 q, $4; mov.b32 z, 0x80008000;"
    " prmt.b32 s, $5, 0, 0x4%d4%d; mad.lo.u32 s, s, 16, 0x76007600;"
    " and.b32 a, q, 0x81C081C0; fma.rn.bf16x2 $0, a, s, z;"
    " shl.b32 a, q, 3; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $1, a, s, z;"
    " shl.b32 b, q, 1; and.b32 b, b, 0x80008000; shl.b32 a, q, 6; lop3.b32 a, a, 0x01C001C0, b, 0xEA;"
    " fma.rn.bf16x2 $2, a, s, z;"
    " shl.b32 b, q, 2; and.b32 b, b, 0x80008000; shr.b32 a, q, 3; lop3.b32 a, a, 0x01C001C0, b, 0xEA;"
    " fma.rn.bf16x2 $3, a, s, z; }"
)
_FOUR_0, _FOUR_1, _FOUR_2, _FOUR_3 = (tl.constexpr(_FOUR % (i, i)) for i in range(4))

# q -> two pairs
_EIGHT = tl.constexpr(
    "{ .reg .b32 q, a, b, s, z; mov.b32 q, $2; mov.b32 s, 0x7B807B80; mov.b32 z, 0x80008000;"
    " prmt.b32 a, q, 0, 0x1404; shr.b32 b, a, 4; and.b32 b, b, 0x07F007F0; lop3.b32 a, a, 0x80008000, b, 0xEA;"
    " fma.rn.bf16x2 $0, a, s, z;"
    " prmt.b32 a, q, 0, 0x3424; shr.b32 b, a, 4; and.b32 b, b, 0x07F007F0; lop3.b32 a, a, 0x80008000, b, 0xEA;"
    " fma.rn.bf16x2 $1, a, s, z; }"
)

_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


@triton.jit
def weights(pointer, inside, ZEROS: tl.constexpr):
    """The four words at `pointer`, int32* and a multiple of 16 bytes, which are read once; where not `inside` they are
    ZEROS, or mean nothing."""
    if not INTERPRETED:
        ASM: tl.constexpr = _WEIGHTS_OR_ZEROS if ZEROS else _WEIGHTS
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,l,r", [pointer.to(tl.int64), inside.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return _quad(pointer, inside, 0 if ZEROS else 0x12345678)


@triton.jit
def values(pointer, inside, ALL: tl.constexpr):
    """The four words at `pointer`; ALL: all of them are `inside`, else the others are zeros."""
    if INTERPRETED:
        return _quad(pointer, inside, 0)
    elif ALL:
        return tl.inline_asm_elementwise(
            _VALUES, "=r,=r,=r,=r,l", [pointer.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _VALUES_OR_ZEROS, "=r,=r,=r,=r,l,r", [pointer.to(tl.int64), inside.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _quad(pointer, inside, OTHER: tl.constexpr):
    return (
        tl.load(pointer, mask=inside, other=OTHER), tl.load(pointer + 1, mask=inside, other=OTHER),
        tl.load(pointer + 2, mask=inside, other=OTHER), tl.load(pointer + 3, mask=inside, other=OTHER),
    )  # fmt: skip


@triton.jit
def four(q, scales, INDEX: tl.constexpr):
    """A word of eight e2m1 codes, and four bytes of which that at INDEX is their scale -> four pairs, times 2^-7."""
    if not INTERPRETED:
        ASM: tl.constexpr = _FOUR_0 if INDEX == 0 else _FOUR_1 if INDEX == 1 else _FOUR_2 if INDEX == 2 else _FOUR_3
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r", [q, scales], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        u = q.to(tl.uint32, bitcast=True)
        scale = ((scales.to(tl.uint32, bitcast=True) >> (8 * INDEX)) & 255) * 16 + 0x7600
        scale = scale | (scale << 16)
        return (
            _times(u & 0x81C081C0, scale),
            _times((u << 3) & 0x81C081C0, scale),
            _times(((u << 6) & 0x01C001C0) | ((u << 1) & 0x80008000), scale),
            _times(((u >> 3) & 0x01C001C0) | ((u << 2) & 0x80008000), scale),
        )


@triton.jit
def eight(q):
    """Four bytes of e4m3 -> two pairs, exactly their values."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(_EIGHT, "=r,=r,r", [q], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        u = q.to(tl.uint32, bitcast=True)
        first = ((u & 0xFF) << 8) | ((u & 0xFF00) << 16)
        second = ((u >> 8) & 0xFF00) | (u & 0xFF000000)
        raised = (u & 0) + 0x7B807B80
        return (
            _times((first & 0x80008000) | ((first >> 4) & 0x07F007F0), raised),
            _times((second & 0x80008000) | ((second >> 4) & 0x07F007F0), raised),
        )


@triton.jit
def mma(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1):
    """c + A B of each warp, fp32."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(
            _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        up0, up1 = _rows_times_columns(a0, a2, b0, b1)
        down0, down1 = _rows_times_columns(a1, a3, b0, b1)
        return c0 + up0, c1 + up1, c2 + down0, c3 + down1


@triton.jit
def _rows_times_columns(a, a_next, b, b_next):
    """Eight rows of A times B: the values at columns 2 t and at columns 2 t + 1 of each thread's row."""
    WARPS: tl.constexpr = a.shape[0] // 32
    left = tl.reshape(tl.join(a, a_next), (WARPS, 8, 1, 4, 2)).to(tl.uint32, bitcast=True)
    right = tl.reshape(tl.join(b, b_next), (WARPS, 1, 8, 4, 2)).to(tl.uint32, bitcast=True)
    low = (left << 16).to(tl.float32, bitcast=True) * (right << 16).to(tl.float32, bitcast=True)
    high = (left & 0xFFFF0000).to(tl.float32, bitcast=True) * (right & 0xFFFF0000).to(tl.float32, bitcast=True)
    total = tl.sum(tl.reshape(low + high, (WARPS, 8, 8, 8)), 3)
    even, odd = tl.split(tl.reshape(total, (WARPS, 8, 4, 2)))
    return tl.reshape(even, (WARPS * 32,)), tl.reshape(odd, (WARPS * 32,))


@triton.jit
def _times(a, b):
    """The products of two pairs (uint32) that are known to be exact, as int32."""
    low = (a << 16).to(tl.float32, bitcast=True) * (b << 16).to(tl.float32, bitcast=True)
    high = (a & 0xFFFF0000).to(tl.float32, bitcast=True) * (b & 0xFFFF0000).to(tl.float32, bitcast=True)
    bits = (low.to(tl.uint32, bitcast=True) >> 16) | (high.to(tl.uint32, bitcast=True) & 0xFFFF0000)
    return bits.to(tl.int32, bitcast=True)
