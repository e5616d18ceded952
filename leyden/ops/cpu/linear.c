/* Products with one stored matrix, and what prepares them. */

#include "product.h"

typedef struct {
    const void *x;     /* [rows, inputs], DOT(type of the matrix) */
    const void *ready; /* the same rows, ready for codes, or null */
    const void *add;   /* [rows, outputs] or null, of the type of out */
    void *out;         /* [rows, outputs] */
    char *panels;      /* [threads, PANEL, inputs] of the matrix's type, if it is codes */
    Matrix matrix;     /* [outputs, inputs] */
    int64_t rows, x_stride, type, square, add_stride;
} Linear;

static void finish(const void *context, int64_t m, int64_t n, const float *sums, int64_t count) {
    const Linear *a = context;
    const int type = a->type;
    char *out = (char *)a->out + (m * a->matrix.rows + n) * size_of(type);
    const char *add = a->add ? (const char *)a->add + (m * a->add_stride + n) * size_of(type) : NULL;
    for (int64_t i = 0; i < count; i += LANES) {
        vec y = load(sums, i, count, F32);
        if (a->square) y = vmax(y, (vec){}) * vmax(y, (vec){});
        if (add) y = rounded(y, type) + load(add, i, count, type);
        store(y, out, i, count, type);
    }
}

/* out = x W^T, or relu(x W^T)^2, plus `add`; the product is rounded before the sum is. */
KERNEL(linear, Linear) {
    enum { GROUP = 256 }; /* rows of x whose addresses are at hand */
    const void *x[GROUP], *ready[GROUP];
    const Matrix *m = &a->matrix;
    const int64_t ready_size = ready_bytes(m);
    void *panel = a->panels ? a->panels + thread * PANEL * m->columns * size_of(m->type) : NULL;
    int64_t from, to;
    share(m->rows, LANES, thread, threads, &from, &to);
    for (int64_t first = 0; first < a->rows; first += GROUP) {
        const int64_t count = a->rows - first < GROUP ? a->rows - first : GROUP;
        for (int64_t i = 0; i < count; i++) {
            x[i] = (const char *)a->x + (first + i) * a->x_stride * size_of(DOT(m->type));
            ready[i] = a->ready ? (const char *)a->ready + (first + i) * ready_size : NULL;
        }
        Linear group = *a;
        group.out = (char *)a->out + first * m->rows * size_of(a->type);
        if (a->add) group.add = (const char *)a->add + first * a->add_stride * size_of(a->type);
        product(x, a->ready ? ready : NULL, count, m, from, to, panel, finish, &group);
    }
}

typedef struct {
    const void *x; /* [rows, width] */
    char *out;     /* [rows] of ready_bytes */
    Matrix matrix; /* that they will meet */
    int64_t rows, x_stride, type;
} Ready;

KERNEL(make_rows_ready, Ready) {
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    for (int64_t row = from; row < to; row++) {
        const void *x = (const char *)a->x + row * a->x_stride * size_of(a->type);
        make_ready(&a->matrix, x, (int)a->type, a->out + row * ready_bytes(&a->matrix));
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
    void *out;             /* [rows, width] */
    Matrix table;          /* [vocabulary, width] */
    int64_t rows;
} Embed;

KERNEL(embed, Embed) {
    const Matrix *m = &a->table;
    const int64_t bytes = m->columns * size_of(m->type);
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    for (int64_t row = from; row < to; row++) {
        void *out = (char *)a->out + row * bytes;
        if (m->kind == PLAIN)
            memcpy(out, m->codes + a->tokens[row] * bytes, bytes);
        else
            unpack(m, a->tokens[row], out, (int)m->type);
    }
}

/* Whether rows that meet a BF16 matrix stay BF16. */
const int64_t dot_bf16 = DOT(BF16) == BF16;

/* Whether the machine multiplies tiles of BF16 (AMX). The kernels do not, oneDNN does. */
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
const int64_t has_tiles = 1;
#else
const int64_t has_tiles = 0;
#endif
