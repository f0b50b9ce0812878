/* Vectors of floats as wide as the CPU has them, in GCC's vector extension (clang has it too). Shared by the cpu_*.c
   files. */

#ifndef SGL_CPU_VECTOR_H
#define SGL_CPU_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

/* Fetch floats into the second-level cache: a core has more of these under way than reads into its first. */
INLINE void fetch(const float *from, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16)
        __builtin_prefetch(from + i, 0, 2);
}

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* LANES numbers in bfloat16, which are the upper halves of floats. */
INLINE vec load_bfloat16(const uint16_t *from) {
    uint16_t narrow __attribute__((vector_size(2 * LANES)));
    memcpy(&narrow, from, sizeof narrow);
    return (vec)(__builtin_convertvector(narrow, ivec) << 16);
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec pick(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

/* The second one where one of them is NaN. */
INLINE vec larger(vec a, vec b) {
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

typedef float quad __attribute__((vector_size(16)));
typedef int32_t iquad __attribute__((vector_size(16)));

/* In an order of its own, the same for every vector. */
INLINE float sum(vec v) {
    quad part[LANES / 4];
    memcpy(part, &v, sizeof v);
    for (int n = LANES / 8; n; n /= 2)
        for (int i = 0; i < n; i++)
            part[i] += part[i + n];
    quad all = part[0];
    all += __builtin_shuffle(all, (iquad){2, 3, 0, 1});
    all += __builtin_shuffle(all, (iquad){1, 0, 3, 2});
    return all[0];
}

/* Lanes of a and b that the list names, each plus the one that is `apart` lanes on. */
#define JOIN(a, b, apart, ...)                                                                                         \
    (__builtin_shuffle(a, b, (ivec){__VA_ARGS__}) + __builtin_shuffle(a, b, (ivec){__VA_ARGS__} + (apart)))

/* Lane i: sum(v[i]) of LANES vectors, with the same bits. Each pass halves the vectors and doubles what one holds: it
   adds lanes that are 8, then 4, 2 and 1 apart. */
INLINE vec sums(vec *v) {
#if LANES == 16
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        v[i] = JOIN(v[2 * i], v[2 * i + 1], 8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v[i] = JOIN(v[2 * i], v[2 * i + 1], 4, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        v[i] = JOIN(v[2 * i], v[2 * i + 1], 2, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
    return JOIN(v[0], v[1], 1, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif LANES == 8
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v[i] = JOIN(v[2 * i], v[2 * i + 1], 4, 0, 1, 2, 3, 8, 9, 10, 11);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        v[i] = JOIN(v[2 * i], v[2 * i + 1], 2, 0, 1, 4, 5, 8, 9, 12, 13);
    return JOIN(v[0], v[1], 1, 0, 2, 4, 6, 8, 10, 12, 14);
#else
    vec all;
    for (int i = 0; i < LANES; i++)
        all[i] = sum(v[i]);
    return all;
#endif
}

/* Lane j of v[i] and lane i of v[j] change places. Each pass exchanges squares of half the size, whose lanes are 8, 4, 2
   and 1 apart. */
INLINE void transpose(vec v[LANES]) {
    ivec lane;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
#pragma GCC unroll 4
    for (int apart = LANES / 2; apart; apart /= 2) {
        ivec low = (lane & apart) == 0;
        ivec first = (low & lane) | (~low & (lane - apart + LANES));
        ivec second = (low & (lane + apart)) | (~low & (lane + LANES));
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & apart)
                continue;
            vec a = v[i], b = v[i + apart];
            v[i] = __builtin_shuffle(a, b, first);
            v[i + apart] = __builtin_shuffle(a, b, second);
        }
    }
}

INLINE quad larger_of_four(quad a, quad b) {
    iquad where = a > b;
    return (quad)((where & (iquad)a) | (~where & (iquad)b));
}

INLINE float largest(vec v) {
    quad part[LANES / 4];
    memcpy(part, &v, sizeof v);
    for (int n = LANES / 8; n; n /= 2)
        for (int i = 0; i < n; i++)
            part[i] = larger_of_four(part[i], part[i + n]);
    quad all = larger_of_four(part[0], __builtin_shuffle(part[0], (iquad){2, 3, 0, 1}));
    all = larger_of_four(all, __builtin_shuffle(all, (iquad){1, 0, 3, 2}));
    return all[0];
}

/* e^x of numbers that are not positive, to about an ulp; 0 below the least normal number, NaN of NaN. x = n ln 2 + r,
   and e^r by its series up to r^7 / 7!, |r| <= ln 2 / 2. */
INLINE vec exp_to_one(vec x) {
    const vec magic = splat(12582912.0f); /* adding 1.5 * 2^23 rounds to an integer, which stands in the low bits */
    ivec vanishes = x < splat(-87.3365447f);
    vec shifted = x * splat(1.44269504f) + magic;
    vec n = shifted - magic;
    vec r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vec p = splat(1.0f / 5040);
    p = p * r + splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
#if LANES == 16
    vec scaled = (vec)_mm512_scalef_ps((__m512)p, (__m512)n); /* p * 2^n, as below */
#else
    vec scaled = p * (vec)(((ivec)shifted - (ivec)magic + 127) << 23);
#endif
    return pick(vanishes, splat(0.0f), scaled);
}

/* As `exp_to_one`, of any number; infinity above 2^127.5. */
INLINE vec exp_of(vec x) { return pick(x > splat(88.3762589f), splat(INFINITY), exp_to_one(x)); }

#endif
