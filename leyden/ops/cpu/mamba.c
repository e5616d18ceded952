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

/* One head's part of the work: what all of its dims share, and the place of its first dim. */
typedef struct {
    int64_t row, head, first, end, n; /* dims [first, end) of all heads' */
    float rate, dt_bias, D;
    const void *B, *C; /* of the group, at token 0 */
} Head;

/* Time steps and decays of the `count` tokens from `start` on, of the first LANES of them. */
INLINE void time_steps(const Scan *a, const Head *h, int64_t start, int64_t count, float *dt, float *decay,
                       const int type) {
    float raw[LANES] = {};
    for (int64_t t = 0; t < count && t < LANES; t++) raw[t] = load_one(a->dt, (start + t) * a->dt_stride + h->head, type);
    vec delta = softplus(load_all(raw, F32) + h->dt_bias);
    delta = vmin(vmax(delta, splat((float)a->low)), splat((float)a->high));
    store_all(delta, dt, F32);
    store_all(vexp(delta * h->rate), decay, F32);
}

/* S = decay S + dt x B^T and y = S C + D x, for LANES dims of a head and one token. S is read from `from` and written to
`to`, rows of n elements `stride` apart. */
INLINE void step(const Scan *a, const Head *h, int64_t token, float dt, float decay, const void *from, void *to,
                 int64_t stride, int64_t dims, const int type, const int from_type, const int to_type) {
    const void *B = (const char *)h->B + token * a->B_stride * size_of(type);
    const void *C = (const char *)h->C + token * a->C_stride * size_of(type);
    const vec x = load((const char *)a->x + token * a->x_stride * size_of(type), h->first, h->end, type);
    float input[LANES];
    store_all(x * dt, input, F32);
    vec y[LANES];
    for (int i = 0; i < LANES; i++) y[i] = (vec){};
    for (int64_t v = 0; v < h->n; v += LANES) {
        const vec b = load(B, v, h->n, type), c = load(C, v, h->n, type);
        if (dims == LANES && v + LANES <= h->n) {
            for (int i = 0; i < LANES; i++) {
                const int64_t at = i * stride + v;
                const vec s = load_all((const char *)from + at * size_of(from_type), from_type) * decay + b * input[i];
                y[i] += s * c;
                store_all(s, (char *)to + at * size_of(to_type), to_type);
            }
        } else {
            for (int i = 0; i < dims; i++) {
                const vec s = load(from, i * stride + v, i * stride + h->n, from_type) * decay + b * input[i];
                y[i] += s * c;
                store(s, to, i * stride + v, i * stride + h->n, to_type);
            }
        }
    }
    void *out = (char *)a->out + token * a->heads * a->dim * size_of(type);
    store(sums(y) + h->D * x, out, h->first, h->end, type);
}

/* The tokens of a row. Between the first and the last of them the state, a part of it small enough for the L1 cache, is
kept at hand in fp32. */
INLINE void scan_part(const Scan *a, const Head *h, const int type) {
    const int state_type = (int)a->state_type;
    const int64_t dims = h->end - h->first < LANES ? h->end - h->first : LANES, start = a->rows.starts[h->row];
    const int64_t last = a->rows.starts[h->row + 1] - 1;
    char *state = NULL;
    if (a->rows.slots)
        state = (char *)a->state + (a->rows.slots[h->row] * a->heads * a->dim + h->first) * h->n * size_of(state_type);
    float dt[LANES], decay[LANES], desk[LANES * MOST_N];
    const int kept = state && a->rows.past[h->row];
    if (!kept) memset(desk, 0, LANES * h->n * sizeof *desk);
    for (int64_t t = start; t <= last; t++) {
        const int64_t i = (t - start) % LANES;
        if (i == 0) time_steps(a, h, t, last + 1 - t, dt, decay, type);
        const int in = kept && t == start, out = state && t == last; /* from the pool, to the pool */
#define STEP(from_type, to_type)                                                                      \
    step(a, h, t, dt[i], decay[i], in ? (void *)state : desk, out ? (void *)state : desk, h->n, dims, type, from_type, \
         to_type)
        if (state_type == F32 || (!in && !out))
            STEP(F32, F32);
        else if (in && out)
            TYPED(state_type, STEP(T, T));
        else if (in)
            TYPED(state_type, STEP(T, F32));
        else
            TYPED(state_type, STEP(F32, T));
#undef STEP
    }
}

/* Every thread has the same part of every row: rows differ in length. */
KERNEL(ssd_scan, Scan) {
    const int64_t parts = (a->dim + LANES - 1) / LANES;
    int64_t from, to;
    share(a->heads * parts, 1, thread, threads, &from, &to);
    for (int64_t r = 0; r < a->rows.count; r++)
        for (int64_t unit = from; unit < to; unit++) {
            const int64_t head = unit / parts, group = head / (a->heads / a->groups), bytes = size_of(a->type);
            Head h = {.row = r, .head = head, .first = head * a->dim + unit % parts * LANES, .end = (head + 1) * a->dim};
            h.n = a->n;
            h.rate = -expf(a->A_log[head]);
            h.dt_bias = a->dt_bias[head];
            h.D = a->D[head];
            h.B = (const char *)a->B + group * a->n * bytes;
            h.C = (const char *)a->C + group * a->n * bytes;
            TYPED(a->type, scan_part(a, &h, T));
        }
}
