/* The first stage: pieces are asked of the store's nodes, and come into slots. */
#include "plane.h"

#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Small pieces that are asked for at a time on a connection, beside `window`. */
#define SMALL_ASK_BYTES (256 << 10)
/* A thread that waits for replies looks so often for a slot, or a share of them. */
#define LOOK_AGAIN_S 0.001

struct asked {
    struct connection *connection;
    struct piece *piece;
};

/* A thread asks several nodes, for several sessions. Each connection is a lane of its own: one that is silent holds up
 * no other. */
struct receiver {
    struct plane *plane;
    uint32_t thread;
    struct asked asked[MAX_ASKED]; /* those of a connection in the order of their replies */
    int num;
    struct piece *waiting; /* for connections */
    struct piece *held;    /* found no slot */
};

void wake_receiver(struct plane *plane, uint32_t thread)
{
    uint64_t one = 1;
    if (write(plane->wakes[thread], &one, sizeof one) < 0)
        return; /* it is awake */
}

void wake_receivers(struct plane *plane)
{
    for (uint32_t i = 0; i < plane->settings.threads[RECEIVE]; i++)
        wake_receiver(plane, i);
}

/* With plane->lock. */
static struct connection *connection_to(const struct session *session, uint32_t thread, uint32_t hash_slot)
{
    const struct session_thread *its = &session->threads[thread];
    int node = session->node_of[hash_slot];
    return node >= 0 && (uint32_t)node < its->num_connections ? its->connections[node] : NULL;
}

/* Whether the lane of a fetch's next piece has room, with plane->lock. */
static bool has_room(const struct receiver *receiver, const struct fetch *fetch)
{
    const struct session *session = fetch->session;
    uint32_t hash_slot = fetch->hash_slots[fetch->next_piece / session->num_pieces];
    const struct connection *lane = connection_to(session, receiver->thread, hash_slot);
    if (!lane)
        return !session->threads[receiver->thread].is_waiting;
    if (lane->num_asked < (int)receiver->plane->settings.window)
        return true;
    /* More only of small pieces, and with half of the slots: the other half is left to other lanes. */
    return lane->asked_bytes < SMALL_ASK_BYTES && 2 * receiver->plane->num_dependent < receiver->plane->num_slots;
}

/* The next piece for a receiving thread, with plane->lock; NULL if there is none. is_refused: whether there is one that
 * may not be taken now. */
static struct piece *next_piece(struct receiver *receiver, bool *is_refused)
{
    struct plane *plane = receiver->plane;
    if (plane->num_untaken)
        return receiver->num < (int)plane->settings.window ? plane->untaken[--plane->num_untaken] : NULL;
    if (!plane->settings.is_pipelined && plane->num_together)
        return NULL;
    for (struct fetch *fetch = plane->fetches; fetch; fetch = fetch->next) {
        if (!has_more(fetch) || !has_room(receiver, fetch))
            continue;
        if (!may_take(plane, fetch)) {
            *is_refused = true;
            continue;
        }
        struct piece *piece = take_piece(fetch);
        if (plane->settings.is_pipelined) {
            set_dependent(piece, true);
            return piece;
        }
        uint32_t num = fetch->session->num_pieces;
        if ((int)num > plane->together_room) {
            plane->together_room = (int)num;
            plane->untaken = realloc(plane->untaken, num * sizeof *plane->untaken);
            plane->parked = realloc(plane->parked, num * sizeof *plane->parked);
            if (!plane->untaken || !plane->parked)
                abort();
        }
        plane->num_together = 1;
        for (struct piece *other; plane->num_together < (int)num && (other = take_piece(fetch)); plane->num_together++)
            plane->untaken[plane->num_untaken++] = other;
        wake_receivers(plane);
        return piece;
    }
    return NULL;
}

/* A connection has failed: so has what was asked on it. */
static void lose(struct receiver *receiver, struct connection *connection, enum reply how, int error, const char *text)
{
    struct session *session = connection->session;
    uint32_t node = connection->node;
    bool has_answered = connection->has_answered;
    struct piece *lost[MAX_ASKED];
    int num_lost = 0, left = 0;
    pthread_mutex_lock(&receiver->plane->lock);
    session->threads[receiver->thread].connections[node] = NULL;
    pthread_mutex_unlock(&receiver->plane->lock);
    for (int i = 0; i < receiver->num; i++) {
        if (receiver->asked[i].connection != connection)
            receiver->asked[left++] = receiver->asked[i];
        else
            lost[num_lost++] = receiver->asked[i].piece;
    }
    receiver->num = left;
    free_connection(connection);
    tell_failed(session, receiver->thread, node, how, error, has_answered, text);
    /* The last one may end the session. */
    for (int i = 0; i < num_lost; i++)
        end_piece(lost[i], false);
}

/* Ask for a piece that has a slot. Without a connection the control plane is asked for one, and the piece waits. A
 * connection that has sent what was not asked for is lost: all its replies would be taken for others. */
static void ask(struct receiver *receiver, struct piece *piece)
{
    struct plane *plane = receiver->plane;
    struct session *session = piece->fetch->session;
    struct session_thread *its = &session->threads[receiver->thread];
    uint32_t hash_slot = piece->fetch->hash_slots[piece->block];
    pthread_mutex_lock(&plane->lock);
    struct connection *connection = connection_to(session, receiver->thread, hash_slot);
    pthread_mutex_unlock(&plane->lock);
    if (connection && has_unasked(connection)) {
        lose(receiver, connection, UNASKED, 0, "");
        connection = NULL;
    }
    if (!connection) {
        pthread_mutex_lock(&plane->lock);
        bool is_first = !its->is_waiting;
        if (is_first) {
            its->is_waiting = true;
            its->is_answered = its->is_refused = false;
            its->hash_slot = hash_slot;
        }
        pthread_mutex_unlock(&plane->lock);
        piece->next = receiver->waiting;
        receiver->waiting = piece;
        if (is_first)
            tell_need(session, receiver->thread, hash_slot);
        return;
    }
    ask_piece(connection, piece->fetch, piece->block, piece->index);
    connection->asked_bytes += raw_bytes_of(session, piece->index);
    receiver->asked[receiver->num++] = (struct asked){connection, piece};
}

/* What the control plane has answered. */
static void take_answers(struct receiver *receiver)
{
    struct plane *plane = receiver->plane;
    struct piece *waiting = receiver->waiting, *next;
    receiver->waiting = NULL;
    for (; waiting; waiting = next) {
        next = waiting->next;
        struct session_thread *its = &waiting->fetch->session->threads[receiver->thread];
        pthread_mutex_lock(&plane->lock);
        bool is_answered = its->is_answered, is_refused = is_answered && its->is_refused;
        if (is_answered)
            its->is_waiting = false;
        pthread_mutex_unlock(&plane->lock);
        if (!is_answered || receiver->num == MAX_ASKED) {
            waiting->next = receiver->waiting;
            receiver->waiting = waiting;
        } else if (is_refused || !is_wanted(waiting))
            end_piece(waiting, false);
        else
            ask(receiver, waiting);
    }
}

/* Returns whether there may be more that finds no room now. */
static bool ask_more(struct receiver *receiver)
{
    struct plane *plane = receiver->plane;
    bool is_starved = false;
    while (receiver->num < MAX_ASKED) {
        struct piece *piece = receiver->held;
        receiver->held = NULL;
        if (!piece) {
            pthread_mutex_lock(&plane->lock);
            piece = next_piece(receiver, &is_starved);
            note_reading(plane);
            pthread_mutex_unlock(&plane->lock);
        }
        if (!piece)
            break;
        if (!is_wanted(piece)) {
            end_piece(piece, false);
            continue;
        }
        /* With requests in flight, a thread does not wait for room. */
        bool is_idle = !receiver->num && !receiver->waiting;
        piece->slots[COMPRESSED] = take_slot(&plane->slots[COMPRESSED], is_idle ? INFINITY : 0);
        if (!piece->slots[COMPRESSED]) {
            receiver->held = piece;
            is_starved = true;
            break;
        }
        ask(receiver, piece);
    }
    for (int i = 0; i < receiver->num; i++) {
        struct connection *connection = receiver->asked[i].connection;
        int error = 0;
        enum reply reply = connection->out_bytes ? send_asked(connection, &error) : VALUE;
        if (reply != VALUE) {
            lose(receiver, connection, reply, error, "");
            i = -1;
        }
    }
    return is_starved;
}

/* A connection with something to read; NULL: there may be work, or none has answered in time. */
static struct connection *wait_for_reply(struct receiver *receiver, bool is_starved)
{
    struct connection *lanes[MAX_ASKED];
    struct pollfd waiting[MAX_ASKED + 1] = {{receiver->plane->wakes[receiver->thread], POLLIN, 0}};
    int num = 0;
    double end = is_starved ? now() + LOOK_AGAIN_S : INFINITY;
    for (int i = 0; i < receiver->num; i++) {
        struct connection *lane = receiver->asked[i].connection;
        bool is_known = false;
        for (int j = 0; j < num && !is_known; j++)
            is_known = lanes[j] == lane;
        if (is_known)
            continue;
        if (lane->start < lane->end)
            return lane;
        end = lane->deadline < end ? lane->deadline : end;
        waiting[num + 1] = (struct pollfd){lane->fd, POLLIN, 0};
        lanes[num++] = lane;
    }
    double left = end - now();
    int milliseconds = end > 1e17 ? -1 : left <= 0 ? 0 : (int)(left * 1e3) + 1;
    if (poll(waiting, (nfds_t)num + 1, milliseconds) < 0)
        return NULL;
    uint64_t wakes;
    if (waiting[0].revents && read(waiting[0].fd, &wakes, sizeof wakes) < 0)
        return NULL;
    /* The oldest request first. */
    for (int i = 0; i < num; i++)
        if (waiting[i + 1].revents)
            return lanes[i];
    for (int i = 0; i < num; i++)
        if (lanes[i]->deadline <= now()) {
            lose(receiver, lanes[i], TIMED_OUT, 0, "");
            break;
        }
    return NULL;
}

/* Where a piece is received. One that is stored as it is goes straight to the engine's pages, where its bytes do not
 * count until it has been checked. */
static int areas_of(struct plane *plane, struct piece *piece, struct area areas[3])
{
    const struct session *session = piece->fetch->session;
    uint8_t *slot = piece->slots[COMPRESSED]->memory, *window = NULL;
    uint32_t raw_bytes = raw_bytes_of(session, piece->index), tag_bytes = session->has_mac ? TAG_BYTES : 0;
    if (session->codec == RAW && plane->settings.is_direct)
        window = session->destination->window(piece);
    piece->header = slot;
    piece->payload = slot + HEADER_BYTES;
    areas[0] = (struct area){slot, HEADER_BYTES + raw_bytes + tag_bytes};
    if (!window)
        return 1;
    piece->payload = window;
    piece->tag = slot + HEADER_BYTES;
    areas[0].size = HEADER_BYTES;
    areas[1] = (struct area){window, raw_bytes};
    areas[2] = (struct area){slot + HEADER_BYTES, tag_bytes};
    return 3;
}

/* Sleep, which is no fault of the servers that have been asked. */
static void rest_until(struct receiver *receiver, double end, double least)
{
    double began = now();
    sleep_until(end, least);
    double slept = now() - began;
    for (int i = 0; i < receiver->num; i++) {
        struct connection *lane = receiver->asked[i].connection;
        bool is_first = true;
        for (int j = 0; j < i && is_first; j++)
            is_first = receiver->asked[j].connection != lane;
        lane->deadline += is_first ? slept : 0;
    }
}

static void receive_one(struct receiver *receiver, struct connection *connection)
{
    struct plane *plane = receiver->plane;
    int at = 0;
    while (receiver->asked[at].connection != connection)
        at++;
    struct piece *piece = receiver->asked[at].piece;
    struct fetch *fetch = piece->fetch;
    const struct session *session = fetch->session;
    uint32_t raw_bytes = raw_bytes_of(session, piece->index);
    struct area areas[3];
    int num_areas = areas_of(plane, piece, areas);
    size_t size = 0;
    char text[REASON_BYTES] = "";
    int error = 0;
    double began = now();
    enum reply reply = receive_value(connection, areas, num_areas, &size, text, &error);
    if (reply > TOO_LARGE) {
        lose(receiver, connection, reply, error, text);
        return;
    }
    piece->stored_bytes = size;
    if (reply == VALUE && is_of_another(piece)) {
        lose(receiver, connection, UNASKED, 0, "");
        return;
    }
    receiver->num--;
    connection->asked_bytes -= raw_bytes;
    memmove(receiver->asked + at, receiver->asked + at + 1, (size_t)(receiver->num - at) * sizeof *receiver->asked);
    if (reply == REDIRECTED) {
        /* The control plane follows, and brings the piece: bring_piece. */
        release_slot(plane, piece, COMPRESSED);
        pthread_mutex_lock(&plane->lock);
        if (!session->destination->can_stall)
            set_dependent(piece, false);
        pthread_mutex_unlock(&plane->lock);
        tell_redirected(piece);
        free(piece);
        return;
    }
    pthread_mutex_lock(&plane->lock);
    fetch->num_read += reply == VALUE;
    fetch->num_missing += reply == NONE;
    fetch->bytes_read += size * (reply == VALUE);
    set_dependent(piece, piece->is_dependent && session->destination->can_stall);
    pthread_mutex_unlock(&plane->lock);
    if (reply != VALUE) {
        if (reply == TOO_LARGE)
            snprintf(text, sizeof text, "a value has %zu bytes, a piece of %u is expected", size, raw_bytes);
        fail_piece(piece, reply == NONE ? INCOMPLETE : reply == TOO_LARGE ? DAMAGED : REFUSED, text);
        return;
    }
    if (plane->rates[RECEIVE].bytes_per_s)
        rest_until(receiver, end_at_rate(&plane->rates[RECEIVE], began, size), plane->settings.poll_s);
    count_work(plane, RECEIVE, 1, size, now() - began);
    if (num_areas == 1)
        piece->tag = piece->header + size - TAG_BYTES;
    pass_on(plane, piece, DECOMPRESS);
    if (plane->read_limit.bytes_per_s)
        rest_until(receiver, end_at_rate(&plane->read_limit, began, size), 0);
}

void *run_receiver(struct worker *worker)
{
    struct receiver receiver = {.plane = worker->plane, .thread = (uint32_t)worker->index};
    while (!__atomic_load_n(&worker->plane->is_stopping, __ATOMIC_RELAXED)) {
        take_answers(&receiver);
        bool is_starved = ask_more(&receiver);
        struct connection *ready = wait_for_reply(&receiver, is_starved);
        if (ready)
            receive_one(&receiver, ready);
    }
    return NULL;
}
