/* Products of a few rows of x with codes as they are.

The machine multiplies unsigned by signed bytes, four at a time, into 32 bits. Codes are made unsigned by an offset; x is
fixed point, q = 256 high + low, both signed. Sums stay whole numbers as long as the scale of the codes does not change.

A lane has a row of the matrix: codes are turned as they come in, TALL rows and CHUNK columns at a time, and all rows of x
meet them then. So nothing is added up across lanes, and a scale is a vector. */

#include "matrix.h"

#if WIDTH == 64 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512BF16__)

const int64_t has_dots = 1;

enum {
    CHUNK = 128,       /* columns; sums of so many products fit in 32 bits: 255 * 127 * 256 * 128 */
    QUADS = CHUNK / 4, /* a product of the machine has four columns */
    LEAST = 16,        /* columns of the narrowest groups */
    AT_ONCE = 4,       /* rows of x with 8-bit floats, which lie in lanes of columns */
};

/* CHUNK columns of a row of x, in the order in which a format has its quads. */
typedef struct {
    int8_t high[CHUNK], low[CHUNK];
    int32_t less[CHUNK / LEAST]; /* what the offset adds, group by group; a chunk of a wider group has one */
} Fixed;

/* The same columns of TALL rows: lane r of quads[i] has the four codes of row r. */
typedef struct {
    __m512i quads[QUADS];
    vec scales[CHUNK / Q_RUN]; /* of formats that keep them between their codes */
} Tile;

/* 64 columns of BF16, the first 8 of each 16, then the others: in this order 8-bit floats become BF16. */
typedef struct {
    __m512i half[2];
} Floats;

/* Before the columns of a row: the step of fixed point, or what 8-bit floats are as BF16, byte by byte. */
typedef struct {
    float step;
    char unused[60];
    uint8_t table[2][128]; /* low bytes, high bytes; without sign. Fixed point ends before it. */
} Head;

enum { FIXED_HEAD = 64, FLOATS = 64 };

static int32_t offset_of(int64_t kind) { return kind == E2M1 ? 12 : kind == Q8_0 || kind == INT8 ? 128 : 8; }

/* Columns that have one scale, and sums of their own. */
static int64_t group_of(const Matrix *m) {
    const int64_t wide = m->kind == Q8_0 || m->kind == Q4_0 ? Q_RUN : m->scales ? m->wide : m->columns;
    return wide > CHUNK ? CHUNK : wide < LEAST ? LEAST : wide;
}

int64_t ready_bytes(const Matrix *m) {
    if (m->kind == PLAIN) return 0;
    if (m->kind == E4M3) return sizeof(Head) + (m->columns + FLOATS - 1) / FLOATS * sizeof(Floats);
    return FIXED_HEAD + (m->columns + CHUNK - 1) / CHUNK * sizeof(Fixed);
}

static void to_fixed(const Matrix *m, const void *x, int type, char *out) {
    const int64_t columns = m->columns, group = group_of(m);
    vec most = {};
    for (int64_t i = 0; i < columns; i += LANES) {
        vec v = load(x, i, columns, type);
        most = vmax(most, vmax(v, -v));
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    ((Head *)out)->step = largest / 32512; /* high and low fit in signed bytes */
    const float scale = largest > 0 ? 32512 / largest : 0;
    const __m128i apart = m->kind == E2M1 || m->kind == INT4
                              ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                              : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Fixed *fixed = (Fixed *)(out + FIXED_HEAD);
    for (int64_t start = 0; start < columns; start += CHUNK, fixed++) {
        memset(fixed->less, 0, sizeof fixed->less);
        for (int64_t i = 0; i < CHUNK; i += LANES) {
            const __m512i q = _mm512_cvtps_epi32(load(x, start + i, columns, type) * scale);
            const __m512i below = _mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24);
            const __m512i above = _mm512_srai_epi32(_mm512_sub_epi32(q, below), 8);
            const __m128i low = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(below), apart);
            const __m128i high = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(above), apart);
            _mm_storeu_si128((__m128i *)(fixed->low + i), low);
            _mm_storeu_si128((__m128i *)(fixed->high + i), high);
            fixed->less[i / group] -= offset_of(m->kind) * _mm512_reduce_add_epi32(q);
        }
    }
}

void make_ready(const Matrix *m, const void *x, int type, void *out) {
    if (m->kind != E4M3) {
        to_fixed(m, x, type, out);
        return;
    }
    Head *head = out;
    for (int i = 0; i < 128; i += LANES) {
        vec code = splat((float)i);
        for (int lane = 0; lane < LANES; lane++) code[lane] += lane;
        const half value = to_bf16(from_e4m3(__builtin_convertvector(code, bytes)));
        for (int lane = 0; lane < LANES; lane++) {
            head->table[0][i + lane] = (uint8_t)value[lane];
            head->table[1][i + lane] = (uint8_t)(value[lane] >> 8);
        }
    }
    char *at = (char *)(head + 1);
    for (int64_t c = 0; c < m->columns; c += FLOATS, at += sizeof(Floats))
        for (int64_t i = 0; i < FLOATS; i += LANES) {
            const half part = to_bf16(load(x, c + i, m->columns, type));
            memcpy(at + i, &part, 16); /* half of the bytes of 16 columns */
            memcpy(at + 64 + i, (const char *)&part + 16, 16);
        }
}

/* Lane r of x[i] <-> lane i of x[r]. */
INLINE void transpose(__m512i x[16]) {
    __m512i pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            fours[i + 2 * k] = _mm512_unpacklo_epi64(pairs[i + k], pairs[i + k + 2]);
            fours[i + 2 * k + 1] = _mm512_unpackhi_epi64(pairs[i + k], pairs[i + k + 2]);
        }
    for (int k = 0; k < 4; k++) { /* fours[4 i + k]: of rows 4 i to 4 i + 3 the columns k, 4 + k, 8 + k, 12 + k */
        const __m512i even0 = _mm512_shuffle_i32x4(fours[k], fours[4 + k], 0x88);
        const __m512i even1 = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], 0x88);
        const __m512i odd0 = _mm512_shuffle_i32x4(fours[k], fours[4 + k], 0xdd);
        const __m512i odd1 = _mm512_shuffle_i32x4(fours[8 + k], fours[12 + k], 0xdd);
        x[k] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        x[4 + k] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        x[8 + k] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
        x[12 + k] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
    }
}

/* scales[i]: those of group `group` + i, a lane a row. Halved for E2M1, whose codes are doubled. */
static void scales_of_rows(const Matrix *m, const int64_t rows[TALL], int64_t group, vec scales[LANES]) {
    const float by = m->kind == E2M1 ? 0.5f : 1.0f;
    __m512i all[TALL];
    for (int r = 0; r < TALL; r++) all[r] = (__m512i)(scales_at(m, rows[r], group) * by);
    transpose(all);
    memcpy(scales, all, sizeof all);
}

/* Doubled 4-bit floats, plus the offset. */
static const uint8_t E2M1_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Unsigned codes from column `start` on; x is zero behind the last one. */
INLINE void take(const Matrix *m, const char *const codes[TALL], int64_t start, Tile *tile, const int kind) {
    const int64_t left = m->columns - start;
    const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)0x80);
    __m512i x[TALL];
    switch (kind) {
        case INT8:
            for (int part = 0; part < 2; part++) {
                const int64_t count = left - 64 * part;
                const __mmask64 mask = count >= 64 ? ~0ull : count > 0 ? _bzhi_u64(~0ull, count) : 0;
                for (int r = 0; r < TALL; r++) x[r] = _mm512_maskz_loadu_epi8(mask, codes[r] + start + 64 * part);
                transpose(x);
                for (int i = 0; i < 16; i++) tile->quads[16 * part + i] = _mm512_xor_si512(x[i], sign);
            }
            break;
        case E2M1:
        case INT4: {
            const __mmask64 mask = _bzhi_u64(~0ull, left < CHUNK ? left / 2 : 64);
            const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)E2M1_CODES));
            for (int r = 0; r < TALL; r++) x[r] = _mm512_maskz_loadu_epi8(mask, codes[r] + start / 2);
            transpose(x);
            for (int i = 0; i < 16; i++) {
                __m512i even = _mm512_and_si512(x[i], nibble);
                __m512i odd = _mm512_and_si512(_mm512_srli_epi16(x[i], 4), nibble);
                if (kind == E2M1) {
                    even = _mm512_shuffle_epi8(table, even);
                    odd = _mm512_shuffle_epi8(table, odd);
                }
                tile->quads[2 * i] = even;
                tile->quads[2 * i + 1] = odd;
            }
            break;
        }
        case Q8_0:
        case Q4_0: {
            const int64_t size = kind == Q8_0 ? 34 : 18, runs = left < CHUNK ? left / Q_RUN : CHUNK / Q_RUN;
            uint16_t scales[CHUNK / Q_RUN][TALL] = {};
            for (int r = 0; r < TALL; r++)
                for (int64_t run = 0; run < runs; run++)
                    memcpy(&scales[run][r], codes[r] + (start / Q_RUN + run) * size, 2);
            for (int run = 0; run < CHUNK / Q_RUN; run++) tile->scales[run] = load_all(scales[run], F16);
            for (int part = 0; part < (kind == Q8_0 ? 2 : 1); part++) {
                for (int r = 0; r < TALL; r++) {
                    char at[64] = {};
                    const char *from = codes[r] + start / Q_RUN * size + 2;
                    if (kind == Q8_0)
                        for (int64_t run = 0; run < 2 && 2 * part + run < runs; run++)
                            memcpy(at + 32 * run, from + (2 * part + run) * size, 32);
                    else
                        for (int64_t run = 0; run < runs; run++) memcpy(at + 16 * run, from + run * size, 16);
                    x[r] = _mm512_loadu_si512(at);
                }
                transpose(x);
                for (int i = 0; i < 16; i++)
                    if (kind == Q8_0) {
                        tile->quads[16 * part + i] = _mm512_xor_si512(x[i], sign);
                    } else { /* four quads of low halves, four of high ones */
                        tile->quads[i + i / 4 * 4] = _mm512_and_si512(x[i], nibble);
                        tile->quads[i + i / 4 * 4 + 4] = _mm512_and_si512(_mm512_srli_epi16(x[i], 4), nibble);
                    }
            }
            break;
        }
    }
}

static void take_any(const Matrix *m, const char *const codes[TALL], int64_t start, Tile *tile) {
    switch (m->kind) {
        case INT8: take(m, codes, start, tile, INT8); break;
        case E2M1: take(m, codes, start, tile, E2M1); break;
        case INT4: take(m, codes, start, tile, INT4); break;
        case Q8_0: take(m, codes, start, tile, Q8_0); break;
        case Q4_0: take(m, codes, start, tile, Q4_0); break;
    }
}

/* sums[t] += the products of x[t] with a tile, whose groups are `size` quads. */
INLINE void multiply(const Tile *tile, const Fixed *const *x, int64_t groups, int64_t size, const vec *scales, vec *sums,
                     const int T) {
    for (int64_t g = 0; g < groups; g++) {
        __m512i high[MOST_TOKENS], low[MOST_TOKENS];
        for (int t = 0; t < T; t++) {
            high[t] = _mm512_setzero_si512();
            low[t] = _mm512_set1_epi32(x[t]->less[g]);
        }
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            const __m512i codes = tile->quads[i];
            for (int t = 0; t < T; t++) {
                int32_t above, below;
                memcpy(&above, x[t]->high + 4 * i, 4);
                memcpy(&below, x[t]->low + 4 * i, 4);
                high[t] = _mm512_dpbusd_epi32(high[t], codes, _mm512_set1_epi32(above));
                low[t] = _mm512_dpbusd_epi32(low[t], codes, _mm512_set1_epi32(below));
            }
        }
        for (int t = 0; t < T; t++)
            sums[t] += scales[g] * (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(low[t], _mm512_slli_epi32(high[t], 8)));
    }
}

static void multiply_any(const Tile *tile, const Fixed *const *x, int64_t tokens, int64_t groups, int64_t size,
                         const vec *scales, vec *sums) {
    switch (tokens) {
#define CASE(T) \
    case T: multiply(tile, x, groups, size, scales, sums, T); break
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

static void dots_of_integers(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens,
                             float *out, int64_t stride) {
    const int64_t bytes = row_bytes(m), columns = m->columns, group = group_of(m);
    const int64_t groups = m->scales ? (columns + m->wide - 1) / m->wide : 1;
    const int between = m->kind == Q8_0 || m->kind == Q4_0;
    const char *codes[TALL], *next = m->codes + (row + TALL) * bytes;
    const Fixed *fixed[MOST_TOKENS];
    int64_t rows[TALL];
    for (int r = 0; r < TALL; r++) { /* the last row for those that are missing */
        rows[r] = row + (r < count ? r : count - 1);
        codes[r] = m->codes + rows[r] * bytes;
    }
    for (int64_t t = 0; t < tokens; t++) fixed[t] = (const Fixed *)((const char *)x[t] + FIXED_HEAD);
    vec sums[MOST_TOKENS] = {}, scales[LANES];
    int64_t known = -LANES; /* the first of the groups whose scales are at hand */
    Tile tile;
    for (int64_t start = 0; start < columns; start += CHUNK) {
        const int64_t first = groups == 1 ? 0 : start / m->wide;
        const int64_t some = columns - start < CHUNK ? (columns - start + group - 1) / group : CHUNK / group;
        if (!between && first >= known + LANES) scales_of_rows(m, rows, known = first, scales);
        /* The next rows, in the order of their addresses. */
        const int64_t from = start * bytes / columns * TALL, size = CHUNK * bytes / columns * TALL;
        for (int64_t at = 0; at < size; at += 64) _mm_prefetch(next + from + at, _MM_HINT_T1);
        take_any(m, codes, start, &tile);
        multiply_any(&tile, fixed, tokens, some, (group + 3) / 4, between ? tile.scales : scales + (first - known), sums);
        for (int64_t t = 0; t < tokens; t++) fixed[t]++;
    }
    for (int64_t t = 0; t < tokens; t++) store_all(sums[t] * ((const Head *)x[t])->step, out + t * stride, F32);
}

/* R rows with T tokens; lanes are columns here, for 8-bit floats need more room than codes as they are. */
INLINE void dots_of_floats(const Matrix *m, int64_t row, const void *const *x, float *out, int64_t stride, const int R,
                           const int T) {
    const int64_t columns = m->columns, wide = m->scales && m->wide < columns ? m->wide : columns;
    const int64_t lane = wide < FLOATS ? wide / 4 : LANES; /* lanes with the same scale; one stands for four columns */
    const __m512i index = _mm512_srli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                            __builtin_ctzll((uint64_t)lane));
    const Head *head = x[0];
    const __m512i low[2] = {_mm512_loadu_si512(head->table[0]), _mm512_loadu_si512(head->table[0] + 64)};
    const __m512i high[2] = {_mm512_loadu_si512(head->table[1]), _mm512_loadu_si512(head->table[1] + 64)};
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const char *codes = m->codes + row * columns, *ahead = codes + (R * columns > AHEAD ? R * columns : AHEAD);
    vec sums[2 * AT_ONCE] = {}, scales[2] = {};
    int64_t known = -LANES;
    for (int64_t start = 0; start < columns; start += FLOATS) {
        const __mmask64 mask = _bzhi_u64(~0ull, columns - start < FLOATS ? columns - start : FLOATS);
        const int64_t first = start / wide;
        if (first >= known + LANES) {
            known = first;
            for (int r = 0; r < R; r++) scales[r] = scales_at(m, row + r, first);
        }
        const __m512i which = _mm512_add_epi32(index, _mm512_set1_epi32((int)(first - known)));
        __m512bh floats[2][2];
        vec by[2];
        for (int r = 0; r < R; r++) {
            const __m512i bytes = _mm512_maskz_loadu_epi8(mask, codes + r * columns + start);
            _mm_prefetch(ahead + R * start + 64 * r, _MM_HINT_T0);
            const __m512i below = _mm512_permutex2var_epi8(low[0], bytes, low[1]);
            __m512i above = _mm512_permutex2var_epi8(high[0], bytes, high[1]); /* the sign does not select */
            above = _mm512_ternarylogic_epi64(above, bytes, sign, 0xf8);       /* above | (bytes & sign) */
            floats[r][0] = (__m512bh)_mm512_unpacklo_epi8(below, above);
            floats[r][1] = (__m512bh)_mm512_unpackhi_epi8(below, above);
            by[r] = _mm512_permutexvar_ps(which, scales[r]);
        }
        for (int t = 0; t < T; t++) {
            const Floats *of = (const Floats *)((const Head *)x[t] + 1) + start / FLOATS;
            const __m512bh some = (__m512bh)_mm512_loadu_si512(&of->half[0]);
            const __m512bh others = (__m512bh)_mm512_loadu_si512(&of->half[1]);
            for (int r = 0; r < R; r++) {
                const vec part = _mm512_dpbf16_ps((vec){}, some, floats[r][0]);
                sums[r * T + t] += by[r] * (vec)_mm512_dpbf16_ps(part, others, floats[r][1]);
            }
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) out[t * stride + r] = sum(sums[r * T + t]);
}

static void dots_of_floats_any(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens,
                               float *out, int64_t stride) {
    int64_t height, some;
    for (int64_t r = 0; r < count; r += height)
        for (int64_t t = 0; t < tokens; t += some) {
            height = tokens > 1 && r + 1 < count ? 2 : 1; /* one token waits for memory, which likes one stream */
            some = tokens - t < AT_ONCE ? tokens - t : AT_ONCE;
            switch (10 * height + some) {
#define CASE(R, T) \
    case 10 * R + T: dots_of_floats(m, row + r, x + t, out + t * stride + r, stride, R, T); break
                CASE(1, 1);
                CASE(1, 2);
                CASE(1, 3);
                CASE(1, 4);
                CASE(2, 1);
                CASE(2, 2);
                CASE(2, 3);
                CASE(2, 4);
#undef CASE
            }
        }
}

void dots(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens, float *out,
          int64_t stride) {
    if (m->kind == E4M3)
        dots_of_floats_any(m, row, count, x, tokens, out, stride);
    else
        dots_of_integers(m, row, count, x, tokens, out, stride);
}

#else

const int64_t has_dots = 0;

int64_t ready_bytes(const Matrix *m) { return 0 * m->kind; }
void make_ready(const Matrix *m, const void *x, int type, void *out) { (void)m, (void)x, (void)type, (void)out; }
void dots(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens, float *out,
          int64_t stride) {
    (void)m, (void)row, (void)count, (void)x, (void)tokens, (void)out, (void)stride;
}

#endif
