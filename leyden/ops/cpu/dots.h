/* What the products with codes as they are have in common, whatever the machine. */

#ifndef LEYDEN_DOTS_H
#define LEYDEN_DOTS_H

#include "matrix.h"

enum {
    CHUNK = 128, /* columns; sums of so many products fit in 32 bits: 255 * 127 * 256 * 128 */
    LEAST = 16,  /* columns of the narrowest groups */
};

/* What a row of x made ready has after its head, for Python: bytes for CHUNK columns, where codes are multiplied in fixed
point; bytes for 64 columns where they are 8-bit floats. 0: codes are not taken as they are. */
extern const int64_t fixed_bytes, floats_bytes;

/* Whether a byte has codes of two columns. */
INLINE int packed(int64_t kind) { return kind == E2M1 || kind == INT4 || kind == Q4_0; }

INLINE int64_t groups_of(const Matrix *m) { return m->scales ? (m->columns + m->wide - 1) / m->wide : 1; }

/* Columns that have one scale, and sums of their own. */
INLINE int64_t group_of(const Matrix *m) {
    const int64_t wide = m->kind == Q8_0 || m->kind == Q4_0 ? Q_RUN : m->scales ? m->wide : m->columns;
    return wide > CHUNK ? CHUNK : wide < LEAST ? LEAST : wide;
}

#endif
