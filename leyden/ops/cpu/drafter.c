/* What drafters have and the target has not: rotary embedding, the middle of a gated MLP, confidence. */

#include "kernels.h"

typedef struct {
    const int32_t *positions; /* [rows] */
    const float *frequencies; /* [half] */
    float *cos, *sin;         /* [rows, half] */
    int64_t rows, half;
    double scale;
} Angles;

KERNEL(angles, Angles) {
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    const float scale = (float)a->scale;
    for (int64_t row = from; row < to; row++)
        for (int64_t i = 0; i < a->half; i++) {
            const float angle = (float)a->positions[row] * a->frequencies[i];
            a->cos[row * a->half + i] = cosf(angle) * scale;
            a->sin[row * a->half + i] = sinf(angle) * scale;
        }
}

typedef struct {
    const void *x;          /* [rows, heads, 2 half] */
    const float *cos, *sin; /* [rows, half] */
    void *out;              /* as x */
    int64_t rows, heads, half, type;
} Rotate;

/* Halves (a, b) -> (a cos - b sin, b cos + a sin) */
KERNEL(rotate, Rotate) {
    const int64_t half = a->half, size = size_of(a->type);
    const int type = a->type;
    int64_t from, to;
    share(a->rows * a->heads, 1, thread, threads, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        const char *x = (const char *)a->x + 2 * unit * half * size;
        char *out = (char *)a->out + 2 * unit * half * size;
        for (int64_t i = 0; i < half; i += LANES) {
            const vec c = load(a->cos + unit / a->heads * half, i, half, F32);
            const vec s = load(a->sin + unit / a->heads * half, i, half, F32);
            const vec low = load(x, i, half, type), high = load(x + half * size, i, half, type);
            store(low * c - high * s, out, i, half, type);
            store(high * c + low * s, out + half * size, i, half, type);
        }
    }
}

typedef struct {
    const void *gate, *up; /* [count] */
    void *out;             /* [count]; may be one of them */
    int64_t count, type;
} Gated;

/* silu(gate) * up, the first factor rounded */
KERNEL(silu_times, Gated) {
    int64_t from, to;
    share(a->count, LANES, thread, threads, &from, &to);
    for (int64_t i = from; i < to; i += LANES) {
        const vec gate = rounded(silu(load(a->gate, i, to, a->type)), a->type);
        store(gate * load(a->up, i, to, a->type), a->out, i, to, a->type);
    }
}

typedef struct {
    const void *hidden, *also;  /* [rows, width], [rows, more] */
    const float *weight, *bias; /* [width + more], [1] */
    float *out;                 /* [rows] */
    int64_t rows, width, more, type;
} Confidence;

KERNEL(confidence, Confidence) {
    const int type = a->type;
    const int64_t size = size_of(type);
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    for (int64_t row = from; row < to; row++) {
        const char *hidden = (const char *)a->hidden + row * a->width * size, *also = (const char *)a->also + row * a->more * size;
        vec dot = {};
        for (int64_t i = 0; i < a->width; i += LANES)
            dot += load(hidden, i, a->width, type) * load(a->weight, i, a->width, F32);
        for (int64_t i = 0; i < a->more; i += LANES)
            dot += load(also, i, a->more, type) * load(a->weight + a->width, i, a->more, F32);
        a->out[row] = sum(dot) + *a->bias;
    }
}

typedef struct {
    const float *scores;   /* [rows, count] */
    const double *weights; /* [1 + width] */
    float *open;           /* [slots, width] */
    int32_t *made_at;      /* [slots] */
    const int32_t *slots;  /* [rows] */
    const int32_t *places; /* [rows] */
    float *out;            /* [rows, count] */
    int64_t rows, count, width;
} Expect;

KERNEL(expect, Expect) {
    if (thread) return;
    for (int64_t r = 0; r < a->rows; r++) {
        float *open = a->open + a->slots[r] * a->width;
        a->made_at[a->slots[r]] = a->places[r];
        for (int64_t i = 0; i < a->width; i++) open[i] = i < a->count ? a->scores[r * a->count + i] : NAN;
        for (int64_t i = 0; i < a->count; i++)
            a->out[r * a->count + i] = (float)(open[i] * a->weights[0] + a->weights[1 + i]);
    }
}

typedef struct {
    const int64_t *tokens, *following; /* [tokens] */
    Rows rows;
    float *open;            /* [slots, width] */
    const int32_t *made_at; /* [slots] */
    double *memory;         /* [3, size, width] */
    int64_t *at;            /* [1] */
    int64_t size, width;
} Learn;

KERNEL(learn, Learn) {
    if (thread) return;
    const int64_t part = a->size * a->width;
    for (int64_t r = 0; r < a->rows.count; r++) {
        const int64_t first = a->rows.starts[r], end = a->rows.starts[r + 1], slot = a->rows.slots[r];
        float *open = a->open + slot * a->width;
        double *memory = a->memory + *a->at * a->width;
        int reached = 1;
        for (int64_t i = 0; i < a->width; i++) {
            const int there = first + i + 1 < end && a->tokens[first + i + 1] >= 0;
            const int right = there && a->tokens[first + i + 1] == a->following[first + i], sane = isfinite(open[i]);
            memory[i] = sane ? open[i] : 0;
            memory[part + i] = right;
            memory[2 * part + i] = there && reached && sane && a->rows.past[r] == a->made_at[slot];
            reached = reached && right;
            open[i] = NAN;
        }
        *a->at = (*a->at + 1) % a->size;
    }
}
