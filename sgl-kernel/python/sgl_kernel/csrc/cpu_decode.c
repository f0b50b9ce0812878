/* Attention of one query per request over paged keys and values in float32 or bfloat16, without gathering them.

   A request's keys are cut into chunks of CHUNK, which are computed for all heads together: a token's heads lie side by
   side in memory. Chunks of several requests that lie in the same pages are a group. A task is some groups, one after
   the other; while a block of keys is computed, the next one is fetched into the cache. Each chunk keeps its greatest
   score, its sum and its output for each request; then each request's chunks are merged in order. The cut depends on
   the request's length alone, and each request is computed as if alone, so that its bits depend neither on the rest of
   the batch, nor on the frames, nor on the number of threads. Only tokens of the request are read.

   With few heads on a KV head, vectors hold numbers of a key or of a value. Many heads, as of latent attention, stand
   in the lanes of vectors, and the numbers of keys and values are multiplied with all lanes. Tasks are then cut by
   heads, too, where they are few. */

#include "cpu_attention.h"
#include "cpu_tile.h"

#define CHUNK 256
/* Most requests whose chunks are computed together, and tasks that each thread is to have at least. */
#define MOST_TOGETHER 16
#define TASKS_PER_THREAD 4
/* Heads and vectors of a head that are summed in registers. */
#define SCORE_HEADS 4
#define OUT_HEADS 3
#define OUT_VECTORS 4
/* The fewest heads on a KV head that stand in lanes, and those where a head has more than LONG_HEAD numbers. */
#define MANY_HEADS 16
#define MANY_LONG_HEADS 8
#define LONG_HEAD 256

int64_t cpu_lanes(void) { return LANES; }

/* The tokens of a task, for the size of scratch. */
int64_t cpu_decode_chunk(void) { return CHUNK; }

/* n keys and where they and their values lie, in numbers. */
typedef struct {
    const int64_t *k_at, *v_at;
    int64_t n;
} block;

/* scores[g][j] = scale * (q[g] . key j), each sum in the order of `sum`. next: a block whose keys are fetched meanwhile,
   or NULL. */
INLINE void score_heads(int heads, const float *q, const void *k, int narrow, const int64_t *at, int n,
                        int64_t head_dim, float scale, float (*scores)[BLOCK], const block *next) {
    for (int64_t j = n; next && j < next->n; j++)
        fetch_kv(k, next->k_at[j], head_dim, narrow);
    for (int j = 0; j < n; j += LANES) {
        const void *key[LANES];
        for (int i = 0; i < LANES; i++) {
            int token = j + i < n ? j + i : n - 1; /* the same one again behind the last */
            key[i] = ahead(k, at[token], narrow);
            if (next && j + i < n && j + i < next->n)
                fetch_kv(k, next->k_at[j + i], head_dim, narrow);
        }
        for (int g = 0; g < heads; g++) {
            vec acc[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                acc[i] = (vec){0};
#pragma GCC unroll 8
                for (int64_t d = 0; d < head_dim; d += LANES)
                    acc[i] += load(q + g * head_dim + d) * load_kv(key[i], d, narrow);
            }
            store(scores[g] + j, sums(acc) * splat(scale));
        }
    }
}

INLINE void add_values(int heads, int vectors, float (*weights)[BLOCK], const float *shrink, const void *v, int narrow,
                       const int64_t *at, int n, int64_t value_dim, float *out, const block *next) {
    vec acc[OUT_HEADS][OUT_VECTORS];
#pragma GCC unroll 4
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            acc[g][i] = load(out + g * value_dim + i * LANES) * splat(shrink[g]);
    for (int j = 0; j < n; j++) {
        const void *value = ahead(v, at[j], narrow);
        if (next && j < next->n)
            fetch_kv(v, next->v_at[j], value_dim, narrow);
        vec each[OUT_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            each[i] = load_kv(value, i * LANES, narrow);
#pragma GCC unroll 4
        for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                acc[g][i] += splat(weights[g][j]) * each[i];
    }
#pragma GCC unroll 4
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            store(out + g * value_dim + i * LANES, acc[g][i]);
}

static void any_values(int heads, int vectors, float (*weights)[BLOCK], const float *shrink, const void *v, int narrow,
                       const int64_t *at, int n, int64_t value_dim, float *out, const block *next) {
#define CASE(h, w)                                                                                                     \
    case 8 * h + w:                                                                                                    \
        if (narrow)                                                                                                    \
            add_values(h, w, weights, shrink, v, 1, at, n, value_dim, out, next);                                       \
        else                                                                                                           \
            add_values(h, w, weights, shrink, v, 0, at, n, value_dim, out, next);                                       \
        break;
    switch (8 * heads + vectors) {
        CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(2, 1) CASE(2, 2) CASE(2, 3) CASE(2, 4) CASE(3, 1) CASE(3, 2)
        CASE(3, 3) CASE(3, 4)
    }
#undef CASE
}

/* Usual sizes of a head are constants. */
INLINE void sized_scores(int heads, const float *q, const void *k, int narrow, const int64_t *at, int n,
                         int64_t head_dim, float scale, float (*scores)[BLOCK], const block *next) {
    if (head_dim == 64)
        score_heads(heads, q, k, narrow, at, n, 64, scale, scores, next);
    else if (head_dim == 128)
        score_heads(heads, q, k, narrow, at, n, 128, scale, scores, next);
    else
        score_heads(heads, q, k, narrow, at, n, head_dim, scale, scores, next);
}

static void any_scores(int heads, const float *q, const void *k, int narrow, const int64_t *at, int n,
                       int64_t head_dim, float scale, float (*scores)[BLOCK], const block *next) {
    if (narrow)
        sized_scores(heads, q, k, 1, at, n, head_dim, scale, scores, next);
    else
        sized_scores(heads, q, k, 0, at, n, head_dim, scale, scores, next);
}

/* A decode's tasks: which chunks are computed together. */
typedef struct {
    const attention_args *args;
    /* The chunks of the requests before each, and of all. */
    const int64_t *before;
    /* The chunks of group g are order[ends[g - 1]] .. order[ends[g]]. */
    const int64_t *order, *ends;
    int64_t groups, per_task;
    /* With many heads: the tasks of a group, and the units of a KV head and a request. */
    int64_t parts, units;
    /* The heads of a task that merges chunks. */
    int64_t merged_heads;
} decode_job;

/* One request of those that are computed together. */
typedef struct {
    const float *q;
    /* (num_heads, value_dim), and (num_heads, 2), greatest score and sum. */
    float *out, *stats;
} member;

/* next: the block whose keys and values of this KV head are fetched meanwhile. */
static void attend_heads(const attention_args *a, const member *m, int64_t kv, const block *now, const block *next) {
    int64_t d = a->head_dim, width = a->value_dim, group = a->num_heads / a->num_kv_heads;
    const void *k = ahead(a->k, kv * d, a->narrow), *v = ahead(a->v, kv * a->v_head_stride, a->narrow);
    for (int64_t first = 0, heads; first < group; first += heads) {
        float scores[SCORE_HEADS][BLOCK], shrink[SCORE_HEADS], *stats;
        int64_t head = kv * group + first;
        heads = group - first < SCORE_HEADS ? group - first : SCORE_HEADS;
        any_scores(heads, m->q + head * d, k, a->narrow, now->k_at, now->n, d, a->scale, scores, next);
        stats = m->stats + 2 * head;
        for (int g = 0; g < heads; g++, stats += 2)
            shrink[g] = soften(scores[g], now->n, stats, stats + 1);
        for (int64_t g = 0, some; g < heads; g += some) {
            some = heads - g == 4 ? 2 : heads - g < OUT_HEADS ? heads - g : OUT_HEADS;
            for (int64_t i = 0; i < width; i += OUT_VECTORS * LANES) {
                int64_t left = (width - i) / LANES;
                any_values(some, left < OUT_VECTORS ? left : OUT_VECTORS, scores + g, shrink + g,
                           ahead(v, i, a->narrow), a->narrow, now->v_at, now->n, width,
                           m->out + (head + g) * width + i, next);
                next = NULL;
            }
        }
    }
}

/* Chunks of several requests that are the same tokens. */
typedef struct {
    int64_t count, total, k_at[CHUNK], v_at[CHUNK];
    member members[MOST_TOGETHER];
} chunk_group;

static void find_group(const decode_job *job, int64_t number, chunk_group *g) {
    const attention_args *a = job->args;
    int64_t first = number ? job->ends[number - 1] : 0, width = a->value_dim, size = a->num_heads * (width + 2);
    g->count = job->ends[number] - first;
    for (int64_t i = 0; i < g->count; i++) {
        int64_t task = job->order[first + i], req = find_request(job->before, a->num_reqs, task);
        float *out = a->scratch + task * size;
        g->members[i] = (member){a->q + a->rows[req] * a->q_stride, out, out + a->num_heads * width};
        if (i == 0) {
            int64_t begin = (task - job->before[req]) * CHUNK, total = a->kv_lens[req] - begin;
            g->total = total < CHUNK ? total : CHUNK;
            find_tokens(a, req, begin, g->total, g->k_at, g->v_at);
        }
    }
}

static void clear_group(const attention_args *a, const chunk_group *g) {
    for (int64_t i = 0; i < g->count; i++) {
        memset(g->members[i].out, 0, a->num_heads * a->value_dim * sizeof(float));
        for (int64_t h = 0; h < a->num_heads; h++)
            g->members[i].stats[2 * h] = -INFINITY, g->members[i].stats[2 * h + 1] = 0;
    }
}

static block block_of(const chunk_group *g, int64_t at) {
    int64_t left = g->total - at;
    return (block){g->k_at + at, g->v_at + at, left < BLOCK ? left : BLOCK};
}

/* A block is read from memory once, and while the one before is computed. */
static void attend_groups(const void *arguments, int64_t task) {
    const decode_job *job = arguments;
    const attention_args *a = job->args;
    int64_t number = task * job->per_task, end = number + job->per_task;
    int64_t k_row = a->num_kv_heads * a->head_dim, v_row = (a->num_kv_heads - 1) * a->v_head_stride + a->value_dim;
    chunk_group groups[2];
    end = end < job->groups ? end : job->groups;
    find_group(job, number, groups);
    block now = block_of(groups, 0), next;
    for (int64_t j = 0; j < now.n; j++) {
        fetch_kv(a->k, now.k_at[j], k_row, a->narrow);
        fetch_kv(a->v, now.v_at[j], v_row, a->narrow);
    }
    for (int which = 0; number < end; number++, which ^= 1) {
        const chunk_group *g = groups + which;
        clear_group(a, g);
        for (int64_t at = 0; at < g->total; at += BLOCK, now = next) {
            next = (block){0};
            if (at + BLOCK < g->total) {
                next = block_of(g, at + BLOCK);
            } else if (number + 1 < end) {
                find_group(job, number + 1, groups + !which);
                next = block_of(groups + !which, 0);
            }
            for (int64_t kv = 0; kv < a->num_kv_heads; kv++)
                for (int64_t i = 0; i < g->count; i++)
                    attend_heads(a, g->members + i, kv, &now, i ? NULL : &next);
        }
    }
}

/* Lanes of a unit, and units that are computed together at most. */
#define UNIT PANEL
#define MOST_UNITS 64

/* A function of its own: where it is inlined, too few registers are left for its sums. */
#define NOINLINE __attribute__((noinline))

/* Heads of one KV head and one request, one in each lane. */
typedef struct {
    const member *of;
    int64_t head, heads;
    /* (head_dim, UNIT), scaled, and (value_dim, UNIT). */
    float *q, *out;
    vec greatest[2], total[2];
} unit;

/* to[r] = the sum over i of rows[r][i] * panel[i], which is (n, UNIT). count and vectors are constants where this is
   inlined. Every sum is one chain of additions in order. */
INLINE void score_rows(int count, int vectors, const float *const *rows, const float *panel, int64_t n, float *to) {
    vec acc[ROWS][2];
    for (int r = 0; r < count; r++)
        acc[r][0] = acc[r][1] = (vec){0};
    for (int64_t i = 0; i < n; i++, panel += UNIT) {
        vec lanes[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            lanes[v] = load(panel + v * LANES);
            __builtin_prefetch(panel + PANEL_AHEAD * UNIT + v * LANES);
        }
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                acc[r][v] += splat(rows[r][i]) * lanes[v];
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vectors; v++)
            store(to + r * UNIT + v * LANES, acc[r][v]);
}

/* out[r] = out[r] * shrink + the sum over j of rows[j][at + r] * weights[j], which is (n, UNIT), likewise. Meanwhile
   what lies from `later` on is fetched into the second-level cache, `step` bytes with each j. */
INLINE void add_rows(int count, int vectors, const float *const *rows, int64_t at, const float *weights, int n,
                     const vec *shrink, float *out, const char *later, int64_t step) {
    vec acc[ROWS][2];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vectors; v++)
            acc[r][v] = load(out + r * UNIT + v * LANES) * shrink[v];
    for (int j = 0; j < n; j++, weights += UNIT, later += step) {
        vec lanes[2];
        __builtin_prefetch(later, 0, 2);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            lanes[v] = load(weights + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                acc[r][v] += splat(rows[j][at + r]) * lanes[v];
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vectors; v++)
            store(out + r * UNIT + v * LANES, acc[r][v]);
}

static NOINLINE void any_score_rows(int count, int vectors, const float *const *rows, const float *panel, int64_t n,
                                    float *to) {
#define CASE(c)                                                                                                        \
    case c:                                                                                                            \
        if (vectors == 1)                                                                                              \
            score_rows(c, 1, rows, panel, n, to);                                                                      \
        else                                                                                                           \
            score_rows(c, 2, rows, panel, n, to);                                                                      \
        break;
    SWITCH_ROWS(count, CASE)
#undef CASE
}

static NOINLINE void any_add_rows(int count, int vectors, const float *const *rows, int64_t at, const float *weights,
                                  int n, const vec *shrink, float *out, const char *later, int64_t step) {
#define CASE(c)                                                                                                        \
    case c:                                                                                                            \
        if (vectors == 1)                                                                                              \
            add_rows(c, 1, rows, at, weights, n, shrink, out, later, step);                                            \
        else                                                                                                           \
            add_rows(c, 2, rows, at, weights, n, shrink, out, later, step);                                            \
        break;
    SWITCH_ROWS(count, CASE)
#undef CASE
}

/* As `soften`, for every lane. */
INLINE void soften_lanes(float *scores, int n, int v, unit *u, vec *shrink) {
    vec most = u->greatest[v], added = splat(0);
    for (int j = 0; j < n; j++)
        most = larger(load(scores + j * UNIT + v * LANES), most);
    for (int j = 0; j < n; j++) {
        vec weight = exp_to_one(load(scores + j * UNIT + v * LANES) - most);
        added += weight;
        store(scores + j * UNIT + v * LANES, weight);
    }
    shrink[v] = pick(most > u->greatest[v], exp_to_one(u->greatest[v] - most), splat(1));
    u->total[v] = u->total[v] * shrink[v] + added;
    u->greatest[v] = most;
}

/* Keys and values of a KV head as floats, and rows of memory that are fetched meanwhile. */
typedef struct {
    const float *k[BLOCK], *v[BLOCK];
    int n, num_later;
    const void *later[2 * BLOCK];
    /* In numbers. */
    int64_t later_size[2 * BLOCK];
} float_block;

/* fetches: whether the rows are fetched. */
static void attend_unit(const attention_args *a, unit *u, const float_block *b, int fetches) {
    float scores[BLOCK * UNIT];
    vec shrink[2];
    int vectors = u->heads > LANES ? 2 : 1;
    for (int j = 0; j < b->n; j += ROWS)
        any_score_rows(b->n - j < ROWS ? b->n - j : ROWS, vectors, b->k + j, u->q, a->head_dim, scores + j * UNIT);
    for (int v = 0; v < vectors; v++)
        soften_lanes(scores, b->n, v, u, shrink);
    int64_t tiles = (a->value_dim + ROWS - 1) / ROWS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t i = tile * ROWS, row = fetches ? b->num_later * tile / tiles : 0;
        int64_t end = fetches ? b->num_later * (tile + 1) / tiles : 0, step = 0;
        const char *later = (const char *)scores;
        if (row < end)
            later = b->later[row], step = b->later_size[row] * (a->narrow ? 2 : 4) / b->n;
        for (row++; row < end; row++)
            fetch_kv(b->later[row], 0, b->later_size[row], a->narrow);
        any_add_rows(a->value_dim - i < ROWS ? a->value_dim - i : ROWS, vectors, b->v, i, scores, b->n, shrink,
                     u->out + i * UNIT, later, step);
    }
}

/* to[i][j] = from[j][i] * scale. from: (rows, numbers); to: (numbers, UNIT), 0 where there is no row. */
INLINE void turn_in(const float *from, int64_t rows, int64_t numbers, float scale, float *to) {
    for (int64_t first = 0; first < UNIT; first += LANES)
        for (int64_t i = 0; i < numbers; i += LANES) {
            vec square[LANES];
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                square[j] = first + j < rows ? load(from + (first + j) * numbers + i) * splat(scale) : splat(0);
            transpose(square);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                store(to + (i + j) * UNIT + first, square[j]);
        }
}

/* to[j][i] = from[i][j]. from: (numbers, UNIT); to: (rows, numbers). */
INLINE void turn_out(const float *from, int64_t rows, int64_t numbers, float *to) {
    for (int64_t first = 0; first < rows; first += LANES)
        for (int64_t i = 0; i < numbers; i += LANES) {
            vec square[LANES];
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                square[j] = load(from + (i + j) * UNIT + first);
            transpose(square);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                if (first + j < rows)
                    store(to + (first + j) * numbers + i, square[j]);
        }
}

/* Rows of n tokens in floats: where they lie, or of narrow ones a copy. */
INLINE void find_rows(const void *from, const int64_t *at, int n, int64_t numbers, int narrow, float *copy,
                      const float **rows) {
    int64_t step = numbers + 16; /* an odd number of lines spreads columns over the cache's sets */
    for (int j = 0; j < n; j++) {
        rows[j] = narrow ? copy + j * step : (const float *)from + at[j];
        for (int64_t i = 0; narrow && i < numbers; i += LANES)
            store(copy + j * step + i, load_bfloat16((const uint16_t *)from + at[j] + i));
    }
}

/* The place of values in the keys of KV head kv, or -1 where they are elsewhere. */
static int64_t place_in_keys(const attention_args *a, int64_t kv) {
    int64_t bytes = (const char *)a->v - (const char *)a->k, place = bytes / (a->narrow ? 2 : 4);
    if (a->v_page_stride != a->k_page_stride || a->v_token_stride != a->k_token_stride)
        return -1;
    place += kv * (a->v_head_stride - a->head_dim);
    return place >= 0 && place + a->value_dim <= a->head_dim ? place : -1;
}

/* A chunk for some units of KV head kv. */
static void attend_units(const attention_args *a, const chunk_group *g, unit *units, int64_t count, int64_t kv) {
    int64_t d = a->head_dim, width = a->value_dim, place = place_in_keys(a, kv);
    const void *k = ahead(a->k, kv * d, a->narrow), *v = ahead(a->v, kv * a->v_head_stride, a->narrow);
    float q[count * d * UNIT], out[count * width * UNIT];
    float keys[a->narrow ? BLOCK * (d + 16) : 1], values[a->narrow && place < 0 ? BLOCK * (width + 16) : 1];
    memset(out, 0, sizeof out);
    for (int64_t i = 0; i < count; i++) {
        unit *u = units + i;
        u->q = q + i * d * UNIT, u->out = out + i * width * UNIT;
        turn_in(u->of->q + u->head * d, u->heads, d, a->scale, u->q);
        for (int v = 0; v < 2; v++)
            u->greatest[v] = splat(-INFINITY), u->total[v] = splat(0);
    }
    for (int64_t at = 0; at < g->total; at += BLOCK) {
        block now = block_of(g, at), next = block_of(g, at + BLOCK);
        float_block b;
        b.n = now.n, b.num_later = 0;
        find_rows(k, now.k_at, now.n, d, a->narrow, keys, b.k);
        if (place < 0)
            find_rows(v, now.v_at, now.n, width, a->narrow, values, b.v);
        for (int j = 0; place >= 0 && j < now.n; j++)
            b.v[j] = b.k[j] + place;
        for (int j = 0; j < next.n; j++) {
            b.later[b.num_later] = ahead(k, next.k_at[j], a->narrow), b.later_size[b.num_later++] = d;
            if (place < 0)
                b.later[b.num_later] = ahead(v, next.v_at[j], a->narrow), b.later_size[b.num_later++] = width;
        }
        for (int64_t i = 0; i < count; i++)
            attend_unit(a, units + i, &b, i == 0);
    }
    for (int64_t i = 0; i < count; i++) {
        const unit *u = units + i;
        turn_out(u->out, u->heads, width, u->of->out + u->head * width);
        for (int64_t h = 0; h < u->heads; h++) {
            u->of->stats[2 * (u->head + h)] = u->greatest[h / LANES][h % LANES];
            u->of->stats[2 * (u->head + h) + 1] = u->total[h / LANES][h % LANES];
        }
    }
}

/* A part of the units of a group, or all. */
static void attend_part(const void *arguments, int64_t task) {
    const decode_job *job = arguments;
    const attention_args *a = job->args;
    int64_t part = task % job->parts, all = a->num_kv_heads * job->units, group = a->num_heads / a->num_kv_heads;
    int64_t number = all * part / job->parts, end = all * (part + 1) / job->parts, count = 0;
    int64_t most = (TASK_FLOATS / (a->head_dim + a->value_dim) - BLOCK) / UNIT;
    unit units[MOST_UNITS];
    chunk_group g;
    most = most > MOST_UNITS ? MOST_UNITS : most;
    find_group(job, task / job->parts, &g);
    for (; number < end; number++) {
        int64_t kv = number / job->units, first = number % job->units * UNIT, left = group - first;
        int is_last = number + 1 == end || (number + 1) % job->units == 0;
        for (int64_t i = 0; i < g.count; i++) {
            unit *u = units + count++;
            u->of = g.members + i, u->head = kv * group + first, u->heads = left < UNIT ? left : UNIT;
            if (count < most && !(is_last && i + 1 == g.count))
                continue;
            attend_units(a, &g, units, count, kv);
            count = 0;
        }
    }
}

/* Heads begin .. end of request i, whose first task's results are `first`, the others' behind it. */
static void merge(const attention_args *a, int64_t i, int64_t begin, int64_t end, int64_t tasks, const float *first) {
    int64_t width = a->value_dim, size = a->num_heads * (width + 2);
    float *out = a->out + (a->rows[i] * a->num_heads + begin) * width;
    for (int64_t h = begin; h < end; h++, out += width) {
        float most = -INFINITY, total = 0;
        const float *stats = first + a->num_heads * width + 2 * h;
        for (int64_t t = 0; t < tasks; t++)
            most = stats[t * size] > most ? stats[t * size] : most;
        memset(out, 0, width * sizeof *out);
        for (int64_t t = 0; t < tasks; t++) {
            float lane[LANES];
            const float *part = first + t * size + h * width;
            store(lane, exp_to_one(splat(stats[t * size] - most)));
            total += stats[t * size + 1] * lane[0];
            for (int64_t at = 0; at < width; at += LANES)
                store(out + at, load(out + at) + load(part + at) * splat(lane[0]));
        }
        for (int64_t at = 0; tasks && at < width; at += LANES)
            store(out + at, load(out + at) / splat(total));
        if (a->lse)
            a->lse[a->rows[i] * a->num_heads + h] = tasks ? most + logf(total) : -INFINITY;
    }
}

static void merge_chunks(const void *arguments, int64_t task) {
    const decode_job *job = arguments;
    const attention_args *a = job->args;
    int64_t runs = (a->num_heads + job->merged_heads - 1) / job->merged_heads, i = task / runs;
    int64_t begin = task % runs * job->merged_heads, end = begin + job->merged_heads;
    merge(a, i, begin, end < a->num_heads ? end : a->num_heads, job->before[i + 1] - job->before[i],
          a->scratch + job->before[i] * a->num_heads * (a->value_dim + 2));
}

/* Whether chunk c of requests i and j is whole and the same tokens. */
static int is_same(const attention_args *a, int64_t i, int64_t j, int64_t c) {
    int64_t begin = c * CHUNK, end = begin + CHUNK, skip = a->skips ? a->skips[i] : 0;
    if (a->kv_lens[i] < end || a->kv_lens[j] < end || (a->skips && a->skips[j] != skip))
        return 0;
    if (!a->by_slot)
        begin = (begin + skip) / a->page_size, end = (end - 1 + skip) / a->page_size + 1;
    return !memcmp(a->table + a->starts[i] + begin, a->table + a->starts[j] + begin, (end - begin) * sizeof *a->table);
}

/* Which chunks are computed together. before: num_reqs + 1 numbers. leader, order, ends: one for each chunk. All are
   written, see `decode_job`. Returns the number of groups. Requests share their first chunks if any. */
int64_t cpu_decode_plan(const attention_args *a, int64_t *before, int64_t *leader, int64_t *order, int64_t *ends) {
    int64_t n = a->num_reqs, groups = 0, placed = 0;
    before[0] = 0;
    for (int64_t i = 0; i < n; i++)
        before[i + 1] = before[i] + (a->kv_lens[i] + CHUNK - 1) / CHUNK;
    int64_t tasks = before[n], most = tasks / (TASKS_PER_THREAD * a->threads);
    most = most < MOST_TOGETHER ? most : MOST_TOGETHER;
    for (int64_t task = 0; task < tasks; task++)
        leader[task] = task, ends[task] = 1;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = i + 1; j < n; j++)
            for (int64_t c = 0; before[i] + c < before[i + 1] && before[j] + c < before[j + 1]; c++) {
                int64_t with = before[i] + c, task = before[j] + c;
                if (leader[task] != task || leader[with] != with)
                    continue;
                if (!is_same(a, i, j, c))
                    break;
                if (ends[with] < most)
                    leader[task] = with, ends[with]++;
            }
    /* ends has the sizes of groups at their leaders: first each one's place in order, then where it ends. */
    for (int64_t task = 0; task < tasks; task++) {
        if (leader[task] != task)
            continue;
        int64_t size = ends[task];
        order[placed] = task;
        leader[task] = -placed - 1;
        placed += size;
        ends[groups++] = placed;
    }
    for (int64_t task = 0; task < tasks; task++) {
        if (leader[task] < 0)
            continue;
        order[-leader[leader[task]]] = task;
        leader[leader[task]]--;
    }
    return groups;
}

/* Every request has one row of q, which sees all its keys. The numbers are those of `cpu_decode_plan`. */
void cpu_decode(const attention_args *a, const int64_t *before, const int64_t *order, const int64_t *ends,
                int64_t groups) {
    int64_t wanted = TASKS_PER_THREAD * a->threads, per_task = groups / wanted, group = a->num_heads / a->num_kv_heads;
    decode_job job = {a, before, order, ends, groups, per_task > 1 ? per_task : 1, 1, (group + UNIT - 1) / UNIT,
                      a->num_heads};
    if (group >= (a->head_dim > LONG_HEAD ? MANY_LONG_HEADS : MANY_HEADS)) {
        int64_t parts = groups ? (wanted + groups - 1) / groups : 1, most = a->num_kv_heads * job.units;
        job.parts = parts < most ? parts : most;
        job.merged_heads = UNIT;
        cpu_run(attend_part, &job, groups * job.parts, a->threads);
        cpu_run(merge_chunks, &job, a->num_reqs * ((a->num_heads + UNIT - 1) / UNIT), a->threads);
        return;
    }
    cpu_run(attend_groups, &job, (groups + job.per_task - 1) / job.per_task, a->threads);
    cpu_run(merge_chunks, &job, a->num_reqs, before[a->num_reqs] < 64 ? 1 : a->threads);
}
