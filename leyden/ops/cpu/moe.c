/* Mixture of experts: the choice, and the products of each token with the experts it chose. */

#include "product.h"

typedef struct {
    const float *logits, *bias; /* [rows, experts], [experts] */
    int64_t *ids;               /* [rows, k] */
    float *weights;             /* [rows, k] */
    float *scratch;             /* [rows, 2 experts + groups] */
    int64_t rows, experts, k, groups, kept, normalize;
    double scale;
} Choose;

/* Index of the largest of n values, the first of equals; `n` > 0. */
static int64_t largest(const float *x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (x[i] > x[best] || (x[best] != x[best] && x[i] == x[i])) best = i;
    return best;
}

/* Groups that are not among the `kept` ones with the largest sums of two best keys lose their keys. */
static void drop_groups(const Choose *a, float *keys, float *sums) {
    const int64_t size = a->experts / a->groups;
    for (int64_t g = 0; g < a->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = 0; i < size; i++) {
            float key = keys[g * size + i];
            if (key > first) {
                second = first;
                first = key;
            } else if (key > second)
                second = key;
        }
        sums[g] = size > 1 ? first + second : first;
    }
    for (int64_t round = 0; round < a->kept; round++) sums[largest(sums, a->groups)] = -INFINITY; /* marks the kept */
    for (int64_t g = 0; g < a->groups; g++)
        for (int64_t i = 0; sums[g] > -INFINITY && i < size; i++) keys[g * size + i] = -INFINITY;
}

/* s = sigmoid(logits); the k experts with the largest s + bias, weighted by s. */
KERNEL(choose, Choose) {
    const int64_t experts = a->experts;
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    for (int64_t row = from; row < to; row++) {
        float *scores = a->scratch + row * (2 * experts + a->groups), *keys = scores + experts, total = 1e-20f;
        for (int64_t i = 0; i < experts; i += LANES) {
            vec s = 1.0f / (1.0f + vexp(-load(a->logits + row * experts, i, experts, F32)));
            store(s, scores, i, experts, F32);
            store(s + load(a->bias, i, experts, F32), keys, i, experts, F32);
        }
        if (a->groups > 1) drop_groups(a, keys, keys + experts);
        int64_t *ids = a->ids + row * a->k;
        float *weights = a->weights + row * a->k;
        for (int64_t j = 0; j < a->k; j++) {
            ids[j] = largest(keys, experts);
            keys[ids[j]] = NAN; /* below everything */
            weights[j] = scores[ids[j]];
            total += weights[j];
        }
        for (int64_t j = 0; j < a->k; j++) weights[j] = weights[j] / (a->normalize ? total : 1.0f) * (float)a->scale;
    }
}

typedef struct {
    const int64_t *ids; /* [pairs] */
    int64_t *order;     /* [pairs]: the pairs, grouped by expert */
    int64_t *borders;   /* [experts + 1]: where each expert's pairs begin in `order` */
    int64_t pairs, experts;
} Group;

/* Sorts (token, choice) pairs by expert; pairs of an expert keep their order. */
KERNEL(group, Group) {
    if (thread) return;
    int64_t *next = a->borders + 1; /* of expert e: its end in the end, its next free place until then */
    memset(a->borders, 0, (a->experts + 1) * sizeof *a->borders);
    for (int64_t i = 0; i < a->pairs; i++)
        if (a->ids[i] + 1 < a->experts) next[a->ids[i] + 1]++;
    for (int64_t e = 1; e < a->experts; e++) next[e] += next[e - 1];
    for (int64_t i = 0; i < a->pairs; i++) a->order[next[a->ids[i]]++] = i;
}

enum { GROUP = 256 }; /* rows of x whose addresses are at hand */

/* The products of one step with every expert: of each pair's token (up), or of what `up` made of the pair (down). */
typedef struct {
    const int64_t *order, *borders; /* as `group` leaves them */
    const void *x;                  /* DOT(type of the matrices): [tokens, inputs] (up), [pairs, inputs] in order (down) */
    const void *ready;              /* the same rows, ready for codes, or null */
    const float *weights;           /* [tokens, k] (down) */
    float *sums;                    /* [tokens, outputs] (down) */
    void *out;                      /* [pairs, outputs] in order (up), [tokens, outputs] (down) */
    char *panels;                   /* [threads, PANEL, inputs] of the matrices' type, if they are codes */
    Matrix matrices;                /* [experts, outputs, inputs] */
    int64_t tokens, experts, k, x_stride, type;
} Experts;

/* Each thread has the same part of every expert's rows. */
INLINE void each_expert(const Experts *a, int64_t from, int64_t to, int thread, const int down, Finish *finish) {
    const void *x[GROUP], *ready[GROUP];
    const Matrix *all = &a->matrices;
    const int64_t ready_size = ready_bytes(all), x_size = a->x_stride * size_of(DOT(all->type));
    void *panel = a->panels ? a->panels + thread * PANEL * all->columns * size_of(all->type) : NULL;
    for (int64_t e = 0; e < a->experts; e++) {
        const Matrix m = member(all, e);
        for (int64_t first = a->borders[e], count; first < a->borders[e + 1]; first += count) {
            count = a->borders[e + 1] - first < GROUP ? a->borders[e + 1] - first : GROUP;
            for (int64_t i = 0; i < count; i++) {
                const int64_t row = down ? first + i : a->order[first + i] / a->k;
                x[i] = (const char *)a->x + row * x_size;
                ready[i] = a->ready ? (const char *)a->ready + row * ready_size : NULL;
            }
            Experts part = *a;
            part.order += first;
            if (!down) part.out = (char *)a->out + first * all->rows * size_of(a->type);
            product(x, a->ready ? ready : NULL, count, &m, from, to, panel, finish, &part);
        }
    }
}

static void finish_up(const void *context, int64_t m, int64_t n, const float *sums, int64_t count) {
    const Experts *a = context;
    void *out = (char *)a->out + (m * a->matrices.rows + n) * size_of(a->type);
    for (int64_t i = 0; i < count; i += LANES) {
        vec y = vmax(load(sums, i, count, F32), (vec){});
        store(y * y, out, i, count, a->type);
    }
}

/* out[i] = relu(W_e x)^2 for the i-th pair in order. */
KERNEL(experts_up, Experts) {
    int64_t from, to;
    share(a->matrices.rows, LANES, thread, threads, &from, &to);
    each_expert(a, from, to, thread, 0, finish_up);
}

static void finish_down(const void *context, int64_t m, int64_t n, const float *sums, int64_t count) {
    const Experts *a = context;
    const int64_t pair = a->order[m];
    float *out = a->sums + pair / a->k * a->matrices.rows + n;
    for (int64_t i = 0; i < count; i += LANES) {
        vec y = rounded(load(sums, i, count, F32), a->type) * a->weights[pair];
        store(load(out, i, count, F32) + y, out, i, count, F32);
    }
}

/* out[t] = sum of weights[p] W_e x[p] over the pairs p of token t, in fp32 and in the order of the experts. */
KERNEL(experts_down, Experts) {
    const int64_t outputs = a->matrices.rows;
    int64_t from, to;
    share(outputs, LANES, thread, threads, &from, &to);
    if (from == to) return;
    for (int64_t t = 0; t < a->tokens; t++) memset(a->sums + t * outputs + from, 0, (to - from) * sizeof(float));
    each_expert(a, from, to, thread, 1, finish_down);
    for (int64_t t = 0; t < a->tokens; t++)
        for (int64_t i = from; i < to; i += LANES)
            store(load(a->sums + t * outputs, i, to, F32), (char *)a->out + t * outputs * size_of(a->type), i, to, a->type);
}
