/* RMS norms. */

#include "kernels.h"

typedef struct {
    const void *x, *residual, *weight; /* [rows, width], the same or null, [width] */
    void *total, *out;                 /* [rows, width]: the sum, if there is a residual, and its norm */
    int64_t rows, width, type, weight_type;
    double eps;
} Norm;

/* out = weight * t / sqrt(mean(t^2) + eps), t = x + residual rounded to its type. */
INLINE void norm_rows(const Norm *a, const int type, int thread, int threads) {
    const int weight_type = a->weight_type;
    const int64_t width = a->width;
    int64_t from, to;
    share(a->rows, 1, thread, threads, &from, &to);
    for (int64_t row = from; row < to; row++) {
        int64_t offset = row * width * size_of(type);
        const void *x = (const char *)a->x + offset;
        vec squares = {};
        for (int64_t i = 0; i < width; i += LANES) {
            vec t = load(x, i, width, type);
            if (a->residual) {
                t = rounded(t + load((const char *)a->residual + offset, i, width, type), type);
                store(t, (char *)a->total + offset, i, width, type);
            }
            squares += t * t;
        }
        if (a->residual) x = (const char *)a->total + offset;
        float scale = 1.0f / sqrtf(sum(squares) / width + (float)a->eps);
        for (int64_t i = 0; i < width; i += LANES) {
            vec normed = load(x, i, width, type) * scale * load(a->weight, i, width, weight_type);
            store(normed, (char *)a->out + offset, i, width, type);
        }
    }
}

KERNEL(rms_norm, Norm) { TYPED(a->type, norm_rows(a, T, thread, threads)); }

typedef struct {
    const void *y, *z, *weight; /* [rows, width] with strides (elements between rows), [width] */
    void *out;                  /* [rows, width] */
    int64_t rows, width, y_stride, z_stride, groups, type, weight_type;
    double eps;
} GatedNorm;

/* g = y * silu(z); each of the `groups` blocks of a row of g is normalised alone. */
INLINE void gated_groups(const GatedNorm *a, const int type, int thread, int threads) {
    const int weight_type = a->weight_type;
    const int64_t width = a->width / a->groups, bytes = size_of(type);
    int64_t from, to;
    share(a->rows * a->groups, 1, thread, threads, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        int64_t row = unit / a->groups, first = unit % a->groups * width;
        const void *y = (const char *)a->y + (row * a->y_stride + first) * bytes;
        const void *z = (const char *)a->z + (row * a->z_stride + first) * bytes;
        const void *weight = (const char *)a->weight + first * size_of(weight_type);
        void *out = (char *)a->out + (row * a->width + first) * bytes;
        vec squares = {};
        for (int64_t i = 0; i < width; i += LANES) {
            vec g = load(y, i, width, type) * silu(load(z, i, width, type));
            squares += g * g;
        }
        float scale = 1.0f / sqrtf(sum(squares) / width + (float)a->eps);
        for (int64_t i = 0; i < width; i += LANES) {
            vec g = load(y, i, width, type) * silu(load(z, i, width, type));
            store(g * scale * load(weight, i, width, weight_type), out, i, width, type);
        }
    }
}

KERNEL(gated_norm, GatedNorm) { TYPED(a->type, gated_groups(a, T, thread, threads)); }
