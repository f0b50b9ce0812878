/* Tokens drawn from logits, and what is done to logits before; layers/sampler.py and sampling/penalties.py define the
   results, but for the last bits.

   A token's weight is its probability over that of the likeliest token. In most rows the few tokens whose weight is
   not tiny decide where top-k and top-p cut, so that these alone are kept while the row is read. No row is sorted. */

#include "cpu_pool.h"
#include "cpu_vector.h"

#include <stdlib.h>

/* Tokens that are kept at first, and the least weight of those. */
#define FEW 4096
#define LEAST_WEIGHT (1.0f / 8192)
/* Parts of a row whose sums are kept, at most, and the tokens of one, at least. */
#define PARTS 256
#define PART 1024

typedef double dvec __attribute__((vector_size(8 * LANES)));

typedef struct {
    const float *logits;
    int64_t vocab, stride;
    const float *temperatures, *top_ps, *min_ps;
    const int64_t *top_ks;
    const double *uniforms;
    int64_t *tokens;
} draw_args;

typedef struct {
    const float *logits;
    int64_t vocab;
    float most, temperature;
} row;

/* Weights of up to LANES tokens; 0 behind the last. */
INLINE vec weights(row r, int64_t at) {
    vec x;
    if (at + LANES <= r.vocab) {
        x = load(r.logits + at);
    } else {
        x = splat(-INFINITY);
        memcpy(&x, r.logits + at, (r.vocab - at) * sizeof *r.logits);
    }
    return exp_to_one((x - splat(r.most)) / splat(r.temperature));
}

/* In an order of its own. */
INLINE double sum_of(const dvec *v) {
    double total = 0;
    for (int i = 0; i < LANES; i++)
        total += (*v)[i];
    return total;
}

INLINE int is_any(ivec where) {
    int64_t part[LANES / 2], all = 0;
    memcpy(part, &where, sizeof where);
    for (int i = 0; i < LANES / 2; i++)
        all |= part[i];
    return all != 0;
}

/* Where there is NaN, maybe not. */
static float largest_of(const float *x, int64_t n) {
    vec most = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        most = larger(most, load(x + i));
    float found = largest(most);
    for (; i < n; i++)
        found = x[i] > found ? x[i] : found;
    return found;
}

/* The first of the largest, or of NaN. */
static int64_t place_of_largest(const float *x, int64_t n) {
    float most = largest_of(x, n);
    int64_t i = 0;
    ivec is_nan = {0};
    for (; i + LANES <= n; i += LANES)
        is_nan |= load(x + i) != load(x + i);
    int has_nan = is_any(is_nan);
    for (; i < n; i++)
        has_nan |= x[i] != x[i];
    for (i = 0; i + LANES <= n; i += LANES) {
        vec each = load(x + i);
        if (is_any(has_nan ? each != each : each == splat(most)))
            break;
    }
    for (; i < n; i++)
        if (has_nan ? x[i] != x[i] : x[i] == most)
            break;
    return i;
}

/* As `weights`, 0 where it is below `least`. NaN stays. */
INLINE vec weights_from(row r, int64_t at, float least) {
    vec each = weights(r, at);
    return pick(each < splat(least), splat(0), each);
}

/* The first token at which the sum of weights from `least` on exceeds uniform * all of them. */
static int64_t draw_of_all(row r, float least, double uniform) {
    int64_t part = (r.vocab + PARTS - 1) / PARTS;
    part = ((part < PART ? PART : part) + LANES - 1) / LANES * LANES;
    double sums[PARTS], total = 0;
    for (int64_t p = 0; p * part < r.vocab; p++) {
        dvec acc = {0};
        for (int64_t i = p * part; i < (p + 1) * part && i < r.vocab; i += LANES)
            acc += __builtin_convertvector(weights_from(r, i, least), dvec);
        sums[p] = sum_of(&acc);
        total += sums[p];
    }
    if (!(total > 0))
        return r.vocab - 1; /* NaN */
    double wanted = uniform * total, before = 0;
    int64_t p = 0;
    while (before + sums[p] <= wanted)
        before += sums[p++];
    /* Its tokens one by one, whose sum is rounded in another order: the last one that can be drawn may have to do. */
    int64_t last = r.vocab - 1;
    for (int64_t i = p * part; i < (p + 1) * part && i < r.vocab; i += LANES) {
        vec each = weights_from(r, i, least);
        for (int lane = 0; lane < LANES; lane++) {
            before += each[lane];
            if (each[lane] > 0)
                last = i + lane;
            if (before > wanted)
                return last;
        }
    }
    return last;
}

/* How many of n weights are above and equal to one, and the sum of those above. */
static double look(const float *weight, int64_t n, float pivot, int64_t *num_larger, int64_t *num_equal) {
    int64_t larger_ones = 0, equal_ones = 0, i = 0;
    dvec acc = {0};
    while (i + LANES <= n) {
        /* As many as the lanes of a count can hold by far. */
        int64_t end = i + (1 << 20) < n ? i + (1 << 20) : n;
        ivec above = {0}, same = {0};
        for (; i + LANES <= end; i += LANES) {
            vec each = load(weight + i);
            ivec is_larger = each > splat(pivot);
            above -= is_larger;
            same -= each == splat(pivot);
            acc += __builtin_convertvector(pick(is_larger, each, splat(0)), dvec);
        }
        for (int lane = 0; lane < LANES; lane++) {
            larger_ones += above[lane];
            equal_ones += same[lane];
        }
    }
    double mass = sum_of(&acc);
    for (; i < n; i++) {
        larger_ones += weight[i] > pivot;
        equal_ones += weight[i] == pivot;
        mass += weight[i] > pivot ? weight[i] : 0;
    }
    *num_larger = larger_ones;
    *num_equal = equal_ones;
    return mass;
}

/* The least weight that is kept of n: a token is if fewer than `count` are above it, and those have less than `mass`
   together. The weights are put in another order. */
static float last_kept(float *weight, int64_t n, int64_t count, double mass) {
    int64_t above = 0;
    double mass_above = 0;
    uint64_t random = 1;
    for (;;) {
        float three[3];
        for (int i = 0; i < 3; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            three[i] = weight[(random >> 33) % n];
        }
        float low = three[0] < three[1] ? three[0] : three[1], high = three[0] < three[1] ? three[1] : three[0];
        float pivot = three[2] < low ? low : three[2] > high ? high : three[2];
        int64_t num_larger, num_equal, left = 0;
        double larger_mass = look(weight, n, pivot, &num_larger, &num_equal);
        if (above + num_larger >= count || mass_above + larger_mass >= mass) {
            for (int64_t i = 0; i < n; i++) {
                float each = weight[i];
                weight[left] = each;
                left += each > pivot;
            }
        } else {
            above += num_larger + num_equal;
            mass_above += larger_mass + num_equal * (double)pivot;
            if (above >= count || mass_above >= mass || num_larger + num_equal == n)
                return pivot;
            for (int64_t i = 0; i < n; i++) {
                float each = weight[i];
                weight[left] = each;
                left += each < pivot;
            }
        }
        n = left;
    }
}

/* As `draw_of_all`, of n weights of which those from `least` on count: the place of one. */
static int64_t draw_of(const float *weight, int64_t n, float least, double uniform) {
    dvec acc = {0};
    int64_t i = 0, last = 0;
    for (; i + LANES <= n; i += LANES) {
        vec each = load(weight + i);
        acc += __builtin_convertvector(pick(each >= splat(least), each, splat(0)), dvec);
    }
    double total = sum_of(&acc), sum = 0;
    for (; i < n; i++)
        total += weight[i] >= least ? weight[i] : 0;
    double wanted = uniform * total;
    for (i = 0; i < n; i++) {
        if (!(weight[i] >= least) || weight[i] <= 0)
            continue;
        sum += weight[i];
        last = i;
        if (sum > wanted)
            break;
    }
    return last;
}

/* The tokens with the largest weights, in the order of the vocabulary: their number, from half of FEW to FEW if there
   are so many above LEAST_WEIGHT; 0 if more than that are equally likely. kept: as many floats. total: the sum of all
   weights. */
static int64_t likeliest(row r, int32_t *tokens, float *weight, float *kept, double *total) {
    dvec acc = {0};
    float least = LEAST_WEIGHT;
    int64_t n = 0;
    int is_full = 0;
    for (int64_t i = 0; i < r.vocab; i += LANES) {
        vec each = weights(r, i);
        acc += __builtin_convertvector(each, dvec);
        if (is_full || !is_any(each >= splat(least)))
            continue;
        if (n + LANES > FEW) {
            memcpy(kept, weight, n * sizeof *kept);
            least = last_kept(kept, n, FEW / 2, INFINITY);
            int64_t left = 0;
            for (int64_t k = 0; k < n; k++) {
                float one = weight[k];
                tokens[left] = tokens[k];
                weight[left] = one;
                left += one >= least;
            }
            n = left;
            if ((is_full = n + LANES > FEW))
                continue;
        }
        for (int lane = 0; lane < LANES; lane++) {
            tokens[n] = i + lane;
            weight[n] = each[lane];
            n += each[lane] >= least;
        }
    }
    *total = sum_of(&acc);
    return is_full ? 0 : n;
}

static int64_t draw_of_some(row r, int64_t top_k, float top_p, float min_p, double uniform) {
    int32_t tokens[FEW + LANES];
    float few[FEW + LANES], kept[FEW + LANES];
    double total, found = 0;
    int64_t n = likeliest(r, tokens, few, kept, &total);
    if (!(total > 0))
        return r.vocab - 1; /* NaN */
    double mass = top_p < 1 ? top_p * total : INFINITY;
    float smallest = 1;
    for (int64_t i = 0; i < n; i++) {
        found += few[i];
        smallest = few[i] < smallest ? few[i] : smallest;
    }
    /* The cut is among them. */
    if (n && (n >= top_k || found >= mass || min_p >= smallest)) {
        memcpy(kept, few, n * sizeof *kept);
        /* The likeliest is always kept. */
        float least = mass > 0 ? last_kept(kept, n, top_k, mass) : 1;
        return tokens[draw_of(few, n, least < min_p ? min_p : least, uniform)];
    }
    int64_t room = (r.vocab + LANES - 1) / LANES * LANES;
    float *all = malloc(2 * room * sizeof *all);
    if (!all)
        return -1;
    for (int64_t i = 0; i < room; i += LANES) {
        store(all + i, weights(r, i));
        store(all + room + i, weights(r, i));
    }
    float least = mass > 0 ? last_kept(all + room, r.vocab, top_k, mass) : 1;
    int64_t token = draw_of(all, r.vocab, least < min_p ? min_p : least, uniform);
    free(all);
    return token;
}

static void draw(const void *arguments, int64_t task) {
    const draw_args *a = arguments;
    const float *logits = a->logits + task * a->stride;
    if (a->temperatures[task] <= 0) {
        a->tokens[task] = place_of_largest(logits, a->vocab);
        return;
    }
    row r = {logits, a->vocab, largest_of(logits, a->vocab), a->temperatures[task]};
    int64_t top_k = a->top_ks[task];
    float top_p = a->top_ps[task], min_p = a->min_ps[task];
    if (top_k >= a->vocab && top_p >= 1)
        a->tokens[task] = draw_of_all(r, min_p, a->uniforms[task]);
    else
        a->tokens[task] = draw_of_some(r, top_k, top_p, min_p, a->uniforms[task]);
}

/* A token for each of n rows: the likeliest where the temperature is 0, else the last one for a row with NaN, and -1 where
   there was no memory. logits: rows `stride` floats apart. top_ks: `vocab` or more cuts nothing off. */
void cpu_draw(const float *logits, int64_t n, int64_t vocab, int64_t stride, const float *temperatures,
              const int64_t *top_ks, const float *top_ps, const float *min_ps, const double *uniforms, int64_t *tokens,
              int threads) {
    draw_args a = {logits, vocab, stride, temperatures, top_ps, min_ps, top_ks, uniforms, tokens};
    cpu_run(draw, &a, n, threads);
}

typedef struct {
    float *logits;
    int64_t n, vocab, stride;
    const int64_t *rows, *slots;
    const int16_t *counts;
    const float *penalties;
} penalty_args;

/* Counts that are looked at together. */
#define AT_ONCE 32

static void penalize(const void *arguments, int64_t task) {
    const penalty_args *a = arguments;
    float *logits = a->logits + a->rows[task] * a->stride;
    const int16_t *counts = a->counts + a->slots[task] * a->vocab;
    const float *penalties = a->penalties + task;
    float frequency = penalties[0], presence = penalties[a->n], repetition = penalties[2 * a->n];
    for (int64_t begin = 0; begin < a->vocab; begin += AT_ONCE) {
        int64_t end = begin + AT_ONCE < a->vocab ? begin + AT_ONCE : a->vocab;
        uint64_t some[AT_ONCE / 4] = {0}, all = 0;
        memcpy(some, counts + begin, (end - begin) * sizeof *counts);
        for (int i = 0; i < AT_ONCE / 4; i++)
            all |= some[i];
        for (int64_t i = begin; all && i < end; i++) {
            if (counts[i] <= 0)
                continue;
            float x = logits[i] > 0 ? logits[i] / repetition : logits[i] * repetition;
            logits[i] = x - counts[i] * frequency - presence;
        }
    }
}

/* Change the logits of tokens that were generated, in n of their rows. counts: (slots, vocab). penalties: (3, n),
   frequency, presence and repetition. */
void cpu_penalize(float *logits, int64_t n, int64_t vocab, int64_t stride, const int64_t *rows, const int64_t *slots,
                  const int16_t *counts, const float *penalties, int threads) {
    penalty_args a = {logits, n, vocab, stride, rows, slots, counts, penalties};
    cpu_run(penalize, &a, n, threads);
}
