/* Products of a few rows of x with codes as they are.

The machine multiplies unsigned by signed bytes, four at a time, into 32 bits. Codes are made unsigned by an offset; x is
fixed point, q = 256 high + low, both signed. Sums stay whole numbers as long as the scale of the codes does not change.

One or two rows of x meet codes as they lie: a lane has some of the columns, and lanes are added up in the end. For more of
them codes are turned first, TALL rows and CHUNK columns at a time: a lane has a row of the matrix then, nothing is added
up, and a scale is a vector. */

#include "dots.h"

#if WIDTH == 64 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512BF16__)

enum {
    QUADS = 16,  /* of 64 codes: a product of the machine has four columns */
    FLOATS = 64, /* columns of 8-bit floats that are taken together */
    FEW = 2,     /* rows of x for which turning is not worth it */
    AT_ONCE = 4, /* rows of x with 8-bit floats, which lie in lanes of columns */
    FIXED_HEAD = 64,
};

/* CHUNK columns of a row of x, in the order in which a format has its codes: those of 4 bits are of two columns in a byte,
and all low halves come before the high ones. */
typedef struct {
    int8_t high[CHUNK], low[CHUNK];
    int32_t less[2 * QUADS]; /* what the offset adds to a group, taken away from its first quad */
} Fixed;

const int64_t fixed_bytes = sizeof(Fixed), floats_bytes = 2 * FLOATS;

/* The same columns of TALL rows: lane r of quads[i] has four codes of row r. */
typedef struct {
    __m512i quads[2 * QUADS];
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

static int32_t offset_of(int64_t kind) { return kind == E2M1 ? 12 : kind == Q8_0 || kind == INT8 ? 128 : 8; }

/* Quads of a group: all in a row, or so many in both halves of packed codes. x is zero in those too many. */
static int64_t quads_of(const Matrix *m) {
    return packed(m->kind) ? (group_of(m) + 7) / 8 : (group_of(m) + 3) / 4;
}

int64_t ready_bytes(const Matrix *m) {
    if (m->kind == PLAIN) return 0;
    if (m->kind == E4M3) return sizeof(Head) + (m->columns + FLOATS - 1) / FLOATS * sizeof(Floats);
    return FIXED_HEAD + (m->columns + CHUNK - 1) / CHUNK * sizeof(Fixed);
}

/* CHUNK columns as codes of a format lie. */
static void in_order(int64_t kind, const int8_t *columns, int8_t *out) {
    if (kind == INT8 || kind == Q8_0) {
        memcpy(out, columns, CHUNK);
        return;
    }
    for (int i = 0; i < 64; i++) {
        const int even = kind == Q4_0 ? i / 16 * Q_RUN + i % 16 : 2 * i;
        out[i] = columns[even];
        out[64 + i] = columns[kind == Q4_0 ? even + 16 : even + 1];
    }
}

static void to_fixed(const Matrix *m, const void *x, int type, char *out) {
    const int64_t columns = m->columns, group = group_of(m), size = quads_of(m);
    vec most = {};
    for (int64_t i = 0; i < columns; i += LANES) {
        vec v = load(x, i, columns, type);
        most = vmax(most, vmax(v, -v));
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    ((Head *)out)->step = largest / 32512; /* high and low fit in signed bytes */
    const float scale = largest > 0 ? 32512 / largest : 0;
    Fixed *fixed = (Fixed *)(out + FIXED_HEAD);
    for (int64_t start = 0; start < columns; start += CHUNK, fixed++) {
        int8_t high[CHUNK], low[CHUNK]; /* in the order of the columns */
        memset(fixed->less, 0, sizeof fixed->less);
        for (int64_t i = 0; i < CHUNK; i += LANES) {
            const __m512i q = _mm512_cvtps_epi32(load(x, start + i, columns, type) * scale);
            const __m512i below = _mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24);
            const __m512i above = _mm512_srai_epi32(_mm512_sub_epi32(q, below), 8);
            _mm_storeu_si128((__m128i *)(low + i), _mm512_cvtepi32_epi8(below));
            _mm_storeu_si128((__m128i *)(high + i), _mm512_cvtepi32_epi8(above));
            fixed->less[i / group * size] -= offset_of(m->kind) * _mm512_reduce_add_epi32(q);
        }
        in_order(m->kind, high, fixed->high);
        in_order(m->kind, low, fixed->low);
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

/* 64 bytes of codes of a row, zeros behind its end: the `half`-th of CHUNK columns, or all of them where they are packed. */
INLINE __m512i bytes_of(const Matrix *m, const char *codes, int64_t start, int half, const int kind) {
    const int64_t left = m->columns - start;
    if (kind == INT8 || kind == E2M1 || kind == INT4) {
        const int64_t count = kind == INT8 ? left - 64 * half : left / 2;
        const __mmask64 mask = count >= 64 ? ~0ull : _bzhi_u64(~0ull, count > 0 ? count : 0);
        return _mm512_maskz_loadu_epi8(mask, codes + (kind == INT8 ? start + 64 * half : start / 2));
    }
    const int size = kind == Q8_0 ? Q_RUN : Q_RUN / 2, runs = kind == Q8_0 ? 2 : 4;
    const char *at = codes + (start / Q_RUN + half * runs) * (size + 2) + 2;
    const int64_t there = left / Q_RUN - half * runs;
    if (there >= runs && kind == Q8_0) {
        const __m256i first = _mm256_loadu_si256((const __m256i *)at);
        return _mm512_inserti64x4(_mm512_castsi256_si512(first), _mm256_loadu_si256((const __m256i *)(at + 34)), 1);
    }
    if (there >= runs) {
        const __m512i first = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
        const __m512i two = _mm512_inserti32x4(first, _mm_loadu_si128((const __m128i *)(at + 18)), 1);
        const __m512i three = _mm512_inserti32x4(two, _mm_loadu_si128((const __m128i *)(at + 36)), 2);
        return _mm512_inserti32x4(three, _mm_loadu_si128((const __m128i *)(at + 54)), 3);
    }
    char together[64] = {};
    for (int64_t run = 0; run < there; run++) memcpy(together + run * size, at + run * (size + 2), size);
    return _mm512_loadu_si512(together);
}

/* Doubled 4-bit floats, plus the offset. */
static const uint8_t E2M1_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Unsigned codes; the `half` of packed ones. */
INLINE __m512i codes_of(__m512i bytes, int half, const int kind) {
    if (!packed(kind)) return _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80));
    bytes = _mm512_and_si512(half ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
    if (kind != E2M1) return bytes;
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)E2M1_CODES)), bytes);
}

INLINE void take(const Matrix *m, const char *const codes[TALL], int64_t start, Tile *tile, const int kind) {
    __m512i x[TALL];
    for (int half = 0; half < 2; half++) {
        if (half == 0 || !packed(kind)) {
            for (int r = 0; r < TALL; r++) x[r] = bytes_of(m, codes[r], start, half, kind);
            transpose(x);
        }
        for (int i = 0; i < QUADS; i++) tile->quads[QUADS * half + i] = codes_of(x[i], half, kind);
    }
}

/* sums[t] += the products of x[t] with a tile. A group is `size` quads one after the other, or in both halves. */
INLINE void multiply(const Tile *tile, const Fixed *const *x, int64_t groups, int64_t size, int halves, const vec *scales,
                     vec *sums, const int T) {
    for (int64_t g = 0; g < groups; g++) {
        __m512i high[MOST_TOKENS] = {}, low[MOST_TOKENS];
        for (int t = 0; t < T; t++) low[t] = _mm512_set1_epi32(x[t]->less[g * size]);
        for (int half = 0; half < halves; half++)
            for (int64_t i = QUADS * half + g * size; i < QUADS * half + (g + 1) * size; i++)
                for (int t = 0; t < T; t++) {
                    int32_t above, below;
                    memcpy(&above, x[t]->high + 4 * i, 4);
                    memcpy(&below, x[t]->low + 4 * i, 4);
                    high[t] = _mm512_dpbusd_epi32(high[t], tile->quads[i], _mm512_set1_epi32(above));
                    low[t] = _mm512_dpbusd_epi32(low[t], tile->quads[i], _mm512_set1_epi32(below));
                }
        for (int t = 0; t < T; t++)
            sums[t] += scales[g] * (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(low[t], _mm512_slli_epi32(high[t], 8)));
    }
}

static void multiply_any(const Tile *tile, const Fixed *const *x, int64_t tokens, int64_t groups, int64_t size,
                         int halves, const vec *scales, vec *sums) {
    switch (tokens) {
#define CASE(T) \
    case T: multiply(tile, x, groups, size, halves, scales, sums, T); break
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
#undef CASE
    }
}

/* Rows row, row + 1, ... of a matrix, and what is known of the scales of their groups. */
typedef struct {
    const char *codes[TALL];
    int64_t rows[TALL], groups, known;
    vec scales[LANES];
} Rows16;

/* The scales of the chunk that begins with column `start`. */
INLINE const vec *scales_from(const Matrix *m, Rows16 *of, int64_t start, const int kind) {
    if (kind == Q8_0 || kind == Q4_0) {
        const int64_t size = kind == Q8_0 ? 34 : 18, run = start / Q_RUN, left = m->columns / Q_RUN - run;
        uint16_t scales[CHUNK / Q_RUN][TALL] = {};
        for (int r = 0; r < TALL; r++)
            for (int64_t i = 0; i < CHUNK / Q_RUN && i < left; i++)
                memcpy(&scales[i][r], of->codes[r] + (run + i) * size, 2);
        for (int i = 0; i < CHUNK / Q_RUN; i++) of->scales[i] = load_all(scales[i], F16);
        return of->scales;
    }
    const int64_t first = of->groups == 1 ? 0 : start / m->wide;
    if (first >= of->known + LANES) scales_of_rows(m, of->rows, of->known = first, of->scales);
    return of->scales + (first - of->known);
}

INLINE void dots_of_many(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens,
                             float *out, int64_t stride, const int kind) {
    const int64_t bytes = row_bytes(m), columns = m->columns, group = group_of(m);
    const int64_t size = quads_of(m);
    const Fixed *fixed[MOST_TOKENS];
    vec sums[MOST_TOKENS] = {};
    Rows16 of = {.groups = groups_of(m), .known = -LANES};
    for (int r = 0; r < TALL; r++) { /* the last row for those that are missing */
        of.rows[r] = row + (r < count ? r : count - 1);
        of.codes[r] = m->codes + of.rows[r] * bytes;
    }
    for (int64_t t = 0; t < tokens; t++) fixed[t] = (const Fixed *)((const char *)x[t] + FIXED_HEAD);
    const char *next = m->codes + (row + TALL) * bytes; /* is asked for in the order of the addresses */
    const int64_t ahead = CHUNK * bytes / columns * TALL;
    for (int64_t start = 0; start < columns; start += CHUNK, next += ahead) {
        const int64_t groups = columns - start < CHUNK ? (columns - start + group - 1) / group : CHUNK / group;
        Tile tile;
        for (int64_t at = 0; at < ahead; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
        take(m, of.codes, start, &tile, kind);
        const vec *scales = scales_from(m, &of, start, kind);
        multiply_any(&tile, fixed, tokens, groups, size, packed(kind) ? 2 : 1, scales, sums);
        for (int64_t t = 0; t < tokens; t++) fixed[t]++;
    }
    for (int64_t t = 0; t < tokens; t++) store_all(sums[t] * ((const Head *)x[t])->step, out + t * stride, F32);
}

/* R rows with T tokens, few of both. */
INLINE void dots_of_few(const Matrix *m, int64_t row, const void *const *x, float *out, int64_t stride, const int R,
                        const int T, const int kind) {
    const int between = kind == Q8_0 || kind == Q4_0;
    const int64_t bytes = row_bytes(m), columns = m->columns, size = quads_of(m), groups = between ? 0 : groups_of(m);
    const int64_t chunk = CHUNK / (packed(kind) ? 2 : 1); /* bytes of codes; blocks with scales are a little longer */
    const int together = packed(kind) || size > QUADS;    /* whether both halves have the same scales */
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int one = size >= QUADS || groups == 1; /* all lanes have the same scale; else groups are a power of two */
    const __m512i index = _mm512_srlv_epi32(lane, _mm512_set1_epi32(one ? 31 : __builtin_ctzll((uint64_t)size)));
    const char *codes = m->codes + row * bytes, *ahead = codes + (R * bytes > AHEAD ? R * bytes : AHEAD);
    vec sums[FEW * FEW] = {}, scales[FEW] = {};
    int64_t known = -LANES;
    for (int64_t start = 0, c = 0; start < columns; start += CHUNK, c++) {
        const int64_t first = groups == 1 ? 0 : start / (between ? Q_RUN : m->wide);
        if (between) {
            for (int r = 0; r < R; r++) {
                half of = {};
                for (int64_t i = 0; i < CHUNK / Q_RUN; i++) {
                    uint16_t scale = 0;
                    if (first + i < columns / Q_RUN)
                        memcpy(&scale, codes + r * bytes + (first + i) * (kind == Q8_0 ? 34 : 18), 2);
                    of[i] = scale;
                }
                scales[r] = from_f16(of);
            }
            known = first;
        } else if (first >= known + LANES) {
            known = first;
            for (int r = 0; r < R; r++) scales[r] = scales_at(m, row + r, first) * (kind == E2M1 ? 0.5f : 1.0f);
        }
        const __m512i which = _mm512_add_epi32(index, _mm512_set1_epi32((int)(first - known)));
        __m512i high[FEW * FEW] = {}, low[FEW * FEW] = {}, some[FEW];
        for (int half = 0; half < 2; half++) {
            const __m512i here = half && !together ? _mm512_add_epi32(which, _mm512_set1_epi32(QUADS / (int)size)) : which;
            for (int r = 0; r < R; r++)
                if (half == 0 || !packed(kind)) {
                    some[r] = bytes_of(m, codes + r * bytes, start, half, kind);
                    _mm_prefetch(ahead + R * (c * chunk + 64 * half) + 64 * r, _MM_HINT_T0);
                }
            for (int t = 0; t < T; t++) {
                const Fixed *q = (const Fixed *)((const char *)x[t] + FIXED_HEAD) + c;
                const __m512i above = _mm512_loadu_si512(q->high + 64 * half), below = _mm512_loadu_si512(q->low + 64 * half);
                for (int r = 0; r < R; r++) {
                    const int at = r * T + t, fresh = half == 0 || !together;
                    const __m512i code = codes_of(some[r], half, kind);
                    const __m512i less = _mm512_loadu_si512(q->less + QUADS * half);
                    high[at] = _mm512_dpbusd_epi32(fresh ? _mm512_setzero_si512() : high[at], code, above);
                    low[at] = _mm512_dpbusd_epi32(fresh ? less : low[at], code, below);
                    if (half || !together) {
                        const __m512i all = _mm512_add_epi32(low[at], _mm512_slli_epi32(high[at], 8));
                        sums[at] += _mm512_permutexvar_ps(here, scales[r]) * (vec)_mm512_cvtepi32_ps(all);
                    }
                }
            }
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) out[t * stride + r] = sum(sums[r * T + t]) * ((const Head *)x[t])->step;
}

INLINE void dots_of_codes(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens,
                          float *out, int64_t stride, const int kind) {
    if (tokens > FEW) {
        dots_of_many(m, row, count, x, tokens, out, stride, kind);
        return;
    }
    for (int64_t r = 0; r < count; r += 2)
        switch (10 * (count - r > 1 ? 2 : 1) + tokens) {
#define CASE(R, T) \
    case 10 * R + T: dots_of_few(m, row + r, x, out + r, stride, R, T, kind); break
            CASE(1, 1);
            CASE(1, 2);
            CASE(2, 1);
            CASE(2, 2);
#undef CASE
        }
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
    switch (m->kind) {
        case E4M3: dots_of_floats_any(m, row, count, x, tokens, out, stride); break;
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

#elif !defined(__ARM_FEATURE_DOTPROD) /* see dots_arm.c */

const int64_t fixed_bytes = 0, floats_bytes = 0;

int64_t ready_bytes(const Matrix *m) { return 0 * m->kind; }
void make_ready(const Matrix *m, const void *x, int type, void *out) { (void)m, (void)x, (void)type, (void)out; }
void dots(const Matrix *m, int64_t row, int64_t count, const void *const *x, int64_t tokens, float *out,
          int64_t stride) {
    (void)m, (void)row, (void)count, (void)x, (void)tokens, (void)out, (void)stride;
}

#endif
