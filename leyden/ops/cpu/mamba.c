/* Mamba-2: short causal convolution and selective scan, rows of any length; a step is a row of one token.

Rows of guesses: `verify` tells what they give and leaves the states alone, `replay` moves the states over those that
were right. Their inputs wait in a ring, [slots, width, channels + heads]: a replayed row has the first counts[r] tokens
of its slot there, and what is made of them is [rows, width, ...]. */

#include "philox.h"

enum { MOST_TAPS = 8 };

typedef struct {
    const void *x, *weight, *bias; /* [tokens, channels], [channels, taps], [channels] or null */
    void *state;                   /* [slots, taps - 1, channels]: the last inputs, oldest first */
    void *out;                     /* [tokens, channels] */
    Rows rows;
    int64_t channels, taps, x_stride, type, state_type; /* weight and bias are of `type`, too */
    int64_t keep;                  /* whether the state stays as it is */
    const int32_t *counts;         /* [rows]: x is a ring; else null */
    int64_t width;
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
        int64_t from, first, count; /* the row's tokens in x, in out */
        if (a->counts) {
            from = a->rows.slots[r] * a->width;
            first = r * a->width;
            count = a->counts[r];
            if (count == 0) continue;
        } else {
            from = first = a->rows.starts[r];
            count = a->rows.starts[r + 1] - first;
        }
        void *state = NULL;
        if (a->rows.slots)
            state = (char *)a->state + a->rows.slots[r] * (taps - 1) * channels * size_of(a->state_type);
        vec seen[MOST_TAPS] = {}; /* the inputs before the token, oldest first */
        if (state && a->rows.past[r])
            for (int j = 0; j < taps - 1; j++)
                seen[j] = rounded(load(state, j * channels + c, (j + 1) * channels, a->state_type), type);
        for (int64_t t = 0; t < count; t++) {
            seen[taps - 1] = load((const char *)a->x + (from + t) * a->x_stride * size_of(type), c, channels, type);
            vec y = bias;
            for (int j = 0; j < taps; j++) y += seen[j] * weight[j];
            store(silu(y), (char *)a->out + (first + t) * channels * size_of(type), c, channels, type);
            for (int j = 0; j < taps - 1; j++) seen[j] = seen[j + 1];
        }
        if (state && !a->keep)
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
    const int32_t *counts;             /* [rows]: of a replay, whose dt is in the ring; else null */
    int64_t width;
    int64_t rounds;                    /* of Philox, to round an f16 state at random; 0: to nearest */
} Scan;

enum {
    AHEAD = 4096,    /* bytes: how early a state is asked for */
    MOST_N = 256,    /* of the state */
    MOST_WIDTH = 16, /* tokens of a row of guesses */
};

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

INLINE Head head_of(const Scan *a, int64_t row, int64_t unit) {
    const int64_t parts = (a->dim + LANES - 1) / LANES, head = unit / parts;
    const int64_t offset = head / (a->heads / a->groups) * a->n * size_of(a->type);
    return (Head){
        .row = row,
        .head = head,
        .first = head * a->dim + unit % parts * LANES,
        .end = (head + 1) * a->dim,
        .n = a->n,
        .rate = -expf(a->A_log[head]),
        .dt_bias = a->dt_bias[head],
        .D = a->D[head],
        .B = (const char *)a->B + offset,
        .C = (const char *)a->C + offset,
    };
}

/* The head's part of its row's state. */
INLINE char *state_of(const Scan *a, const Head *h) {
    return (char *)a->state + (a->rows.slots[h->row] * a->heads * a->dim + h->first) * h->n * size_of((int)a->state_type);
}

/* What rounds a part of a state at random, see the reference: eight rows share the random words of a column. */
typedef struct {
    uint64_t key;
    int64_t rounds, first, row, n; /* of the part's first call; of its first dim among the eight */
} Dice;

enum { EIGHT = 8 };

INLINE Dice dice_of(const Scan *a, const Head *h, int64_t position) {
    const int64_t dim = h->first - h->head * a->dim, calls = (a->dim + EIGHT - 1) / EIGHT;
    uint32_t layer;
    memcpy(&layer, a->A_log + h->head, sizeof layer);
    return (Dice){
        .key = layer | (uint64_t)position << 32,
        .rounds = a->rounds,
        .first = (h->head * calls + dim / EIGHT) * h->n,
        .row = (int)LANES < EIGHT ? dim % EIGHT : 0, /* a constant where it can be */
        .n = h->n,
    };
}

/* The words for the dims from i on that share them, columns from v on. */
INLINE void throw_dice(const Dice *dice, int64_t i, int64_t v, uvec words[4]) {
    uvec lane;
    for (int j = 0; j < LANES; j++) lane[j] = (uint32_t)j;
    words[0] = lane + (uint32_t)(dice->first + (dice->row + i) / EIGHT * dice->n + v);
    words[1] = words[2] = words[3] = (uvec){};
    philox(words, dice->key, dice->rounds);
}

/* What becomes of s, of dim i; it is an f16 then. */
INLINE vec at_random(const Dice *dice, int64_t i, const uvec words[4], vec s) {
    const int64_t k = (dice->row + i) % EIGHT;
    return cut_to_f16((vec)((uvec)s + (words[k / 2] >> (uint32_t)(k % 2 * 16) & 0x1fff)));
}

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
`to`, rows of n elements `stride` apart. `pool`: that is where S is read; parts follow each other there. `dice` may be null. */
INLINE void step(const Scan *a, const Head *h, int64_t token, float dt, float decay, const void *from, void *to,
                 int64_t stride, int64_t dims, int pool, const Dice *dice, const int type, const int from_type,
                 const int to_type) {
    const void *B = (const char *)h->B + token * a->B_stride * size_of(type);
    const void *C = (const char *)h->C + token * a->C_stride * size_of(type);
    const vec x = load((const char *)a->x + token * a->x_stride * size_of(type), h->first, h->end, type);
    float input[LANES];
    store_all(x * dt, input, F32);
    vec y[LANES];
    for (int i = 0; i < LANES; i++) y[i] = (vec){};
    for (int64_t v = 0; v < h->n; v += LANES) {
        const vec b = load(B, v, h->n, type), c = load(C, v, h->n, type);
        uvec words[4];
        if (dims == LANES && v + LANES <= h->n) {
            for (int i = 0; i < LANES; i++) {
                const int64_t at = i * stride + v;
                if (pool) __builtin_prefetch((const char *)from + at * size_of(from_type) + AHEAD, 1, 2);
                const vec s = load_all((const char *)from + at * size_of(from_type), from_type) * decay + b * input[i];
                y[i] += s * c;
                if (dice && i % EIGHT == 0) throw_dice(dice, i, v, words);
                store_all(dice ? at_random(dice, i, words, s) : s, (char *)to + at * size_of(to_type), to_type);
            }
        } else {
            for (int i = 0; i < dims; i++) {
                const vec s = load(from, i * stride + v, i * stride + h->n, from_type) * decay + b * input[i];
                y[i] += s * c;
                if (dice && i % EIGHT == 0) throw_dice(dice, i, v, words);
                store(dice ? at_random(dice, i, words, s) : s, to, i * stride + v, i * stride + h->n, to_type);
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
    char *state = a->rows.slots ? state_of(a, h) : NULL;
    float dt[LANES], decay[LANES], desk[LANES * MOST_N];
    const int kept = state && a->rows.past[h->row];
    if (!kept) memset(desk, 0, LANES * h->n * sizeof *desk);
    for (int64_t t = start; t <= last; t++) {
        const int64_t i = (t - start) % LANES;
        if (i == 0) time_steps(a, h, t, last + 1 - t, dt, decay, type);
        const int in = kept && t == start, out = state && t == last; /* from the pool, to the pool */
#define STEP(from_type, to_type, dice)                                                                      \
    step(a, h, t, dt[i], decay[i], in ? (void *)state : desk, out ? (void *)state : desk, h->n, dims, in, dice, type, \
         from_type, to_type)
        if (state_type == F32 || (!in && !out)) {
            STEP(F32, F32, NULL);
        } else if (out && a->rounds) {
            const Dice dice = dice_of(a, h, a->rows.past[h->row] + t - start);
            if (in)
                STEP(F16, F16, &dice);
            else
                STEP(F32, F16, &dice);
        } else if (in && out) {
            TYPED(state_type, STEP(T, T, NULL));
        } else if (in) {
            TYPED(state_type, STEP(T, F32, NULL));
        } else {
            TYPED(state_type, STEP(F32, T, NULL));
        }
#undef STEP
    }
}

/* Every thread has the same part of every row: rows differ in length. */
KERNEL(ssd_scan, Scan) {
    int64_t from, to;
    share(a->heads * ((a->dim + LANES - 1) / LANES), 1, thread, threads, &from, &to);
    for (int64_t r = 0; r < a->rows.count; r++)
        for (int64_t unit = from; unit < to; unit++) {
            const Head h = head_of(a, r, unit);
            TYPED(a->type, scan_part(a, &h, T));
        }
}

/* What the heads of a group share, for the tokens of one row. */
typedef struct {
    float B[MOST_WIDTH][MOST_N], C[MOST_WIDTH][MOST_N]; /* zeros from n on */
    float products[MOST_WIDTH][MOST_WIDTH];             /* [t][i] = C_t . B_i */
} Group;

INLINE void group_of(const Scan *a, const Head *h, int64_t start, int64_t count, int products, Group *g,
                     const int type) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t v = 0; v < h->n; v += LANES) {
            const int64_t token = start + t;
            store_all(load((const char *)h->B + token * a->B_stride * size_of(type), v, h->n, type), g->B[t] + v, F32);
            if (products)
                store_all(load((const char *)h->C + token * a->C_stride * size_of(type), v, h->n, type), g->C[t] + v, F32);
        }
    for (int64_t t = 0; products && t < count; t++)
        for (int64_t i = 0; i <= t; i++) {
            vec dot = {};
            for (int64_t v = 0; v < h->n; v += LANES) dot += load_all(g->C[t] + v, F32) * load_all(g->B[i] + v, F32);
            g->products[t][i] = sum(dot);
        }
}

/* All time steps and decays of a row of guesses; dt of its first token is at `start`. */
INLINE void guessed_steps(const Scan *a, const Head *h, int64_t start, int64_t count, float *dt, float *decay,
                          const int type) {
    for (int64_t t = 0; t < count; t += LANES) time_steps(a, h, start + t, count - t, dt + t, decay + t, type);
}

enum {
    GUESSES = 8, /* sums that stay in registers: of so many tokens, */
    DIMS = 2,    /* for so many dims of the state */
};

/* out[t][dim] = S C_t as LANES sums, for T tokens of the group and `dims` dims of S. */
INLINE void read_state(const char *S, const Group *g, int64_t first, int64_t n, int64_t dims, vec (*out)[LANES],
                       const int T, const int type) {
    for (int64_t d = 0; d < dims; d += DIMS) {
        vec acc[DIMS][GUESSES];
        for (int i = 0; i < DIMS; i++)
            for (int t = 0; t < T; t++) acc[i][t] = (vec){};
        const int64_t last = d + 1 < dims ? d + 1 : d; /* twice the same where there is one left */
        for (int64_t v = 0; v < n; v += LANES) {
            const vec s0 = load(S, d * n + v, (d + 1) * n, type), s1 = load(S, last * n + v, (last + 1) * n, type);
            for (int i = 0; i < DIMS; i++)
                __builtin_prefetch(S + ((d + i) * n + v) * size_of(type) + AHEAD, 0, 2);
            for (int t = 0; t < T; t++) {
                const vec c = load_all(g->C[first + t] + v, F32);
                acc[0][t] += s0 * c;
                acc[1][t] += s1 * c;
            }
        }
        for (int t = 0; t < T; t++) {
            out[t][d] = acc[0][t];
            out[t][last] = acc[1][t];
        }
    }
}

static void read_for(const Scan *a, const Head *h, const Group *g, int64_t first, int64_t count, int64_t dims,
                     vec (*out)[LANES]) {
    const char *S = state_of(a, h);
    switch (count) {
#define CASE(N)                                                                    \
    case N: TYPED(a->state_type, read_state(S, g, first, h->n, dims, out, N, T)); \
        break
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

/* y_t = D x_t + decay(0..t) S C_t + sum over i <= t of decay(i+1..t) dt_i (C_t . B_i) x_i: what the steps would give, read
from the state before them (the output-only form of ReplaySSM). */
INLINE void verify_part(const Scan *a, const Head *h, const Group *g, const int type) {
    const int64_t dims = h->end - h->first < LANES ? h->end - h->first : LANES, start = a->rows.starts[h->row];
    const int64_t count = a->rows.starts[h->row + 1] - start;
    float dt[MOST_WIDTH + LANES], decay[MOST_WIDTH + LANES], since[MOST_WIDTH], whole = 1;
    guessed_steps(a, h, start, count, dt, decay, type);
    vec x[MOST_WIDTH], parts[GUESSES][LANES];
    memset(parts, 0, sizeof parts);
    for (int64_t t = 0; t < count; t++) {
        if (a->rows.past[h->row] && t % GUESSES == 0)
            read_for(a, h, g, t, count - t < GUESSES ? count - t : GUESSES, dims, parts);
        x[t] = load((const char *)a->x + (start + t) * a->x_stride * size_of(type), h->first, h->end, type);
        whole *= decay[t];
        since[t] = dt[t];
        vec y = sums(parts[t % GUESSES]) * whole + x[t] * h->D;
        for (int64_t i = 0; i <= t; i++) {
            if (i < t) since[i] *= decay[t];
            y += x[i] * (since[i] * g->products[t][i]);
        }
        store(y, (char *)a->out + (start + t) * a->heads * a->dim * size_of(type), h->first, h->end, type);
    }
}

/* Calls `part` for this thread's share of every row's heads, with what their group shares. */
#define EACH_PART(tokens, start, products, part)                                                    \
    do {                                                                                            \
        Group g;                                                                                    \
        int64_t from, to;                                                                           \
        share(a->heads * ((a->dim + LANES - 1) / LANES), 1, thread, threads, &from, &to);           \
        for (int64_t r = 0; r < a->rows.count; r++) {                                               \
            const void *known = NULL;                                                               \
            for (int64_t unit = from; (tokens) > 0 && unit < to; unit++) {                          \
                const Head h = head_of(a, r, unit);                                                 \
                if (h.B != known) TYPED(a->type, group_of(a, &h, start, tokens, products, &g, T));  \
                known = h.B;                                                                        \
                TYPED(a->type, part(a, &h, &g, T));                                                 \
            }                                                                                       \
        }                                                                                           \
    } while (0)

KERNEL(verify, Scan) {
    EACH_PART(a->rows.starts[r + 1] - a->rows.starts[r], a->rows.starts[r], 1, verify_part);
}

/* The same as write_state() of an f16 state that is rounded at random: the rows that share the words at a time. */
INLINE void write_at_random(char *S, const Group *g, float whole, float (*input)[LANES], int64_t count, int64_t n,
                            int64_t dims, const Dice *dice) {
    enum { ROWS = (int)LANES < EIGHT ? LANES : EIGHT };
    for (int64_t d = 0; d < dims; d += ROWS)
        for (int64_t v = 0; v < n; v += LANES) {
            uvec words[4];
            vec s[ROWS] = {};
            for (int i = 0; i < ROWS && whole != 0; i++)
                if (d + i < dims) s[i] = load(S, (d + i) * n + v, (d + i + 1) * n, F16) * whole;
            for (int64_t t = 0; t < count; t++) {
                const vec b = load_all(g->B[t] + v, F32);
                for (int i = 0; i < ROWS; i++) s[i] += b * input[t][d + i];
            }
            throw_dice(dice, d, v, words);
            for (int i = 0; i < ROWS; i++)
                if (d + i < dims) store(at_random(dice, i, words, s[i]), S, (d + i) * n + v, (d + i + 1) * n, F16);
        }
}

/* S = whole S + sum over t of B_t input_t, `dims` rows of n elements; whole == 0: nothing was there. */
INLINE void write_state(char *S, const Group *g, float whole, float (*input)[LANES], int64_t count, int64_t n,
                        int64_t dims, const int type) {
    enum { MANY = 8 };
    for (int64_t d = 0; d < dims; d++) {
        int64_t v = 0;
        for (; v + MANY * LANES <= n; v += MANY * LANES) {
            vec s[MANY];
            for (int j = 0; j < MANY; j++)
                s[j] = whole == 0 ? (vec){} : load_all(S + (d * n + v + j * LANES) * size_of(type), type) * whole;
            for (int64_t t = 0; t < count; t++)
                for (int j = 0; j < MANY; j++) s[j] += load_all(g->B[t] + v + j * LANES, F32) * input[t][d];
            for (int j = 0; j < MANY; j++) store_all(s[j], S + (d * n + v + j * LANES) * size_of(type), type);
        }
        for (; v < n; v += LANES) {
            vec s = whole == 0 ? (vec){} : load(S, d * n + v, (d + 1) * n, type) * whole;
            for (int64_t t = 0; t < count; t++) s += load_all(g->B[t] + v, F32) * input[t][d];
            store(s, S, d * n + v, (d + 1) * n, type);
        }
    }
}

INLINE void replay_part(const Scan *a, const Head *h, const Group *g, const int type) {
    const int64_t dims = h->end - h->first < LANES ? h->end - h->first : LANES, count = a->counts[h->row];
    float dt[MOST_WIDTH + LANES], decay[MOST_WIDTH + LANES], input[MOST_WIDTH][LANES], whole = 1;
    guessed_steps(a, h, a->rows.slots[h->row] * a->width, count, dt, decay, type);
    for (int64_t t = count - 1; t >= 0; t--) {
        const void *x = (const char *)a->x + (h->row * a->width + t) * a->x_stride * size_of(type);
        store_all(load(x, h->first, h->end, type) * (dt[t] * whole), input[t], F32);
        whole *= decay[t];
    }
    if (!a->rows.past[h->row]) whole = 0;
    if (a->rounds) {
        const Dice dice = dice_of(a, h, a->rows.past[h->row] + count - 1);
        write_at_random(state_of(a, h), g, whole, input, count, h->n, dims, &dice);
        return;
    }
    TYPED(a->state_type, write_state(state_of(a, h), g, whole, input, count, h->n, dims, T));
}

KERNEL(replay, Scan) { EACH_PART(a->counts[r], r * a->width, 0, replay_part); }

typedef struct {
    const void *inputs; /* [tokens, width] */
    void *ring;         /* [slots, ring_width, width] */
    Rows rows;
    int64_t width, stride, ring_width, type, ring_type;
} Ring;

/* Row r's inputs into the ring of its slot. */
KERNEL(ring_write, Ring) {
    int64_t from, to;
    share(a->rows.starts[a->rows.count], 1, thread, threads, &from, &to);
    for (int64_t r = 0; r < a->rows.count; r++)
        for (int64_t t = a->rows.starts[r]; t < a->rows.starts[r + 1]; t++) {
            if (t < from || t >= to) continue;
            const int64_t at = (a->rows.slots[r] * a->ring_width + t - a->rows.starts[r]) * a->width;
            const char *inputs = (const char *)a->inputs + t * a->stride * size_of(a->type);
            for (int64_t i = 0; i < a->width; i += LANES)
                store(load(inputs, i, a->width, a->type), a->ring, at + i, at + a->width, a->ring_type);
        }
}
