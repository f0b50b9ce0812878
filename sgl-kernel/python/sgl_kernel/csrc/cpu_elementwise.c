/* A decoder's float32 work between its matrix products; elementwise/reference.py defines the results. */

#include "cpu_pool.h"
#include "cpu_vector.h"

/* Floats of a task, about. */
#define TASK_FLOATS 16384

/* Tasks that share rows, with the rows of a task. */
typedef struct {
    int64_t rows, per_task;
} shares;

static shares share(int64_t rows, int64_t floats) {
    int64_t per_task = TASK_FLOATS / (floats + 1) + 1;
    return (shares){rows, per_task};
}

static int64_t num_tasks(shares s) { return (s.rows + s.per_task - 1) / s.per_task; }

#define FOR_ROWS(s, task)                                                                                              \
    for (int64_t row = (task) * (s).per_task; row < ((task) + 1) * (s).per_task && row < (s).rows; row++)

typedef struct {
    shares rows;
    float *x;
    const float *update, *weight;
    float *out;
    int64_t d;
    float eps;
} rmsnorm_args;

static void rmsnorm(const void *arguments, int64_t task) {
    const rmsnorm_args *a = arguments;
    int64_t d = a->d;
    FOR_ROWS(a->rows, task) {
        float *mine = a->x + row * d, *to = a->out + row * d, squares;
        const float *update = a->update ? a->update + row * d : NULL, *weight = a->weight;
        vec acc = splat(0);
        int64_t i = 0;
        for (; i + LANES <= d; i += LANES) {
            vec each = load(mine + i);
            if (update) {
                each += load(update + i);
                store(mine + i, each);
            }
            acc += each * each;
        }
        squares = sum(acc);
        for (; i < d; i++) {
            if (update)
                mine[i] += update[i];
            squares += mine[i] * mine[i];
        }
        float factor = 1 / sqrtf(squares / d + a->eps);
        for (i = 0; i < d; i++)
            to[i] = mine[i] * factor * weight[i];
    }
}

/* The norm of x + update into out, and x + update into x; update: NULL for none. (n, d) each; weight: (d,). */
void cpu_rmsnorm(float *x, const float *update, const float *weight, float *out, int64_t n, int64_t d, float eps,
                 int threads) {
    rmsnorm_args a = {share(n, d), x, update, weight, out, d, eps};
    cpu_run(rmsnorm, &a, num_tasks(a.rows), threads);
}

typedef struct {
    shares rows;
    float *x;
    const int64_t *positions;
    const float *table;
    int64_t heads, d, row_stride, head_stride;
} rope_args;

static void rope(const void *arguments, int64_t task) {
    const rope_args *a = arguments;
    int64_t half = a->d / 2;
    FOR_ROWS(a->rows, task) {
        const float *cosines = a->table + a->positions[row] * a->d, *sines = cosines + half;
        for (int64_t head = 0; head < a->heads; head++) {
            float *restrict first = a->x + row * a->row_stride + head * a->head_stride, *restrict second = first + half;
            for (int64_t i = 0; i < half; i++) {
                float p = first[i], q = second[i];
                first[i] = p * cosines[i] - q * sines[i];
                second[i] = q * cosines[i] + p * sines[i];
            }
        }
    }
}

/* Rotate the first half of each head with its second half, in place. x: (n, heads, d), rows row_stride and heads
   head_stride floats apart. table: (positions, d), cosines, then sines. */
void cpu_rope(float *x, const int64_t *positions, const float *table, int64_t n, int64_t heads, int64_t d,
              int64_t row_stride, int64_t head_stride, int threads) {
    rope_args a = {share(n, heads * d), x, positions, table, heads, d, row_stride, head_stride};
    cpu_run(rope, &a, num_tasks(a.rows), threads);
}

/* Row i of values to slot loc[i], which is slot loc[i] % page_size of its page. Rows of d floats: value_stride apart, in a
   page slot_stride apart, and pages page_stride apart, in floats. */
void cpu_store_rows(const float *values, const int64_t *loc, float *pages, int64_t n, int64_t d, int64_t value_stride,
                    int64_t page_size, int64_t page_stride, int64_t slot_stride) {
    for (int64_t i = 0; i < n; i++) {
        float *slot = pages + loc[i] / page_size * page_stride + loc[i] % page_size * slot_stride;
        memcpy(slot, values + i * value_stride, d * sizeof *values);
    }
}
