/* Products with one stored matrix, and what prepares them. */

#include "product.h"

typedef struct {
    const void *x;      /* [rows, inputs], DOT(weight_type) */
    const void *weight; /* [outputs, inputs] */
    const void *add;    /* [rows, outputs] or null, like out */
    void *out;          /* [rows, outputs] */
    int64_t rows, inputs, outputs, x_stride, type, weight_type, square;
} Linear;

static void finish(const void *context, int64_t m, int64_t n, const float *sums, int64_t count) {
    const Linear *a = context;
    const int type = a->type;
    const int64_t offset = (m * a->outputs + n) * size_of(type);
    for (int64_t i = 0; i < count; i += LANES) {
        vec y = load(sums, i, count, F32);
        if (a->square) y = vmax(y, (vec){}) * vmax(y, (vec){});
        if (a->add) y = rounded(y, type) + load((const char *)a->add + offset, i, count, type);
        store(y, (char *)a->out + offset, i, count, type);
    }
}

/* out = x W^T, or relu(x W^T)^2, plus `add`; the product is rounded before the sum is. */
KERNEL(linear, Linear) {
    enum { GROUP = 256 }; /* rows of x whose addresses are at hand */
    const void *x[GROUP];
    int64_t from, to;
    share(a->outputs, LANES, thread, threads, &from, &to);
    for (int64_t first = 0; first < a->rows; first += GROUP) {
        const int64_t count = a->rows - first < GROUP ? a->rows - first : GROUP;
        const int64_t offset = first * a->outputs * size_of(a->type);
        for (int64_t i = 0; i < count; i++)
            x[i] = (const char *)a->x + (first + i) * a->x_stride * size_of(DOT(a->weight_type));
        Linear group = *a;
        group.out = (char *)a->out + offset;
        if (a->add) group.add = (const char *)a->add + offset;
        product(x, count, a->weight, from, to, a->inputs, a->weight_type, finish, &group);
    }
}

typedef struct {
    const void *x; /* [rows, width] */
    float *out;    /* [rows, width] */
    int64_t rows, width, x_stride, type;
} Widen;

/* To F32. */
KERNEL(widen, Widen) {
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    for (int64_t row = from; row < to; row++) {
        const void *x = (const char *)a->x + row * a->x_stride * size_of(a->type);
        for (int64_t i = 0; i < a->width; i += LANES)
            store(load(x, i, a->width, a->type), a->out + row * a->width, i, a->width, F32);
    }
}

typedef struct {
    const int64_t *tokens; /* [rows] */
    const void *table;     /* [vocabulary, width] */
    void *out;             /* [rows, width] */
    int64_t rows, bytes;   /* of a row */
} Embed;

KERNEL(embed, Embed) {
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    for (int64_t row = from; row < to; row++)
        memcpy((char *)a->out + row * a->bytes, (const char *)a->table + a->tokens[row] * a->bytes, a->bytes);
}

/* Whether rows that meet a BF16 matrix stay BF16. */
const int64_t dot_bf16 = DOT(BF16) == BF16;
