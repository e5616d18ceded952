/* From logits to a token, without a sort of the vocabulary. */

#include <stdlib.h>

#include "philox.h"

typedef struct {
    float z; /* logit / temperature */
    int32_t id;
} Candidate;

typedef struct {
    const float *logits;                      /* [rows, vocabulary] */
    const float *temperature, *top_p, *min_p; /* a value per row, each with its stride */
    const int64_t *top_k, *seed, *position;
    int64_t *out;          /* [rows] */
    Candidate *candidates; /* [threads, vocabulary + 2 LANES]: room to work in */
    int64_t rows, vocabulary, logits_stride, temperature_stride, top_p_stride, min_p_stride, top_k_stride, seed_stride,
        position_stride;
} Sample;

/* The noise G = -log(-log u) of the Gumbel trick has 2^23 values: from -2.82 for u = 2^-24 to 16.64 for u = 1 - 2^-24.
What is 19.5 below the best can therefore not be drawn. What is REACH below it has no weight worth counting: a whole
vocabulary of it, 2^20 e^-32, is below the resolution of top_p. */
enum { REACH = 32, BINS_PER_UNIT = 64, BINS = REACH * BINS_PER_UNIT };
static const float NOISE = 16.64f, RANGE = 19.5f;

/* Uniforms in (0, 1) of token ids: Philox 4x32-10, see the reference. */
INLINE vec uniform(uvec id, uint64_t seed, uint32_t position) {
    uvec c[4] = {id >> 2, (uvec){} + position, {}, {}};
    philox(c, seed, 10);
    uvec which = id & 3;
    uvec first = (uvec)(which == 0), second = (uvec)(which == 1), third = (uvec)(which == 2), fourth = (uvec)(which == 3);
    uvec word = (c[0] & first) | (c[1] & second) | (c[2] & third) | (c[3] & fourth);
    return (__builtin_convertvector((ivec)(word >> 9), vec) + 0.5f) * 0x1p-23f;
}

static float largest(const float *x, int64_t n) {
    vec most = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) most = vmax(load_all(x + i, F32), most);
    float top = maximum(most);
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* The largest first, and the lower id first among equals. */
static int by_rank(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->z != y->z) return x->z > y->z ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

INLINE int bin_of(float z, float top) {
    float bin = (top - z) * BINS_PER_UNIT;
    return bin < BINS - 1 ? (int)bin : BINS - 1;
}

/* Keeps of the candidates the k best, and of these the best until their weights sum to p of the whole.

Both borders are found in a histogram over z; only the candidates in the border's bin are put in order. Returns how many
candidates are left. */
static int64_t cut(Candidate *c, int64_t n, float top, int64_t k, double p) {
    int32_t counts[BINS] = {0};
    double weights[BINS] = {0};
    for (int64_t i = 0; i < n; i++) {
        int bin = bin_of(c[i].z, top);
        counts[bin]++;
        weights[bin] += expf(c[i].z - top);
    }
    for (int by_weight = 0; by_weight < 2; by_weight++) { /* top_k first: top_p is a part of what it left */
        if (by_weight ? p >= 1 : k <= 0 || k >= n) continue;
        double goal = k, reached = 0;
        if (by_weight) {
            goal = 0;
            for (int bin = 0; bin < BINS; bin++) goal += weights[bin];
            goal *= p;
        }
        int border = 0;
        for (; border < BINS; border++) {
            double here = by_weight ? weights[border] : counts[border];
            if (reached + here >= goal) break;
            reached += here;
        }
        if (border == BINS) continue; /* rounding of the sums: everything is kept */
        /* [0, left) are kept for certain, [left, left + tied) are in the border's bin */
        int64_t left = 0, tied = 0;
        for (int64_t i = 0; i < n; i++) {
            int bin = bin_of(c[i].z, top);
            if (bin > border) continue;
            Candidate moved = c[i];
            if (bin == border) {
                c[left + tied++] = moved;
            } else {
                c[left + tied] = c[left];
                c[left++] = moved;
            }
        }
        qsort(c + left, tied, sizeof *c, by_rank);
        n = left;
        double kept = 0;
        for (int64_t i = 0; i < tied && reached < goal; i++) {
            double weight = expf(c[left + i].z - top);
            reached += by_weight ? weight : 1;
            kept += weight;
            n++;
        }
        weights[border] = kept;
        for (int bin = border + 1; bin < BINS; bin++) weights[bin] = 0;
    }
    return n;
}

/* The candidate with the largest z + G. */
static int64_t draw(const Candidate *c, int64_t n, float top, uint64_t seed, uint32_t position) {
    vec best = splat(-INFINITY);
    ivec ids = {};
    float bar = top - RANGE; /* what cannot come above it is not drawn for */
    for (int64_t i = 0; i < n; i += LANES) {
        vec z = splat(-INFINITY);
        ivec id = {};
        for (int64_t lane = 0; lane < LANES && i + lane < n; lane++) {
            z[lane] = c[i + lane].z;
            id[lane] = c[i + lane].id;
        }
        float most = -INFINITY;
        for (int lane = 0; lane < LANES; lane++) most = z[lane] > most ? z[lane] : most;
        if (most < bar) continue;
        vec u = uniform((uvec)id, seed, position);
        vec score = z - vlog(-vlog(u));
        ivec better = score > best;
        best = pick(better, score, best);
        ids = (id & better) | (ids & ~better);
        for (int lane = 0; lane < LANES; lane++)
            if (best[lane] - NOISE > bar) bar = best[lane] - NOISE;
    }
    int winner = 0;
    for (int lane = 1; lane < LANES; lane++)
        if (best[lane] > best[winner] || (best[lane] == best[winner] && ids[lane] < ids[winner])) winner = lane;
    return ids[winner];
}

KERNEL(sample, Sample) {
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    Candidate *candidates = a->candidates + thread * (a->vocabulary + 2 * LANES);
    for (int64_t row = from; row < to; row++) {
        const float *logits = a->logits + row * a->logits_stride, temperature = a->temperature[row * a->temperature_stride];
        const float highest = largest(logits, a->vocabulary), top = highest / temperature;
        if (temperature < 1e-5f || !(highest > -INFINITY)) {
            int64_t id = 0;
            while (id + 1 < a->vocabulary && logits[id] != highest) id++;
            a->out[row] = id;
            continue;
        }
        const float top_p = a->top_p[row * a->top_p_stride];
        const int64_t top_k = a->top_k[row * a->top_k_stride];
        const int filtered = top_k > 0 || top_p < 1;
        float least = top + logf(a->min_p[row * a->min_p_stride]); /* -infinity without min_p */
        const float reach = top - (filtered ? REACH : RANGE);
        if (!(least > reach)) least = reach;
        int64_t n = 0;
        for (int64_t i = 0; i < a->vocabulary; i += LANES) {
            vec z = load(logits, i, a->vocabulary, F32) / temperature;
            ivec in = z >= least;
#if WIDTH == 64
            if (!_mm512_movepi32_mask((__m512i)in)) continue;
#endif
            for (int lane = 0; lane < LANES && i + lane < a->vocabulary; lane++)
                if (in[lane]) candidates[n++] = (Candidate){z[lane], (int32_t)(i + lane)};
        }
        if (filtered) n = cut(candidates, n, top, top_k, top_p);
        a->out[row] = draw(candidates, n, top, (uint64_t)a->seed[row * a->seed_stride],
                           (uint32_t)a->position[row * a->position_stride]);
    }
}

typedef struct {
    const float *logits; /* [rows, vocabulary] */
    float *out;          /* [rows] */
    int64_t rows, vocabulary, stride;
    double surest;
} Certainty;

/* log p - log(1 - p) of the largest: its weight is 1, and what counts is the sum of the other ones. */
KERNEL(certainty, Certainty) {
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    const float surest = (float)a->surest;
    for (int64_t row = from; row < to; row++) {
        const float *logits = a->logits + row * a->stride, most = largest(logits, a->vocabulary);
        int64_t winner = 0;
        while (winner + 1 < a->vocabulary && logits[winner] != most) winner++;
        vec others = {};
        for (int64_t i = 0; i < a->vocabulary; i += LANES) {
            vec weight = vexp(load(logits, i, a->vocabulary, F32) - most);
            for (int64_t lane = 0; lane < LANES && ((winner >= i && winner < i + LANES) || i + LANES > a->vocabulary); lane++)
                if (i + lane == winner || i + lane >= a->vocabulary) weight[lane] = 0;
            others += weight;
        }
        const float odds = -logf(sum(others));
        a->out[row] = odds > surest ? surest : odds < -surest ? -surest : odds;
    }
}
