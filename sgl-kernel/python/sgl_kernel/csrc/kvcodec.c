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

/* ---- Deflate (RFC 1951) with literals alone: Huffman codes, no search for repeated strings ---- */

#define LITERALS 257 /* 256 bytes, and the end of the block */
#define END_OF_BLOCK 256
#define MAX_BITS 14 /* of the format's 15: four codes and 7 left-over bits fit into 64 */
#define LENGTH_CODES 19
#define MAX_LENGTH_BITS 7
#define BLOCK_BYTES (32 << 10)
#define SLACK 8 /* bits are written 8 bytes at a time */

struct writer {
    uint8_t *out;
    uint64_t bits;
    int count;
};

static inline void put(struct writer *w, uint32_t bits, int count)
{
    w->bits |= (uint64_t)bits << w->count;
    w->count += count;
}

static inline void flush(struct writer *w)
{
    uint64_t bits = w->bits;
    for (int i = 0; i < 8; i++)
        w->out[i] = (uint8_t)(bits >> 8 * i); /* one store */
    w->out += w->count >> 3;
    w->bits = bits >> (w->count & ~7);
    w->count &= 7;
}

/* Lengths of a Huffman code over n symbols, at most max_bits; 0 for those that do not occur. At least two occur. */
static void code_lengths(const uint32_t *frequency, int n, int max_bits, uint8_t *lengths)
{
    uint32_t f[LITERALS], weight[2 * LITERALS];
    int16_t symbol[LITERALS], parent[2 * LITERALS];
    uint8_t depth[2 * LITERALS];
    uint32_t floor = 1;
    memcpy(f, frequency, sizeof(*f) * (size_t)n);
    for (int s = 0; s < n; s++)
        floor += f[s] >> max_bits;
    for (;;) {
        int m = 0;
        for (int s = 0; s < n; s++) {
            if (!f[s])
                continue;
            int at = m++;
            for (; at && f[symbol[at - 1]] > f[s]; at--)
                symbol[at] = symbol[at - 1];
            symbol[at] = (int16_t)s;
        }
        for (int i = 0; i < m; i++)
            weight[i] = f[symbol[i]];
        /* Leaves in order of weight, then inner nodes in order of weight: the two lightest are at the two fronts. */
        for (int leaf = 0, inner = m, node = m; node < 2 * m - 1; node++) {
            weight[node] = 0;
            for (int child = 0; child < 2; child++) {
                int lightest = leaf < m && (inner == node || weight[leaf] <= weight[inner]) ? leaf++ : inner++;
                weight[node] += weight[lightest];
                parent[lightest] = (int16_t)node;
            }
        }
        int deepest = 0;
        depth[2 * m - 2] = 0;
        for (int node = 2 * m - 3; node >= 0; node--) {
            depth[node] = (uint8_t)(depth[parent[node]] + 1);
            if (depth[node] > deepest)
                deepest = depth[node];
        }
        if (deepest <= max_bits) {
            memset(lengths, 0, (size_t)n);
            for (int i = 0; i < m; i++)
                lengths[symbol[i]] = depth[i];
            return;
        }
        for (int s = 0; s < n; s++) /* rare: take the rarest as more frequent than they are, and once more */
            if (f[s] && f[s] < floor)
                f[s] = floor;
        floor *= 2;
    }
}

/* The canonical code of these lengths, each code with its bits reversed, as Deflate sends them. */
static void canonical(const uint8_t *lengths, int n, uint16_t *codes)
{
    uint32_t first[MAX_BITS + 1] = {0}, count[MAX_BITS + 1] = {0};
    for (int s = 0; s < n; s++)
        count[lengths[s]] += lengths[s] != 0;
    for (int bits = 1; bits <= MAX_BITS; bits++)
        first[bits] = (first[bits - 1] + count[bits - 1]) << 1;
    for (int s = 0; s < n; s++) {
        uint32_t code = lengths[s] ? first[lengths[s]]++ : 0, reversed = 0;
        for (int bit = 0; bit < lengths[s]; bit++)
            reversed |= (code >> bit & 1) << (lengths[s] - 1 - bit);
        codes[s] = (uint16_t)reversed;
    }
}

/* Returns the number of bytes written to out, or -1 where they and SLACK do not fit into capacity. */
int64_t kvcodec_deflate(const uint8_t *restrict in, int64_t n, uint8_t *restrict out, int64_t capacity)
{
    static const uint8_t order[LENGTH_CODES] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    struct writer w = {out, 0, 0};
    int64_t start = 0;
    do {
        int64_t size = n - start < BLOCK_BYTES ? n - start : BLOCK_BYTES;
        const uint8_t *block = in + start;
        uint32_t counts[4][256], frequency[LITERALS];
        memset(counts, 0, sizeof counts);
        for (int64_t i = 0; i < size; i++)
            counts[i & 3][block[i]]++;
        for (int s = 0; s < 256; s++)
            frequency[s] = counts[0][s] + counts[1][s] + counts[2][s] + counts[3][s];
        frequency[END_OF_BLOCK] = 1;
        frequency[0] += size == 0; /* a code has two symbols at least */

        /* Two distance codes of one bit, which nothing uses: a complete code, so that no decoder minds. */
        uint8_t lengths[LITERALS + 2];
        uint16_t codes[LITERALS];
        code_lengths(frequency, LITERALS, MAX_BITS, lengths);
        lengths[LITERALS] = lengths[LITERALS + 1] = 1;
        canonical(lengths, LITERALS, codes);

        uint32_t length_frequency[LENGTH_CODES] = {0};
        uint8_t length_lengths[LENGTH_CODES];
        uint16_t length_codes[LENGTH_CODES];
        for (int s = 0; s < LITERALS + 2; s++)
            length_frequency[lengths[s]]++;
        code_lengths(length_frequency, LENGTH_CODES, MAX_LENGTH_BITS, length_lengths);
        canonical(length_lengths, LENGTH_CODES, length_codes);

        int64_t bits = w.count + 17 + 3 * LENGTH_CODES;
        for (int s = 0; s < LITERALS + 2; s++)
            bits += length_lengths[lengths[s]];
        for (int s = 0; s < LITERALS; s++)
            bits += (int64_t)frequency[s] * lengths[s];
        if ((w.out - out) + (bits + 7) / 8 + SLACK > capacity)
            return -1;

        put(&w, (uint32_t)(start + size == n) | 2 << 1, 3); /* last block?, dynamic codes */
        put(&w, LITERALS - 257, 5);
        put(&w, 2 - 1, 5);
        put(&w, LENGTH_CODES - 4, 4);
        flush(&w);
        for (int i = 0; i < LENGTH_CODES; i++) {
            put(&w, length_lengths[order[i]], 3);
            flush(&w);
        }
        for (int s = 0; s < LITERALS + 2; s++) {
            put(&w, length_codes[lengths[s]], length_lengths[lengths[s]]);
            flush(&w);
        }
        uint32_t table[256]; /* code, and its length above it */
        for (int s = 0; s < 256; s++)
            table[s] = (uint32_t)codes[s] | (uint32_t)lengths[s] << 16;
        int64_t i = 0;
        for (; i + 4 <= size; i += 4) {
            for (int k = 0; k < 4; k++)
                put(&w, table[block[i + k]] & 0xffff, (int)(table[block[i + k]] >> 16));
            flush(&w);
        }
        for (; i < size; i++) {
            put(&w, codes[block[i]], lengths[block[i]]);
            flush(&w);
        }
        put(&w, codes[END_OF_BLOCK], lengths[END_OF_BLOCK]);
        flush(&w);
        start += size;
    } while (start < n);
    if (w.count)
        *w.out++ = (uint8_t)w.bits;
    return w.out - out;
}
