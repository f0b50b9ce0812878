/* Attention of one query per request over paged keys and values in float32 or bfloat16, without gathering them.

   A request's keys are cut into chunks of CHUNK, which are computed for all heads together: a token's heads lie side by
   side in memory. Chunks of several requests that lie in the same pages are a group. A task is some groups, one after
   the other; while a block of keys is computed, the next one is fetched into the cache. Each chunk keeps its greatest
   score, its sum and its output for each request; then each request's chunks are merged in order. The cut depends on
   the request's length alone, and each request is computed as if alone, so that its bits depend neither on the rest of
   the batch, nor on the frames, nor on the number of threads. Only tokens of the request are read. */

#include "cpu_attention.h"

#define CHUNK 256
/* Most requests whose chunks are computed together, and tasks that each thread is to have at least. */
#define MOST_TOGETHER 16
#define TASKS_PER_THREAD 4
/* Heads and vectors of a head that are summed in registers. */
#define SCORE_HEADS 4
#define OUT_HEADS 3
#define OUT_VECTORS 4

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
        memset(out, 0, a->num_heads * width * sizeof *out);
        for (int64_t h = 0; h < a->num_heads; h++)
            g->members[i].stats[2 * h] = -INFINITY, g->members[i].stats[2 * h + 1] = 0;
        if (i == 0) {
            int64_t begin = (task - job->before[req]) * CHUNK, total = a->kv_lens[req] - begin;
            g->total = total < CHUNK ? total : CHUNK;
            find_tokens(a, req, begin, g->total, g->k_at, g->v_at);
        }
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

/* The end of request i, whose first task's results are `first`, the others' behind it. */
static void merge(const attention_args *a, int64_t i, int64_t tasks, const float *first) {
    int64_t width = a->value_dim, size = a->num_heads * (width + 2);
    float *out = a->out + a->rows[i] * a->num_heads * width;
    for (int64_t h = 0; h < a->num_heads; h++, out += width) {
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

static void merge_chunks(const void *arguments, int64_t i) {
    const decode_job *job = arguments;
    const attention_args *a = job->args;
    merge(a, i, job->before[i + 1] - job->before[i],
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
    int64_t per_task = groups / (TASKS_PER_THREAD * a->threads);
    decode_job job = {a, before, order, ends, groups, per_task > 1 ? per_task : 1};
    cpu_run(attend_groups, &job, (groups + job.per_task - 1) / job.per_task, a->threads);
    cpu_run(merge_chunks, &job, a->num_reqs, before[a->num_reqs] < 64 ? 1 : a->threads);
}
