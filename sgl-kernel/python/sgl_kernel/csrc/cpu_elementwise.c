/* A decoder's float32 work between its matrix products; elementwise/reference.py defines the results. Rows are shared
   among threads where there is enough work for it. */

#include <omp.h>

#include "cpu_vector.h"

/* Floats below which one thread is faster. */
#define PARALLEL_FROM 65536

/* The norm of x + update into out, and x + update into x; update: NULL for none. (n, d) each; weight: (d,). */
void cpu_rmsnorm(float *x, const float *update, const float *weight, float *out, int64_t n, int64_t d, float eps,
                 int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * d >= PARALLEL_FROM)
    for (int64_t row = 0; row < n; row++) {
        float *mine = x + row * d, *to = out + row * d, squares;
        vec acc = splat(0);
        int64_t i = 0;
        for (; i + LANES <= d; i += LANES) {
            vec each = load(mine + i);
            if (update) {
                each += load(update + row * d + i);
                store(mine + i, each);
            }
            acc += each * each;
        }
        squares = sum(acc);
        for (; i < d; i++) {
            if (update)
                mine[i] += update[row * d + i];
            squares += mine[i] * mine[i];
        }
        float factor = 1 / sqrtf(squares / d + eps);
        for (i = 0; i < d; i++)
            to[i] = mine[i] * factor * weight[i];
    }
}

/* x: (n, 2 d), gate and up side by side; out: (n, d). */
void cpu_silu_and_mul(const float *x, float *out, int64_t n, int64_t d, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * d >= PARALLEL_FROM)
    for (int64_t row = 0; row < n; row++) {
        const float *gate = x + row * 2 * d, *up = gate + d;
        float *to = out + row * d;
        for (int64_t i = 0; i < d; i += LANES) {
            float lane[2][LANES] = {{0}};
            int64_t some = d - i < LANES ? d - i : LANES;
            if (some < LANES) {
                memcpy(lane[0], gate + i, some * sizeof(float));
                memcpy(lane[1], up + i, some * sizeof(float));
            }
            vec g = load(some < LANES ? lane[0] : gate + i), u = load(some < LANES ? lane[1] : up + i);
            vec result = g / (splat(1) + exp_of(-g)) * u;
            if (some < LANES) {
                store(lane[0], result);
                memcpy(to + i, lane[0], some * sizeof(float));
            } else {
                store(to + i, result);
            }
        }
    }
}

/* Rotate the first half of each head with its second half, in place. x: (n, heads, d), rows row_stride and heads
   head_stride floats apart. table: (positions, d), cosines, then sines. */
void cpu_rope(float *x, const int64_t *positions, const float *table, int64_t n, int64_t heads, int64_t d,
              int64_t row_stride, int64_t head_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * heads * d >= PARALLEL_FROM)
    for (int64_t row = 0; row < n; row++) {
        const float *cosines = table + positions[row] * d, *sines = cosines + d / 2;
        for (int64_t head = 0; head < heads; head++) {
            float *first = x + row * row_stride + head * head_stride, *second = first + d / 2;
            for (int64_t i = 0; i < d / 2; i++) {
                float a = first[i], b = second[i];
                first[i] = a * cosines[i] - b * sines[i];
                second[i] = b * cosines[i] + a * sines[i];
            }
        }
    }
}

/* Row i of values to slot loc[i]. Rows of d floats, value_stride and slot_stride floats apart. */
void cpu_store_rows(const float *values, const int64_t *loc, float *slots, int64_t n, int64_t d, int64_t value_stride,
                    int64_t slot_stride) {
    for (int64_t i = 0; i < n; i++)
        memcpy(slots + loc[i] * slot_stride, values + i * value_stride, d * sizeof *values);
}
