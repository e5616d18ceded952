/* Tables with a row per slot. */

#include "kernels.h"

typedef struct {
    const int32_t *slots;     /* [rows] */
    const int64_t *last;      /* [slots] */
    const int32_t *committed; /* [slots] */
    int64_t *tokens;          /* [rows] */
    int32_t *past;            /* [rows] */
    int64_t *positions;       /* [rows]: past + 1 */
    int64_t rows;
} Begin;

KERNEL(begin, Begin) {
    if (thread) return;
    for (int64_t r = 0; r < a->rows; r++) {
        a->tokens[r] = a->last[a->slots[r]];
        a->past[r] = a->committed[a->slots[r]];
        a->positions[r] = a->past[r] + 1;
    }
}

typedef struct {
    const char *from;     /* [rows or slots] of `bytes` */
    char *to;             /* [slots or rows] of `bytes` */
    const int32_t *slots; /* [rows] */
    int64_t rows, bytes, put;
} Move;

/* to[r] = from[slots[r]], or to[slots[r]] = from[r] */
KERNEL(move, Move) {
    if (thread) return;
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t slot = a->slots[r];
        memcpy(a->to + (a->put ? slot : r) * a->bytes, a->from + (a->put ? r : slot) * a->bytes, a->bytes);
    }
}
