/* What the kernels of attention over paged keys and values share. */

#ifndef SGL_CPU_ATTENTION_H
#define SGL_CPU_ATTENTION_H

#include "cpu_pool.h"
#include "cpu_vector.h"

/* Keys whose scores are known before their values are added. */
#define BLOCK 64
/* What a task keeps on its thread's stack, which may be one of 2 MiB. The core's second-level cache should hold it. */
#define TASK_FLOATS (224 << 10)

typedef struct {
    /* q: (rows, num_heads, head_dim), rows q_stride floats apart. out: (rows, num_heads, value_dim), contiguous. lse:
       (rows, num_heads) or NULL. */
    const float *q;
    float *out, *lse;
    /* k: (pages, page_size, num_kv_heads, head_dim) of float, or where it is narrow of bfloat16, the last two
       dimensions contiguous; strides in numbers. v: (pages, page_size, num_kv_heads, value_dim) of the same type, the
       last dimension contiguous. It may be a part of k's memory. */
    const void *k, *v;
    int64_t k_page_stride, k_token_stride, v_page_stride, v_token_stride, v_head_stride;
    /* Request i: rows rows[i] .. rows[i] + q_lens[i] of q, its keys are kv_lens[i] tokens from the skips[i]-th token
       of page table[starts[i]] on. skips: NULL for none. by_slot: the table holds not pages, but slots (page *
       page_size + offset). The first row sees the first sees[i] keys, each following row one key more, up to all. A
       row of a request with several sees the last `window` of them only; 0 for all. */
    const int64_t *rows, *q_lens, *table, *starts, *kv_lens, *sees, *skips;
    /* Floats: for each chunk of a decode, num_heads * (value_dim + 2). */
    float *scratch;
    int64_t q_stride, num_reqs, num_heads, num_kv_heads, head_dim, value_dim, page_size, window;
    float scale;
    int32_t threads, by_slot, narrow;
} attention_args;

/* Some numbers behind another of keys or values. */
INLINE const void *ahead(const void *from, int64_t numbers, int narrow) {
    return (const char *)from + numbers * (narrow ? 2 : 4);
}

INLINE vec load_kv(const void *from, int64_t at, int narrow) {
    return narrow ? load_bfloat16((const uint16_t *)from + at) : load((const float *)from + at);
}

/* As `fetch`. */
INLINE void fetch_kv(const void *from, int64_t at, int64_t numbers, int narrow) {
    fetch(ahead(from, at, narrow), narrow ? (numbers + 1) / 2 : numbers);
}

/* Where n keys and values of request i lie, from its key `begin` on, in numbers from k and v. */
INLINE void find_tokens(const attention_args *a, int64_t i, int64_t begin, int n, int64_t *k_at, int64_t *v_at) {
    const int64_t *entries = a->table + a->starts[i];
    int64_t skip = a->skips ? a->skips[i] : 0;
    int64_t page = (begin + skip) / a->page_size, offset = (begin + skip) % a->page_size;
    for (int j = 0; j < n; j++) {
        if (a->by_slot) {
            int64_t slot = entries[begin + j];
            k_at[j] = slot / a->page_size * a->k_page_stride + slot % a->page_size * a->k_token_stride;
            v_at[j] = slot / a->page_size * a->v_page_stride + slot % a->page_size * a->v_token_stride;
            continue;
        }
        k_at[j] = entries[page] * a->k_page_stride + offset * a->k_token_stride;
        v_at[j] = entries[page] * a->v_page_stride + offset * a->v_token_stride;
        if (++offset == a->page_size)
            page++, offset = 0;
    }
}

/* The weights of a block's scores relative to the greatest so far, in place. Returns what the sums so far shrink by. */
INLINE float soften(float *scores, int n, float *greatest, float *total) {
    vec most = splat(*greatest);
    for (int j = n; j < BLOCK; j++)
        scores[j] = -INFINITY;
    for (int j = 0; j < BLOCK; j += LANES)
        most = larger(load(scores + j), most);
    float most_of_all = largest(most);
    vec added = splat(0);
    for (int j = 0; j < BLOCK; j += LANES) {
        vec weight = exp_to_one(load(scores + j) - splat(most_of_all));
        added += weight;
        store(scores + j, weight);
    }
    float shrinks = 1;
    if (most_of_all > *greatest) {
        vec each = exp_to_one(splat(*greatest - most_of_all));
        shrinks = each[0];
    }
    *total = *total * shrinks + sum(added);
    *greatest = most_of_all;
    return shrinks;
}

/* The last of n requests that begins at or before a task. before: the tasks before each. */
INLINE int64_t find_request(const int64_t *before, int64_t n, int64_t task) {
    int64_t low = 0, high = n;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (before[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    return low;
}

#endif
