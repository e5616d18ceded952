/* What drafters have and the target has not: rotary embedding, and the middle of a gated MLP. */

#include "kernels.h"

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
