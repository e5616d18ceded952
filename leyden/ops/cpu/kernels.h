/* What every kernel is made of: stored types, vectors of floats, and a share of the work.

A kernel is a function of a struct of arguments, called by every thread of the team with its index. The fields of the
struct are 8 bytes each (pointers, int64_t, double), so that Python can write it without knowing C's padding. Kernels
allocate nothing and do not wait for each other: what one needs from another comes as a step of its own (see run.c).

Vectors are as wide as the machine's registers, by the vector extension of GCC and Clang; intrinsics appear only where
the extension has no word for an instruction. */

#ifndef LEYDEN_KERNELS_H
#define LEYDEN_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Defines a kernel and says how many bytes of arguments it takes. */
#define KERNEL(name, Args)                       \
    const int64_t name##_bytes = sizeof(Args);   \
    void name(const Args *a, int thread, __attribute__((unused)) int threads)

#define INLINE static inline __attribute__((always_inline))

/* The codes of stored types; Python has the same list. */
enum { F32, BF16, F16 };

/* Evaluates `call` where T is `type` as a constant, so that what is inlined there does not decide over and over. */
#define TYPED(type, call)                    \
    do {                                     \
        if ((type) == F32) {                 \
            enum { T = F32 };                \
            call;                            \
        } else if ((type) == BF16) {         \
            enum { T = BF16 };               \
            call;                            \
        } else {                             \
            enum { T = F16 };                \
            call;                            \
        }                                    \
    } while (0)

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
enum { LANES = WIDTH / 4 };

typedef float vec __attribute__((vector_size(WIDTH)));
typedef int32_t ivec __attribute__((vector_size(WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(WIDTH)));
typedef uint16_t half __attribute__((vector_size(WIDTH / 2)));

/* [*from, *to) is this thread's share of n things that are handed out `unit` at a time. */
INLINE void share(int64_t n, int64_t unit, int thread, int threads, int64_t *from, int64_t *to) {
    int64_t units = (n + unit - 1) / unit;
    *from = units * thread / threads * unit;
    *to = units * (thread + 1) / threads * unit;
    if (*to > n) *to = n;
}

/* Where the sequences of a batch are: row r has the tokens from starts[r] to starts[r + 1], and past[r] before them. */
typedef struct {
    const int32_t *starts, *past, *slots; /* slots null: no state is kept */
    int64_t count;
} Rows;

INLINE vec splat(float x) { return x - (vec){}; }

/* a where the mask is all ones, b where it is zero. */
INLINE vec pick(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

INLINE vec vmax(vec a, vec b) { return pick(a > b, a, b); }
INLINE vec vmin(vec a, vec b) { return pick(a < b, a, b); }

INLINE vec from_bf16(half x) {
#if WIDTH == 64
    return (vec)((uvec)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#elif defined(__aarch64__)
    return (vec)vshll_n_u16((uint16x4_t)x, 16);
#else
    return (vec)(__builtin_convertvector(x, uvec) << 16);
#endif
}

/* To nearest, ties to even, NaN to NaN; what is subnormal may become 0. */
INLINE half to_bf16(vec x) {
#if WIDTH == 64 && defined(__AVX512BF16__)
    return (half)_mm512_cvtneps_pbh(x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (half)vcvt_bf16_f32((float32x4_t)x);
#else
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec nan = (uvec)(x != x);
    uvec wide = (nan & 0x7fc0) | (~nan & rounded);
#if WIDTH == 64
    return (half)_mm512_cvtepi32_epi16((__m512i)wide);
#else
    return __builtin_convertvector(wide, half);
#endif
#endif
}

INLINE vec from_f16(half x) {
#if WIDTH == 64
    return _mm512_cvtph_ps((__m256i)x);
#elif WIDTH == 32 && defined(__F16C__)
    return _mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16((float16x4_t)x);
#elif defined(__FLT16_MANT_DIG__)
    vec out;
    for (int i = 0; i < LANES; i++) {
        _Float16 value;
        memcpy(&value, (const char *)&x + 2 * i, 2);
        out[i] = value;
    }
    return out;
#else
    return splat(NAN); /* Python does not send f16 to a build without it: see has_f16 */
#endif
}

INLINE half to_f16(vec x) {
#if WIDTH == 64
    return (half)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif WIDTH == 32 && defined(__F16C__)
    return (half)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    return (half)vcvt_f16_f32((float32x4_t)x);
#elif defined(__FLT16_MANT_DIG__)
    half out;
    for (int i = 0; i < LANES; i++) {
        _Float16 value = x[i];
        memcpy((char *)&out + 2 * i, &value, 2);
    }
    return out;
#else
    return (half){};
#endif
}

/* x without the bits that f16 has not; what is too large becomes the largest number. */
INLINE vec cut_to_f16(vec x) {
#if WIDTH == 64
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_ZERO));
#elif WIDTH == 32 && defined(__F16C__)
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_ZERO));
#else
    ivec below = 113 - (ivec)(((uvec)x >> 23) & 0xff); /* how far below the normal numbers */
    ivec bits = 13 + (below & (below > 0)), none = below > 10;
    uvec kept = (uvec)x & (~(uvec){} << (uvec)(bits & ~none));
    vec cut = (vec)((kept & ~(uvec)none) | ((uvec)x & 0x80000000));
    return vmin(vmax(cut, splat(-65504.0f)), splat(65504.0f));
#endif
}

INLINE int64_t size_of(int type) { return type == F32 ? 4 : 2; }

/* LANES elements of a stored type. */
INLINE vec load_all(const void *at, int type) {
    if (type == F32) {
        vec x;
        memcpy(&x, at, sizeof x);
        return x;
    }
    half x;
    memcpy(&x, at, sizeof x);
    return type == BF16 ? from_bf16(x) : from_f16(x);
}

/* Elements i, i + 1, ... of an array of `count` elements; those beyond its end are zero, and their memory untouched. */
INLINE vec load(const void *array, int64_t i, int64_t count, int type) {
    const char *at = (const char *)array + i * size_of(type);
    int64_t left = count < i ? 0 : count - i;
#if WIDTH == 64
    __mmask16 mask = _bzhi_u32(0xffff, left < LANES ? left : LANES);
    if (type == F32) return _mm512_maskz_loadu_ps(mask, at);
    half x = (half)_mm256_maskz_loadu_epi16(mask, at);
    return type == BF16 ? from_bf16(x) : from_f16(x);
#else
    if (left >= LANES) return load_all(at, type);
    vec x = {};
    memcpy(&x, at, size_of(type) * left);
    return type == F32 ? x : load_all(&x, type);
#endif
}

INLINE void store_all(vec x, void *at, int type) {
    if (type == F32) {
        memcpy(at, &x, sizeof x);
    } else {
        half narrow = type == BF16 ? to_bf16(x) : to_f16(x);
        memcpy(at, &narrow, sizeof narrow);
    }
}

INLINE void store(vec x, void *array, int64_t i, int64_t count, int type) {
    char *at = (char *)array + i * size_of(type);
    int64_t left = count < i ? 0 : count - i;
    half narrow = {};
    if (type != F32) narrow = type == BF16 ? to_bf16(x) : to_f16(x);
#if WIDTH == 64
    __mmask16 mask = _bzhi_u32(0xffff, left < LANES ? left : LANES);
    if (type == F32)
        _mm512_mask_storeu_ps(at, mask, x);
    else
        _mm256_mask_storeu_epi16(at, mask, (__m256i)narrow);
#else
    const void *bits = type == F32 ? (const void *)&x : (const void *)&narrow;
    if (left < LANES)
        memcpy(at, bits, size_of(type) * left);
    else
        memcpy(at, bits, size_of(type) * LANES);
#endif
}

INLINE float load_one(const void *array, int64_t i, int type) {
    if (type == F32) return ((const float *)array)[i];
    uint16_t narrow = ((const uint16_t *)array)[i];
    if (type == F16) return from_f16(narrow - (half){})[0];
    uint32_t bits = (uint32_t)narrow << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE void store_one(float x, void *array, int64_t i, int type) { store(splat(x), array, i, i + 1, type); }

/* What x becomes when it is stored as `type`. */
INLINE vec rounded(vec x, int type) {
    if (type == F32) return x;
    return type == BF16 ? from_bf16(to_bf16(x)) : from_f16(to_f16(x));
}

/* In the order of `sums`: within each 128 bits first, then what is two of these apart. */
INLINE float sum(vec x) {
#if WIDTH == 64
    x += (vec)_mm512_permute_ps(x, 0x4e);
    x += (vec)_mm512_permute_ps(x, 0xb1);
    x += (vec)_mm512_shuffle_f32x4(x, x, 0x4e);
    x += (vec)_mm512_shuffle_f32x4(x, x, 0xb1);
    return x[0];
#elif WIDTH == 32
    x += (vec)_mm256_permute_ps(x, 0x4e);
    x += (vec)_mm256_permute_ps(x, 0xb1);
    return x[0] + x[4];
#elif defined(__aarch64__)
    return vaddvq_f32((float32x4_t)x);
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

INLINE float maximum(vec x) {
#if WIDTH == 64
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

/* Lane i is the sum of x[i]. */
INLINE vec sums(const vec x[LANES]) {
#if WIDTH >= 32
#if WIDTH == 64
#define UNPACK(half, a, b) _mm512_unpack##half##_ps(a, b)
#define SHUFFLE(a, b, how) _mm512_shuffle_ps(a, b, how)
#else
#define UNPACK(half, a, b) _mm256_unpack##half##_ps(a, b)
#define SHUFFLE(a, b, how) _mm256_shuffle_ps(a, b, how)
#endif
    vec quarter[LANES / 4]; /* sums of four vectors within each 128 bits */
    for (int i = 0; i < LANES / 4; i++) {
        const vec *a = x + 4 * i;
        vec low = UNPACK(lo, a[0], a[1]) + UNPACK(hi, a[0], a[1]), high = UNPACK(lo, a[2], a[3]) + UNPACK(hi, a[2], a[3]);
        quarter[i] = SHUFFLE(low, high, 0x44) + SHUFFLE(low, high, 0xee);
    }
#undef UNPACK
#undef SHUFFLE
#endif
#if WIDTH == 64
#define SHUFFLE(a, b, how) _mm512_shuffle_f32x4(a, b, how)
    vec low = SHUFFLE(quarter[0], quarter[1], 0x44) + SHUFFLE(quarter[0], quarter[1], 0xee);
    vec high = SHUFFLE(quarter[2], quarter[3], 0x44) + SHUFFLE(quarter[2], quarter[3], 0xee);
    return SHUFFLE(low, high, 0x88) + SHUFFLE(low, high, 0xdd);
#undef SHUFFLE
#elif WIDTH == 32
    return _mm256_permute2f128_ps(quarter[0], quarter[1], 0x20) + _mm256_permute2f128_ps(quarter[0], quarter[1], 0x31);
#elif defined(__aarch64__)
    return (vec)vpaddq_f32(vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]), vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]));
#else
    vec out = {};
    for (int i = 0; i < LANES; i++) out[i] = sum(x[i]);
    return out;
#endif
}

/* e^x to 2 units in the last place; 0 below -87.3, e^88.7 above (no infinity). Range reduction and polynomial are those
of Cephes' expf (S. Moshier). */
INLINE vec vexp(vec x) {
    ivec tiny = x < -87.3f, nan = x != x;
    x = vmin(vmax(x, splat(-87.3f)), splat(88.7f));
    vec turns = x * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: what is left of it is a whole number */
    ivec n = (ivec)turns - (ivec)splat(12582912.0f);
    turns -= 12582912.0f;
    vec r = x - turns * 0.693359375f + turns * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec e = p * (vec)((n + 127) << 23);
    return pick(nan, x * splat(NAN), pick(tiny, (vec){}, e));
}

/* Natural logarithm of normal, positive, finite x to 2 units in the last place (Cephes' logf). */
INLINE vec vlog(vec x) {
    ivec bits = (ivec)x;
    ivec exponent = ((bits >> 23) & 0xff) - 126;
    vec m = (vec)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    ivec small = m < 0.70710678f;
    exponent += small; /* a mask is -1 */
    m = m + pick(small, m, (vec){}) - 1.0f;
    vec e = __builtin_convertvector(exponent, vec), square = m * m;
    vec p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * square - e * 2.12194440e-4f - 0.5f * square;
    return m + p + e * 0.693359375f;
}

INLINE vec silu(vec x) { return x / (1.0f + vexp(-x)); }

#endif
