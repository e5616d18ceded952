/* Rows of drafts: what a step begins with, what of it is kept, and what a drafter starts from. */

#include "kernels.h"

typedef struct {
    const int32_t *slots;     /* [rows] */
    const int64_t *last;      /* [slots] */
    const int64_t *drafts;    /* [slots, width] */
    const int32_t *committed; /* [slots] */
    int64_t *tokens;          /* [rows, count + 1] */
    int32_t *past;            /* [rows] */
    int32_t *positions;       /* [rows, count + 1]: of the tokens */
    int64_t *places;          /* the same: of what is sampled behind each, positions + 1 */
    int64_t rows, count, width;
} BeginDrafts;

KERNEL(begin_drafts, BeginDrafts) {
    if (thread) return;
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t slot = a->slots[r], first = r * (a->count + 1);
        a->past[r] = a->committed[slot];
        for (int64_t i = 0; i <= a->count; i++) {
            int64_t token = i ? a->drafts[slot * a->width + i - 1] : a->last[slot];
            a->tokens[first + i] = token < 0 ? 0 : token;
            a->positions[first + i] = a->past[r] + i;
            a->places[first + i] = a->past[r] + i + 1;
        }
    }
}

typedef struct {
    const int64_t *drawn;     /* [rows, count + 1] */
    const int64_t *guesses;   /* [rows, count] */
    const int64_t *before;    /* [rows]: the token before the first of `drawn` */
    const int64_t *positions; /* [rows]: of the first of `drawn` */
    const int64_t *stops;     /* [rows, stop_count] */
    const int64_t *open_at;   /* [rows] */
    int64_t *kept;            /* [rows, count + 1]: -1 behind the kept ones */
    int32_t *counts;          /* [rows]: how many are kept */
    int64_t *newest;          /* [rows]: the last of them */
    int32_t *ends, *at;       /* [rows]: its index in `drawn`, its position */
    int64_t rows, count, stop_count, guess_stride, position_stride;
} Accept;

static int stops(const Accept *a, int64_t row, int64_t token, int64_t position) {
    if (position < a->open_at[row]) return 0;
    for (int64_t i = 0; i < a->stop_count; i++)
        if (a->stops[row * a->stop_count + i] == token) return 1;
    return 0;
}

KERNEL(accept, Accept) {
    if (thread) return;
    for (int64_t r = 0; r < a->rows; r++) {
        const int64_t *drawn = a->drawn + r * (a->count + 1), *guesses = a->guesses + r * a->guess_stride;
        int64_t first = a->positions[r * a->position_stride], n = 0;
        if (!stops(a, r, a->before[r], first - 1))
            while (n < a->count && drawn[n] == guesses[n] && !stops(a, r, drawn[n], first + n)) n++;
        for (int64_t i = 0; i <= a->count; i++) a->kept[r * (a->count + 1) + i] = i <= n ? drawn[i] : -1;
        a->counts[r] = n + 1;
        a->newest[r] = drawn[n];
        a->ends[r] = r * (a->count + 1) + n;
        a->at[r] = first + n;
    }
}

typedef struct {
    const int64_t *anchors; /* [count] */
    const int32_t *places;  /* [count] */
    int64_t *tokens;        /* [count, rows] */
    int32_t *positions;     /* [count, rows] */
    int32_t *starts;        /* [count + 1] */
    int64_t count, rows, mask;
} BeginBlock;

KERNEL(begin_block, BeginBlock) {
    if (thread) return;
    for (int64_t r = 0; r < a->count; r++)
        for (int64_t i = 0; i < a->rows; i++) {
            a->tokens[r * a->rows + i] = i ? a->mask : a->anchors[r];
            a->positions[r * a->rows + i] = a->places[r] + i;
        }
    for (int64_t r = 0; r <= a->count; r++) a->starts[r] = r * a->rows;
}

typedef struct {
    const int32_t *places; /* [rows] */
    void *out;             /* [count, rows], 8 or 4 bytes each */
    int64_t rows, count, wide;
} Ahead;

KERNEL(ahead, Ahead) {
    if (thread) return;
    for (int64_t i = 0; i < a->count; i++)
        for (int64_t r = 0; r < a->rows; r++) {
            if (a->wide)
                ((int64_t *)a->out)[i * a->rows + r] = a->places[r] + i;
            else
                ((int32_t *)a->out)[i * a->rows + r] = a->places[r] + i;
        }
}

typedef struct {
    const char *from; /* [rows] of `bytes` */
    char *to;         /* the same */
    int64_t rows, bytes, from_stride, to_stride;
} Columns;

KERNEL(columns, Columns) {
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    for (int64_t r = from; r < to; r++) memcpy(a->to + r * a->to_stride, a->from + r * a->from_stride, a->bytes);
}
