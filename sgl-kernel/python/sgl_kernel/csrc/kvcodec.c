/* The inner loops of the remote tier's codecs. kvcodec/reference.py defines what each of them does; this file must
 * give the same bytes. Owns nothing, allocates nothing; Python has checked every size before it calls.
 *
 * Addresses need no alignment: slots of a buffer begin anywhere. Compiled without -ffast-math and without
 * contraction, so that every float is the one IEEE arithmetic gives.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));

/* ---- planes: a value rotated left by one bit, so that the exponent comes first; then its bytes apart ---- */

void kvcodec_split2(const u16 *restrict in, int64_t n, uint8_t *restrict first, uint8_t *restrict rest)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t r = (uint16_t)(in[i] << 1 | in[i] >> 15);
        first[i] = (uint8_t)(r >> 8);
        rest[i] = (uint8_t)r;
    }
}

void kvcodec_merge2(const uint8_t *restrict first, const uint8_t *restrict rest, int64_t n, u16 *restrict out)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t r = (uint16_t)(first[i] << 8 | rest[i]);
        out[i] = (uint16_t)(r >> 1 | r << 15);
    }
}

void kvcodec_split4(const u32 *restrict in, int64_t n, uint8_t *restrict first, uint8_t *restrict rest)
{
    uint8_t *restrict b = rest, *restrict c = rest + n, *restrict d = rest + 2 * n;
    for (int64_t i = 0; i < n; i++) {
        uint32_t r = in[i] << 1 | in[i] >> 31;
        first[i] = (uint8_t)(r >> 24);
        b[i] = (uint8_t)(r >> 16);
        c[i] = (uint8_t)(r >> 8);
        d[i] = (uint8_t)r;
    }
}

void kvcodec_merge4(const uint8_t *restrict first, const uint8_t *restrict rest, int64_t n, u32 *restrict out)
{
    const uint8_t *restrict b = rest, *restrict c = rest + n, *restrict d = rest + 2 * n;
    for (int64_t i = 0; i < n; i++) {
        uint32_t r = (uint32_t)first[i] << 24 | (uint32_t)b[i] << 16 | (uint32_t)c[i] << 8 | d[i];
        out[i] = r >> 1 | r << 31;
    }
}

/* ---- bins: one scale per vector, codes of 8 bits ---- */

static inline float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static inline float from_bf16(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

static inline float from_f16(uint16_t bits)
{
    _Float16 h;
    memcpy(&h, &bits, 2);
    return (float)h;
}

static inline uint16_t to_bf16(float f)
{
    uint32_t bits = bits_of(f);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t to_f16(float f)
{
    _Float16 h = (_Float16)f;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
}

#define TOO_LARGE 0x7e800000u /* 2^126: beyond it, and for inf and NaN, whose bits are larger still, nothing is binned */
#define SMALLEST 0x1p-126f    /* a scale below it would be subnormal or 0 */

/* Returns 1, or 0 where a vector cannot be binned. */
#define BIN(name, type, load)                                                                                         \
    int name(const type *restrict in, int64_t num_vectors, int64_t dim, const uint8_t *restrict half,                 \
             u32 *restrict scales, int8_t *restrict codes)                                                            \
    {                                                                                                                 \
        for (int64_t v = 0; v < num_vectors; v++, in += dim, codes += dim) {                                          \
            uint32_t top = 0;                                                                                         \
            for (int64_t i = 0; i < dim; i++) {                                                                       \
                uint32_t bits = bits_of(load(in[i])) & 0x7fffffffu;                                                   \
                top = bits > top ? bits : top;                                                                        \
            }                                                                                                         \
            if (top > TOO_LARGE)                                                                                      \
                return 0;                                                                                             \
            if (top == 0) {                                                                                           \
                scales[v] = 0;                                                                                        \
                memset(codes, 0, (size_t)dim);                                                                        \
                continue;                                                                                             \
            }                                                                                                         \
            float scale = float_of(top) / (float)half[v];                                                             \
            if (scale < SMALLEST)                                                                                     \
                scale = SMALLEST;                                                                                     \
            scales[v] = bits_of(scale);                                                                               \
            for (int64_t i = 0; i < dim; i++)                                                                         \
                codes[i] = (int8_t)(int32_t)rintf(load(in[i]) / scale);                                               \
        }                                                                                                             \
        return 1;                                                                                                     \
    }

#define UNBIN(name, type, store)                                                                                      \
    void name(const u32 *restrict scales, const int8_t *restrict codes, int64_t num_vectors, int64_t dim,             \
              type *restrict out)                                                                                     \
    {                                                                                                                 \
        for (int64_t v = 0; v < num_vectors; v++, codes += dim, out += dim) {                                         \
            float scale = float_of(scales[v]);                                                                        \
            for (int64_t i = 0; i < dim; i++)                                                                         \
                out[i] = store((float)codes[i] * scale);                                                              \
        }                                                                                                             \
    }

BIN(kvcodec_bin_bfloat16, u16, from_bf16)
BIN(kvcodec_bin_float16, u16, from_f16)
BIN(kvcodec_bin_float32, u32, float_of)
UNBIN(kvcodec_unbin_bfloat16, u16, to_bf16)
UNBIN(kvcodec_unbin_float16, u16, to_f16)
UNBIN(kvcodec_unbin_float32, u32, bits_of)
