/* Codes and scales to floats; products with codes as they are. */

#include "matrix.h"

enum {
    Q_RUN = 32, /* columns of a GGUF block */
    SIDE = 128, /* of a block of 8-bit floats: the widest group of columns, but for whole rows */
};

int64_t row_bytes(const Matrix *m) {
    switch (m->kind) {
        case PLAIN: return m->columns * size_of(m->type);
        case E4M3:
        case INT8: return m->columns;
        case Q8_0: return m->columns / Q_RUN * 34;
        case Q4_0: return m->columns / Q_RUN * 18;
        default: return m->columns / 2;
    }
}

static int64_t scales_of_a_row(const Matrix *m) { return (m->columns + m->wide - 1) / m->wide; }

static int64_t scale_size(const Matrix *m) { return m->scale_type >= SCALE_E4M3 ? 1 : size_of(m->scale_type); }

Matrix member(const Matrix *stack, int64_t e) {
    Matrix m = *stack;
    m.codes += e * m.rows * row_bytes(&m);
    if (m.scales) m.scales += e * ((m.rows + m.tall - 1) / m.tall) * scales_of_a_row(&m) * scale_size(&m);
    if (m.whole) m.whole += e;
    return m;
}

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

/* The scales of a row, those of the whole included; `out` has room for LANES more. Returns how many. */
static int64_t scales_at(const Matrix *m, int64_t row, float *out) {
    const float whole = m->whole ? *m->whole : 1.0f;
    const int64_t count = m->scales ? scales_of_a_row(m) : 1;
    const char *at = m->scales + (m->scales ? row / m->tall * count * scale_size(m) : 0);
    for (int64_t i = 0; i < count; i += LANES) {
        vec s = splat(1.0f);
        if (m->scales) {
            if (m->scale_type == SCALE_E4M3)
                s = from_e4m3(bytes_at(at + i, count - i));
            else if (m->scale_type == SCALE_E8M0) { /* 0 stands for 2^-127, which is subnormal */
                uvec e = (uvec)widened(bytes_at(at + i, count - i)) & 0xff;
                s = pick((ivec)(e == 0), splat(0x1p-127f), (vec)(e << 23));
            } else
                s = load(at, i, count, (int)m->scale_type);
        }
        s *= whole;
        memcpy(out + i, &s, sizeof s);
    }
    return count;
}

static const float E2M1_VALUES[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
static const float INT4_VALUES[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

/* LANES codes of 4 bits from an even column on, as `table` has them. */
INLINE vec nibbles(const char *at, int64_t count, const float *table) {
#if WIDTH == 64 && defined(__AVX512VBMI__)
    int64_t word = 0;
    if (count < LANES)
        memcpy(&word, at, count / 2);
    else
        memcpy(&word, at, 8);
    /* in every 8 bytes, the nibbles 2i and 2i + 1 at the bottom of 4 bytes each; what is above them does not matter */
    const __m512i where = _mm512_setr_epi64(0x0400000000, 0x0c00000008, 0x1400000010, 0x1c00000018, 0x2400000020,
                                            0x2c00000028, 0x3400000030, 0x3c00000038);
    const __m512i index = _mm512_multishift_epi64_epi8(where, _mm512_set1_epi64(word));
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table));
#else
    vec out = {};
    for (int64_t i = 0; i < LANES && i < count; i++) out[i] = table[(uint8_t)at[i / 2] >> (i % 2 * 4) & 15];
    return out;
#endif
}

/* `count` codes from column c on, LANES at most. */
INLINE vec codes_at(const char *codes, int64_t c, int64_t count, const int kind) {
    if (kind == E4M3) return from_e4m3(bytes_at(codes + c, count));
    if (kind == INT8) return __builtin_convertvector(widened(bytes_at(codes + c, count)), vec);
    return nibbles(codes + c / 2, count, kind == E2M1 ? E2M1_VALUES : INT4_VALUES);
}

/* Rows follow each other in memory, but a row is short and two may be read side by side: what a processor foresees by
itself is less than what memory delivers. So kernels ask for what they will read so many bytes from now. */
enum { AHEAD = 4096 };

INLINE void unpack_as(const Matrix *m, int64_t row, void *out, const int kind, const int type) {
    const int64_t columns = m->columns, bytes = row_bytes(m);
    const char *codes = m->codes + row * bytes;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(codes + AHEAD + at, 0, 2);
    if (kind == Q8_0 || kind == Q4_0) {
        for (int64_t c = 0; c < columns; c += LANES) {
            const char *block = codes + c / Q_RUN * (kind == Q8_0 ? 34 : 18);
            ivec q;
            if (kind == Q8_0) {
                q = widened(bytes_at(block + 2 + c % Q_RUN, LANES));
            } else {
                q = widened(bytes_at(block + 2 + c % 16, LANES));
                q = ((c % Q_RUN < 16 ? q : q >> 4) & 15) - 8;
            }
            store(__builtin_convertvector(q, vec) * load_one(block, 0, F16), out, c, columns, type);
        }
        return;
    }
    float scales[MOST_SCALES + LANES];
    scales_at(m, row, scales);
    /* Groups are as wide as a power of two, at least LANES, or as the row: Python sees to that. */
    const int shift = m->scales && m->wide < columns ? __builtin_ctzll((uint64_t)m->wide) : 63;
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES)
        store_all(codes_at(codes, c, LANES, kind) * scales[c >> shift], (char *)out + c * size_of(type), type);
    if (c < columns) store(codes_at(codes, c, columns - c, kind) * scales[c >> shift], out, c, columns, type);
}

void unpack(const Matrix *m, int64_t row, void *out, int type) {
#define CASE(kind)                                \
    case kind:                                    \
        TYPED(type, unpack_as(m, row, out, kind, T)); \
        break
    switch (m->kind) {
        CASE(E4M3);
        CASE(E2M1);
        CASE(INT4);
        CASE(Q8_0);
        CASE(Q4_0);
        CASE(INT8);
    }
#undef CASE
}

#if WIDTH == 64 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512BF16__)

const int64_t has_dots = 1;

/* The machine multiplies unsigned by signed bytes, four at a time, into 32 bits. Codes are made unsigned by an offset;
q = 256 high + low, both signed. What the offset adds goes again: minus offset times the sum of the q that it met stands
below the products in place of zero; for bytes, where many products have one scale, it follows the q of the row, group by
group. Codes of 4 bits come in chunks of 64 bytes, even columns in the low halves: q is kept in that order. */
typedef struct {
    __m512i high[2], low[2]; /* even columns, odd columns */
    __m512i less;
} Nibbles;

typedef struct {
    __m256i high, low, less;
} Bytes;

typedef struct {
    __m512i high, low;
} Octets; /* 64 columns as they are */

enum { SUMS = 64 }; /* bytes for each 64 columns: room for what follows the q of a row, and LANES - 1 more */

/* 64 columns, the first 8 of each 16, then the others: in this order codes become BF16. */
typedef struct {
    __m512i half[2];
} Floats;

/* Before the columns of a row: the step of fixed point, or what 8-bit floats are as BF16, byte by byte. */
typedef struct {
    float step;
    char unused[60];
    uint8_t table[2][128]; /* low bytes, high bytes; without sign */
} Head;

enum { NIBBLES = 128, OCTETS = 64, FLOATS = 64 }; /* columns that are taken together */

/* R rows ask for what follows them, in the order of the addresses: at byte `at` of a row, the r-th asks R * at + 64 r
beyond `ahead`. */
INLINE const char *ahead_of(const char *codes, const int R, int64_t bytes) {
    return codes + (R * bytes > AHEAD ? R * bytes : AHEAD);
}
#define ASK(at) _mm_prefetch(ahead + R * (at) + 64 * r, _MM_HINT_T0)

static int32_t offset_of(int64_t kind) { return kind == E2M1 ? 12 : kind == Q8_0 || kind == INT8 ? 128 : 8; }

int64_t ready_bytes(const Matrix *m) {
    switch (m->kind) {
        case E4M3: return sizeof(Head) + (m->columns + FLOATS - 1) / FLOATS * sizeof(Floats);
        case Q8_0:
        case Q4_0: return sizeof(Head) + m->columns / Q_RUN * sizeof(Bytes);
        case INT8: return sizeof(Head) + (m->columns + OCTETS - 1) / OCTETS * (sizeof(Octets) + SUMS);
        case E2M1:
        case INT4: return sizeof(Head) + (m->columns + NIBBLES - 1) / NIBBLES * sizeof(Nibbles);
        default: return 0;
    }
}

/* 128 bytes -> the even ones, the odd ones. */
INLINE void apart(__m512i bytes[2]) {
    const __m256i even[2] = {_mm512_cvtepi16_epi8(bytes[0]), _mm512_cvtepi16_epi8(bytes[1])};
    const __m256i odd[2] = {_mm512_cvtepi16_epi8(_mm512_srli_epi16(bytes[0], 8)),
                            _mm512_cvtepi16_epi8(_mm512_srli_epi16(bytes[1], 8))};
    bytes[0] = _mm512_inserti64x4(_mm512_castsi256_si512(even[0]), even[1], 1);
    bytes[1] = _mm512_inserti64x4(_mm512_castsi256_si512(odd[0]), odd[1], 1);
}

/* Behind the q of a row for bytes: what goes again, [groups]. */
INLINE float *sums_of(const Matrix *m, const Head *head) {
    return (float *)((char *)(head + 1) + (m->columns + OCTETS - 1) / OCTETS * sizeof(Octets));
}

static void to_fixed(const Matrix *m, const void *x, int type, Head *head) {
    const int64_t columns = m->columns;
    vec most = {};
    for (int64_t i = 0; i < columns; i += LANES) {
        vec v = load(x, i, columns, type);
        most = vmax(most, vmax(v, -v));
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    head->step = largest / 32512; /* high and low fit in signed bytes */
    const float scale = largest > 0 ? 32512 / largest : 0;
    const int32_t offset = offset_of(m->kind);
    const __m512i none = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
    const int runs = m->kind == Q8_0 || m->kind == Q4_0, whole = m->kind == INT8;
    const int64_t wide = m->scales ? m->wide : columns;
    Nibbles *nibbles = (Nibbles *)(head + 1);
    Octets *octets = (Octets *)(head + 1);
    Bytes *bytes = (Bytes *)(head + 1);
    float *sums = sums_of(m, head);
    int64_t sum = 0;
    for (int64_t start = 0; start < columns; start += NIBBLES) {
        __m512i high[2], low[2], less[2]; /* in the order of the columns */
        for (int64_t i = 0; i < NIBBLES; i += LANES) {
            const __m512i q = _mm512_cvtps_epi32(load(x, start + i, columns, type) * scale);
            const __m512i below = _mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24);
            const __m512i above = _mm512_srai_epi32(_mm512_sub_epi32(q, below), 8);
            _mm_storeu_si128((__m128i *)((char *)low + i), _mm512_cvtepi32_epi8(below));
            _mm_storeu_si128((__m128i *)((char *)high + i), _mm512_cvtepi32_epi8(above));
            if (whole && start + i < columns) {
                const int64_t end = start + i + LANES;
                sum -= _mm512_reduce_add_epi32(q);
                if (end % wide == 0 || end >= columns) {
                    *sums++ = (float)(sum * offset);
                    sum = 0;
                }
            }
        }
        if (whole) {
            for (int i = 0; i < 2 && start + i * OCTETS < columns; i++) {
                const Octets made = {high[i], low[i]};
                memcpy(octets++, &made, sizeof made);
            }
            continue;
        }
        if (!runs) {
            apart(high);
            apart(low);
        }
        for (int i = 0; i < 2; i++) {
            const __m512i upper = _mm512_slli_epi32(_mm512_dpbusd_epi32(none, ones, high[i]), 8);
            const __m512i all = _mm512_add_epi32(_mm512_dpbusd_epi32(none, ones, low[i]), upper);
            less[i] = _mm512_mullo_epi32(all, _mm512_set1_epi32(-offset));
        }
        if (runs) {
            for (int64_t i = 0; i < NIBBLES && start + i < columns; i += Q_RUN, bytes++) {
                memcpy(&bytes->high, (char *)high + i, Q_RUN);
                memcpy(&bytes->low, (char *)low + i, Q_RUN);
                memcpy(&bytes->less, (char *)less + i, Q_RUN);
            }
        } else {
            const Nibbles made = {{high[0], high[1]}, {low[0], low[1]}, _mm512_add_epi32(less[0], less[1])};
            memcpy(nibbles++, &made, sizeof made);
        }
    }
}

void make_ready(const Matrix *m, const void *x, int type, void *out) {
    Head *head = out;
    if (m->kind != E4M3) {
        to_fixed(m, x, type, head);
        return;
    }
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

/* Which of the scales loaded for some columns the lanes need, if each lane stands for `columns` of them in a row. */
INLINE __m512i lanes_of(const Matrix *m, int64_t taken, int64_t columns) {
    const int64_t wide = m->scales && m->wide < taken && m->wide < m->columns ? m->wide : taken;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_srlv_epi32(lane, _mm512_set1_epi32(__builtin_ctzll((uint64_t)(wide / columns))));
}

/* out[t * stride + r] = the sum of acc[r][t], times `by`, times the step of x[t] if it is fixed point. */
INLINE void hand_out(vec acc[MOST_ROWS][MOST_TOKENS], const void *const *x, float by, int fixed, float *out,
                     int64_t stride, const int R, const int T) {
    float flat[LANES];
    if (R * T > 2) {
        vec all[LANES] = {};
        for (int r = 0; r < R; r++)
            for (int t = 0; t < T; t++) all[r * T + t] = acc[r][t];
        store_all(sums(all), flat, F32);
    } else {
        for (int i = 0; i < R * T; i++) flat[i] = sum(acc[i / T][i % T]);
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++)
            out[t * stride + r] = flat[r * T + t] * (fixed ? ((const Head *)x[t])->step * by : by);
}

/* Takes away what the offset of bytes added. */
INLINE void settle(const Matrix *m, vec acc[MOST_ROWS][MOST_TOKENS], float scales[MOST_ROWS][MOST_SCALES + LANES],
                   const void *const *x, const int R, const int T) {
    const int64_t groups = m->scales ? scales_of_a_row(m) : 1;
    for (int t = 0; t < T; t++) {
        const float *sums = sums_of(m, x[t]);
        for (int64_t i = 0; i < groups; i += LANES) {
            const vec less = load(sums, i, groups, F32);
            for (int r = 0; r < R; r++) acc[r][t] += load_all(scales[r] + i, F32) * less;
        }
    }
}

/* Doubled 4-bit floats, plus the offset. */
static const uint8_t E2M1_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

INLINE void dots_of_nibbles(const Matrix *m, int64_t row, const void *const *x, float *out, int64_t stride, const int R,
                            const int T, const int kind) {
    float scales[MOST_ROWS][MOST_SCALES + LANES];
    const char *codes[MOST_ROWS];
    for (int r = 0; r < R; r++) {
        scales_at(m, row + r, scales[r]);
        codes[r] = m->codes + (row + r) * (m->columns / 2);
    }
    const char *ahead = ahead_of(codes[0], R, m->columns / 2);
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)E2M1_CODES));
    const __m512i nibble = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
    const __m512i index = lanes_of(m, NIBBLES, 8); /* a lane: four even and four odd columns */
    const int64_t wide = m->scales ? m->wide : m->columns, columns = m->columns;
    const int64_t next = wide >= columns ? 0 : NIBBLES / wide; /* scales of a chunk; groups are not wider than one */
    vec acc[MOST_ROWS][MOST_TOKENS];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) acc[r][t] = (vec){};
    int64_t scale = 0, chunk = 0;
    for (int64_t start = 0; start < columns; start += NIBBLES, chunk++, scale += next) {
        const __mmask64 mask = _bzhi_u64(~0ull, columns - start < NIBBLES ? (columns - start) / 2 : 64);
        __m512i even[MOST_ROWS], odd[MOST_ROWS];
        vec by[MOST_ROWS];
        for (int r = 0; r < R; r++) {
            const __m512i bytes = _mm512_maskz_loadu_epi8(mask, codes[r] + start / 2);
            ASK(start / 2);
            even[r] = _mm512_and_si512(bytes, nibble);
            odd[r] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
            if (kind == E2M1) {
                even[r] = _mm512_shuffle_epi8(table, even[r]);
                odd[r] = _mm512_shuffle_epi8(table, odd[r]);
            }
            by[r] = _mm512_permutexvar_ps(index, _mm512_loadu_ps(scales[r] + scale));
        }
        for (int t = 0; t < T; t++) {
            const Nibbles *q = (const Nibbles *)((const Head *)x[t] + 1) + chunk;
            const __m512i high0 = _mm512_loadu_si512(&q->high[0]), high1 = _mm512_loadu_si512(&q->high[1]);
            const __m512i low0 = _mm512_loadu_si512(&q->low[0]), low1 = _mm512_loadu_si512(&q->low[1]);
            const __m512i less = _mm512_loadu_si512(&q->less);
            for (int r = 0; r < R; r++) {
                const __m512i high = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, even[r], high0), odd[r], high1);
                const __m512i low = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(less, even[r], low0), odd[r], low1);
                acc[r][t] += by[r] * (vec)_mm512_cvtepi32_ps(_mm512_add_epi32(low, _mm512_slli_epi32(high, 8)));
            }
        }
    }
    hand_out(acc, x, kind == E2M1 ? 0.5f : 1.0f, 1, out, stride, R, T);
}

INLINE void dots_of_runs(const Matrix *m, int64_t row, const void *const *x, float *out, int64_t stride, const int R,
                         const int T, const int kind) {
    const int64_t size = kind == Q8_0 ? 34 : 18;
    const char *codes[MOST_ROWS];
    for (int r = 0; r < R; r++) codes[r] = m->codes + (row + r) * row_bytes(m);
    const char *ahead = ahead_of(codes[0], R, row_bytes(m));
    const __m256i sign = _mm256_set1_epi8((char)0x80), zero = _mm256_setzero_si256();
    __m256 acc[MOST_ROWS][MOST_TOKENS];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) acc[r][t] = _mm256_setzero_ps();
    for (int64_t i = 0; i < m->columns / Q_RUN; i++) {
        __m256i unsigned_codes[MOST_ROWS];
        __m256 by[MOST_ROWS];
        for (int r = 0; r < R; r++) {
            const char *block = codes[r] + i * size;
            if (i % 2 == 0 || kind == Q8_0) ASK(i * size);
            if (kind == Q8_0) {
                unsigned_codes[r] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(block + 2)), sign);
            } else {
                const __m128i pairs = _mm_loadu_si128((const __m128i *)(block + 2));
                const __m256i both = _mm256_set_m128i(_mm_srli_epi16(pairs, 4), pairs);
                unsigned_codes[r] = _mm256_and_si256(both, _mm256_set1_epi8(15));
            }
            by[r] = _mm256_set1_ps(load_one(block, 0, F16));
        }
        for (int t = 0; t < T; t++) {
            const Bytes *q = (const Bytes *)((const Head *)x[t] + 1) + i;
            for (int r = 0; r < R; r++) {
                const __m256i high = _mm256_dpbusd_epi32(zero, unsigned_codes[r], _mm256_loadu_si256(&q->high));
                const __m256i less = _mm256_loadu_si256(&q->less);
                const __m256i low = _mm256_dpbusd_epi32(less, unsigned_codes[r], _mm256_loadu_si256(&q->low));
                const __m256i all = _mm256_add_epi32(low, _mm256_slli_epi32(high, 8));
                acc[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(all), by[r], acc[r][t]);
            }
        }
    }
    vec wide[MOST_ROWS][MOST_TOKENS];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) wide[r][t] = _mm512_zextps256_ps512(acc[r][t]);
    hand_out(wide, x, 1.0f, 1, out, stride, R, T);
}

/* Groups of columns narrower than 64: each 64 have several scales. */
INLINE void dots_of_octets(const Matrix *m, int64_t row, const void *const *x, float *out, int64_t stride, const int R,
                           const int T) {
    float scales[MOST_ROWS][MOST_SCALES + LANES];
    const char *codes[MOST_ROWS];
    for (int r = 0; r < R; r++) {
        scales_at(m, row + r, scales[r]);
        codes[r] = m->codes + (row + r) * m->columns;
    }
    const char *ahead = ahead_of(codes[0], R, m->columns);
    const __m512i sign = _mm512_set1_epi8((char)0x80), zero = _mm512_setzero_si512();
    const __m512i index = lanes_of(m, OCTETS, 4);
    const int64_t columns = m->columns, next = OCTETS / m->wide;
    vec acc[MOST_ROWS][MOST_TOKENS];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) acc[r][t] = (vec){};
    for (int64_t start = 0, scale = 0; start < columns; start += OCTETS, scale += next) {
        const __mmask64 mask = _bzhi_u64(~0ull, columns - start < OCTETS ? columns - start : OCTETS);
        __m512i unsigned_codes[MOST_ROWS];
        vec by[MOST_ROWS];
        for (int r = 0; r < R; r++) {
            unsigned_codes[r] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, codes[r] + start), sign);
            ASK(start);
            by[r] = _mm512_permutexvar_ps(index, _mm512_loadu_ps(scales[r] + scale));
        }
        for (int t = 0; t < T; t++) {
            const Octets *q = (const Octets *)((const Head *)x[t] + 1) + start / OCTETS;
            const __m512i high = _mm512_loadu_si512(&q->high), low = _mm512_loadu_si512(&q->low);
            for (int r = 0; r < R; r++) {
                const __m512i above = _mm512_dpbusd_epi32(zero, unsigned_codes[r], high);
                const __m512i all = _mm512_add_epi32(_mm512_dpbusd_epi32(zero, unsigned_codes[r], low),
                                                     _mm512_slli_epi32(above, 8));
                acc[r][t] += by[r] * (vec)_mm512_cvtepi32_ps(all);
            }
        }
    }
    settle(m, acc, scales, x, R, T);
    hand_out(acc, x, 1.0f, 1, out, stride, R, T);
}

/* Groups of 64 columns or more: sums stay whole numbers until the scale changes, or until 32 bits may not hold them. */
INLINE void dots_of_long_octets(const Matrix *m, int64_t row, const void *const *x, float *out, int64_t stride,
                                const int R, const int T) {
    enum { MOST = 2048 }; /* columns: 255 * 127 * 2^8 for each of the four times 32 in a lane */
    float scales[MOST_ROWS][MOST_SCALES + LANES];
    const char *codes[MOST_ROWS];
    for (int r = 0; r < R; r++) {
        scales_at(m, row + r, scales[r]);
        codes[r] = m->codes + (row + r) * m->columns;
    }
    const char *ahead = ahead_of(codes[0], R, m->columns);
    const __m512i sign = _mm512_set1_epi8((char)0x80), zero = _mm512_setzero_si512();
    const int64_t columns = m->columns, wide = m->scales && m->wide < columns ? m->wide : columns;
    vec acc[MOST_ROWS][MOST_TOKENS];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) acc[r][t] = (vec){};
    for (int64_t group = 0, scale = 0; group < columns; group += wide, scale++)
        for (int64_t first = group; first < group + wide; first += MOST) {
            const int64_t last = first + MOST < group + wide ? first + MOST : group + wide;
            __m512i above[MOST_ROWS][MOST_TOKENS], below[MOST_ROWS][MOST_TOKENS];
            for (int r = 0; r < R; r++)
                for (int t = 0; t < T; t++) above[r][t] = below[r][t] = zero;
            for (int64_t start = first; start < last; start += OCTETS) {
                const __mmask64 mask = _bzhi_u64(~0ull, last - start < OCTETS ? last - start : OCTETS);
                __m512i unsigned_codes[MOST_ROWS];
                for (int r = 0; r < R; r++) {
                    unsigned_codes[r] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, codes[r] + start), sign);
                    ASK(start);
                }
                for (int t = 0; t < T; t++) {
                    const Octets *q = (const Octets *)((const Head *)x[t] + 1) + start / OCTETS;
                    const __m512i high = _mm512_loadu_si512(&q->high), low = _mm512_loadu_si512(&q->low);
                    for (int r = 0; r < R; r++) {
                        above[r][t] = _mm512_dpbusd_epi32(above[r][t], unsigned_codes[r], high);
                        below[r][t] = _mm512_dpbusd_epi32(below[r][t], unsigned_codes[r], low);
                    }
                }
            }
            for (int r = 0; r < R; r++)
                for (int t = 0; t < T; t++) {
                    const __m512i all = _mm512_add_epi32(below[r][t], _mm512_slli_epi32(above[r][t], 8));
                    acc[r][t] += scales[r][scale] * (vec)_mm512_cvtepi32_ps(all);
                }
        }
    settle(m, acc, scales, x, R, T);
    hand_out(acc, x, 1.0f, 1, out, stride, R, T);
}

INLINE void dots_of_floats(const Matrix *m, int64_t row, const void *const *x, float *out, int64_t stride, const int R,
                           const int T) {
    float scales[MOST_ROWS][MOST_SCALES + LANES];
    for (int r = 0; r < R; r++) scales_at(m, row + r, scales[r]);
    const char *ahead = ahead_of(m->codes + row * m->columns, R, m->columns);
    const Head *head = x[0];
    const __m512i low[2] = {_mm512_loadu_si512(head->table[0]), _mm512_loadu_si512(head->table[0] + 64)};
    const __m512i high[2] = {_mm512_loadu_si512(head->table[1]), _mm512_loadu_si512(head->table[1] + 64)};
    const __m512i sign = _mm512_set1_epi8((char)0x80), index = lanes_of(m, FLOATS, 4);
    const int64_t columns = m->columns, wide = m->scales ? m->wide : columns;
    vec acc[MOST_ROWS][MOST_TOKENS];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) acc[r][t] = (vec){};
    for (int64_t start = 0; start < columns; start += FLOATS) {
        const __mmask64 mask = _bzhi_u64(~0ull, columns - start < FLOATS ? columns - start : FLOATS);
        const int64_t scale = wide >= columns ? 0 : wide >= FLOATS ? start / SIDE : start / FLOATS * (FLOATS / wide);
        __m512bh codes[MOST_ROWS][2];
        vec by[MOST_ROWS];
        for (int r = 0; r < R; r++) {
            const __m512i bytes = _mm512_maskz_loadu_epi8(mask, m->codes + (row + r) * columns + start);
            ASK(start);
            const __m512i below = _mm512_permutex2var_epi8(low[0], bytes, low[1]);
            __m512i above = _mm512_permutex2var_epi8(high[0], bytes, high[1]); /* the sign does not select */
            above = _mm512_ternarylogic_epi64(above, bytes, sign, 0xf8);       /* above | (bytes & sign) */
            codes[r][0] = (__m512bh)_mm512_unpacklo_epi8(below, above);
            codes[r][1] = (__m512bh)_mm512_unpackhi_epi8(below, above);
            by[r] = _mm512_permutexvar_ps(index, _mm512_loadu_ps(scales[r] + scale));
        }
        for (int t = 0; t < T; t++) {
            const Floats *row_of_x = (const Floats *)((const Head *)x[t] + 1) + start / FLOATS;
            const __m512bh first = (__m512bh)_mm512_loadu_si512(&row_of_x->half[0]);
            const __m512bh second = (__m512bh)_mm512_loadu_si512(&row_of_x->half[1]);
            for (int r = 0; r < R; r++) {
                const vec part = _mm512_dpbf16_ps((vec){}, first, codes[r][0]);
                acc[r][t] += by[r] * (vec)_mm512_dpbf16_ps(part, second, codes[r][1]);
            }
        }
    }
    hand_out(acc, x, 1.0f, 0, out, stride, R, T);
}

INLINE void dots_as(const Matrix *m, int64_t row, const void *const *x, float *out, int64_t stride, const int R,
                    const int T) {
    switch (m->kind) {
        case E4M3: dots_of_floats(m, row, x, out, stride, R, T); break;
        case Q8_0: dots_of_runs(m, row, x, out, stride, R, T, Q8_0); break;
        case Q4_0: dots_of_runs(m, row, x, out, stride, R, T, Q4_0); break;
        case E2M1: dots_of_nibbles(m, row, x, out, stride, R, T, E2M1); break;
        case INT4: dots_of_nibbles(m, row, x, out, stride, R, T, INT4); break;
        case INT8:
            if (m->scales && m->wide < OCTETS && m->wide < m->columns)
                dots_of_octets(m, row, x, out, stride, R, T);
            else
                dots_of_long_octets(m, row, x, out, stride, R, T);
            break;
    }
}

void dots(const Matrix *m, int64_t row, int64_t rows, const void *const *x, int64_t tokens, float *out, int64_t stride) {
    switch (rows * 10 + tokens) {
#define CASE(R, T) \
    case R * 10 + T: dots_as(m, row, x, out, stride, R, T); break
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

#else

const int64_t has_dots = 0;

int64_t ready_bytes(const Matrix *m) { return 0 * m->kind; }
void make_ready(const Matrix *m, const void *x, int type, void *out) { (void)m, (void)x, (void)type, (void)out; }
void dots(const Matrix *m, int64_t row, int64_t rows, const void *const *x, int64_t tokens, float *out, int64_t stride) {
    (void)m, (void)row, (void)rows, (void)x, (void)tokens, (void)out, (void)stride;
}

#endif
