/* The control plane's messages, at one end of a stream socket; offload/proxy/plane.py is the other.
 *
 *     length (4 bytes), kind (1), and the message; numbers are little-endian and not aligned
 *
 * Descriptors come beside the first byte of a message. The control plane is trusted: a message that is no message ends
 * the plane. */
#include "plane.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum to_plane { CONFIGURE = 1, OPEN, ROUTES, CONNECTED, GET, GIVE_UP, BROUGHT, SEND, CLOSE, PING };
enum from_plane { OPENED = 1, NEED, ENDED, BAD, FAILED, REDIRECT, LINK_ENDED, SESSION_CLOSED, PONG };

#define MAX_MESSAGE_BYTES (64u << 20)
#define MAX_FDS 4
#define NODES 4096

/* ---- out ---- */

struct out {
    uint8_t bytes[64 + REASON_BYTES];
    size_t size;
};

static void add(struct out *out, const void *data, size_t size)
{
    memcpy(out->bytes + out->size, data, size);
    out->size += size;
}

#define ADD(out, type, value) add(out, &(type){(type)(value)}, sizeof(type))

static struct out begin(enum from_plane kind, uint32_t session)
{
    struct out out = {.size = 4};
    ADD(&out, uint8_t, kind);
    ADD(&out, uint32_t, session);
    return out;
}

static void tell(struct plane *plane, struct out *out, const char *text)
{
    size_t length = strnlen(text, REASON_BYTES - 1), at = 0;
    add(out, text, length);
    memcpy(out->bytes, &(uint32_t){(uint32_t)out->size - 4}, 4);
    pthread_mutex_lock(&plane->event_lock);
    while (at < out->size) {
        ssize_t sent = send(plane->control, out->bytes + at, out->size - at, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR)
            break; /* the control plane has gone: reading ends too */
        at += sent > 0 ? (size_t)sent : 0;
    }
    pthread_mutex_unlock(&plane->event_lock);
}

void tell_need(struct session *session, uint32_t thread, uint32_t hash_slot)
{
    struct out out = begin(NEED, session->id);
    ADD(&out, uint32_t, thread);
    ADD(&out, uint32_t, hash_slot);
    tell(session->plane, &out, "");
}

void tell_end(const struct fetch *fetch, uint32_t count)
{
    struct out out = begin(ENDED, fetch->session->id);
    ADD(&out, uint64_t, fetch->operation);
    ADD(&out, uint32_t, count);
    ADD(&out, uint64_t, fetch->num_read);
    ADD(&out, uint64_t, fetch->num_missing);
    ADD(&out, uint64_t, fetch->bytes_read);
    tell(fetch->session->plane, &out, "");
}

void tell_bad(const struct piece *piece, enum bad kind, const char *text)
{
    struct out out = begin(BAD, piece->fetch->session->id);
    ADD(&out, uint8_t, kind);
    add(&out, piece->fetch->keys + (size_t)piece->block * KEY_BYTES, KEY_BYTES);
    tell(piece->fetch->session->plane, &out, text);
}

void tell_failed(struct session *session, uint32_t thread, uint32_t node, enum reply how, int error, bool has_answered,
                 const char *text)
{
    struct out out = begin(FAILED, session->id);
    ADD(&out, uint32_t, thread);
    ADD(&out, uint32_t, node);
    ADD(&out, uint8_t, how);
    ADD(&out, uint32_t, error);
    ADD(&out, uint8_t, has_answered);
    tell(session->plane, &out, text);
}

void tell_redirected(const struct piece *piece)
{
    struct out out = begin(REDIRECT, piece->fetch->session->id);
    ADD(&out, uint64_t, piece->fetch->operation);
    ADD(&out, uint32_t, piece->block);
    ADD(&out, uint32_t, piece->index);
    add(&out, piece->fetch->keys + (size_t)piece->block * KEY_BYTES, KEY_BYTES);
    tell(piece->fetch->session->plane, &out, "");
}

void tell_link_ended(struct session *session)
{
    struct out out = begin(LINK_ENDED, session->id);
    tell(session->plane, &out, "");
}

/* ---- in ---- */

struct in {
    const uint8_t *at, *end;
    int fds[MAX_FDS], num_fds;
    bool is_short;
};

static void get(struct in *in, void *to, size_t size)
{
    if ((size_t)(in->end - in->at) < size) {
        in->is_short = true;
        memset(to, 0, size);
        return;
    }
    memcpy(to, in->at, size);
    in->at += size;
}

#define NUMBER(in, type)                                                                                                 \
    ({                                                                                                                \
        type value;                                                                                                   \
        get(in, &value, sizeof value);                                                                                \
        value;                                                                                                        \
    })

static int get_fd(struct in *in)
{
    int fd = in->num_fds ? in->fds[0] : -1;
    if (in->num_fds)
        memmove(in->fds, in->fds + 1, (size_t)--in->num_fds * sizeof *in->fds);
    return fd;
}

static void *copy_of(struct in *in, size_t size)
{
    void *to = (size_t)(in->end - in->at) >= size ? malloc(size ? size : 1) : NULL;
    if (to)
        get(in, to, size);
    in->is_short |= !to;
    return to;
}

static struct session *session_of(struct plane *plane, uint32_t id)
{
    struct session *session = plane->sessions; /* only this thread changes the list */
    while (session && session->id != id)
        session = session->next;
    return session;
}

/* Why the plane cannot work, or "". */
static const char *configure(struct plane *plane, struct in *in)
{
    struct settings *settings = &plane->settings;
    for (int i = 0; i < NUM_STAGES; i++)
        settings->threads[i] = NUMBER(in, uint32_t);
    for (int i = 0; i < NUM_BUFFERS; i++)
        settings->slots[i] = NUMBER(in, uint32_t);
    settings->window = NUMBER(in, uint32_t);
    settings->is_direct = NUMBER(in, uint32_t);
    settings->is_pipelined = NUMBER(in, uint32_t);
    settings->is_preallocated = NUMBER(in, uint32_t);
    for (int i = 0; i < NUM_STAGES; i++)
        settings->rates[i] = NUMBER(in, double);
    settings->poll_s = NUMBER(in, double);
    settings->read_limit = NUMBER(in, double);
    for (int i = 0; i < NUM_STAGES; i++) {
        settings->num_cores[i] = NUMBER(in, uint32_t);
        settings->cores[i] = copy_of(in, settings->num_cores[i] * sizeof *settings->cores[i]);
    }
    int fd = get_fd(in);
    void *counters = mmap(NULL, sizeof *plane->counters, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (in->is_short || counters == MAP_FAILED)
        return "the message does not describe its settings, or has no memory for counters";
    plane->counters = counters;
    return start_pipeline(plane);
}

/* Why the session cannot be, or "". */
static const char *open_session(struct plane *plane, struct in *in, uint32_t id)
{
    struct session *session = calloc(1, sizeof *session);
    uint8_t link_key[MAC_KEY_BYTES];
    if (!session)
        return "there is no memory left";
    session->id = id;
    session->plane = plane;
    session->engine_fd = -1;
    session->codec = NUMBER(in, uint8_t);
    session->coder = NUMBER(in, uint8_t);
    session->dtype = NUMBER(in, uint8_t);
    session->value_bytes = NUMBER(in, uint32_t);
    session->head_dim = NUMBER(in, uint32_t);
    session->fingerprint = NUMBER(in, uint64_t);
    session->block_bytes = NUMBER(in, uint64_t);
    session->piece_bytes = NUMBER(in, uint32_t);
    session->num_pieces = NUMBER(in, uint32_t);
    session->page_bytes = NUMBER(in, uint32_t);
    session->num_pages = NUMBER(in, uint32_t);
    session->pages_per_block = NUMBER(in, uint32_t);
    session->ttl_s = NUMBER(in, uint32_t);
    session->timeout_s = NUMBER(in, double);
    session->has_mac = NUMBER(in, uint8_t);
    get(in, session->mac_key, sizeof session->mac_key);
    bool is_elsewhere = NUMBER(in, uint8_t);
    get(in, link_key, sizeof link_key);
    uint64_t number = NUMBER(in, uint64_t);
    size_t prefix_bytes = (size_t)(in->end - in->at);
    if (prefix_bytes <= MAX_PREFIX_BYTES)
        get(in, session->prefix, prefix_bytes);
    session->threads = calloc(plane->settings.threads[RECEIVE], sizeof *session->threads);
    for (int i = 0; i < HASH_SLOTS; i++)
        session->node_of[i] = -1;
    session->destination = is_elsewhere ? &FRAMES : &POOL;
    int first = get_fd(in), second = is_elsewhere ? -1 : get_fd(in);
    const char *why = "";
    uint64_t vector_bytes = (uint64_t)session->head_dim * session->value_bytes;
    if (in->is_short || prefix_bytes > MAX_PREFIX_BYTES || !session->threads || !session->piece_bytes ||
        session->piece_bytes > MAX_PIECE_BYTES || !session->num_pieces || !session->page_bytes || !session->value_bytes)
        why = "the message does not describe a session";
    else if (session->codec == BINNED &&
             (!vector_bytes || session->piece_bytes / vector_bytes * (4 + session->head_dim) > SLOT_BYTES))
        why = "its vectors are too short for codec binned: use codec lossless";
    else if (!has_xxhash())
        why = "there is no libxxhash.so.0, with which pieces are checked: install it (libxxhash0)";
    else if (session->coder == ZSTD && !has_zstd())
        why = "there is no libzstd.so.1: install it (libzstd1), or set coder to deflate";
    else if ((session->has_mac || is_elsewhere) && !has_hmac())
        why = "there is no libcrypto.so.3 or 1.1, with which bytes are authenticated: install it (libssl3)";
    else if (is_elsewhere) {
        session->sender = new_sender(session, first, link_key, number);
        if (!session->sender)
            why = "there is no memory left";
        else
            first = -1;
    } else {
        session->pool_bytes = (size_t)session->num_pages * session->page_bytes;
        session->pool = mmap(NULL, session->pool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, first, 0);
        session->engine_fd = second;
        second = -1;
        if (session->pool == MAP_FAILED) {
            session->pool = NULL;
            why = "the host pool's memory cannot be mapped";
        }
    }
    if (first >= 0)
        close(first);
    if (second >= 0)
        close(second);
    if (*why) {
        if (session->engine_fd >= 0)
            close(session->engine_fd);
        free(session->threads);
        free(session);
        return why;
    }
    pthread_mutex_lock(&plane->lock);
    session->next = plane->sessions;
    plane->sessions = session;
    pthread_mutex_unlock(&plane->lock);
    return why;
}

static void route(struct plane *plane, struct session *session, struct in *in)
{
    pthread_mutex_lock(&plane->lock);
    bool is_cluster = NUMBER(in, uint8_t);
    if (is_cluster)
        get(in, session->node_of, sizeof session->node_of);
    else
        memset(session->node_of, 0, sizeof session->node_of);
    pthread_mutex_unlock(&plane->lock);
}

static bool connected(struct plane *plane, struct session *session, struct in *in)
{
    uint32_t thread = NUMBER(in, uint32_t), node = NUMBER(in, uint32_t);
    int fd = get_fd(in);
    struct connection *connection = fd >= 0 ? new_connection(session, node, fd) : NULL;
    if (in->is_short || thread >= plane->settings.threads[RECEIVE] || node >= NODES)
        return false;
    pthread_mutex_lock(&plane->lock);
    struct session_thread *its = &session->threads[thread];
    if (node >= its->num_connections) {
        its->connections = realloc(its->connections, (node + 1) * sizeof *its->connections);
        if (!its->connections)
            abort();
        while (its->num_connections <= node)
            its->connections[its->num_connections++] = NULL;
    }
    /* A connection that there is may have requests in flight, and stays. */
    if (connection && !its->connections[node]) {
        its->connections[node] = connection;
        connection = NULL;
    }
    /* The control plane knows best which node serves the slot. */
    if (fd >= 0)
        session->node_of[its->hash_slot] = (int16_t)node;
    its->is_refused = fd < 0;
    its->is_answered = true;
    pthread_mutex_unlock(&plane->lock);
    if (connection)
        free_connection(connection);
    wake_receiver(plane, thread);
    return true;
}

/* CRC-16 (XMODEM), which a cluster of Redis takes of a name's part in braces. */
static uint16_t hash_slot_of(const struct session *session, const uint8_t *key)
{
    char tag[MAX_PREFIX_BYTES + 2 * KEY_BYTES + 1];
    const char *brace = strchr(session->prefix, '{');
    int size = snprintf(tag, sizeof tag, "%s", brace ? brace + 1 : session->prefix);
    for (int i = 0; i < KEY_BYTES; i++)
        size += snprintf(tag + size, sizeof tag - (size_t)size, "%02x", key[i]);
    uint16_t crc = 0;
    for (int i = 0; i < size; i++) {
        crc = (uint16_t)(crc ^ (uint16_t)((uint8_t)tag[i] << 8));
        for (int bit = 0; bit < 8; bit++)
            crc = (uint16_t)(crc & 0x8000 ? crc << 1 ^ 0x1021 : crc << 1);
    }
    return crc % HASH_SLOTS;
}

static bool get_blocks(struct plane *plane, struct session *session, struct in *in)
{
    struct fetch *fetch = calloc(1, sizeof *fetch);
    if (!fetch)
        return false;
    fetch->session = session;
    fetch->operation = NUMBER(in, uint64_t);
    fetch->num_blocks = fetch->limit = NUMBER(in, uint32_t);
    size_t num = fetch->num_blocks, num_pages = num * session->pages_per_block;
    fetch->keys = copy_of(in, num * KEY_BYTES);
    if (session->pool)
        fetch->pages = copy_of(in, num_pages * sizeof *fetch->pages);
    if (in->is_short)
        return false;
    for (size_t i = 0; session->pool && i < num_pages; i++)
        if (fetch->pages[i] < 0 || (uint32_t)fetch->pages[i] >= session->num_pages)
            return false;
    fetch->hash_slots = calloc(num ? num : 1, sizeof *fetch->hash_slots);
    fetch->missing = calloc(num ? num : 1, sizeof *fetch->missing);
    if (!fetch->hash_slots || !fetch->missing)
        return false;
    for (size_t i = 0; i < num; i++) {
        fetch->missing[i] = session->num_pieces;
        fetch->hash_slots[i] = hash_slot_of(session, fetch->keys + i * KEY_BYTES);
    }
    submit_fetch(plane, fetch);
    return true;
}

static bool brought(struct plane *plane, struct session *session, struct in *in)
{
    uint64_t operation = NUMBER(in, uint64_t);
    uint32_t block = NUMBER(in, uint32_t), index = NUMBER(in, uint32_t);
    bool has_come = NUMBER(in, uint8_t);
    size_t size = (size_t)(in->end - in->at);
    uint8_t *bytes = has_come ? copy_of(in, size) : NULL;
    struct fetch *fetch;
    pthread_mutex_lock(&plane->lock);
    for (fetch = plane->fetches; fetch; fetch = fetch->next)
        if (fetch->session == session && fetch->operation == operation)
            break;
    pthread_mutex_unlock(&plane->lock);
    /* It cannot end, as this piece is under way. */
    if (in->is_short || !fetch)
        return false;
    bring_piece(plane, fetch, block, index, bytes, size);
    return true;
}

/* Returns false for what is no message. */
static bool take_message(struct plane *plane, struct in *in)
{
    enum to_plane kind = NUMBER(in, uint8_t);
    const char *why;
    if (kind == CONFIGURE) {
        if (plane->counters)
            return false;
        plane->is_refused = *(why = configure(plane, in));
        struct out out = begin(OPENED, 0);
        tell(plane, &out, why);
        return true;
    }
    uint32_t id = NUMBER(in, uint32_t);
    if (in->is_short || !plane->counters || plane->is_refused)
        return false;
    if (kind == OPEN) {
        why = open_session(plane, in, id);
        struct out out = begin(OPENED, id);
        tell(plane, &out, why);
        return true;
    }
    struct session *session = session_of(plane, id);
    if (!session)
        return false;
    switch (kind) {
    case ROUTES:
        route(plane, session, in);
        return !in->is_short;
    case CONNECTED:
        return connected(plane, session, in);
    case GET:
        return get_blocks(plane, session, in);
    case GIVE_UP:
        give_up(plane, session, NUMBER(in, uint64_t));
        return !in->is_short;
    case BROUGHT:
        return brought(plane, session, in);
    case SEND:
        if (session->sender)
            send_message(session->sender, in->at, (size_t)(in->end - in->at));
        return session->sender;
    case CLOSE: {
        close_session(session);
        struct out out = begin(SESSION_CLOSED, id);
        tell(plane, &out, "");
        return true;
    }
    case PING: {
        struct out out = begin(PONG, id);
        tell(plane, &out, "");
        return true;
    }
    default:
        return false;
    }
}

/* Size bytes, and the descriptors that came beside them. */
static bool receive_exactly(int control, uint8_t *to, size_t size, struct in *in)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } beside;
    while (size) {
        struct iovec part = {to, size};
        struct msghdr message = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = &beside, .msg_controllen = sizeof beside};
        ssize_t got = recvmsg(control, &message, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each)) {
            if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS)
                continue;
            size_t num = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < num; i++) {
                int fd;
                memcpy(&fd, CMSG_DATA(each) + i * sizeof fd, sizeof fd);
                if (in->num_fds < MAX_FDS)
                    in->fds[in->num_fds++] = fd;
                else
                    close(fd);
            }
        }
        to += got;
        size -= (size_t)got;
    }
    return true;
}

int kvplane_run(int control, int is_program)
{
    struct plane plane = {.control = control};
    pthread_mutex_init(&plane.event_lock, NULL);
    uint8_t *bytes = NULL;
    size_t room = 0;
    int status = 0;
    for (;;) {
        uint32_t size;
        struct in in = {0};
        if (!receive_exactly(control, (uint8_t *)&size, sizeof size, &in))
            break;
        if (size > MAX_MESSAGE_BYTES) {
            status = 1;
            break;
        }
        if (size > room) {
            free(bytes);
            bytes = malloc(room = size);
        }
        if (!bytes || !receive_exactly(control, bytes, size, &in))
            break;
        in.at = bytes;
        in.end = bytes + size;
        bool ok = take_message(&plane, &in);
        while (in.num_fds)
            close(get_fd(&in));
        if (!ok) {
            fprintf(stderr, "kvplane: a message of kind %d is no message of this version\n", size ? bytes[0] : 0);
            status = 1;
            break;
        }
    }
    free(bytes);
    if (is_program)
        _exit(status); /* an engine waits until nothing writes into its pages any more */
    if (plane.counters)
        stop_pipeline(&plane);
    for (int i = 0; i < NUM_STAGES; i++)
        free(plane.settings.cores[i]);
    if (plane.counters)
        munmap(plane.counters, sizeof *plane.counters);
    close(control);
    return status;
}
