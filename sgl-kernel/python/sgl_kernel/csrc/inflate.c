/* A decoder of raw Deflate (RFC 1951) into memory of a known size, made for streams that are literals alone: one look
 * into a table gives up to three of them. Trusts nothing: reads and writes stay inside of the two buffers whatever the
 * stream holds. Allocates nothing but its tables, on the stack.
 */
#include <stdint.h>
#include <string.h>

#define LITERALS 288
#define DISTANCES 32
#define LENGTH_CODES 19
#define MAX_BITS 15
/* Bits of a look into a table: few where codes are short, because a table is made anew every 32 KiB. */
#define FEW_BITS 9
#define MANY_BITS 11
#define END_OF_BLOCK 256

/* Codes that begin alike and are longer than a look are two or more. */
#define MAX_ENTRIES ((1 << MANY_BITS) + (LITERALS / 2 << (MAX_BITS - FEW_BITS)))

/* An entry of a table: in the low byte 6 bits, how many bits of input it takes, and 2 bits, how many literals it gives;
 * above them the literals, or a symbol that is none. One of 0 bits: no code begins like this; with a symbol, all that
 * do are longer, and lie in the part of the table that begins there. */
#define BITS_OF(entry) ((int)((entry) & 63))
#define COUNT_OF(entry) ((int)((entry) >> 6 & 3))
#define SYMBOL_OF(entry) ((int)((entry) >> 8))
#define ENTRY(symbol, bits, count) ((uint32_t)(symbol) << 8 | (uint32_t)(count) << 6 | (uint32_t)(bits))

struct code {
    int bits;                           /* of a look */
    uint32_t table[MAX_ENTRIES];        /* 1 << bits entries, then the parts */
    uint8_t first_bits[1 << MANY_BITS]; /* of an entry with several literals: what the first takes */
};

struct reader {
    const uint8_t *in, *end;
    uint64_t bits;
    int count; /* valid bits, 63 at most; those above may be any */
};

static inline uint32_t take(struct reader *r, int n)
{
    uint32_t value = (uint32_t)(r->bits & ((UINT64_C(1) << n) - 1));
    r->bits >>= n;
    r->count -= n;
    return value;
}

static inline uint64_t load64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

/* At least 56 bits, or all that are left. */
static inline void refill(struct reader *r)
{
    r->bits &= (UINT64_C(1) << r->count) - 1;
    if (r->end - r->in >= 8) {
        r->bits |= load64(r->in) << r->count;
        r->in += (63 - r->count) >> 3;
        r->count |= 56;
        return;
    }
    while (r->count < 56 && r->in < r->end) {
        r->bits |= (uint64_t)*r->in++ << r->count;
        r->count += 8;
    }
}

enum kind { OF_LENGTHS, OF_LITERALS, OF_DISTANCES };

/* Returns 0, or -1 for lengths that are no code. It may be incomplete where it has one symbol of one bit, or none. */
static int build(struct code *c, const uint8_t *lengths, int n, enum kind kind)
{
    uint16_t count[MAX_BITS + 1] = {0}, first[MAX_BITS + 2];
    for (int s = 0; s < n; s++)
        count[lengths[s]]++;
    int left = 1, used = n - count[0];
    count[0] = 0;
    for (int bits = 1; bits <= MAX_BITS; bits++) {
        left = (left << 1) - count[bits];
        if (left < 0)
            return -1;
    }
    if (left > 0 && (kind == OF_LENGTHS || used > 1 || count[1] != used))
        return -1;
    first[0] = 0;
    int expected = 0; /* bits of a symbol, in 2^-15, where the code fits the data */
    for (int bits = 1; bits <= MAX_BITS; bits++) {
        first[bits] = (uint16_t)((first[bits - 1] + count[bits - 1]) << 1);
        expected += bits * count[bits] << (MAX_BITS - bits);
    }
    const int few = kind != OF_LITERALS || expected <= 3 << MAX_BITS, look = few ? FEW_BITS : MANY_BITS;
    const uint32_t size_of_table = 1u << look, size_of_part = 1u << (MAX_BITS - look);
    uint32_t *table = c->table, end = size_of_table;
    c->bits = look;
    memset(table, 0, size_of_table * sizeof *table);
    for (int s = 0; s < n; s++) {
        int bits = lengths[s];
        if (!bits)
            continue;
        uint32_t code = first[bits]++, reversed = 0;
        for (int bit = 0; bit < bits; bit++)
            reversed |= (code >> bit & 1) << (bits - 1 - bit);
        uint32_t entry = ENTRY(s, bits, kind == OF_LITERALS && s < END_OF_BLOCK);
        uint32_t index = reversed, size = size_of_table, step = 1u << bits;
        if (bits > look) {
            uint32_t *begin = table + (reversed & (size_of_table - 1));
            if (!*begin) {
                *begin = ENTRY(end, 0, 0);
                memset(table + end, 0, size_of_part * sizeof *table);
                end += size_of_part;
            }
            uint32_t part = (uint32_t)SYMBOL_OF(*begin);
            index = part + (reversed >> look);
            size = part + size_of_part;
            step = 1u << (bits - look);
        }
        for (; index < size; index += step)
            table[index] = entry;
    }
    if (kind != OF_LITERALS)
        return 0;
    /* From the last on: what is behind a code lies at a smaller index, which still has one symbol. */
    for (int index = (int)size_of_table - 1; index >= 0; index--) {
        uint32_t entry = table[index];
        c->first_bits[index] = (uint8_t)BITS_OF(entry);
        for (int num = COUNT_OF(entry); num == 1 || num == 2; num++) {
            int bits = BITS_OF(entry);
            uint32_t next = table[index >> bits];
            if (!index || COUNT_OF(next) != 1 || bits + BITS_OF(next) > look)
                break;
            entry = (entry & 0xffffff00) | (next >> 8) << (8 + 8 * num) | (uint32_t)(num + 1) << 6 |
                    (uint32_t)(bits + BITS_OF(next));
        }
        table[index] = entry;
    }
    return 0;
}

/* The next symbol, of the bits that are there; -1 if there is none. */
static inline int next_symbol(struct reader *r, const struct code *c)
{
    uint32_t index = (uint32_t)r->bits & ((1u << c->bits) - 1), entry = c->table[index];
    if (COUNT_OF(entry) > 1)
        entry = ENTRY(SYMBOL_OF(entry) & 0xff, c->first_bits[index], 1);
    else if (BITS_OF(entry) == 0 && SYMBOL_OF(entry))
        entry = c->table[SYMBOL_OF(entry) + (int)(r->bits >> c->bits & ((1u << (MAX_BITS - c->bits)) - 1))];
    if (BITS_OF(entry) == 0 || BITS_OF(entry) > r->count)
        return -1;
    take(r, BITS_OF(entry));
    return SYMBOL_OF(entry);
}

static int read_codes(struct reader *r, struct code *literals, struct code *distances)
{
    static const uint8_t order[LENGTH_CODES] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    uint8_t lengths[LITERALS + DISTANCES] = {0};
    refill(r);
    if (r->count < 14)
        return -1;
    int num_literals = 257 + (int)take(r, 5), num_distances = 1 + (int)take(r, 5), num_lengths = 4 + (int)take(r, 4);
    if (num_literals > 286 || num_distances > 30)
        return -1;
    for (int i = 0; i < num_lengths; i++) {
        refill(r);
        if (r->count < 3)
            return -1;
        lengths[order[i]] = (uint8_t)take(r, 3);
    }
    struct code *of_lengths = distances; /* its memory is free until then */
    if (build(of_lengths, lengths, LENGTH_CODES, OF_LENGTHS))
        return -1;
    memset(lengths, 0, sizeof lengths);
    for (int at = 0; at < num_literals + num_distances;) {
        refill(r);
        int symbol = next_symbol(r, of_lengths);
        if (symbol < 0)
            return -1;
        if (symbol < 16) {
            lengths[at++] = (uint8_t)symbol;
            continue;
        }
        static const uint8_t extra[3] = {2, 3, 7}, base[3] = {3, 3, 11};
        if (r->count < extra[symbol - 16] || (symbol == 16 && !at))
            return -1;
        int times = base[symbol - 16] + (int)take(r, extra[symbol - 16]);
        if (at + times > num_literals + num_distances)
            return -1;
        memset(lengths + at, symbol == 16 ? lengths[at - 1] : 0, (size_t)times);
        at += times;
    }
    if (!lengths[END_OF_BLOCK] || build(distances, lengths + num_literals, num_distances, OF_DISTANCES))
        return -1;
    return build(literals, lengths, num_literals, OF_LITERALS);
}

static void fixed_codes(struct code *literals, struct code *distances)
{
    uint8_t lengths[LITERALS];
    memset(lengths, 8, 144);
    memset(lengths + 144, 9, 112);
    memset(lengths + 256, 7, 24);
    memset(lengths + 280, 8, 8);
    build(literals, lengths, LITERALS, OF_LITERALS);
    memset(lengths, 5, DISTANCES);
    build(distances, lengths, DISTANCES, OF_DISTANCES);
}

/* Literals as long as looks give some and both buffers have room for a few. look: a constant for the compiler. */
static inline __attribute__((always_inline)) uint8_t *decode_looks(struct reader *r, const uint32_t *table, uint8_t *out,
                                                                   const uint8_t *out_end, const int look)
{
    uint32_t entry;
    do {
        if (r->end - r->in < 8 || out_end - out < 4 * (56 / look))
            return out;
        refill(r);
        uint64_t bits = r->bits;
        int used = 0;
        for (int i = 0; i < 56 / look; i++) {
            entry = table[bits & ((1u << look) - 1)];
            if (COUNT_OF(entry) == 0)
                break;
            uint32_t bytes = entry >> 8;
            memcpy(out, &bytes, 4);
            out += COUNT_OF(entry);
            bits >>= BITS_OF(entry);
            used += BITS_OF(entry);
        }
        r->bits = bits;
        r->count -= used;
    } while (COUNT_OF(entry));
    return out;
}

static uint8_t *decode_literals(struct reader *r, const struct code *c, uint8_t *out, const uint8_t *out_end)
{
    if (c->bits == FEW_BITS)
        return decode_looks(r, c->table, out, out_end, FEW_BITS);
    return decode_looks(r, c->table, out, out_end, MANY_BITS);
}

/* Returns the end of the output, or NULL for a stream that is not valid or longer than the output. */
static uint8_t *decode_block(struct reader *r, const struct code *literals, const struct code *distances,
                             const uint8_t *out_start, uint8_t *out, const uint8_t *out_end)
{
    static const uint16_t length_base[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                             31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
    static const uint8_t length_extra[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
    static const uint16_t distance_base[30] = {1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
                                               193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
    for (;;) {
        out = decode_literals(r, literals, out, out_end);
        refill(r); /* a length and a distance take 48 bits at most */
        int symbol = next_symbol(r, literals);
        if (symbol < 0)
            return NULL;
        if (symbol < END_OF_BLOCK) {
            if (out == out_end)
                return NULL;
            *out++ = (uint8_t)symbol;
            continue;
        }
        if (symbol == END_OF_BLOCK)
            return out;
        if (symbol > 285 || r->count < length_extra[symbol - 257])
            return NULL;
        int length = length_base[symbol - 257] + (int)take(r, length_extra[symbol - 257]);
        int code = next_symbol(r, distances);
        if (code < 0 || code > 29)
            return NULL;
        int extra = code < 2 ? 0 : (code >> 1) - 1;
        if (r->count < extra)
            return NULL;
        int distance = distance_base[code] + (int)take(r, extra);
        if (distance > out - out_start || length > out_end - out)
            return NULL;
        const uint8_t *from = out - distance;
        if (distance >= 8 && out_end - out >= length + 8) {
            /* What is written behind the end is written again. */
            for (int i = 0; i < length; i += 8)
                memcpy(out + i, from + i, 8);
            out += length;
        } else
            while (length--)
                *out++ = *from++;
    }
}

/* Returns 0 if the n bytes are one whole stream of exactly size bytes, which are written to out; else -1, and out may
 * hold anything. */
int kvcodec_inflate(const uint8_t *in, int64_t n, uint8_t *out, int64_t size)
{
    struct code literals, distances;
    struct reader r = {in, in + n, 0, 0};
    uint8_t *at = out, *out_end = out + size;
    for (int is_last = 0; !is_last;) {
        refill(&r);
        if (r.count < 3)
            return -1;
        is_last = (int)take(&r, 1);
        switch (take(&r, 2)) {
        case 0: {
            take(&r, r.count & 7);
            refill(&r);
            if (r.count < 32)
                return -1;
            uint32_t length = take(&r, 16), complement = take(&r, 16);
            r.in -= r.count >> 3; /* bytes that were read ahead */
            r.bits = 0;
            r.count = 0;
            if ((length ^ complement) != 0xffff || length > r.end - r.in || length > out_end - at)
                return -1;
            memcpy(at, r.in, length);
            at += length;
            r.in += length;
            continue;
        }
        case 1:
            fixed_codes(&literals, &distances);
            break;
        case 2:
            if (read_codes(&r, &literals, &distances))
                return -1;
            break;
        default:
            return -1;
        }
        at = decode_block(&r, &literals, &distances, out, at, out_end);
        if (!at)
            return -1;
    }
    return at == out_end && r.in - (r.count >> 3) == r.end ? 0 : -1;
}
