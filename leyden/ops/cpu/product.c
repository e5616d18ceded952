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
};

/* sums[m][n] = x[m] . row n of w, k elements each, `stride` bytes between the rows of w.

Memory delivers most when it is read in one stream. That is what happens with N = 1; otherwise the tile asks for the
next N rows, `ahead`, in the order of their addresses, while it computes. */
INLINE void tile(const void *const *x, const void *w, int64_t stride, int64_t k, const void *ahead, const int M,
                 const int N, const int type, float (*sums)[STRIP]) {
    vec acc[TILE_M][TILE_N]; /* M x N of them are used, and live in registers */
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) acc[m][n] = (vec){};
    const char *const rows = w;
    const char *next = ahead;
    int64_t i = 0;
#if WIDTH == 64 && defined(__AVX512BF16__)
    if (type == BF16) {
        for (; i < k; i += 32) {
            const __mmask32 mask = k - i < 32 ? _bzhi_u32(~0u, k - i) : ~0u;
            __m512bh column[TILE_N];
            for (int n = 0; n < N; n++) {
                column[n] = (__m512bh)_mm512_maskz_loadu_epi16(mask, rows + n * stride + 2 * i);
                if (N > 1 && ahead) _mm_prefetch(next + 64 * n, _MM_HINT_T1);
            }
            next += 64 * N;
            for (int m = 0; m < M; m++) {
                __m512bh row = (__m512bh)_mm512_maskz_loadu_epi16(mask, (const char *)x[m] + 2 * i);
                for (int n = 0; n < N; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], row, column[n]);
            }
        }
    }
#endif
    if (type != BF16 || DOT(BF16) == F32) {
        const int bytes = LANES * (int)size_of(type);
        for (; i < k; i += LANES) {
            vec column[TILE_N];
            for (int n = 0; n < N; n++) {
                column[n] = load(rows + n * stride, i, k, type);
                if (N > 1 && ahead) __builtin_prefetch(next + bytes * n, 0, 2);
            }
            next += bytes * N;
            for (int m = 0; m < M; m++) {
                vec row = load(x[m], i, k, F32);
                for (int n = 0; n < N; n++) acc[m][n] += row * column[n];
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sums[m][n] = sum(acc[m][n]);
}

/* M tokens from `first` with rows [from, to), at most STRIP of them. */
INLINE void strip(const void *const *x, int64_t first, const char *w, int64_t from, int64_t to, int64_t k, const int M,
                  const int type, Finish *finish, const void *context) {
    const int64_t stride = k * size_of(type);
    float sums[TILE_M][STRIP];
    int64_t n = from;
    for (; M > 1 && n + TILE_N <= to; n += TILE_N) {
        const void *ahead = first ? NULL : w + (n + TILE_N) * stride;
        tile(x + first, w + n * stride, stride, k, ahead, M, TILE_N, type, (float(*)[STRIP])(sums[0] + (n - from)));
    }
    for (; n < to; n++)
        tile(x + first, w + n * stride, stride, k, NULL, M, 1, type, (float(*)[STRIP])(sums[0] + (n - from)));
    for (int m = 0; m < M; m++) finish(context, first + m, from, sums[m], to - from);
}

INLINE void blocks(const void *const *x, int64_t count, const void *w, int64_t from, int64_t to, int64_t k,
                   const int type, Finish *finish, const void *context) {
    const int64_t tiles = (count + TILE_M - 1) / TILE_M, height = (count + tiles - 1) / tiles;
    int64_t block = BLOCK_BYTES / (k * size_of(type)) / STRIP * STRIP;
    if (block < STRIP) block = STRIP;
    for (int64_t start = from; start < to; start += block)
        for (int64_t first = 0; first < count; first += height)
            for (int64_t n = start; n < start + block && n < to; n += STRIP) {
                const int64_t end = n + STRIP < to ? n + STRIP : to;
                switch (count - first < height ? count - first : height) {
#define CASE(M)                                                              \
    case M: strip(x, first, w, n, end, k, M, type, finish, context); break
                    CASE(1);
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
            }
}

void product(const void *const *x, int64_t count, const void *w, int64_t from, int64_t to, int64_t k, int type,
             Finish *finish, const void *context) {
    if (count == 0) return;
    if (type == F32)
        blocks(x, count, w, from, to, k, F32, finish, context);
    else
        blocks(x, count, w, from, to, k, BF16, finish, context);
}
