/* Products of a few rows of x with codes as they are, on ARM. The idea is that of dots.c; bytes are signed on both sides
here, so there is no offset.

Codes are of four rows and 32 columns at a time, which are four octets; x has the high and the low bytes of an octet side
by side. MMLA multiplies the octets of two rows with both; where it is missing, DOT multiplies four columns of four rows,
which have to be turned for that. Either way a lane has a row in the end: nothing is added up, and a scale is a vector.

8-bit floats are not among the codes: there is no product of a few of them that would be worth it. */

#include "dots.h"

#if defined(__ARM_FEATURE_DOTPROD)

enum {
    ROWS = 4, /* of the matrix */
    UNIT = 32,
    OCTETS = UNIT / 8,
};

/* UNIT columns of a row of x: octet by octet its high bytes, then its low ones, as a format has its codes (see `order`). */
typedef struct {
    int8_t octets[OCTETS][16];
} Fixed;

typedef struct {
    float step;
    char unused[60];
} Head;

const int64_t fixed_bytes = CHUNK / UNIT * sizeof(Fixed), floats_bytes = 0;

int64_t ready_bytes(const Matrix *m) {
    if (m->kind == PLAIN || m->kind == E4M3) return 0;
    return sizeof(Head) + (m->columns + CHUNK - 1) / CHUNK * fixed_bytes;
}

/* Columns as codes of a format lie: of each 8 bytes first the low halves, then the high ones. */
static void order(int64_t kind, int8x8_t x[OCTETS]) {
    if (kind == INT4 || kind == E2M1)
        for (int i = 0; i < OCTETS; i += 2) {
            const int8x8_t even = vuzp1_s8(x[i], x[i + 1]);
            x[i + 1] = vuzp2_s8(x[i], x[i + 1]);
            x[i] = even;
        }
    if (kind == Q4_0) {
        const int8x8_t high = x[2];
        x[2] = x[1];
        x[1] = high;
    }
}

void make_ready(const Matrix *m, const void *x, int type, void *out) {
    Head *head = out;
    Fixed *fixed = (Fixed *)(head + 1);
    vec most = {};
    for (int64_t i = 0; i < m->columns; i += LANES) {
        const vec v = load(x, i, m->columns, type);
        most = vmax(most, vmax(v, -v));
    }
    const float largest = maximum(most), scale = largest > 0 ? 32512 / largest : 0;
    head->step = largest / 32512; /* high and low fit in signed bytes */
    for (int64_t start = 0; start < m->columns; start += UNIT, fixed++) {
        int8x8_t high[OCTETS], low[OCTETS];
        for (int i = 0; i < OCTETS; i++) {
            const vec first = load(x, start + 8 * i, m->columns, type) * scale;
            const vec second = load(x, start + 8 * i + 4, m->columns, type) * scale;
            const int16x8_t q = vcombine_s16(vmovn_s32(vcvtnq_s32_f32((float32x4_t)first)),
                                             vmovn_s32(vcvtnq_s32_f32((float32x4_t)second)));
            high[i] = vshrn_n_s16(vaddq_s16(q, vdupq_n_s16(128)), 8); /* q = 256 high + low, -128 <= low < 128 */
            low[i] = vmovn_s16(q);
        }
        order(m->kind, high);
        order(m->kind, low);
        for (int i = 0; i < OCTETS; i++) vst1q_s8(fixed->octets[i], vcombine_s8(high[i], low[i]));
    }
}

/* 16 bytes of codes of a row, zeros behind its end: all of UNIT columns where they are packed, else the `part`-th half. */
INLINE int8x16_t bytes_of(const Matrix *m, const char *codes, int64_t start, int part, const int kind) {
    if (kind == Q8_0) return vld1q_s8((const int8_t *)codes + start / Q_RUN * (Q_RUN + 2) + 2 + 16 * part);
    if (kind == Q4_0) return vld1q_s8((const int8_t *)codes + start / Q_RUN * (Q_RUN / 2 + 2) + 2);
    const int64_t at = kind == INT8 ? start + 16 * part : start / 2, left = (kind == INT8 ? m->columns : m->columns / 2) - at;
    if (left >= 16) return vld1q_s8((const int8_t *)codes + at);
    int8_t some[16] = {};
    if (left > 0) memcpy(some, codes + at, left);
    return vld1q_s8(some);
}

/* Signed codes; the `high` halves of packed ones. */
INLINE int8x16_t codes_of(int8x16_t bytes, int high, const int kind) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* E2M1 */
    if (!packed(kind)) return bytes;
    const uint8x16_t both = vreinterpretq_u8_s8(bytes), code = high ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    return kind == E2M1 ? vqtbl1q_s8(vld1q_s8(doubled), code) : vsubq_s8(vreinterpretq_s8_u8(code), vdupq_n_s8(8));
}

/* Of 16 bytes of each row: two vectors with the first octets, two with the second ones, as products take them. */
INLINE void turn(const int8x16_t x[ROWS], int8x16_t out[ROWS]) {
#define PAIRS(how, a, b, bits) vreinterpretq_s8_s##bits(how##q_s##bits(vreinterpretq_s##bits##_s8(a), vreinterpretq_s##bits##_s8(b)))
#if defined(__ARM_FEATURE_MATMUL_INT8)
    out[0] = PAIRS(vzip1, x[0], x[1], 64);
    out[1] = PAIRS(vzip1, x[2], x[3], 64);
    out[2] = PAIRS(vzip2, x[0], x[1], 64);
    out[3] = PAIRS(vzip2, x[2], x[3], 64);
#else
    const int8x16_t even0 = PAIRS(vtrn1, x[0], x[1], 32), odd0 = PAIRS(vtrn2, x[0], x[1], 32);
    const int8x16_t even1 = PAIRS(vtrn1, x[2], x[3], 32), odd1 = PAIRS(vtrn2, x[2], x[3], 32);
    out[0] = PAIRS(vtrn1, even0, even1, 64);
    out[1] = PAIRS(vtrn1, odd0, odd1, 64);
    out[2] = PAIRS(vtrn2, even0, even1, 64);
    out[3] = PAIRS(vtrn2, odd0, odd1, 64);
#endif
#undef PAIRS
}

INLINE void take(const Matrix *m, const char *const codes[ROWS], int64_t start, int8x16_t tile[2 * OCTETS], const int kind) {
    for (int part = 0; part < (packed(kind) ? 1 : 2); part++) {
        int8x16_t x[ROWS], turned[ROWS];
        for (int r = 0; r < ROWS; r++) x[r] = bytes_of(m, codes[r], start, part, kind);
        turn(x, turned);
        for (int i = 0; i < ROWS; i++)
            if (packed(kind)) {
                tile[i / 2 * 4 + i % 2] = codes_of(turned[i], 0, kind);
                tile[i / 2 * 4 + 2 + i % 2] = codes_of(turned[i], 1, kind);
            } else
                tile[4 * part + i] = turned[i];
    }
}

/* Sums of products, as the machine gives them. */
typedef struct {
    int32x4_t part[2];
} Sums;

/* Adds the products of an octet of four rows with one of x. */
INLINE void add(Sums *to, const int8x16_t octet[2], int8x16_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    to->part[0] = vmmlaq_s32(to->part[0], octet[0], x); /* row 0 with high, with low, row 1 with high, with low */
    to->part[1] = vmmlaq_s32(to->part[1], octet[1], x);
#else
    to->part[0] = vdotq_laneq_s32(vdotq_laneq_s32(to->part[0], octet[0], x, 0), octet[1], x, 1); /* high */
    to->part[1] = vdotq_laneq_s32(vdotq_laneq_s32(to->part[1], octet[0], x, 2), octet[1], x, 3);
#endif
}

/* A lane a row. */
INLINE vec total(const Sums *of) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    const int32x4_t high = vuzp1q_s32(of->part[0], of->part[1]), low = vuzp2q_s32(of->part[0], of->part[1]);
#else
    const int32x4_t high = of->part[0], low = of->part[1];
#endif
    return (vec)vcvtq_f32_s32(vaddq_s32(low, vshlq_n_s32(high, 8)));
}

/* The rows that are taken together, and what is known of the scales of their groups. */
typedef struct {
    const char *codes[ROWS];
    int64_t rows[ROWS], known;
    vec scales[LANES];
} Taken;

/* The scales of the group that begins with column `start`, a lane a row. Halved for E2M1, whose codes are doubled. */
INLINE vec scales_from(const Matrix *m, Taken *of, int64_t start, const int kind) {
    if (kind == Q8_0 || kind == Q4_0) {
        half scales;
        for (int r = 0; r < ROWS; r++)
            memcpy((char *)&scales + 2 * r, of->codes[r] + start / Q_RUN * (kind == Q8_0 ? 34 : 18), 2);
        return from_f16(scales);
    }
    const int64_t group = m->scales ? start / m->wide : 0;
    if (group >= of->known + LANES) {
        of->known = group;
        vec row[ROWS];
        for (int r = 0; r < ROWS; r++) row[r] = scales_at(m, of->rows[r], group) * (kind == E2M1 ? 0.5f : 1.0f);
        for (int i = 0; i < LANES; i++)
            for (int r = 0; r < ROWS; r++) of->scales[i][r] = row[r][i];
    }
    return of->scales[group - of->known];
}

/* `count` rows with T tokens. */
INLINE void dots_of_rows(const Matrix *m, int64_t row, int64_t count, const void *const *x, float *out, int64_t stride,
                         const int T, const int kind) {
    const int64_t bytes = row_bytes(m), columns = m->columns, group = group_of(m);
    Taken of = {.known = -LANES};
    for (int r = 0; r < ROWS; r++) { /* the last row for those that are missing */
        of.rows[r] = row + (r < count ? r : count - 1);
        of.codes[r] = m->codes + of.rows[r] * bytes;
    }
    const char *ahead = of.codes[0] + (ROWS * bytes > AHEAD ? ROWS * bytes : AHEAD); /* read in the order of addresses */
    Sums some[MOST_TOKENS] = {};
    vec sums[MOST_TOKENS] = {};
    for (int64_t start = 0, begun = 0; start < columns; start += UNIT) {
        int8x16_t tile[2 * OCTETS];
        take(m, of.codes, start, tile, kind);
        for (int i = 0; i < (packed(kind) ? 1 : 2); i++, ahead += 64) __builtin_prefetch(ahead);
        for (int i = 0; i < OCTETS; i++) {
            for (int t = 0; t < T; t++) {
                const Fixed *fixed = (const Fixed *)((const Head *)x[t] + 1) + start / UNIT;
                add(&some[t], tile + 2 * i, vld1q_s8(fixed->octets[i]));
            }
            const int64_t end = start + 8 * (i + 1);
            if (i % 2 && (end % group == 0 || (i == OCTETS - 1 && end >= columns))) {
                const vec scale = scales_from(m, &of, begun, kind);
                for (int t = 0; t < T; t++) {
                    sums[t] += scale * total(&some[t]);
                    some[t] = (Sums){};
                }
                begun = end;
            }
        }
    }
    for (int t = 0; t < T; t++) {
        const vec result = sums[t] * ((const Head *)x[t])->step;
        memcpy(out + t * stride, &result, sizeof result);
    }
}

static void dots_of_codes(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens, float *out,
                          int64_t stride, const int kind) {
    for (int64_t r = 0; r < count; r += ROWS)
        switch (tokens) {
#define CASE(T) \
    case T: dots_of_rows(m, row + r, count - r, x, out + r, stride, T, kind); break
            CASE(1);
            CASE(2);
            CASE(3);
            CASE(4);
            CASE(5);
            CASE(6);
            CASE(7);
            CASE(8);
#undef CASE
        }
}

void dots(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens, float *out,
          int64_t stride) {
    switch (m->kind) {
#define CASE(kind) \
    case kind: dots_of_codes(m, row, count, x, tokens, out, stride, kind); break
        CASE(INT8);
        CASE(E2M1);
        CASE(INT4);
        CASE(Q8_0);
        CASE(Q4_0);
#undef CASE
    }
}

#endif
