/* The inner loop of all products: tiles of sums that stay in registers. */

#include "product.h"

/* The largest tile of sums that the registers hold, beside a column of the matrix and an element of x. */
#if WIDTH == 64 || defined(__aarch64__)
enum { TILE_M = 8, TILE_N = 3 };
#else
enum { TILE_M = 4, TILE_N = 2 };
#endif

enum {
    STRIP = 48,               /* rows of the matrix whose sums are handed on together */
    BLOCK_BYTES = 192 * 1024, /* of the matrix: stays in the cache while all of x passes by */
    AHEAD_BYTES = 16 * 1024,  /* of the matrix, at least: from asking for it to its arrival */
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
/* Eight of them, zeros beyond the first `count`. */
INLINE bfloat16x8_t eight(const char *at, int64_t count) {
    bfloat16x8_t x = {};
    if (count >= 8)
        memcpy(&x, at, 16);
    else
        memcpy(&x, at, 2 * count);
    return x;
}
#endif

/* acc[m * N + n] = x[m] . row n of w, k elements each, in LANES sums; `stride` bytes between the rows of w.

Memory delivers most when it is read in one stream. That is what happens with N = 1; otherwise the tile asks for the
N rows that begin `ahead`, in the order of their addresses, while it computes. */
INLINE void tile(const void *const *x, const char *w, int64_t stride, int64_t k, const char *ahead, const int M,
                 const int N, const int type, vec *acc) {
    int64_t i = 0;
#if WIDTH == 64 && defined(__AVX512BF16__)
    if (type == BF16) {
        for (; i < k; i += 32) {
            const __mmask32 mask = k - i < 32 ? _bzhi_u32(~0u, k - i) : ~0u;
            __m512bh column[TILE_N];
            for (int n = 0; n < N; n++) {
                column[n] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + n * stride + 2 * i);
                if (N > 1 && ahead) _mm_prefetch(ahead + 2 * N * i + 64 * n, _MM_HINT_T1);
            }
            for (int m = 0; m < M; m++) {
                const __m512bh row = (__m512bh)_mm512_maskz_loadu_epi16(mask, (const char *)x[m] + 2 * i);
                for (int n = 0; n < N; n++) acc[m * N + n] = _mm512_dpbf16_ps(acc[m * N + n], row, column[n]);
            }
        }
        return;
    }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if (type == BF16) {
        for (; i < k; i += 8) {
            bfloat16x8_t column[TILE_N];
            for (int n = 0; n < N; n++) column[n] = eight(w + n * stride + 2 * i, k - i);
            if (N > 1 && ahead) __builtin_prefetch(ahead + 2 * N * i, 0, 2);
            for (int m = 0; m < M; m++) {
                const bfloat16x8_t row = eight((const char *)x[m] + 2 * i, k - i);
                for (int n = 0; n < N; n++)
                    acc[m * N + n] = (vec)vbfdotq_f32((float32x4_t)acc[m * N + n], row, column[n]);
            }
        }
        return;
    }
#endif
    for (; i < k; i += LANES) {
        vec column[TILE_N];
        for (int n = 0; n < N; n++) {
            column[n] = load(w + n * stride, i, k, type);
            if (N > 1 && ahead) __builtin_prefetch(ahead + (N * i + LANES * n) * size_of(type), 0, 2);
        }
        for (int m = 0; m < M; m++) {
            const vec row = load(x[m], i, k, F32);
            for (int n = 0; n < N; n++) acc[m * N + n] += row * column[n];
        }
    }
}

/* One token with rows [from, to), at most STRIP of them. */
INLINE void strip_of_one(const void *const *x, const char *w, int64_t from, int64_t to, int64_t k, const int type,
                         float *out) {
    const int64_t stride = k * size_of(type);
    for (int64_t n = from; n < to; n += LANES) {
        vec acc[LANES] = {};
        for (int64_t i = 0; i < LANES && n + i < to; i++) {
            vec dot = {};
            tile(x, w + (n + i) * stride, stride, k, NULL, 1, 1, type, &dot);
            acc[i] = dot;
        }
        store(sums(acc), out, n - from, STRIP, F32);
    }
}

/* M tokens with rows [from, to), at most STRIP of them. `cold`: these rows have not been read yet. */
INLINE void strip(const void *const *x, const char *w, int64_t from, int64_t to, int64_t k, int cold, const int M,
                  const int type, float (*out)[STRIP]) {
    enum { VECTORS = (TILE_M * TILE_N + LANES - 1) / LANES };
    const int64_t stride = k * size_of(type), far = (AHEAD_BYTES / (TILE_N * stride) + 1) * TILE_N * stride;
    float flat[VECTORS * LANES];
    int64_t n = from;
    for (; n + TILE_N <= to; n += TILE_N) {
        vec acc[VECTORS * LANES] = {}; /* M x TILE_N of them are used, and live in registers */
        tile(x, w + n * stride, stride, k, cold ? w + n * stride + far : NULL, M, TILE_N, type, acc);
        for (int v = 0; v * LANES < M * TILE_N; v++) store(sums(acc + v * LANES), flat, v * LANES, VECTORS * LANES, F32);
        for (int m = 0; m < M; m++)
            for (int i = 0; i < TILE_N; i++) out[m][n - from + i] = flat[m * TILE_N + i];
    }
    for (; n < to; n++) {
        vec acc[VECTORS * LANES] = {};
        tile(x, w + n * stride, stride, k, NULL, M, 1, type, acc);
        for (int m = 0; m < M; m++) out[m][n - from] = sum(acc[m]);
    }
}

/* All tokens with `rows` rows of k elements, the first of which is the matrix's row `from`. */
INLINE void blocks(const void *const *x, int64_t count, const char *w, int64_t rows, int64_t from, int64_t k,
                   const int type, Finish *finish, const void *context) {
    const int64_t tiles = (count + TILE_M - 1) / TILE_M, height = (count + tiles - 1) / tiles;
    int64_t block = BLOCK_BYTES / (k * size_of(type)) / STRIP * STRIP;
    if (block < STRIP) block = STRIP;
    for (int64_t start = 0; start < rows; start += block)
        for (int64_t first = 0; first < count; first += height)
            for (int64_t n = start; n < start + block && n < rows; n += STRIP) {
                const int64_t end = n + STRIP < rows ? n + STRIP : rows;
                const int64_t some = count - first < height ? count - first : height;
                float out[TILE_M][STRIP];
                switch (some) {
#define CASE(M)                                                                  \
    case M: strip(x + first, w, n, end, k, first == 0, M, type, out); break
#if WIDTH == 16
                    CASE(1); /* one sum alone would wait for itself at every step of so short vectors */
#else
                    case 1: strip_of_one(x + first, w, n, end, k, type, out[0]); break;
#endif
                    CASE(2);
                    CASE(3);
                    CASE(4);
#if WIDTH == 64 || defined(__aarch64__)
                    CASE(5);
                    CASE(6);
                    CASE(7);
                    CASE(8);
#endif
#undef CASE
                }
                for (int64_t m = 0; m < some; m++) finish(context, first + m, from + n, out[m], end - n);
            }
}

static void plain(const void *const *x, int64_t count, const void *w, int64_t rows, int64_t from, int64_t k, int type,
                  Finish *finish, const void *context) {
    if (type == F32)
        blocks(x, count, w, rows, from, k, F32, finish, context);
    else
        blocks(x, count, w, rows, from, k, BF16, finish, context);
}

void product(const void *const *x, const void *const *ready, int64_t count, const Matrix *m, int64_t from, int64_t to,
             void *panel, Finish *finish, const void *context) {
    const int type = (int)m->type;
    const int64_t k = m->columns, stride = k * size_of(type);
    if (count == 0) return;
    if (m->kind == PLAIN) {
        plain(x, count, m->codes + from * stride, to - from, from, k, type, finish, context);
    } else if (count <= MOST_TOKENS && ready) {
        for (int64_t n = from; n < to; n += STRIP) {
            const int64_t end = n + STRIP < to ? n + STRIP : to;
            float out[MOST_TOKENS][STRIP];
            for (int64_t row = n; row < end; row += TALL)
                dots(m, row, end - row < TALL ? end - row : TALL, ready, count, out[0] + row - n, STRIP);
            for (int64_t i = 0; i < count; i++) finish(context, i, n, out[i], end - n);
        }
    } else {
        for (int64_t n = from; n < to; n += PANEL) {
            const int64_t end = n + PANEL < to ? n + PANEL : to;
            for (int64_t row = n; row < end; row++) unpack(m, row, (char *)panel + (row - n) * stride, type);
            plain(x, count, panel, end - n, n, k, type, finish, context);
        }
    }
}
