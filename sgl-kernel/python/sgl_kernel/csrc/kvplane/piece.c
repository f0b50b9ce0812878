/* Stored pieces: their header and checksums, and the two stages of each codec. codec/header.py and codec/base.py define
 * the format, and what a reader accepts; every size is computed here and none is taken from a piece. */
#include "plane.h"

#include <stdio.h>
#include <string.h>

#define VERSION 1
#define STORED 1
#define LARGEST 0x1p126f /* of a scale */

struct header { /* little-endian, as all machines are that this runs on */
    char magic[4];
    uint8_t version, codec, flags, zero;
    uint32_t index;
    uint8_t key[KEY_BYTES];
    uint32_t raw_bytes, mid_bytes, payload_bytes;
    uint64_t fingerprint, payload_checksum, checksum;
} __attribute__((packed));
_Static_assert(sizeof(struct header) == HEADER_BYTES, "the header has no gaps");

uint32_t raw_bytes_of(const struct session *session, uint32_t index)
{
    uint64_t start = (uint64_t)index * session->piece_bytes, left = session->block_bytes - start;
    return left < session->piece_bytes ? (uint32_t)left : session->piece_bytes;
}

uint32_t mid_bytes_of(const struct session *session, uint32_t raw_bytes)
{
    if (session->codec == LOSSLESS)
        return raw_bytes / session->value_bytes;
    if (session->codec == BINNED)
        return raw_bytes / (session->head_dim * session->value_bytes) * (4 + session->head_dim);
    return 0;
}

static const char *differs(char *reason, const char *what, unsigned long long found, unsigned long long expected)
{
    snprintf(reason, REASON_BYTES, "%s: found %llu, expected %llu", what, found, expected);
    return reason;
}

const char *check_piece(struct piece *piece, char reason[REASON_BYTES])
{
    const struct session *session = piece->fetch->session;
    struct header header;
    size_t size = piece->stored_bytes;
    if (session->has_mac) {
        uint8_t tag[TAG_BYTES], difference = 0;
        if (size < HEADER_BYTES + TAG_BYTES)
            return "it is too short for a piece with a tag";
        size -= TAG_BYTES;
        const struct span spans[] = {{piece->header, HEADER_BYTES}, {piece->payload, size - HEADER_BYTES}};
        hmac_tag(session->mac_key, spans, 2, tag);
        for (int i = 0; i < TAG_BYTES; i++)
            difference |= tag[i] ^ piece->tag[i];
        if (difference)
            return "it was not written with this deployment's secret, or is damaged";
    }
    if (size < HEADER_BYTES)
        return "too few bytes for a stored piece";
    memcpy(&header, piece->header, sizeof header);
    if (memcmp(header.magic, "SGKV", 4))
        return "not a stored piece: the magic is missing";
    if (header.version != VERSION)
        return differs(reason, "version", header.version, VERSION);
    if (header.checksum != xxh3(piece->header, offsetof(struct header, checksum)) || header.zero)
        return "the header is damaged";
    uint32_t raw_bytes = raw_bytes_of(session, piece->index), mid_bytes = mid_bytes_of(session, raw_bytes);
    piece->is_plain = header.flags == STORED;
    if (header.codec != session->codec)
        return differs(reason, "codec", header.codec, session->codec);
    if (header.flags && !piece->is_plain)
        return differs(reason, "flags", header.flags, 0);
    if (header.index != piece->index)
        return differs(reason, "piece", header.index, piece->index);
    if (memcmp(header.key, piece->fetch->keys + (size_t)piece->block * KEY_BYTES, KEY_BYTES))
        return "it is a piece of another block";
    if (header.fingerprint != session->fingerprint)
        return "it was written with other settings or another layout";
    if (header.raw_bytes != raw_bytes)
        return differs(reason, "raw bytes", header.raw_bytes, raw_bytes);
    if (header.mid_bytes != (piece->is_plain ? 0 : mid_bytes))
        return differs(reason, "mid bytes", header.mid_bytes, piece->is_plain ? 0 : mid_bytes);
    if (header.payload_bytes != size - HEADER_BYTES)
        return differs(reason, "payload bytes", header.payload_bytes, size - HEADER_BYTES);
    if (piece->is_plain && header.payload_bytes != raw_bytes)
        return differs(reason, "payload bytes", header.payload_bytes, raw_bytes);
    if (!piece->is_plain && (session->codec == RAW || header.payload_bytes >= raw_bytes))
        return "a piece of this codec cannot have this payload";
    if (header.payload_checksum != xxh3(piece->payload, header.payload_bytes))
        return "the payload is damaged";
    piece->stored_bytes = size;
    return NULL;
}

bool is_of_another(const struct piece *piece)
{
    struct header header;
    if (piece->stored_bytes < HEADER_BYTES)
        return false;
    memcpy(&header, piece->header, sizeof header);
    return !memcmp(header.magic, "SGKV", 4) &&
           header.checksum == xxh3(piece->header, offsetof(struct header, checksum)) &&
           (header.index != piece->index ||
            memcmp(header.key, piece->fetch->keys + (size_t)piece->block * KEY_BYTES, KEY_BYTES));
}

/* Of a piece that was checked, which is not plain. */
const char *decompress_piece(struct piece *piece, void *zstd_context, uint8_t *mid)
{
    const struct session *session = piece->fetch->session;
    uint32_t raw_bytes = raw_bytes_of(session, piece->index), mid_bytes = mid_bytes_of(session, raw_bytes);
    const uint8_t *in = piece->payload;
    size_t n = piece->stored_bytes - HEADER_BYTES;
    if (session->codec == LOSSLESS) {
        uint32_t rest_bytes = raw_bytes - mid_bytes;
        if (n < rest_bytes)
            return "the payload is too short";
        in += rest_bytes;
        n -= rest_bytes;
    }
    bool ok = session->coder == ZSTD ? zstd_decode(zstd_context, in, n, mid, mid_bytes)
                                     : kvcodec_inflate(in, (int64_t)n, mid, mid_bytes) == 0;
    return ok ? NULL : "the payload is no whole stream of the coder";
}

/* Of a piece that was decompressed. out: its raw bytes. */
const char *dequantize_piece(struct piece *piece, const uint8_t *mid, uint8_t *out)
{
    const struct session *session = piece->fetch->session;
    uint32_t raw_bytes = raw_bytes_of(session, piece->index), mid_bytes = mid_bytes_of(session, raw_bytes);
    const uint8_t *payload = piece->payload;
    if (piece->is_plain) {
        if (out != payload)
            memcpy(out, payload, raw_bytes);
        return NULL;
    }
    if (session->codec == LOSSLESS) {
        if (session->value_bytes == 2)
            kvcodec_merge2(mid, payload, mid_bytes, out);
        else if (session->value_bytes == 4)
            kvcodec_merge4(mid, payload, mid_bytes, out);
        else
            memcpy(out, mid, raw_bytes);
        return NULL;
    }
    uint32_t dim = session->head_dim, num_vectors = mid_bytes / (4 + dim);
    const int8_t *codes = (const int8_t *)mid + (size_t)4 * num_vectors;
    for (uint32_t i = 0; i < num_vectors; i++) {
        float scale;
        memcpy(&scale, mid + (size_t)4 * i, 4);
        if (!(scale >= 0 && scale <= LARGEST)) /* also a NaN */
            return "a scale is negative, infinite or not a number";
    }
    if (session->dtype == BFLOAT16)
        kvcodec_unbin_bfloat16(mid, codes, num_vectors, dim, out);
    else if (session->dtype == FLOAT16)
        kvcodec_unbin_float16(mid, codes, num_vectors, dim, out);
    else
        kvcodec_unbin_float32(mid, codes, num_vectors, dim, out);
    return NULL;
}
