/* Attention of requests with several queries over paged keys and values in float32 or bfloat16.

   The query heads that share a KV head, of all queries of a request, are the rows of one matrix, query by query. A
   task is a run of its rows. Blocks of keys and values are copied out of the pages into panels, which the rows are
   multiplied with while they are in the core's cache. A row's blocks begin at multiples of BLOCK from the request's
   first key, and its sums run over them in order: its bits depend on its keys alone, neither on the chunk of the prompt
   it is computed in, nor on the rest of the batch, nor on the frames, nor on the number of threads. Only a value that
   is not finite reaches queries of its block that do not see it. */

#include "cpu_attention.h"
#include "cpu_tile.h"

/* Rows of a task, unless there are too few tasks for the threads, or its memory would be more than TASK_FLOATS. */
#define TASK_ROWS 384
#define LEAST_TASK_ROWS 48

/* The rows of a task and where they stand. */
typedef struct {
    const attention_args *args;
    /* The request, its KV head, and the first of the matrix's rows. */
    int64_t req, kv_head, first;
    int rows;
} task_rows;

/* A row of values in panels. */
INLINE int64_t panels_width(const attention_args *a) { return (a->value_dim + PANEL - 1) / PANEL * PANEL; }

/* The end of the keys that row r sees. */
INLINE int64_t visible(const task_rows *t, int r) {
    const attention_args *a = t->args;
    int64_t keys = a->sees[t->req] + (t->first + r) / (a->num_heads / a->num_kv_heads);
    return keys < a->kv_lens[t->req] ? keys : a->kv_lens[t->req];
}

/* Keys before a row's first one. */
INLINE int64_t hidden(const task_rows *t, int r) {
    int64_t end = visible(t, r), window = t->args->window;
    return window && end > window ? end - window : 0;
}

/* Row r's place in an array of (rows, num_heads). */
INLINE int64_t place(const task_rows *t, int r) {
    const attention_args *a = t->args;
    int64_t group = a->num_heads / a->num_kv_heads, row = t->first + r;
    return (a->rows[t->req] + row / group) * a->num_heads + t->kv_head * group + row % group;
}

/* Scores of a tile with a block of keys, their softmax, and the sum of its values, on top of what the blocks before
   gave. q: (rows, d), out: (rows, width), keys: (BLOCK / PANEL, d, PANEL), values: (width / PANEL, BLOCK, PANEL).
   Row r sees keys from[r] .. to[r] of the n. stats: (rows, 2), greatest score and sum. */
INLINE void attend_tile(int rows, const float *q, int64_t d, const float *keys, const float *values, int n,
                        const int *from, const int *to, int64_t width, float *stats, float *out) {
    float scores[ROWS][BLOCK], shrink[ROWS];
    vec acc[ROWS][2];
    for (int j = 0; j < n; j += PANEL) {
        for (int r = 0; r < rows; r++)
            acc[r][0] = acc[r][1] = (vec){0};
        add_product(rows, q, d, keys + j * d, 0, d, NULL, acc);
        for (int r = 0; r < rows; r++)
            store(scores[r] + j, acc[r][0]), store(scores[r] + j + LANES, acc[r][1]);
    }
    for (int r = 0; r < rows; r++) {
        if (from[r] >= to[r]) {
            memset(scores[r], 0, sizeof scores[r]);
            shrink[r] = 1;
            continue;
        }
        for (int j = 0; j < from[r]; j++)
            scores[r][j] = -INFINITY;
        shrink[r] = soften(scores[r], to[r], stats + 2 * r, stats + 2 * r + 1);
    }
    for (int64_t i = 0; i < width; i += PANEL) {
        for (int r = 0; r < rows; r++) {
            acc[r][0] = load(out + r * width + i) * splat(shrink[r]);
            acc[r][1] = load(out + r * width + i + LANES) * splat(shrink[r]);
        }
        add_product(rows, scores[0], BLOCK, values + i * BLOCK, 0, n, NULL, acc);
        for (int r = 0; r < rows; r++)
            store(out + r * width + i, acc[r][0]), store(out + r * width + i + LANES, acc[r][1]);
    }
}

static void any_attend_tile(int rows, const float *q, int64_t d, const float *keys, const float *values, int n,
                            const int *from, const int *to, int64_t width, float *stats, float *out) {
#define CASE(count)                                                                                                    \
    case count:                                                                                                        \
        attend_tile(count, q, d, keys, values, n, from, to, width, stats, out);                                        \
        break;
    SWITCH_ROWS(rows, CASE)
#undef CASE
}

/* A block of keys and where they and their values lie. */
typedef struct {
    int n;
    int64_t k_at[BLOCK], v_at[BLOCK];
} block;

static void find_block(const task_rows *t, int64_t begin, int64_t end, block *b) {
    b->n = end - begin < BLOCK ? end - begin : BLOCK;
    if (b->n > 0)
        find_tokens(t->args, t->req, begin, b->n, b->k_at, b->v_at);
}

/* Fetch part `part` of `parts` of a block into the cache. Tokens may lie anywhere, so that the CPU does not guess. */
INLINE void fetch_part(const task_rows *t, const block *b, int part, int parts) {
    const attention_args *a = t->args;
    int64_t d = a->head_dim, v_at = t->kv_head * a->v_head_stride;
    for (int j = b->n * part / parts; j < b->n * (part + 1) / parts; j++) {
        fetch_kv(a->k, b->k_at[j] + t->kv_head * d, d, a->narrow);
        fetch_kv(a->v, b->v_at[j] + v_at, a->value_dim, a->narrow);
    }
}

/* Copy a block into panels. Columns without a key, and what a value's last panel has beyond it, become 0. */
INLINE void pack(const task_rows *t, const block *b, int narrow, int64_t width, float *keys, float *values) {
    const attention_args *a = t->args;
    int64_t d = a->head_dim;
    int n = b->n;
    for (int first = 0; first < (n + PANEL - 1) / PANEL * PANEL; first += LANES) {
        float *panel = keys + first / PANEL * PANEL * d + first % PANEL;
        for (int64_t i = 0; i < d; i += LANES) {
            vec square[LANES];
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                square[j] =
                    first + j < n ? load_kv(a->k, b->k_at[first + j] + t->kv_head * d + i, narrow) : splat(0);
            transpose(square);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                store(panel + (i + j) * PANEL, square[j]);
        }
    }
    for (int j = 0; j < n; j++) {
        int64_t at = b->v_at[j] + t->kv_head * a->v_head_stride;
        for (int64_t i = 0; i < width; i += PANEL) {
            float *to = values + i * BLOCK + j * PANEL;
            store(to, load_kv(a->v, at + i, narrow));
            store(to + LANES, a->value_dim - i < PANEL ? splat(0) : load_kv(a->v, at + i + LANES, narrow));
        }
    }
}

static void attend(const task_rows *t) {
    const attention_args *a = t->args;
    int64_t d = a->head_dim, width = panels_width(a);
    int64_t keys_begin = hidden(t, 0) / BLOCK * BLOCK, keys_end = visible(t, t->rows - 1);
    float q[t->rows * d], out[t->rows * width], stats[t->rows * 2], keys[BLOCK * d], values[BLOCK * width];
    memset(out, 0, sizeof out);
    for (int r = 0; r < t->rows; r++) {
        int64_t at = place(t, r);
        const float *row = a->q + at / a->num_heads * a->q_stride + at % a->num_heads * d;
        for (int64_t i = 0; i < d; i++)
            q[r * d + i] = row[i] * a->scale;
        stats[2 * r] = -INFINITY, stats[2 * r + 1] = 0;
    }
    block now, next;
    find_block(t, keys_begin, keys_end, &next);
    for (int64_t begin = keys_begin; begin < keys_end; begin += BLOCK) {
        now = next;
        find_block(t, begin + BLOCK, keys_end, &next);
        if (a->narrow)
            pack(t, &now, 1, width, keys, values);
        else
            pack(t, &now, 0, width, keys, values);
        for (int first = 0, n = now.n; first < t->rows; first += ROWS) {
            fetch_part(t, &next, first / ROWS, (t->rows + ROWS - 1) / ROWS);
            int rows = t->rows - first < ROWS ? t->rows - first : ROWS, from[ROWS], to[ROWS];
            if (visible(t, first + rows - 1) <= begin || hidden(t, first) >= begin + n)
                continue;
            for (int r = 0; r < rows; r++) {
                int64_t before = hidden(t, first + r) - begin, end = visible(t, first + r) - begin;
                from[r] = before < 0 ? 0 : before < n ? before : n;
                to[r] = end < 0 ? 0 : end < n ? end : n;
            }
            any_attend_tile(rows, q + first * d, d, keys, values, to[rows - 1], from, to, width, stats + 2 * first,
                            out + first * width);
        }
    }
    for (int r = 0; r < t->rows; r++) {
        float total = stats[2 * r + 1], *to = a->out + place(t, r) * a->value_dim;
        for (int64_t i = 0; i < a->value_dim; i++)
            to[i] = visible(t, r) > 0 ? out[r * width + i] / total : 0;
        if (a->lse)
            a->lse[place(t, r)] = visible(t, r) > 0 ? stats[2 * r] + logf(total) : -INFINITY;
    }
}

typedef struct {
    const attention_args *args;
    /* Tasks before each request, and of all. */
    const int64_t *before;
    /* Of a task. */
    int64_t rows;
} extend_job;

static void attend_task(const void *arguments, int64_t task) {
    const extend_job *job = arguments;
    const attention_args *a = job->args;
    int64_t req = find_request(job->before, a->num_reqs, task);
    /* The last queries see the most keys: they are begun first, so that the threads end together. */
    int64_t run = (job->before[req + 1] - 1 - task) / a->num_kv_heads, first = run * job->rows;
    int64_t left = a->q_lens[req] * (a->num_heads / a->num_kv_heads) - first;
    const task_rows t = {a, req, (task - job->before[req]) % a->num_kv_heads, first,
                         left < job->rows ? left : job->rows};
    attend(&t);
}

/* Every q_lens[i] is 1 or more. before: room for num_reqs + 1 numbers. */
void cpu_extend(const attention_args *a, int64_t *before) {
    int64_t group = a->num_heads / a->num_kv_heads, rows = TASK_FLOATS / (a->head_dim + panels_width(a)) - BLOCK;
    extend_job job = {a, before, 0};
    rows = rows < LEAST_TASK_ROWS ? LEAST_TASK_ROWS : rows < TASK_ROWS ? rows : TASK_ROWS;
    before[0] = 0;
    for (;; rows /= 2) {
        /* Whole queries, or equal parts of one. */
        int64_t parts = (group + rows - 1) / rows;
        job.rows = parts > 1 ? (group + parts - 1) / parts : rows / group * group;
        for (int64_t i = 0; i < a->num_reqs; i++)
            before[i + 1] = before[i] + (a->q_lens[i] * group + job.rows - 1) / job.rows * a->num_kv_heads;
        if (before[a->num_reqs] >= 4 * a->threads || rows / 2 < LEAST_TASK_ROWS)
            break;
    }
    cpu_run(attend_task, &job, before[a->num_reqs], a->threads);
}
