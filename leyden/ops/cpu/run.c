/* Programs: steps that the whole team of threads runs one after the other.

A program is a run of 8-byte words. Each step is the kernel's address, the size of its arguments in words, and the
arguments. */

#include "kernels.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

typedef void Kernel(const void *arguments, int thread, int threads);

static void run(const uint64_t *word, const uint64_t *end, int thread, int threads) {
    while (word < end) {
        ((Kernel *)(uintptr_t)word[0])(word + 2, thread, threads);
        word += 2 + word[1];
#if defined(_OPENMP)
        if (threads > 1 && word < end) {
#pragma omp barrier
        }
#endif
    }
}

/* The team outlives the call: OpenMP keeps its threads, and they spin for a while before they sleep. */
void run_program(const uint64_t *program, int64_t words, int threads) {
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        run(program, program + words, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    run(program, program + words, 0, 1);
}

#if defined(__FLT16_MANT_DIG__) || defined(__F16C__)
const int64_t has_f16 = 1;
#else
const int64_t has_f16 = 0;
#endif
