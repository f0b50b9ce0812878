/* Attention of one query per request over paged keys and values in float32, without gathering them.

   A request's keys are cut into chunks of CHUNK. A task is one chunk, for all heads: a token's heads lie side by side
   in memory. Chunks of several requests that lie in the same pages are one task. Each chunk keeps its greatest score,
   its sum and its output for each request; then each request's chunks are merged in order. The cut depends on the
   request's length alone, and each request is computed as if alone, so that its bits depend neither on the rest of the
   batch, nor on the frames, nor on the number of threads. Only tokens of the request are read. */

#include "cpu_attention.h"

#define CHUNK 256
/* Keys before the first of a block's: they are fetched into the cache while the scores are computed, with the values of
   the same token. Tokens may lie anywhere, so that the CPU does not guess the next one. */
#ifndef AHEAD
#define AHEAD 16
#endif
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

/* What to fetch beside the scores of a block: keys AHEAD of it, of `left` tokens, and its values. */
typedef struct {
    const float *k, *v;
    const int64_t *k_at, *v_at;
    int64_t left, row;
} fetches;

INLINE void fetch(const float *row, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16)
        __builtin_prefetch(row + i);
}

/* scores[g][j] = scale * (q[g] . key j), each sum in the order of `sum`. */
INLINE void score_heads(int heads, const float *q, const float *k, const int64_t *at, int n, int64_t head_dim,
                        float scale, float (*scores)[BLOCK], const fetches *ahead) {
    for (int j = 0; j < n; j += LANES) {
        const float *key[LANES];
        for (int i = 0; i < LANES; i++) {
            int token = j + i < n ? j + i : n - 1; /* the same one again behind the last */
            key[i] = k + at[token];
            if (ahead && j + i < n) {
                if (token + AHEAD < ahead->left)
                    fetch(ahead->k + ahead->k_at[token + AHEAD], ahead->row);
                fetch(ahead->v + ahead->v_at[token], ahead->row);
            }
        }
        for (int g = 0; g < heads; g++) {
            vec acc[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                acc[i] = (vec){0};
#pragma GCC unroll 8
                for (int64_t d = 0; d < head_dim; d += LANES)
                    acc[i] += load(q + g * head_dim + d) * load(key[i] + d);
            }
            store(scores[g] + j, sums(acc) * splat(scale));
        }
    }
}

INLINE void add_values(int heads, int vectors, float (*weights)[BLOCK], const float *shrink, const float *v,
                       const int64_t *at, int n, int64_t head_dim, float *out) {
    vec acc[OUT_HEADS][OUT_VECTORS];
#pragma GCC unroll 4
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            acc[g][i] = load(out + g * head_dim + i * LANES) * splat(shrink[g]);
    for (int j = 0; j < n; j++) {
        const float *value = v + at[j];
        vec each[OUT_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            each[i] = load(value + i * LANES);
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
            store(out + g * head_dim + i * LANES, acc[g][i]);
}

static void any_values(int heads, int vectors, float (*weights)[BLOCK], const float *shrink, const float *v,
                       const int64_t *at, int n, int64_t head_dim, float *out) {
#define CASE(h, w)                                                                                                     \
    case 8 * h + w:                                                                                                    \
        add_values(h, w, weights, shrink, v, at, n, head_dim, out);                                                    \
        break;
    switch (8 * heads + vectors) {
        CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(2, 1) CASE(2, 2) CASE(2, 3) CASE(2, 4) CASE(3, 1) CASE(3, 2)
        CASE(3, 3) CASE(3, 4)
    }
#undef CASE
}

/* Usual sizes of a head are constants. */
static void any_scores(int heads, const float *q, const float *k, const int64_t *at, int n, int64_t head_dim,
                       float scale, float (*scores)[BLOCK], const fetches *ahead) {
    if (head_dim == 64)
        score_heads(heads, q, k, at, n, 64, scale, scores, ahead);
    else if (head_dim == 128)
        score_heads(heads, q, k, at, n, 128, scale, scores, ahead);
    else
        score_heads(heads, q, k, at, n, head_dim, scale, scores, ahead);
}

/* A decode's tasks: which chunks are computed together. */
typedef struct {
    const attention_args *args;
    /* The chunks of the requests before each, and of all. */
    const int64_t *before;
    /* The chunks of group g are order[ends[g - 1]] .. order[ends[g]]. */
    const int64_t *order, *ends;
} decode_job;

/* One request of those that are computed together. */
typedef struct {
    const float *q;
    /* (num_heads, head_dim), and (num_heads, 2), greatest score and sum. */
    float *out, *stats;
} member;

static void attend_heads(const attention_args *a, const member *m, int64_t kv, const int64_t *k_at,
                         const int64_t *v_at, int n, const fetches *ahead) {
    int64_t d = a->head_dim, group = a->num_heads / a->num_kv_heads;
    for (int64_t first = 0, heads; first < group; first += heads) {
        float scores[SCORE_HEADS][BLOCK], shrink[SCORE_HEADS], *stats;
        int64_t head = kv * group + first;
        heads = group - first < SCORE_HEADS ? group - first : SCORE_HEADS;
        any_scores(heads, m->q + head * d, a->k + kv * d, k_at, n, d, a->scale, scores, first ? NULL : ahead);
        stats = m->stats + 2 * head;
        for (int g = 0; g < heads; g++, stats += 2)
            shrink[g] = soften(scores[g], n, stats, stats + 1);
        for (int64_t g = 0, some; g < heads; g += some) {
            some = heads - g == 4 ? 2 : heads - g < OUT_HEADS ? heads - g : OUT_HEADS;
            for (int64_t i = 0; i < d; i += OUT_VECTORS * LANES) {
                int64_t left = (d - i) / LANES;
                any_values(some, left < OUT_VECTORS ? left : OUT_VECTORS, scores + g, shrink + g, a->v + kv * d + i,
                           v_at, n, d, m->out + (head + g) * d + i);
            }
        }
    }
}

/* Chunks of several requests that are the same tokens: a block of them is read from memory once. */
static void attend_group(const void *arguments, int64_t number) {
    const decode_job *job = arguments;
    const attention_args *a = job->args;
    int64_t first = number ? job->ends[number - 1] : 0, count = job->ends[number] - first;
    int64_t d = a->head_dim, row = a->num_kv_heads * d, size = a->num_heads * (d + 2);
    int64_t k_at[CHUNK], v_at[CHUNK], begin = 0, total = 0;
    member members[MOST_TOGETHER];
    for (int64_t i = 0; i < count; i++) {
        int64_t task = job->order[first + i], req = find_request(job->before, a->num_reqs, task);
        float *out = a->scratch + task * size;
        members[i] = (member){a->q + a->rows[req] * a->q_stride, out, out + a->num_heads * d};
        memset(out, 0, a->num_heads * d * sizeof *out);
        for (int64_t h = 0; h < a->num_heads; h++)
            members[i].stats[2 * h] = -INFINITY, members[i].stats[2 * h + 1] = 0;
        if (i == 0) {
            begin = (task - job->before[req]) * CHUNK, total = a->kv_lens[req] - begin;
            total = total < CHUNK ? total : CHUNK;
            find_tokens(a, req, begin, total, k_at, v_at);
        }
    }
    for (int at = 0; at < total && at < AHEAD; at++)
        fetch(a->k + k_at[at], row);
    for (int at = 0; at < total; at += BLOCK) {
        int n = total - at < BLOCK ? total - at : BLOCK;
        const fetches ahead = {a->k, a->v, k_at + at, v_at + at, total - at, row};
        for (int64_t kv = 0; kv < a->num_kv_heads; kv++)
            for (int64_t i = 0; i < count; i++)
                attend_heads(a, members + i, kv, k_at + at, v_at + at, n, kv + i ? NULL : &ahead);
    }
}

/* The end of request i, whose first task's results are `first`, the others' behind it. */
static void merge(const attention_args *a, int64_t i, int64_t tasks, const float *first) {
    int64_t d = a->head_dim, size = a->num_heads * (d + 2);
    float *out = a->out + a->rows[i] * a->num_heads * d;
    for (int64_t h = 0; h < a->num_heads; h++, out += d) {
        float most = -INFINITY, total = 0;
        const float *stats = first + a->num_heads * d + 2 * h;
        for (int64_t t = 0; t < tasks; t++)
            most = stats[t * size] > most ? stats[t * size] : most;
        memset(out, 0, d * sizeof *out);
        for (int64_t t = 0; t < tasks; t++) {
            float lane[LANES];
            const float *part = first + t * size + h * d;
            store(lane, exp_to_one(splat(stats[t * size] - most)));
            total += stats[t * size + 1] * lane[0];
            for (int64_t at = 0; at < d; at += LANES)
                store(out + at, load(out + at) + load(part + at) * splat(lane[0]));
        }
        for (int64_t at = 0; tasks && at < d; at += LANES)
            store(out + at, load(out + at) / splat(total));
        if (a->lse)
            a->lse[a->rows[i] * a->num_heads + h] = tasks ? most + logf(total) : -INFINITY;
    }
}

static void merge_chunks(const void *arguments, int64_t i) {
    const decode_job *job = arguments;
    const attention_args *a = job->args;
    merge(a, i, job->before[i + 1] - job->before[i],
          a->scratch + job->before[i] * a->num_heads * (a->head_dim + 2));
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
    decode_job job = {a, before, order, ends};
    cpu_run(attend_group, &job, groups, a->threads);
    cpu_run(merge_chunks, &job, a->num_reqs, before[a->num_reqs] < 64 ? 1 : a->threads);
}
