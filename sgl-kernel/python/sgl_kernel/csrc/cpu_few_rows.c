/* Products of a few rows in bfloat16 with a matrix as it is, (n, k) row by row: as fast as it is read.

   A word of a row of the matrix has two of its numbers, of an even place in the lower half and of an odd one in the upper
   half. x is laid out alike before: for each 2 * LANES places the even ones, then the odd ones, in float32. Sums are in
   float32, of as many chains as there are lanes. */

#include "cpu_pool.h"
#include "cpu_vector.h"

#include <stdlib.h>

/* Outputs and rows of a tile, whose sums are in registers. */
#define OUTPUTS 4
#define ROWS 4
/* Outputs of a task. */
#define TASK_OUTPUTS 64
#define PLACES (2 * LANES)

typedef struct {
    const float *x;
    const uint16_t *weight, *bias;
    uint16_t *out;
    int64_t m, k, n;
} few_rows_args;

INLINE float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* To the nearest, of two equally near ones to the even one. */
INLINE uint16_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x)
        return bits >> 16 | 0x40;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

/* Fetches the next tile's outputs meanwhile. outputs, rows: constants where this is inlined. */
INLINE void tile(const few_rows_args *a, int64_t row, int64_t output, int outputs, int rows) {
    vec acc[OUTPUTS * ROWS];
    for (int i = 0; i < OUTPUTS * ROWS; i++)
        acc[i] = (vec){0};
    const float *x = a->x + row * a->k;
    const uint16_t *weight = a->weight + output * a->k;
    for (int64_t i = 0; i < a->k; i += PLACES) {
        vec even[ROWS], odd[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const float *from = x + r * a->k + i;
            even[r] = load(from);
            odd[r] = load(from + LANES);
        }
#pragma GCC unroll 4
        for (int j = 0; j < outputs; j++) {
            const uint16_t *from = weight + j * a->k + i;
            /* Into the second-level cache. */
            __builtin_prefetch(from + OUTPUTS * a->k, 0, 2);
            ivec both;
            memcpy(&both, from, sizeof both);
            vec low = (vec)(both << 16), high = (vec)(both & (int32_t)0xFFFF0000);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                acc[j * ROWS + r] += low * even[r];
                acc[j * ROWS + r] += high * odd[r];
            }
        }
    }
    for (int j = 0; j < outputs; j++)
        for (int r = 0; r < rows; r++) {
            float total = sum(acc[j * ROWS + r]);
            if (a->bias)
                total += widened(a->bias[output + j]);
            a->out[(row + r) * a->n + output + j] = rounded(total);
        }
}

static void multiply(const void *arguments, int64_t task) {
    const few_rows_args *a = arguments;
    int64_t first = task * TASK_OUTPUTS, end = first + TASK_OUTPUTS < a->n ? first + TASK_OUTPUTS : a->n;
    for (int64_t output = first; output < end; output += OUTPUTS)
        for (int64_t row = 0; row < a->m; row += ROWS) {
            int rows = a->m - row < ROWS ? (int)(a->m - row) : ROWS;
            if (end - output < OUTPUTS) {
                for (int64_t one = output; one < end; one++)
                    for (int64_t r = row; r < row + rows; r++)
                        tile(a, r, one, 1, 1);
                continue;
            }
            switch (rows) {
            case 1:
                tile(a, row, output, OUTPUTS, 1);
                break;
            case 2:
                tile(a, row, output, OUTPUTS, 2);
                break;
            case 3:
                tile(a, row, output, OUTPUTS, 3);
                break;
            default:
                tile(a, row, output, OUTPUTS, ROWS);
            }
        }
}

/* All in bfloat16. x: (m, k), rows x_stride apart, k a multiple of PLACES; weight: (n, k), out: (m, n), contiguous; bias:
   NULL or (n,). Returns 0, or -1 where there is no memory. */
int cpu_few_rows(const uint16_t *x, int64_t m, int64_t k, int64_t x_stride, const uint16_t *weight, int64_t n,
                 const uint16_t *bias, uint16_t *out, int threads) {
    float *wide = malloc((m * k + 1) * sizeof *wide);
    if (!wide)
        return -1;
    for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < k; i++)
            wide[row * k + i / PLACES * PLACES + i % 2 * LANES + i % PLACES / 2] = widened(x[row * x_stride + i]);
    few_rows_args a = {wide, weight, bias, out, m, k, n};
    cpu_run(multiply, &a, (n + TASK_OUTPUTS - 1) / TASK_OUTPUTS, threads);
    free(wide);
    return 0;
}
