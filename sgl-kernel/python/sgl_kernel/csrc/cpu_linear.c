/* Linear layers in float32 over packed weights.

   The weights' rows are outputs. PANEL of them stand side by side in a panel, input by input:
   panels[p][k][i] = weight[p * PANEL + i][k], rows beyond the end are 0. A tile of ROWS inputs by PANEL outputs is
   summed in registers, over k in order. Each output is therefore the same chain of additions in every batch. */

#include "cpu_pool.h"
#include "cpu_tile.h"

/* Panels that are multiplied with one tile of rows after the other should stay in a core's second-level cache. */
#define GROUP_BYTES (192 << 10)
/* Inputs that are summed in one chain; the chains' sums are added. Shorter chains round less. */
#define BLOCK 256
/* Rows of a task. */
#define TASK_ROWS (40 * ROWS)

int64_t cpu_panel(void) { return PANEL; }

INLINE void tile(int rows, const float *x, int64_t x_stride, const float *panel, int64_t k, const float *bias,
                 float *out, int64_t out_stride, int64_t cols) {
    vec total[ROWS][2];
    for (int r = 0; r < rows; r++)
        total[r][0] = total[r][1] = (vec){0};
    for (int64_t begin = 0; begin < k; begin += BLOCK) {
        int64_t end = k - begin < BLOCK ? k : begin + BLOCK;
        vec acc[ROWS][2];
        for (int r = 0; r < rows; r++)
            acc[r][0] = acc[r][1] = (vec){0};
        add_product(rows, x + begin, x_stride, panel + begin * PANEL, end - begin, acc);
        for (int r = 0; r < rows; r++)
            total[r][0] += acc[r][0], total[r][1] += acc[r][1];
    }
    float last[PANEL];
    for (int r = 0; r < rows; r++) {
        if (bias) {
            if (cols == PANEL) {
                total[r][0] += load(bias), total[r][1] += load(bias + LANES);
            } else {
                memset(last, 0, sizeof last);
                memcpy(last, bias, cols * sizeof *bias);
                total[r][0] += load(last), total[r][1] += load(last + LANES);
            }
        }
        if (cols == PANEL) {
            store(out + r * out_stride, total[r][0]);
            store(out + r * out_stride + LANES, total[r][1]);
        } else {
            store(last, total[r][0]);
            store(last + LANES, total[r][1]);
            memcpy(out + r * out_stride, last, cols * sizeof *out);
        }
    }
}

static void any_tile(int rows, const float *x, int64_t x_stride, const float *panel, int64_t k, const float *bias,
                     float *out, int64_t out_stride, int64_t cols) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        tile(n, x, x_stride, panel, k, bias, out, out_stride, cols);                                                   \
        break;
    SWITCH_ROWS(rows, CASE)
#undef CASE
}

typedef struct {
    const float *x, *panels, *bias;
    float *out;
    int64_t m, k, x_stride, n, group, num_groups;
} linear_args;

/* A group of panels for TASK_ROWS rows. Neighbouring tasks read neighbouring panels. */
static void multiply(const void *arguments, int64_t task) {
    const linear_args *a = arguments;
    int64_t num_panels = (a->n + PANEL - 1) / PANEL, panel_floats = a->k * PANEL, n = a->n;
    int64_t row = task / a->num_groups * TASK_ROWS, end_row = row + TASK_ROWS;
    int64_t first = task % a->num_groups * a->group, end = first + a->group;
    end_row = end_row < a->m ? end_row : a->m;
    end = end < num_panels ? end : num_panels;
    for (; row < end_row; row += ROWS) {
        int rows = end_row - row < ROWS ? (int)(end_row - row) : ROWS;
        for (int64_t p = first; p < end; p++) {
            int64_t col = p * PANEL, cols = n - col < PANEL ? n - col : PANEL;
            any_tile(rows, a->x + row * a->x_stride, a->x_stride, a->panels + p * panel_floats, a->k,
                     a->bias ? a->bias + col : NULL, a->out + row * n + col, n, cols);
        }
    }
}

/* x: (m, k), rows x_stride apart; out: (m, n), contiguous; bias: (n,) or NULL. */
void cpu_linear(const float *x, int64_t m, int64_t k, int64_t x_stride, const float *panels, int64_t n,
                const float *bias, float *out, int threads) {
    int64_t num_panels = (n + PANEL - 1) / PANEL, group = GROUP_BYTES / (k * PANEL * sizeof(float) + 1);
    int64_t fair = (num_panels + 8 * threads - 1) / (8 * threads);
    group = group < fair ? group : fair;
    group = group > 1 ? group : 1;
    linear_args a = {x, panels, bias, out, m, k, x_stride, n, group, (num_panels + group - 1) / group};
    cpu_run(multiply, &a, (m + TASK_ROWS - 1) / TASK_ROWS * a.num_groups, threads);
}
