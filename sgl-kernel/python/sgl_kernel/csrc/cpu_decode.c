/* Attention of one query per request over paged keys and values in float32, without gathering them.

   A request's keys are cut into chunks of CHUNK. A task is one chunk, for all heads: a token's heads lie side by side
   in memory. Each task keeps its greatest score, its sum and its output; then each request's chunks are merged in
   order. The cut depends on the request's length alone, so that a request's bits depend neither on the rest of the
   batch, nor on the frames, nor on the number of threads. Only tokens of the request are read. */

#include "cpu_attention.h"

#define CHUNK 256
/* Keys before the first of a block's: they are fetched into the cache while the scores are computed, with the values of
   the same token. Tokens may lie anywhere, so that the CPU does not guess the next one. */
#ifndef AHEAD
#define AHEAD 16
#endif
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

INLINE void score_heads(int heads, const float *q, const float *k, const int64_t *at, int n, int64_t head_dim,
                        float scale, float (*scores)[BLOCK], const fetches *ahead) {
    for (int j = 0; j < n; j++) {
        const float *key = k + at[j];
        if (ahead) {
            if (j + AHEAD < ahead->left)
                fetch(ahead->k + ahead->k_at[j + AHEAD], ahead->row);
            fetch(ahead->v + ahead->v_at[j], ahead->row);
        }
        vec acc[SCORE_HEADS];
#pragma GCC unroll 4
        for (int g = 0; g < heads; g++)
            acc[g] = (vec){0};
        for (int64_t d = 0; d < head_dim; d += LANES) {
            vec each = load(key + d);
#pragma GCC unroll 4
            for (int g = 0; g < heads; g++)
                acc[g] += load(q + g * head_dim + d) * each;
        }
#pragma GCC unroll 4
        for (int g = 0; g < heads; g++)
            scores[g][j] = sum(acc[g]) * scale;
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

static void any_scores(int heads, const float *q, const float *k, const int64_t *at, int n, int64_t head_dim,
                       float scale, float (*scores)[BLOCK], const fetches *ahead) {
#define CASE(h)                                                                                                        \
    case h:                                                                                                            \
        score_heads(h, q, k, at, n, head_dim, scale, scores, ahead);                                                          \
        break;
    switch (heads) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
}

/* Tokens begin .. end of request i. out: (num_heads, head_dim), stats: (num_heads, 2), greatest score and sum. */
static void attend(const attention_args *a, int64_t i, int64_t begin, int64_t end, float *out, float *stats) {
    int64_t d = a->head_dim, group = a->num_heads / a->num_kv_heads;
    const float *q = a->q + a->rows[i] * a->q_stride;
    for (int64_t h = 0; h < a->num_heads; h++)
        stats[2 * h] = -INFINITY, stats[2 * h + 1] = 0;
    memset(out, 0, a->num_heads * d * sizeof *out);
    int64_t k_at[CHUNK], v_at[CHUNK], row = a->num_kv_heads * d;
    int total = (int)(end - begin);
    find_tokens(a, i, begin, total, k_at, v_at);
    for (int at = 0; at < total && at < AHEAD; at++)
        fetch(a->k + k_at[at], row);
    for (int at = 0; at < total; at += BLOCK) {
        int n = total - at < BLOCK ? total - at : BLOCK;
        const fetches ahead = {a->k, a->v, k_at + at, v_at + at, total - at, row};
        for (int64_t kv = 0; kv < a->num_kv_heads; kv++) {
            for (int64_t first = 0, heads; first < group; first += heads) {
                float scores[SCORE_HEADS][BLOCK], shrink[SCORE_HEADS];
                int64_t head = kv * group + first;
                heads = group - first < SCORE_HEADS ? group - first : SCORE_HEADS;
                any_scores(heads, q + head * d, a->k + kv * d, k_at + at, n, d, a->scale, scores, kv + first ? NULL : &ahead);
                for (int g = 0; g < heads; g++)
                    shrink[g] = soften(scores[g], n, stats + 2 * (head + g), stats + 2 * (head + g) + 1);
                for (int64_t g = 0, some; g < heads; g += some) {
                    some = heads - g == 4 ? 2 : heads - g < OUT_HEADS ? heads - g : OUT_HEADS;
                    for (int64_t i = 0; i < d; i += OUT_VECTORS * LANES) {
                        int64_t left = (d - i) / LANES;
                        any_values(some, left < OUT_VECTORS ? left : OUT_VECTORS, scores + g, shrink + g,
                                   a->v + kv * d + i, v_at + at, n, d, out + (head + g) * d + i);
                    }
                }
            }
        }
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
            store(lane, exp_of(splat(stats[t * size] - most)));
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

/* The tasks of the requests before each, and of all. */
typedef struct {
    const attention_args *args;
    const int64_t *before;
} decode_job;

static void attend_chunk(const void *arguments, int64_t task) {
    const decode_job *job = arguments;
    const attention_args *a = job->args;
    int64_t req = find_request(job->before, a->num_reqs, task);
    int64_t begin = (task - job->before[req]) * CHUNK, end = begin + CHUNK;
    float *out = a->scratch + task * a->num_heads * (a->head_dim + 2);
    attend(a, req, begin, end < a->kv_lens[req] ? end : a->kv_lens[req], out, out + a->num_heads * a->head_dim);
}

static void merge_chunks(const void *arguments, int64_t i) {
    const decode_job *job = arguments;
    const attention_args *a = job->args;
    merge(a, i, job->before[i + 1] - job->before[i],
          a->scratch + job->before[i] * a->num_heads * (a->head_dim + 2));
}

/* Every request has one row of q, which sees all its keys. before: room for num_reqs + 1 numbers. */
void cpu_decode(const attention_args *a, int64_t *before) {
    decode_job job = {a, before};
    before[0] = 0;
    for (int64_t i = 0; i < a->num_reqs; i++)
        before[i + 1] = before[i] + (a->kv_lens[i] + CHUNK - 1) / CHUNK;
    int64_t tasks = before[a->num_reqs];
    cpu_run(attend_chunk, &job, tasks, a->threads);
    cpu_run(merge_chunks, &job, a->num_reqs, tasks < 64 ? 1 : a->threads);
}
