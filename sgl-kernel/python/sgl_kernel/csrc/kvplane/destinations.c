/* The two destinations: pages in shared memory, and authenticated frames to the relay beside an engine elsewhere, which
 * offload/frames.py defines. A sender owns what waits to be sent and the thread that sends it; messages go before data,
 * which is cut into frames, so that no answer waits behind a fetch. */
#include "plane.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define DATA_BYTES (256 << 10)
/* An engine that takes nothing for so long has gone; and one whose session ends is not waited for as long. */
#define SILENCE_MS 30000
#define LAST_MS 2000

/* ---- pages ---- */

static const int32_t *pages_of(const struct piece *piece, uint64_t *skipped, uint32_t *num)
{
    const struct session *session = piece->fetch->session;
    uint64_t start = (uint64_t)piece->index * session->piece_bytes;
    uint64_t end = start + raw_bytes_of(session, piece->index);
    uint64_t first = start / session->page_bytes;
    *skipped = start - first * session->page_bytes;
    *num = (uint32_t)((end - 1) / session->page_bytes - first + 1);
    return piece->fetch->pages + (uint64_t)piece->block * session->pages_per_block + first;
}

static uint8_t *window_in_pool(struct piece *piece)
{
    const struct session *session = piece->fetch->session;
    uint64_t skipped;
    uint32_t num;
    const int32_t *pages = pages_of(piece, &skipped, &num);
    for (uint32_t i = 1; i < num; i++)
        if (pages[i] != pages[i - 1] + 1)
            return NULL;
    return session->pool + (uint64_t)pages[0] * session->page_bytes + skipped;
}

static void submit_to_pool(struct piece *piece)
{
    const struct session *session = piece->fetch->session;
    uint64_t skipped, left = raw_bytes_of(session, piece->index);
    uint32_t num;
    const int32_t *pages = pages_of(piece, &skipped, &num);
    const uint8_t *from = piece->out;
    for (uint32_t i = 0; i < num; i++) {
        uint64_t size = session->page_bytes - skipped;
        size = size < left ? size : left;
        memcpy(session->pool + (uint64_t)pages[i] * session->page_bytes + skipped, from, size);
        from += size;
        left -= size;
        skipped = 0;
    }
    deliver_ended(piece, true);
}

const struct destination POOL = {false, window_in_pool, submit_to_pool};

/* ---- frames ---- */

struct message {
    struct message *next;
    size_t size;
    uint8_t bytes[];
};

struct waiting {
    struct waiting *next;
    struct piece *piece;
};

struct sender {
    struct session *session;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct message *messages, **last_message;
    struct waiting *pieces, **last_piece;
    bool is_closing, has_failed;
    int fd;
    uint8_t key[MAC_KEY_BYTES];
    uint64_t number;
};

static bool wait_to_send(const struct sender *sender)
{
    for (int waited = 0; waited < SILENCE_MS; waited += 100) {
        struct pollfd waiting = {sender->fd, POLLOUT, 0};
        if (poll(&waiting, 1, 100) > 0)
            return true;
        if (waited >= LAST_MS && __atomic_load_n(&sender->is_closing, __ATOMIC_RELAXED))
            return false;
    }
    return false;
}

static bool send_frame(struct sender *sender, const struct frame_header *header, const void *payload)
{
    uint8_t tag[TAG_BYTES];
    const struct span spans[] = {
        {&sender->number, sizeof sender->number}, {header, sizeof *header}, {payload, header->size}};
    hmac_tag(sender->key, spans, 3, tag);
    sender->number++;
    struct iovec parts[] = {{(void *)(uintptr_t)header, sizeof *header},
                            {(void *)(uintptr_t)payload, header->size},
                            {tag, TAG_BYTES}};
    int first = 0;
    while (first < 3) {
        struct msghdr message = {.msg_iov = parts + first, .msg_iovlen = (size_t)(3 - first)};
        ssize_t sent = sendmsg(sender->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!wait_to_send(sender))
                return false;
            continue;
        }
        if (sent < 0)
            return false;
        for (; first < 3 && (size_t)sent >= parts[first].iov_len; first++)
            sent -= (ssize_t)parts[first].iov_len;
        if (first < 3) {
            parts[first].iov_base = (uint8_t *)parts[first].iov_base + sent;
            parts[first].iov_len -= (size_t)sent;
        }
    }
    return true;
}

/* The first piece that waits, as far as one frame goes. */
static bool send_data(struct sender *sender, struct piece *piece, uint32_t *at)
{
    const struct session *session = sender->session;
    uint32_t left = raw_bytes_of(session, piece->index) - *at, size = left < DATA_BYTES ? left : DATA_BYTES;
    struct frame_header header = {.size = size,
                                  .block = piece->block,
                                  .start = (uint32_t)((uint64_t)piece->index * session->piece_bytes) + *at,
                                  .kind = DATA_FRAME,
                                  .operation = piece->fetch->operation};
    if (!send_frame(sender, &header, piece->out + *at))
        return false;
    *at += size;
    return true;
}

static struct piece *pop_piece(struct sender *sender)
{
    struct waiting *first = sender->pieces;
    struct piece *piece = first->piece;
    sender->pieces = first->next;
    if (!sender->pieces)
        sender->last_piece = &sender->pieces;
    free(first);
    return piece;
}

static void *run_sender(void *argument)
{
    struct sender *sender = argument;
    uint32_t at = 0;
    pthread_mutex_lock(&sender->lock);
    for (;;) {
        while (!sender->messages && !sender->is_closing && (!sender->pieces || sender->has_failed))
            pthread_cond_wait(&sender->changed, &sender->lock);
        struct message *message = sender->messages;
        bool ok = !sender->has_failed;
        if (message) {
            sender->messages = message->next;
            if (!message->next)
                sender->last_message = &sender->messages;
            pthread_mutex_unlock(&sender->lock);
            struct frame_header header = {.size = (uint32_t)message->size, .kind = MESSAGE_FRAME};
            ok = ok && send_frame(sender, &header, message->bytes);
            free(message);
            pthread_mutex_lock(&sender->lock);
        } else if (sender->is_closing)
            break;
        else {
            struct piece *piece = sender->pieces->piece;
            pthread_mutex_unlock(&sender->lock);
            bool wanted = is_wanted(piece);
            ok = !wanted || send_data(sender, piece, &at);
            bool is_over = !wanted || (ok && at == raw_bytes_of(sender->session, piece->index));
            pthread_mutex_lock(&sender->lock);
            if (is_over && ok) {
                pop_piece(sender);
                at = 0;
                pthread_mutex_unlock(&sender->lock);
                deliver_ended(piece, wanted);
                pthread_mutex_lock(&sender->lock);
            }
        }
        if (!ok && !sender->has_failed) {
            sender->has_failed = true;
            shutdown(sender->fd, SHUT_RDWR);
            while (sender->pieces) {
                struct piece *piece = pop_piece(sender);
                pthread_mutex_unlock(&sender->lock);
                deliver_ended(piece, false);
                pthread_mutex_lock(&sender->lock);
            }
            at = 0;
            pthread_mutex_unlock(&sender->lock);
            tell_link_ended(sender->session);
            pthread_mutex_lock(&sender->lock);
        }
    }
    pthread_mutex_unlock(&sender->lock);
    return NULL;
}

struct sender *new_sender(struct session *session, int fd, const uint8_t key[MAC_KEY_BYTES], uint64_t number)
{
    struct sender *sender = calloc(1, sizeof *sender);
    if (!sender)
        return NULL;
    sender->session = session;
    sender->fd = fd;
    sender->number = number;
    memcpy(sender->key, key, MAC_KEY_BYTES);
    sender->last_message = &sender->messages;
    sender->last_piece = &sender->pieces;
    pthread_mutex_init(&sender->lock, NULL);
    pthread_cond_init(&sender->changed, NULL);
    if (pthread_create(&sender->thread, NULL, run_sender, sender)) {
        free(sender);
        return NULL;
    }
    return sender;
}

void send_message(struct sender *sender, const uint8_t *payload, size_t size)
{
    struct message *message = malloc(sizeof *message + size);
    if (!message)
        abort();
    message->next = NULL;
    message->size = size;
    memcpy(message->bytes, payload, size);
    pthread_mutex_lock(&sender->lock);
    *sender->last_message = message;
    sender->last_message = &message->next;
    pthread_cond_signal(&sender->changed);
    pthread_mutex_unlock(&sender->lock);
}

void free_sender(struct sender *sender)
{
    pthread_mutex_lock(&sender->lock);
    __atomic_store_n(&sender->is_closing, true, __ATOMIC_RELAXED);
    pthread_cond_signal(&sender->changed);
    pthread_mutex_unlock(&sender->lock);
    pthread_join(sender->thread, NULL);
    close(sender->fd);
    free(sender);
}

static uint8_t *no_window(struct piece *piece)
{
    (void)piece;
    return NULL;
}

static void submit_frames(struct piece *piece)
{
    struct sender *sender = piece->fetch->session->sender;
    struct waiting *waiting = calloc(1, sizeof *waiting);
    if (!waiting)
        abort();
    waiting->piece = piece;
    pthread_mutex_lock(&sender->lock);
    bool has_failed = sender->has_failed;
    if (!has_failed) {
        *sender->last_piece = waiting;
        sender->last_piece = &waiting->next;
        pthread_cond_signal(&sender->changed);
    }
    pthread_mutex_unlock(&sender->lock);
    if (has_failed) {
        free(waiting);
        deliver_ended(piece, false);
    }
}

const struct destination FRAMES = {true, no_window, submit_frames};
