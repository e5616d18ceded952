/* Codes and scales to floats. */

#include "matrix.h"

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

Matrix member(const Matrix *stack, int64_t e) {
    Matrix m = *stack;
    m.codes += e * m.rows * row_bytes(&m);
    if (m.scales) m.scales += e * ((m.rows + m.tall - 1) / m.tall) * scales_of_a_row(&m) * scale_size(&m);
    if (m.whole) m.whole += e;
    return m;
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
    for (int64_t g = 0; g < (m->scales ? scales_of_a_row(m) : 1); g += LANES)
        store_all(scales_at(m, row, g), scales + g, F32);
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
