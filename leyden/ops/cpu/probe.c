/* How fast memory delivers: the ruler for everything that reads weights. */

#include "kernels.h"

typedef struct {
    const char *memory;
    int64_t *out; /* [threads]: so that nobody can leave the reading out */
    int64_t bytes;
} Probe;

KERNEL(read_all, Probe) {
    int64_t from, to;
    share(a->bytes, 4 * WIDTH, thread, threads, &from, &to);
    ivec seen[4] = {};
    for (int64_t i = from; i + 4 * WIDTH <= to; i += 4 * WIDTH)
        for (int j = 0; j < 4; j++) {
            ivec x;
            memcpy(&x, a->memory + i + j * WIDTH, sizeof x);
            seen[j] |= x;
        }
    a->out[thread] = (seen[0] | seen[1] | seen[2] | seen[3])[0];
}
