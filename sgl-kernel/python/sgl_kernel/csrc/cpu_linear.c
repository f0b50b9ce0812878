/* Linear layers in float32 over packed weights.

   The weights' rows are outputs. PANEL of them stand side by side in a panel, input by input:
   panels[p][k][i] = weight[p * PANEL + i][k], rows beyond the end are 0. A tile of ROWS inputs by PANEL outputs is
   summed in registers, over k in order. Each output is therefore the same chain of additions in every batch. Where the
   lower half of every weight is 0, as of bfloat16, panels may be halved, see cpu_tile.h: the outputs' bits are the same.

   A gated layer's weight is two matrices, gate and up: after each panel of the gate's comes the same one of up's. The
   layer gives silu(gate) * up, or as gpt-oss has it (up + 1) * gate * sigmoid(alpha * gate), where gate is at most a
   limit and up between it and its negative. A tile of both is multiplied while it is in the core's cache.

   Matrices of one shape, of which each has inputs and outputs of its own, as the heads of attention have, are
   multiplied at once. */

#include "cpu_pool.h"
#include "cpu_tile.h"

/* Panels that are multiplied with one tile of rows after the other should stay in a core's second-level cache. */
#define GROUP_BYTES (384 << 10)
/* Inputs that are summed in one chain; the chains' sums are added. Shorter chains round less. */
#define BLOCK 256
/* Rows of a task. */
#define TASK_ROWS (40 * ROWS)
/* Rows that wait for panels from memory whatever is fetched, and tiles that are few. */
#define WAITING_ROWS 7
#define FEW_TILES 8

int64_t cpu_panel(void) { return PANEL; }

INLINE void tile(int rows, const float *x, int64_t x_stride, const float *panel, int halved, int64_t k,
                 const float *later, const float *bias, float *out, int64_t out_stride, int64_t cols) {
    vec total[ROWS][2];
    for (int r = 0; r < rows; r++)
        total[r][0] = total[r][1] = (vec){0};
    for (int64_t begin = 0; begin < k; begin += BLOCK) {
        int64_t end = k - begin < BLOCK ? k : begin + BLOCK;
        vec acc[ROWS][2];
        for (int r = 0; r < rows; r++)
            acc[r][0] = acc[r][1] = (vec){0};
        int64_t words = begin * ROW_WORDS(halved);
        add_product(rows, x + begin, x_stride, panel + words, halved, end - begin, later + words, acc);
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

/* later: as of `add_product`. */
static void any_tile(int rows, const float *x, int64_t x_stride, const float *panel, int halved, int64_t k,
                     const float *later, const float *bias, float *out, int64_t out_stride, int64_t cols) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        if (halved)                                                                                                    \
            tile(n, x, x_stride, panel, 1, k, later, bias, out, out_stride, cols);                                     \
        else                                                                                                           \
            tile(n, x, x_stride, panel, 0, k, later, bias, out, out_stride, cols);                                     \
        break;
    SWITCH_ROWS(rows, CASE)
#undef CASE
}

static void gated_tile(int rows, const float *x, int64_t x_stride, const float *panels, int halved, int64_t k,
                       const float *later, const float *gate_bias, const float *up_bias, const float *clamp,
                       float *out, int64_t out_stride, int64_t cols) {
    int64_t words = k * ROW_WORDS(halved);
    float gate[ROWS * PANEL] = {0}, up[ROWS * PANEL] = {0};
    any_tile(rows, x, x_stride, panels, halved, k, later, gate_bias, gate, PANEL, cols);
    any_tile(rows, x, x_stride, panels + words, halved, k, later + words, up_bias, up, PANEL, cols);
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < PANEL; i += LANES) {
            float *here = gate + r * PANEL + i;
            vec g = load(here), u = load(up + r * PANEL + i);
            if (clamp) {
                vec most = splat(clamp[1]);
                g = pick(g > most, most, g);
                u = pick(u > most, most, pick(u < -most, -most, u));
                store(here, g / (splat(1) + exp_of(splat(-clamp[0]) * g)) * (u + splat(1)));
            } else {
                store(here, g / (splat(1) + exp_of(-g)) * u);
            }
        }
        memcpy(out + r * out_stride, gate + r * PANEL, cols * sizeof *out);
    }
}

typedef struct {
    const float *x, *panels, *bias;
    float *out;
    int64_t m, k, x_stride, n, out_stride, group, num_groups;
    int halved, gated, threads;
    const float *clamp;
} linear_args;

/* Rows row .. end_row, tile t of a task, with panel p, of a gated layer with gate's and up's. The first tiles fetch
   panel `next`, each a line of every row of it, if there is one. */
static void multiply_tile(const linear_args *a, int64_t row, int64_t end_row, int64_t t, int64_t p, int64_t next) {
    int rows = (int)(end_row - row);
    int64_t n = a->n, col = p * PANEL, cols = n - col < PANEL ? n - col : PANEL;
    int64_t row_words = ROW_WORDS(a->halved), panel_words = a->k * row_words << a->gated;
    const float *x = a->x + row * a->x_stride, *panels = a->panels + p * panel_words, *later = panels;
    const float *bias = a->bias ? a->bias + col : NULL;
    float *out = a->out + row * a->out_stride + col;
    if (t * 16 < row_words && next * PANEL < n)
        later = a->panels + next * panel_words + t * 16;
    if (a->gated)
        gated_tile(rows, x, a->x_stride, panels, a->halved, a->k, later, bias, bias ? bias + n : NULL, a->clamp,
                   out, a->out_stride, cols);
    else
        any_tile(rows, x, a->x_stride, panels, a->halved, a->k, later, bias, out, a->out_stride, cols);
}

/* A group of panels for TASK_ROWS rows. Neighbouring tasks read neighbouring panels.

   Few rows are computed faster than panels come from memory: one panel after the other is multiplied with all of them,
   and the next one fetched meanwhile; behind the last it is the one that this thread probably begins with next. Many
   rows are multiplied with all panels of the group, tile by tile, so that a row is read once. */
static void multiply(const void *arguments, int64_t task) {
    const linear_args *a = arguments;
    int64_t num_panels = (a->n + PANEL - 1) / PANEL, row = task / a->num_groups * TASK_ROWS;
    int64_t first = task % a->num_groups * a->group, end = first + a->group;
    int64_t num_rows = a->m - row < TASK_ROWS ? a->m - row : TASK_ROWS, tiles = (num_rows + ROWS - 1) / ROWS;
    end = end < num_panels ? end : num_panels;
    int few = tiles <= FEW_TILES;
    for (int64_t i = 0; i < tiles * (end - first); i++) {
        int64_t t = few ? i % tiles : i / (end - first), p = first + (few ? i / tiles : i % (end - first));
        int64_t next = p + 1 < end ? p + 1 : first + a->threads * a->group;
        multiply_tile(a, row + num_rows * t / tiles, row + num_rows * (t + 1) / tiles, t, p,
                      few && num_rows > WAITING_ROWS ? next : num_panels);
    }
}

/* The tasks of each of `matrices`, and how many panels a task multiplies with. */
static int64_t cut(linear_args *a, int64_t matrices) {
    int64_t num_panels = (a->n + PANEL - 1) / PANEL, runs = (a->m + TASK_ROWS - 1) / TASK_ROWS;
    int64_t group = GROUP_BYTES / ((a->k * ROW_WORDS(a->halved) * sizeof(float) << a->gated) + 1);
    int64_t fair = (num_panels * runs * matrices + 8 * a->threads - 1) / (8 * a->threads);
    group = group < fair ? group : fair;
    a->group = group > 1 ? group : 1;
    a->num_groups = (num_panels + a->group - 1) / a->group;
    return runs * a->num_groups;
}

/* x: (m, k), rows x_stride apart; out: (m, n), contiguous; bias: NULL or (n,), of a gated layer the gate's, then
   up's. halved, gated: 0 or 1. clamp: NULL, or of a gated layer alpha and the limit. */
void cpu_linear(const float *x, int64_t m, int64_t k, int64_t x_stride, const float *panels, int64_t n,
                const float *bias, float *out, int halved, int gated, const float *clamp, int threads) {
    linear_args a = {x, panels, bias, out, m, k, x_stride, n, n, 0, 0, halved, gated, threads, clamp};
    int64_t tasks = cut(&a, 1);
    cpu_run(multiply, &a, tasks, threads);
}

typedef struct {
    linear_args of_first;
    int64_t x_head_stride, tasks;
} heads_args;

static void multiply_head(const void *arguments, int64_t task) {
    const heads_args *a = arguments;
    linear_args one = a->of_first;
    int64_t head = task / a->tasks, num_panels = (one.n + PANEL - 1) / PANEL;
    one.x += head * a->x_head_stride;
    one.panels += head * num_panels * one.k * ROW_WORDS(one.halved);
    one.out += head * one.n;
    multiply(&one, task % a->tasks);
}

/* Each head's inputs with its matrix. x: (m, heads, k), x_stride and x_head_stride floats apart; panels: of one matrix
   behind those of the other; out: (m, heads, n), contiguous. */
void cpu_linear_heads(const float *x, int64_t m, int64_t heads, int64_t k, int64_t x_stride, int64_t x_head_stride,
                      const float *panels, int64_t n, float *out, int halved, int threads) {
    heads_args a = {{x, panels, NULL, out, m, k, x_stride, n, heads * n, 0, 0, halved, 0, threads, NULL},
                    x_head_stride,
                    0};
    a.tasks = cut(&a.of_first, heads);
    cpu_run(multiply_head, &a, heads * a.tasks, threads);
}

typedef struct {
    const float *panels;
    const int64_t *index;
    float *out;
    int64_t k;
    int halved;
} rows_args;

static void copy_row(const void *arguments, int64_t i) {
    const rows_args *a = arguments;
    int64_t words = ROW_WORDS(a->halved), column = a->index[i] % PANEL;
    const float *from = a->panels + a->index[i] / PANEL * words * a->k + column % words;
    for (int64_t j = 0; j < a->k; j++) {
        __builtin_prefetch(from + (j + PANEL_AHEAD) * words);
        float each = from[j * words];
        if (a->halved) {
            uint32_t both;
            memcpy(&both, &each, sizeof both);
            both = column < LANES ? both << 16 : both & 0xFFFF0000;
            memcpy(&each, &both, sizeof each);
        }
        a->out[i * a->k + j] = each;
    }
}

/* Rows index[i] of the weight; out: (n, k). */
void cpu_rows(const float *panels, const int64_t *index, float *out, int64_t n, int64_t k, int halved, int threads) {
    rows_args a = {panels, index, out, k, halved};
    cpu_run(copy_row, &a, n, threads);
}
