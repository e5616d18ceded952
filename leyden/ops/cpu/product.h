/* Products of a few rows of x with the rows of a stored matrix: the one loop in which a model spends its time.

A matrix has values of F32 or BF16. Its partners are rows of DOT(type): F32 for F32; for BF16 also BF16 where the
machine multiplies pairs of them, else F32. */

#ifndef LEYDEN_PRODUCT_H
#define LEYDEN_PRODUCT_H

#include "matrix.h"

#if (WIDTH == 64 && defined(__AVX512BF16__)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define DOT(type) (type)
#else
#define DOT(type) F32
#endif

/* Takes the products of token `m` with rows n, n + 1, ... of the matrix: `count` sums. */
typedef void Finish(const void *context, int64_t m, int64_t n, const float *sums, int64_t count);

enum { PANEL = 24 }; /* rows of the matrix that are unpacked together, if they are codes */

/* Rows x[0 .. count) of DOT(type) times rows [from, to) of m; each sum goes to `finish` once.

Sums are taken in the same order however many tokens there are: a token's result does not depend on those beside it.
But MOST_TOKENS and fewer meet codes as they are, if their rows have been made ready for that (`ready` not null; see
`dots`). `panel`: room for PANEL rows of `type`. */
void product(const void *const *x, const void *const *ready, int64_t count, const Matrix *m, int64_t from, int64_t to,
             void *panel, Finish *finish, const void *context);

#endif
