/* Grouped-query attention without rotary embedding: causal over KV pages or packed rows, and that of a drafter's blocks. */

#include "kernels.h"

enum {
    TILE = 32, /* keys that are compared at once, a multiple of LANES */
    MOST_QUERIES = 128, /* of a block */
    MOST_DIM = 512, /* of a head */
};

/* Keys and values of a batch. In pages: [pages, page, heads, dim], and table r lists the pages of row r. Without tables:
[tokens, heads, dim], beginning with the row's first token. */
typedef struct {
    char *keys, *values;
    const int32_t *tables; /* [rows, table_stride] or null */
    int64_t table_stride, page, heads, dim, type;
} Store;

/* Element offset of the key of `head` at a position of row r. */
INLINE int64_t place(const Store *s, const Rows *rows, int64_t r, int64_t position, int64_t head) {
    int64_t token = rows->starts[r] + position;
    if (s->tables) token = s->tables[r * s->table_stride + position / s->page] * s->page + position % s->page;
    return (token * s->heads + head) * s->dim;
}

typedef struct {
    const void *k, *v; /* [tokens, heads * dim] */
    Store store;
    Rows rows;
    int64_t k_stride, v_stride, type;
} Write;

KERNEL(kv_write, Write) {
    const int type = a->type, kept = a->store.type;
    const int64_t width = a->store.heads * a->store.dim;
    int64_t from, to;
    share(a->rows.starts[a->rows.count], 1, thread, threads, &from, &to);
    for (int64_t r = 0; r < a->rows.count; r++)
        for (int64_t t = a->rows.starts[r]; t < a->rows.starts[r + 1]; t++) {
            if (t < from || t >= to) continue;
            const int64_t at = place(&a->store, &a->rows, r, a->rows.past[r] + t - a->rows.starts[r], 0);
            const char *k = (const char *)a->k + t * a->k_stride * size_of(type);
            const char *v = (const char *)a->v + t * a->v_stride * size_of(type);
            for (int64_t i = 0; i < width; i += LANES) {
                store(load(k, i, width, type), a->store.keys, at + i, at + width, kept);
                store(load(v, i, width, type), a->store.values, at + i, at + width, kept);
            }
        }
}

/* The store holds the rows' own keys and values, or it ends before them, and k and v are those (a drafter's block). */
typedef struct {
    const void *q;     /* [tokens, heads * dim] */
    const void *k, *v; /* [tokens, heads * dim], of the store's heads; or null */
    const void *sinks; /* [heads] or null: one more score for each query, without a value */
    void *out;         /* [tokens, heads * dim] */
    float *parts;  /* [tokens, heads, splits, dim + 2], if there are splits: sums, then maximum and total of weights */
    float *desk;   /* [threads, desk_size]: room to work in */
    Store store;
    Rows rows;
    int64_t heads, q_stride, k_stride, v_stride, block, splits, desk_size, type, sink_type;
    int64_t causal, window; /* whether a row's later tokens are hidden; how many positions are seen before a row, 0: all */
    double scale;
} Attention;

/* Queries of one block: `block` tokens with all the heads that share a key head, one after the other.

With F32, queries are copies, keys and values are widened. With BF16 where the machine multiplies pairs of that, queries
stay where they are, two keys' values lie side by side: (v0[0], v1[0]), (v0[1], v1[1]), ..., and so do the same two
elements of all keys: (k0[0], k0[1]), (k1[0], k1[1]), ... */
typedef struct {
    int64_t count, width;      /* queries, elements of each in memory: dim, rounded up */
    float *q, *sums;           /* [count, width] */
    float *keys, *values;      /* [TILE, width]; in pairs [width / 2, TILE, 2] and [TILE / 2, width, 2] of BF16 */
    float *weights;            /* [count, TILE] */
    float *most, *total;       /* [count] */
    float *first, *limit;      /* [count]: the query sees positions from `first` to before `limit` */
    const char *query[MOST_QUERIES];
    float scale;               /* of the scores */
} Desk;

#if WIDTH == 64 && defined(__AVX512BF16__)
enum { PAIRS = 1 };
#else
enum { PAIRS = 0 };
#endif

/* Scores of M queries with the keys of the tile, to where their weights will be. */
INLINE void compare(const Desk *d, int64_t m, const int M, __attribute__((unused)) const int narrow) {
#if WIDTH == 64 && defined(__AVX512BF16__)
    if (narrow) {
        vec score[4][TILE / LANES] = {};
        for (int64_t pair = 0; pair < d->width / 2; pair++)
            for (int i = 0; i < M; i++) {
                int32_t both;
                memcpy(&both, d->query[m + i] + 4 * pair, 4);
                for (int j = 0; j < TILE / LANES; j++) {
                    const __m512bh keys = (__m512bh)_mm512_loadu_si512(d->keys + pair * TILE + j * LANES);
                    score[i][j] = _mm512_dpbf16_ps(score[i][j], keys, (__m512bh)_mm512_set1_epi32(both));
                }
            }
        for (int i = 0; i < M; i++) memcpy(d->weights + (m + i) * TILE, score[i], sizeof score[i]);
        return;
    }
#endif
    for (int64_t i = m; i < m + M; i++)
        for (int64_t j = 0; j < TILE; j += LANES) {
            vec score[LANES] = {};
            for (int64_t e = 0; e < d->width; e += LANES)
                for (int key = 0; key < LANES; key++)
                    score[key] += load_all(d->query[i] + 4 * e, F32) * load_all(d->keys + (j + key) * d->width + e, F32);
            store_all(sums(score), d->weights + i * TILE + j, F32);
        }
}

/* From a query's scores with the tile at `start` to weights: exp(score - largest so far). What was summed with an older
maximum shrinks by the factor that is returned. */
INLINE float weigh(const Desk *d, int64_t m, int64_t start, const int narrow) {
    float *weights = d->weights + m * TILE;
    vec position = splat((float)start), most = splat(-INFINITY);
    for (int i = 0; i < LANES; i++) position[i] += i;
    const vec first = splat(d->first[m]), limit = splat(d->limit[m]);
    for (int64_t j = 0; j < TILE; j += LANES) {
        const vec score = load_all(weights + j, F32) * d->scale;
        const vec seen = pick((position >= first) & (position < limit), score, splat(-INFINITY));
        memcpy(weights + j, &seen, sizeof seen);
        most = vmax(most, seen);
        position += LANES;
    }
    const float largest = fmaxf(maximum(most), d->most[m]);
    if (largest == -INFINITY) { /* nothing to see yet */
        memset(weights, 0, TILE * sizeof *weights);
        return 1;
    }
    const float shrink = d->most[m] < largest ? vexp(splat(d->most[m] - largest))[0] : 1;
    vec total = {};
    for (int64_t j = 0; j < TILE; j += LANES) {
        const vec w = vexp(load_all(weights + j, F32) - largest);
        total += w;
        if (narrow)
            store_all(w, (char *)weights + 2 * j, BF16); /* the scores there have been read */
        else
            memcpy(weights + j, &w, sizeof w);
    }
    d->most[m] = largest;
    d->total[m] = d->total[m] * shrink + sum(total);
    return shrink;
}

/* sums = shrink sums + weights values, for M queries and E vectors of a head's dim. */
INLINE void mix(const Desk *d, int64_t m, int64_t e, const float *shrink, const int M, const int E, const int narrow) {
    vec acc[4][4];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < E; j++) acc[i][j] = load_all(d->sums + (m + i) * d->width + e + j * LANES, F32) * shrink[i];
#if WIDTH == 64 && defined(__AVX512BF16__)
    for (int64_t pair = 0; narrow && pair < TILE / 2; pair++) {
        __m512bh weights[4];
        for (int i = 0; i < M; i++) weights[i] = (__m512bh)_mm512_set1_epi32(((int32_t *)(d->weights + (m + i) * TILE))[pair]);
        for (int j = 0; j < E; j++) {
            const __m512bh values = (__m512bh)_mm512_loadu_si512(d->values + pair * d->width + e + j * LANES);
            for (int i = 0; i < M; i++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], values, weights[i]);
        }
    }
#endif
    for (int64_t key = 0; !narrow && key < TILE; key++)
        for (int j = 0; j < E; j++) {
            const vec value = load_all(d->values + key * d->width + e + j * LANES, F32);
            for (int i = 0; i < M; i++) acc[i][j] += value * d->weights[(m + i) * TILE + key];
        }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < E; j++)
            memcpy(d->sums + (m + i) * d->width + e + j * LANES, &acc[i][j], sizeof(vec));
}

static const char NOTHING[4 * MOST_DIM] __attribute__((aligned(64))); /* a key or value beyond the end */

/* Where the key and the value of `head` at a position of row r are. */
INLINE void find(const Attention *a, int64_t r, int64_t position, int64_t head, const char **key, const char **value) {
    const int64_t own = position - a->rows.past[r];
    if (a->k && own >= 0) {
        const int64_t token = a->rows.starts[r] + own, size = size_of(a->type), column = head * a->store.dim;
        *key = (const char *)a->k + (token * a->k_stride + column) * size;
        *value = (const char *)a->v + (token * a->v_stride + column) * size;
    } else {
        const int64_t at = place(&a->store, &a->rows, r, position, head) * size_of(a->store.type);
        *key = a->store.keys + at;
        *value = a->store.values + at;
    }
}

#if WIDTH == 64 && defined(__AVX512BF16__)
/* 16 rows of 16 words become columns: fours within each 128 bits first, then the fours. */
INLINE void transpose(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(a, c);
        y[i + 1] = _mm512_unpackhi_epi64(a, c);
        y[i + 2] = _mm512_unpacklo_epi64(b, d);
        y[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(y[i], y[4 + i], 0x88), b = _mm512_shuffle_i32x4(y[8 + i], y[12 + i], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(y[i], y[4 + i], 0xdd), d = _mm512_shuffle_i32x4(y[8 + i], y[12 + i], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, b, 0x88);
        x[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
        x[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}
#endif

/* Keys and values of positions [start, start + TILE), zeros from `end` on. */
INLINE void lay_out(const Attention *a, Desk *d, int64_t r, int64_t head, int64_t start, int64_t end,
                    __attribute__((unused)) const int narrow) {
    const Store *s = &a->store;
    const int64_t dim = s->dim, past = a->rows.past[r];
    const char *key[TILE], *value[TILE], *next_key, *next_value;
    for (int64_t j = 0; j < TILE; j++) {
        key[j] = value[j] = NOTHING;
        if (start + j < end) find(a, r, start + j, head, &key[j], &value[j]);
        if (start + TILE + j < end) { /* pages lie anywhere: only we know what is read next */
            find(a, r, start + TILE + j, head, &next_key, &next_value);
            for (int64_t e = 0; e < dim * size_of(s->type); e += 64) {
                __builtin_prefetch(next_key + e, 0, 2);
                __builtin_prefetch(next_value + e, 0, 2);
            }
        }
    }
#if WIDTH == 64 && defined(__AVX512BF16__)
    if (narrow) {
        const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                               6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        for (int64_t pair = 0; pair < TILE / 2; pair++)
            for (int64_t e = 0; e < dim; e += LANES) {
                const __m256i first = _mm256_loadu_si256((const __m256i *)(value[2 * pair] + 2 * e));
                const __m256i second = _mm256_loadu_si256((const __m256i *)(value[2 * pair + 1] + 2 * e));
                const __m512i both = _mm512_permutex2var_epi16(_mm512_castsi256_si512(first), order,
                                                               _mm512_castsi256_si512(second));
                _mm512_storeu_si512(d->values + pair * d->width + e, both);
            }
        for (int64_t j = 0; j < TILE; j += 16)
            for (int64_t e = 0; e < dim; e += 32) {
                __m512i pairs[16];
                for (int i = 0; i < 16; i++) pairs[i] = _mm512_loadu_si512(key[j + i] + 2 * e);
                transpose(pairs);
                for (int i = 0; i < 16; i++) _mm512_storeu_si512(d->keys + (e / 2 + i) * TILE + j, pairs[i]);
            }
        return;
    }
#endif
    for (int64_t j = 0; j < TILE; j++) {
        const int kept = a->k && start + j >= past ? (int)a->type : (int)s->type;
        for (int64_t e = 0; e < d->width; e += LANES) {
            store_all(load(key[j], e, dim, kept), d->keys + j * d->width + e, F32);
            store_all(load(value[j], e, dim, kept), d->values + j * d->width + e, F32);
        }
    }
}

/* Tokens [first, first + tokens) of row r, the query heads of one key head, against one of `splits` parts of the past. */
INLINE void attend(const Attention *a, Desk *d, int64_t r, int64_t head, int64_t first, int64_t tokens, int64_t split,
                   const int narrow) {
    const Store *s = &a->store;
    const int type = a->type;
    const int64_t group = a->heads / s->heads, dim = s->dim, start_token = a->rows.starts[r] + first;
    const int64_t past = a->rows.past[r], n = a->rows.starts[r + 1] - a->rows.starts[r];
    const int64_t end = past + (a->causal ? first + tokens : n); /* the last token sees nothing from here on */
    const int64_t begin = a->window && past + first >= a->window ? past + first - a->window + 1 : 0;
    const int64_t before = (begin < past ? begin : past) / TILE, tiles = (end + TILE - 1) / TILE - before;
    const int64_t from = (before + tiles * split / a->splits) * TILE, to = (before + tiles * (split + 1) / a->splits) * TILE;
    d->scale = (float)a->scale;
    for (int64_t m = 0; m < d->count; m++) {
        const int64_t i = first + m / group, query = head * group + m % group, window_start = past + i - a->window + 1;
        d->query[m] = (const char *)a->q + ((a->rows.starts[r] + i) * a->q_stride + query * dim) * size_of(type);
        for (int64_t e = 0; e < d->width; e += LANES) {
            if (!narrow) store_all(load(d->query[m], e, dim, type), d->q + m * d->width + e, F32);
            store_all((vec){}, d->sums + m * d->width + e, F32);
        }
        if (!narrow) d->query[m] = (const char *)(d->q + m * d->width);
        d->most[m] = a->sinks ? load_one(a->sinks, query, (int)a->sink_type) : -INFINITY;
        d->total[m] = a->sinks ? 1 : 0;
        d->first[m] = a->window ? (float)(window_start < past ? window_start : past) : 0;
        d->limit[m] = (float)(past + (a->causal ? i + 1 : n));
    }
    for (int64_t start = from; start < to; start += TILE) {
        lay_out(a, d, r, head, start, end, narrow);
        for (int64_t m = 0, some; m < d->count; m += some) {
            float shrink[4];
            some = d->count - m < 4 ? 1 : 4;
            if (some == 4)
                compare(d, m, 4, narrow);
            else
                compare(d, m, 1, narrow);
            for (int i = 0; i < some; i++) shrink[i] = weigh(d, m + i, start, narrow);
            int64_t e = 0;
            for (; some == 4 && e + 4 * LANES <= d->width; e += 4 * LANES) mix(d, m, e, shrink, 4, 4, narrow);
            for (; e < d->width; e += LANES) {
                if (some == 4)
                    mix(d, m, e, shrink, 4, 1, narrow);
                else
                    mix(d, m, e, shrink, 1, 1, narrow);
            }
        }
    }
    for (int64_t m = 0; m < d->count; m++) {
        const int64_t cell = (start_token + m / group) * a->heads + head * group + m % group;
        float *part = a->splits > 1 ? a->parts + (cell * a->splits + split) * (dim + 2) : NULL;
        for (int64_t e = 0; e < dim; e += LANES) {
            vec y = load_all(d->sums + m * d->width + e, F32);
            if (part)
                store(y, part, e, dim, F32);
            else
                store(y / d->total[m], a->out, cell * dim + e, (cell + 1) * dim, type);
        }
        if (part) {
            part[dim] = d->most[m];
            part[dim + 1] = d->total[m];
        }
    }
}

/* softmax(scale q k^T) v over the positions that a query sees. */
KERNEL(attention, Attention) {
    const Store *s = &a->store;
    const int64_t group = a->heads / s->heads, width = (s->dim + LANES - 1) / LANES * LANES, most = a->block * group;
    float *desk = a->desk + thread * a->desk_size;
    Desk d = {.width = width, .q = desk, .sums = desk + most * width};
    d.keys = d.sums + most * width;
    d.values = d.keys + TILE * width;
    d.weights = d.values + TILE * width;
    d.most = d.weights + most * TILE;
    d.total = d.most + most;
    d.first = d.total + most;
    d.limit = d.first + most;
    const int narrow = PAIRS && a->type == BF16 && s->type == BF16 && s->dim % 32 == 0;
    int64_t unit = 0;
    for (int64_t r = 0; r < a->rows.count; r++) {
        const int64_t n = a->rows.starts[r + 1] - a->rows.starts[r];
        for (int64_t first = 0; first < n; first += a->block)
            for (int64_t head = 0; head < s->heads; head++)
                for (int64_t split = 0; split < a->splits; split++)
                    if (unit++ % threads == thread) { /* later blocks are more work: everybody gets some of them */
                        const int64_t tokens = n - first < a->block ? n - first : a->block;
                        d.count = tokens * group;
                        if (narrow)
                            attend(a, &d, r, head, first, tokens, split, 1);
                        else
                            attend(a, &d, r, head, first, tokens, split, 0);
                    }
    }
}

/* The splits of each query put together. */
KERNEL(attention_join, Attention) {
    const int64_t dim = a->store.dim;
    int64_t from, to;
    share(a->rows.starts[a->rows.count] * a->heads, 1, thread, threads, &from, &to);
    for (int64_t cell = from; cell < to; cell++) {
        const float *parts = a->parts + cell * a->splits * (dim + 2);
        float most = -INFINITY, total = 0;
        for (int64_t i = 0; i < a->splits; i++) most = fmaxf(most, parts[i * (dim + 2) + dim]);
        for (int64_t i = 0; i < a->splits; i++)
            total += expf(parts[i * (dim + 2) + dim] - most) * parts[i * (dim + 2) + dim + 1];
        for (int64_t e = 0; e < dim; e += LANES) {
            vec y = {};
            for (int64_t i = 0; i < a->splits; i++)
                y += load(parts + i * (dim + 2), e, dim, F32) * expf(parts[i * (dim + 2) + dim] - most);
            store(y / total, a->out, cell * dim + e, (cell + 1) * dim, a->type);
        }
    }
}
