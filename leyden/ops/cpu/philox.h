/* Random words that depend on nothing but a key and a counter. */

#ifndef LEYDEN_PHILOX_H
#define LEYDEN_PHILOX_H

#include "kernels.h"

/* High and low words of a * b. */
INLINE void multiply(uvec a, uint32_t b, uvec *high, uvec *low) {
    *low = a * b;
#if WIDTH == 64
    __m512i factor = _mm512_set1_epi64(b);
    __m512i even = _mm512_mul_epu32((__m512i)a, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    *high = (uvec)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#else
    for (int i = 0; i < LANES; i++) (*high)[i] = (uint32_t)((uint64_t)a[i] * b >> 32);
#endif
}

/* Philox 4x32, see the reference: the counters become random words. */
INLINE void philox(uvec c[4], uint64_t key, int64_t rounds) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int64_t round = 0; round < rounds; round++) {
        uvec high0, low0, high1, low1;
        multiply(c[0], 0xD2511F53, &high0, &low0);
        multiply(c[2], 0xCD9E8D57, &high1, &low1);
        c[0] = high1 ^ c[1] ^ k0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1;
        c[3] = low0;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

#endif
