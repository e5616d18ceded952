/* Stored matrices: plain ones, and codes with scales. */

#ifndef LEYDEN_MATRIX_H
#define LEYDEN_MATRIX_H

#include "kernels.h"

/* How the codes of a row lie; Python has the same list.

PLAIN   floats of the matrix's type
E4M3    8-bit floats
E2M1    4-bit floats, the even column in the low half of a byte
INT4    q + 8 in 4 bits, the even column in the low half of a byte
INT8    signed bytes
Q8_0    GGUF: an F16 scale and 32 signed bytes, 34 bytes together
Q4_0    GGUF: an F16 scale and 32 times q + 8, columns 0 to 15 in the low halves of 16 bytes, 16 to 31 in the high ones */
enum { PLAIN, E4M3, E2M1, INT4, Q8_0, Q4_0, INT8 };

/* Types of scales besides F32, BF16 and F16: E4M3, and E8M0, a power of two. */
enum { SCALE_E4M3 = 3, SCALE_E8M0 = 4 };

/* [rows, columns], or a stack of such. The value of a code is code * (scale * whole), rounded to `type`. */
typedef struct {
    const char *codes, *scales; /* scales [rows / tall, columns / wide], both rounded up, or null */
    const float *whole;         /* a scale for the matrix, [members] in a stack; or null */
    int64_t rows, columns, kind, type, scale_type, tall, wide;
} Matrix;

enum { MOST_SCALES = 2048 }; /* of a row */

/* Member e of a stack. */
Matrix member(const Matrix *stack, int64_t e);

/* Bytes of a row of codes. */
int64_t row_bytes(const Matrix *m);

/* Row `row` as `type`. */
void unpack(const Matrix *m, int64_t row, void *out, int type);

/* Products with codes as they are need rows of x in another form: `ready_bytes` for a row; 0: there is no such way.

For integer codes that is fixed point: x = step * q with 16 bits for q, split into bytes so that the machine's products
of bytes apply. For 8-bit floats x stays BF16, in another order. */
int64_t ready_bytes(const Matrix *m);
void make_ready(const Matrix *m, const void *x, int type, void *out);

/* out[t * stride + r] = x[t] . row `row` + r of m, for up to MOST_ROWS rows and MOST_TOKENS tokens made ready. */
enum { MOST_ROWS = 2, MOST_TOKENS = 4 };
void dots(const Matrix *m, int64_t row, int64_t rows, const void *const *x, int64_t tokens, float *out, int64_t stride);

#endif
