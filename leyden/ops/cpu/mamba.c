/* Mamba-2: short causal convolution and selective scan, rows of any length; a step is a row of one token. */

#include "kernels.h"

enum { MOST_TAPS = 8 };

typedef struct {
    const void *x, *weight, *bias; /* [tokens, channels], [channels, taps], [channels] or null */
    void *state;                   /* [slots, taps - 1, channels]: the last inputs, oldest first */
    void *out;                     /* [tokens, channels] */
    Rows rows;
    int64_t channels, taps, x_stride, type, state_type; /* weight and bias are of `type`, too */
} Conv;

/* weight[j] = tap j of LANES channels from c on. */
INLINE void taps_of(const Conv *a, int64_t c, const int taps, const int type, vec *weight) {
    const int64_t channels = a->channels, left = channels - c < LANES ? channels - c : LANES;
#if WIDTH == 64
    if (taps == 4) {
        vec four[4]; /* of four channels each */
        for (int i = 0; i < 4; i++) four[i] = load(a->weight, (c + 4 * i) * 4, channels * 4, type);
        const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
        for (int j = 0; j < 4; j++) {
            const __m512i which = _mm512_add_epi32(first, _mm512_set1_epi32(j));
            const vec low = _mm512_permutex2var_ps(four[0], which, four[1]);
            const vec high = _mm512_permutex2var_ps(four[2], which, four[3]);
            weight[j] = _mm512_insertf32x8(low, _mm512_castps512_ps256(high), 1);
        }
        return;
    }
#endif
    float across[MOST_TAPS][LANES] = {};
    for (int64_t lane = 0; lane < left; lane++)
        for (int j = 0; j < taps; j++) across[j][lane] = load_one(a->weight, (c + lane) * taps + j, type);
    for (int j = 0; j < taps; j++) weight[j] = load_all(across[j], F32);
}

/* out = silu(bias + sum_j weight[c, j] x[t - (taps - 1) + j, c]), LANES channels from c on. */
INLINE void conv_channels(const Conv *a, int64_t c, const int taps, const int type) {
    const int64_t channels = a->channels;
    vec weight[MOST_TAPS];
    taps_of(a, c, taps, type, weight);
    const vec bias = a->bias ? load(a->bias, c, channels, type) : (vec){};
    for (int64_t r = 0; r < a->rows.count; r++) {
        void *state = NULL;
        if (a->rows.slots)
            state = (char *)a->state + a->rows.slots[r] * (taps - 1) * channels * size_of(a->state_type);
        vec seen[MOST_TAPS] = {}; /* the inputs before the token, oldest first */
        if (state && a->rows.past[r])
            for (int j = 0; j < taps - 1; j++)
                seen[j] = rounded(load(state, j * channels + c, (j + 1) * channels, a->state_type), type);
        for (int64_t t = a->rows.starts[r]; t < a->rows.starts[r + 1]; t++) {
            seen[taps - 1] = load((const char *)a->x + t * a->x_stride * size_of(type), c, channels, type);
            vec y = bias;
            for (int j = 0; j < taps; j++) y += seen[j] * weight[j];
            store(silu(y), (char *)a->out + t * channels * size_of(type), c, channels, type);
            for (int j = 0; j < taps - 1; j++) seen[j] = seen[j + 1];
        }
        if (state)
            for (int j = 0; j < taps - 1; j++)
                store(seen[j], state, j * channels + c, (j + 1) * channels, a->state_type);
    }
}

KERNEL(causal_conv, Conv) {
    int64_t from, to;
    share(a->channels, LANES, thread, threads, &from, &to);
    for (int64_t c = from; c < to; c += LANES) {
        if (a->taps == 4)
            TYPED(a->type, conv_channels(a, c, 4, T));
        else
            TYPED(a->type, conv_channels(a, c, (int)a->taps, T));
    }
}

typedef struct {
    const void *x, *dt, *B, *C;        /* [tokens, heads * dim], [tokens, heads], [tokens, groups * n] twice */
    const float *A_log, *D, *dt_bias;  /* [heads] */
    void *state;                       /* [slots, heads, dim, n] */
    void *out;                         /* [tokens, heads * dim] */
    Rows rows;
    int64_t heads, dim, groups, n, x_stride, dt_stride, B_stride, C_stride, type, state_type;
    double low, high;                  /* of the time step */
} Scan;

enum { MOST_N = 256 }; /* of the state */

/* log(1 + e^x), x itself above 20. */
INLINE vec softplus(vec x) {
    vec e = vexp(vmin(x, splat(20.0f))), u = 1.0f + e;
    ivec lost = u == 1.0f; /* u has lost the low bits of a small e; the quotient makes up for them (W. Kahan) */
    vec y = pick(lost, e, vlog(u) * (e / pick(lost, splat(1.0f), u - 1.0f)));
    return pick(x > 20.0f, x, y);
}

/* LANES dims from p on of one head of one row: S = decay S + dt x B^T, y = S C + D x, from its first token to its last.

The part of the state, [LANES dims, n], is small enough to stay in the L1 cache meanwhile. */
INLINE void scan_part(const Scan *a, int64_t r, int64_t head, int64_t p, const int type) {
    const int64_t n = a->n, vectors = (n + LANES - 1) / LANES, group = head / (a->heads / a->groups);
    const int64_t first = head * a->dim + p, end = (head + 1) * a->dim, dims = end - first < LANES ? end - first : LANES;
    float S[MOST_N / LANES][LANES][LANES]; /* of n, dims, n */
    void *state = NULL;
    if (a->rows.slots)
        state = (char *)a->state + (a->rows.slots[r] * a->heads * a->dim + first) * n * size_of(a->state_type);
    if (state && a->rows.past[r]) {
        for (int64_t v = 0; v < vectors; v++)
            for (int64_t i = 0; i < LANES; i++)
                store(i < dims ? load(state, i * n + v * LANES, (i + 1) * n, a->state_type) : (vec){}, S[v][i], 0, LANES,
                      F32);
    } else {
        memset(S, 0, vectors * sizeof *S);
    }

    const float rate = -expf(a->A_log[head]);
    float dt[LANES] = {}, decay[LANES], input[LANES];
    for (int64_t start = a->rows.starts[r]; start < a->rows.starts[r + 1]; start += LANES) {
        const int64_t left = a->rows.starts[r + 1] - start, count = left < LANES ? left : LANES;
        for (int64_t t = 0; t < count; t++) dt[t] = load_one(a->dt, (start + t) * a->dt_stride + head, type);
        vec delta = softplus(load_all(dt, F32) + a->dt_bias[head]);
        delta = vmin(vmax(delta, splat((float)a->low)), splat((float)a->high));
        store(delta, dt, 0, LANES, F32);
        store(vexp(delta * rate), decay, 0, LANES, F32);
        for (int64_t t = 0; t < count; t++) {
            const int64_t token = start + t;
            const void *B = (const char *)a->B + (token * a->B_stride + group * n) * size_of(type);
            const void *C = (const char *)a->C + (token * a->C_stride + group * n) * size_of(type);
            vec x = load((const char *)a->x + token * a->x_stride * size_of(type), first, end, type);
            store(x * dt[t], input, 0, LANES, F32);
            vec y[LANES];
            for (int i = 0; i < LANES; i++) y[i] = (vec){};
            for (int64_t v = 0; v < vectors; v++) {
                vec b = load(B, v * LANES, n, type), c = load(C, v * LANES, n, type);
                for (int i = 0; i < LANES; i++) {
                    vec s = load_all(S[v][i], F32) * decay[t] + b * input[i];
                    y[i] += s * c;
                    memcpy(S[v][i], &s, sizeof s);
                }
            }
            void *out = (char *)a->out + token * a->heads * a->dim * size_of(type);
            store(sums(y) + a->D[head] * x, out, first, end, type);
        }
    }

    if (state)
        for (int64_t v = 0; v < vectors; v++)
            for (int64_t i = 0; i < dims; i++)
                store(load_all(S[v][i], F32), state, i * n + v * LANES, (i + 1) * n, a->state_type);
}

/* Every thread has the same part of every row: rows differ in length. */
KERNEL(ssd_scan, Scan) {
    const int64_t parts = (a->dim + LANES - 1) / LANES;
    int64_t from, to;
    share(a->heads * parts, 1, thread, threads, &from, &to);
    for (int64_t r = 0; r < a->rows.count; r++)
        for (int64_t unit = from; unit < to; unit++)
            TYPED(a->type, scan_part(a, r, unit / parts, unit % parts * LANES, T));
}
