/* The other end of frames, beside an engine: checks each frame of a proxy elsewhere, writes the bytes of open fetches into
 * the engine's pages, and gives messages to its caller (offload/relay.py). A frame's bytes are nothing until its tag has
 * been checked. */
#include "plane.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define DATA_BYTES (256 << 10)
#define MAX_MESSAGE_BYTES (16 << 20)
#define SILENCE_MS 30000

enum { RELAY_GONE = -1, RELAY_FORGED = -2, RELAY_NO_FRAME = -3, RELAY_NOT_ASKED = -4 };

struct open_fetch {
    struct open_fetch *next;
    uint64_t operation;
    uint32_t num_blocks;
    int32_t *pages;
    uint32_t *came; /* bytes of each piece, which come in order */
};

struct relay {
    int fd;
    uint8_t key[MAC_KEY_BYTES];
    uint64_t number;
    uint8_t *pool;
    struct relay_layout {
        uint64_t block_bytes;
        uint32_t page_bytes, pages_per_block, piece_bytes, num_pieces;
    } layout;
    uint8_t *payload;
    size_t room;
    /* Held while pages are written, and while fetches begin and end. */
    pthread_mutex_t lock;
    struct open_fetch *fetches;
};

struct relay *kvplane_relay(int fd, const uint8_t key[MAC_KEY_BYTES], uint64_t number, uint8_t *pool,
                            const struct relay_layout *layout)
{
    struct relay *relay = calloc(1, sizeof *relay);
    if (!relay || !has_hmac() || !(relay->payload = malloc(relay->room = DATA_BYTES))) {
        free(relay);
        return NULL;
    }
    relay->fd = fd;
    relay->number = number;
    relay->pool = pool;
    relay->layout = *layout;
    memcpy(relay->key, key, MAC_KEY_BYTES);
    pthread_mutex_init(&relay->lock, NULL);
    return relay;
}

/* pages: of num_blocks blocks, which the caller has checked. Returns 0, or -1 without memory. */
int kvplane_relay_open(struct relay *relay, uint64_t operation, uint32_t num_blocks, const int32_t *pages)
{
    size_t num_pages = (size_t)num_blocks * relay->layout.pages_per_block;
    struct open_fetch *fetch = calloc(1, sizeof *fetch);
    if (!fetch || !(fetch->pages = malloc(num_pages * sizeof *pages)) ||
        !(fetch->came = calloc((size_t)num_blocks * relay->layout.num_pieces, sizeof *fetch->came))) {
        if (fetch)
            free(fetch->pages);
        free(fetch);
        return -1;
    }
    fetch->operation = operation;
    fetch->num_blocks = num_blocks;
    memcpy(fetch->pages, pages, num_pages * sizeof *pages);
    pthread_mutex_lock(&relay->lock);
    fetch->next = relay->fetches;
    relay->fetches = fetch;
    pthread_mutex_unlock(&relay->lock);
    return 0;
}

static uint32_t size_of_piece(const struct relay_layout *layout, uint32_t index)
{
    uint64_t left = layout->block_bytes - (uint64_t)index * layout->piece_bytes;
    return left < layout->piece_bytes ? (uint32_t)left : layout->piece_bytes;
}

static void free_fetch(struct open_fetch *fetch)
{
    free(fetch->pages);
    free(fetch->came);
    free(fetch);
}

/* Nothing is written for a fetch any more. Returns how many of its leading blocks have come; -1: it is not open. */
int64_t kvplane_relay_end(struct relay *relay, uint64_t operation)
{
    struct open_fetch *found = NULL;
    pthread_mutex_lock(&relay->lock);
    for (struct open_fetch **at = &relay->fetches; *at; at = &(*at)->next)
        if ((*at)->operation == operation) {
            found = *at;
            *at = found->next;
            break;
        }
    pthread_mutex_unlock(&relay->lock);
    if (!found)
        return -1;
    const struct relay_layout *layout = &relay->layout;
    int64_t num = 0;
    for (bool is_whole = true; num < found->num_blocks; num++) {
        for (uint32_t i = 0; i < layout->num_pieces && is_whole; i++)
            is_whole = found->came[(size_t)num * layout->num_pieces + i] == size_of_piece(layout, i);
        if (!is_whole)
            break;
    }
    free_fetch(found);
    return num;
}

static int receive_all(struct relay *relay, uint8_t *to, size_t size)
{
    while (size) {
        ssize_t got = recv(relay->fd, to, size, MSG_DONTWAIT);
        if (got > 0) {
            to += got;
            size -= (size_t)got;
            continue;
        }
        if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
            return RELAY_GONE;
        struct pollfd waiting = {relay->fd, POLLIN, 0};
        if (errno != EINTR && poll(&waiting, 1, SILENCE_MS) == 0)
            return RELAY_GONE;
    }
    return 0;
}

static int write_pages(struct relay *relay, const struct frame_header *header)
{
    const struct relay_layout *layout = &relay->layout;
    uint32_t index = header->start / layout->piece_bytes, at = header->start % layout->piece_bytes;
    int status = 0;
    pthread_mutex_lock(&relay->lock);
    struct open_fetch *fetch = relay->fetches;
    while (fetch && fetch->operation != header->operation)
        fetch = fetch->next;
    if (fetch) {
        uint32_t *came = NULL;
        if (header->block < fetch->num_blocks && index < layout->num_pieces)
            came = &fetch->came[(size_t)header->block * layout->num_pieces + index];
        if (!came || *came != at || !header->size || header->size > size_of_piece(layout, index) - at)
            status = RELAY_NOT_ASKED;
        else {
            const int32_t *pages = fetch->pages + (size_t)header->block * layout->pages_per_block;
            const uint8_t *from = relay->payload;
            for (uint64_t start = header->start, end = start + header->size; start < end;) {
                uint64_t skipped = start % layout->page_bytes, size = layout->page_bytes - skipped;
                size = size < end - start ? size : end - start;
                memcpy(relay->pool + (uint64_t)pages[start / layout->page_bytes] * layout->page_bytes + skipped, from, size);
                start += size;
                from += size;
            }
            *came += header->size;
        }
    }
    pthread_mutex_unlock(&relay->lock);
    return status;
}

/* The size of the next message, which is at *message until the next call; or why there is none. For one thread. */
int64_t kvplane_relay_receive(struct relay *relay, const uint8_t **message)
{
    for (;;) {
        struct frame_header header;
        uint8_t tag[TAG_BYTES], expected[TAG_BYTES], difference = 0;
        int status = receive_all(relay, (uint8_t *)&header, sizeof header);
        if (status)
            return status;
        if (header.kind > DATA_FRAME || header.size > (header.kind == DATA_FRAME ? DATA_BYTES : MAX_MESSAGE_BYTES))
            return RELAY_NO_FRAME;
        if (header.size > relay->room) {
            free(relay->payload);
            if (!(relay->payload = malloc(relay->room = header.size)))
                abort();
        }
        if ((status = receive_all(relay, relay->payload, header.size)) || (status = receive_all(relay, tag, sizeof tag)))
            return status;
        const struct span spans[] = {
            {&relay->number, sizeof relay->number}, {&header, sizeof header}, {relay->payload, header.size}};
        hmac_tag(relay->key, spans, 3, expected);
        relay->number++;
        for (int i = 0; i < TAG_BYTES; i++)
            difference |= tag[i] ^ expected[i];
        if (difference)
            return RELAY_FORGED;
        if (header.kind == MESSAGE_FRAME) {
            *message = relay->payload;
            return header.size;
        }
        if ((status = write_pages(relay, &header)))
            return status;
    }
}

/* After the last call of the others. */
void kvplane_relay_free(struct relay *relay)
{
    for (struct open_fetch *fetch = relay->fetches, *next; fetch; fetch = next) {
        next = fetch->next;
        free_fetch(fetch);
    }
    free(relay->payload);
    free(relay);
}
