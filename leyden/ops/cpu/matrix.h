/* Stored matrices: plain ones, and codes with scales. */

#ifndef LEYDEN_MATRIX_H
#define LEYDEN_MATRIX_H

#include "kernels.h"

/* How the codes of a row lie; Python has the same list.

PLAIN   floats of the matrix's type
E4M3    8-bit floats
E2M1    4-bit floats, the even column in the low half of a byte
INT4    q + 8 in 4 bits, the even column in the low half of a byte
INT8    signed bytes
Q8_0    GGUF: an F16 scale and 32 signed bytes, 34 bytes together
Q4_0    GGUF: an F16 scale and 32 times q + 8, columns 0 to 15 in the low halves of 16 bytes, 16 to 31 in the high ones */
enum { PLAIN, E4M3, E2M1, INT4, Q8_0, Q4_0, INT8 };

/* Types of scales besides F32, BF16 and F16: E4M3, and E8M0, a power of two. */
enum { SCALE_E4M3 = 3, SCALE_E8M0 = 4 };

/* [rows, columns], or a stack of such. The value of a code is code * (scale * whole), rounded to `type`. */
typedef struct {
    const char *codes, *scales; /* scales [rows / tall, columns / wide], both rounded up, or null */
    const float *whole;         /* a scale for the matrix, [members] in a stack; or null */
    int64_t rows, columns, kind, type, scale_type, tall, wide;
} Matrix;

enum {
    Q_RUN = 32,         /* columns of a GGUF block */
    MOST_SCALES = 2048, /* of a row */
    AHEAD = 4096,       /* bytes: so far ahead kernels ask for what they will read, for processors foresee too little */
};

/* Member e of a stack. */
Matrix member(const Matrix *stack, int64_t e);

/* Bytes of a row of codes. */
int64_t row_bytes(const Matrix *m);

/* Row `row` as `type`. */
void unpack(const Matrix *m, int64_t row, void *out, int type);

/* Products with codes as they are need rows of x in another form: `ready_bytes` for a row; 0: there is no such way.

For integer codes that is fixed point: x = step * q with 16 bits for q, split into bytes so that the machine's products
of bytes apply. For 8-bit floats x stays BF16, in another order. */
int64_t ready_bytes(const Matrix *m);
void make_ready(const Matrix *m, const void *x, int type, void *out);

/* out[t * stride + r] = x[t] . row `row` + r of m, for up to TALL rows and MOST_TOKENS tokens made ready. There must be
room for TALL results of each. Results of one or two tokens differ from those of more in the order of the last sums. */
enum { TALL = 16, MOST_TOKENS = 8 };
void dots(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens, float *out,
          int64_t stride);

typedef int8_t bytes __attribute__((vector_size(LANES)));

/* LANES bytes, zeros beyond the first `count`. */
INLINE bytes bytes_at(const void *at, int64_t count) {
    bytes b = {};
    if (count >= LANES)
        memcpy(&b, at, sizeof b);
    else
#if WIDTH == 64
        b = (bytes)_mm_maskz_loadu_epi8(_bzhi_u32(0xffff, count), at);
#else
        memcpy(&b, at, count);
#endif
    return b;
}

INLINE ivec widened(bytes b) {
#if WIDTH == 64
    return (ivec)_mm512_cvtepi8_epi32((__m128i)b);
#else
    return __builtin_convertvector(b, ivec);
#endif
}

/* The finite 8-bit floats. With their bits moved up they are halves, subnormal ones too, 2^8 times too small. */
INLINE vec from_e4m3(bytes b) {
#if WIDTH == 64
    half bits = (half)_mm256_cvtepi8_epi16((__m128i)b);
#else
    typedef int16_t signed_half __attribute__((vector_size(WIDTH / 2)));
    half bits = (half)__builtin_convertvector(b, signed_half);
#endif
    return from_f16((bits << 7) & 0xbfff) * 256.0f; /* the sign is in all the upper bits: one of them goes */
}

INLINE int64_t scales_of_a_row(const Matrix *m) { return (m->columns + m->wide - 1) / m->wide; }

INLINE int64_t scale_size(const Matrix *m) { return m->scale_type >= SCALE_E4M3 ? 1 : size_of(m->scale_type); }

/* The scales of a row from `group` on, as many as there are lanes, times that of the whole. */
INLINE vec scales_at(const Matrix *m, int64_t row, int64_t group) {
    const int64_t count = m->scales ? scales_of_a_row(m) : 1, left = count - group;
    const char *at = m->scales + (m->scales ? (row / m->tall * count + group) * scale_size(m) : 0);
    vec s = splat(1.0f);
    if (m->scales) {
        if (m->scale_type == SCALE_E4M3)
            s = from_e4m3(bytes_at(at, left));
        else if (m->scale_type == SCALE_E8M0) { /* 0 stands for 2^-127, which is subnormal */
            uvec e = (uvec)widened(bytes_at(at, left)) & 0xff;
            s = pick((ivec)(e == 0), splat(0x1p-127f), (vec)(e << 23));
        } else
            s = load(at, 0, left, (int)m->scale_type);
    }
    return m->whole ? s * *m->whole : s;
}

#endif
