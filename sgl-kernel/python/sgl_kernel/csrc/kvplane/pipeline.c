/* The stages and their threads; fetches, and which piece is next. */
#include "plane.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Small pieces that are asked for at a time on a connection, beside `window`. */
#define SMALL_ASK_BYTES (256 << 10)
/* A thread that waits for replies looks so often for a slot, or a share of them. */
#define LOOK_AGAIN_S 0.001
#define MAX_ASKED 64

double end_at_rate(struct rate *rate, double began, uint64_t bytes)
{
    pthread_mutex_lock(&rate->lock);
    rate->free_at = (rate->free_at > began ? rate->free_at : began) + (double)bytes / rate->bytes_per_s;
    double end = rate->free_at;
    pthread_mutex_unlock(&rate->lock);
    return end;
}

static void sleep_until(double end, double least)
{
    for (double left = end - now(); left > 0; left = end - now()) {
        left = left > least ? left : least;
        struct timespec t = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
        nanosleep(&t, NULL);
    }
}

static void count(struct plane *plane, enum stage stage, uint64_t pieces, uint64_t bytes, double seconds)
{
    struct counters *c = plane->counters;
    __atomic_fetch_add(&c->pieces[stage], pieces, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->bytes[stage], bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->us[stage], (uint64_t)(1e6 * seconds), __ATOMIC_RELAXED);
}

static void wake_receivers(struct plane *plane);

/* ---- fetches: all with plane->lock ---- */

static bool may_take(const struct plane *plane, const struct fetch *fetch)
{
    /* An engine that takes nothing has half of what is left, and never the last slot. */
    const struct session *session = fetch->session;
    return !session->destination->can_stall || session->num_stallable < plane->num_slots - plane->num_stallable - 1;
}

static bool has_more(const struct fetch *fetch)
{
    return fetch->next_piece < (uint64_t)fetch->limit * fetch->session->num_pieces;
}

static void note_reading(struct plane *plane)
{
    bool is_reading = plane->num_untaken;
    for (struct fetch *fetch = plane->fetches; fetch && !is_reading; fetch = fetch->next)
        is_reading = has_more(fetch) && may_take(plane, fetch);
    __atomic_store_n(&plane->counters->is_reading, is_reading, __ATOMIC_RELAXED);
}

static struct piece *take_piece(struct fetch *fetch)
{
    const struct session *session = fetch->session;
    if (!has_more(fetch))
        return NULL;
    struct piece *piece = calloc(1, sizeof *piece);
    if (!piece)
        abort();
    piece->fetch = fetch;
    piece->block = (uint32_t)(fetch->next_piece / session->num_pieces);
    piece->index = (uint32_t)(fetch->next_piece % session->num_pieces);
    fetch->next_piece++;
    fetch->num_under_way++;
    return piece;
}

bool is_wanted(const struct piece *piece)
{
    return piece->block < __atomic_load_n(&piece->fetch->limit, __ATOMIC_RELAXED);
}

static void limit_to(struct fetch *fetch, uint32_t limit)
{
    if (limit < fetch->limit)
        __atomic_store_n(&fetch->limit, limit, __ATOMIC_RELAXED);
}

static void unlink_fetch(struct plane *plane, struct fetch *fetch)
{
    for (struct fetch **at = &plane->fetches; *at; at = &(*at)->next)
        if (*at == fetch) {
            *at = fetch->next;
            if (!*at)
                plane->last_fetch = at;
            return;
        }
}

/* Whether it has just ended, so that the caller calls end_fetch without the lock. */
static bool is_over(struct fetch *fetch)
{
    struct plane *plane = fetch->session->plane;
    if (fetch->is_over || fetch->num_under_way || has_more(fetch))
        return false;
    fetch->is_over = true;
    unlink_fetch(plane, fetch);
    note_reading(plane);
    return true;
}

static void end_fetch(struct fetch *fetch)
{
    struct session *session = fetch->session;
    struct plane *plane = session->plane;
    uint32_t num = 0;
    while (num < fetch->limit && !fetch->missing[num])
        num++;
    tell_end(fetch, num);
    free(fetch->keys);
    free(fetch->hash_slots);
    free(fetch->pages);
    free(fetch->missing);
    free(fetch);
    pthread_mutex_lock(&plane->lock);
    session->num_open--;
    pthread_cond_broadcast(&plane->changed);
    pthread_mutex_unlock(&plane->lock);
}

void submit_fetch(struct plane *plane, struct fetch *fetch)
{
    pthread_mutex_lock(&plane->lock);
    fetch->session->num_open++;
    fetch->next = NULL;
    *plane->last_fetch = fetch;
    plane->last_fetch = &fetch->next;
    note_reading(plane);
    wake_receivers(plane);
    bool ended = is_over(fetch);
    pthread_mutex_unlock(&plane->lock);
    if (ended)
        end_fetch(fetch);
}

void close_session(struct session *session)
{
    struct plane *plane = session->plane;
    pthread_mutex_lock(&plane->lock);
    while (session->num_open)
        pthread_cond_wait(&plane->changed, &plane->lock);
    for (struct session **at = &plane->sessions; *at; at = &(*at)->next)
        if (*at == session) {
            *at = session->next;
            break;
        }
    pthread_mutex_unlock(&plane->lock);
    if (session->sender)
        free_sender(session->sender);
    for (uint32_t i = 0; i < plane->settings.threads[RECEIVE]; i++) {
        for (uint32_t node = 0; node < session->threads[i].num_connections; node++)
            if (session->threads[i].connections[node])
                free_connection(session->threads[i].connections[node]);
        free(session->threads[i].connections);
    }
    free(session->threads);
    if (session->pool)
        munmap(session->pool, session->pool_bytes);
    if (session->engine_fd >= 0)
        close(session->engine_fd);
    free(session);
}

/* ---- pieces ---- */

static void release(struct plane *plane, struct piece *piece, enum buffer buffer)
{
    if (piece->slots[buffer])
        give_slot(&plane->slots[buffer], piece->slots[buffer]);
    piece->slots[buffer] = NULL;
}

/* Without pipelining: begin the next stage once all pieces of the block have ended the one before. */
static void go_on_together(struct plane *plane)
{
    if (plane->num_parked != plane->num_together)
        return;
    int num = plane->num_parked;
    plane->num_parked = 0;
    for (int i = 0; i < num; i++)
        put_piece(&plane->rings[plane->parked_for], plane->parked[i]);
}

static void pass_on(struct plane *plane, struct piece *piece, enum stage stage)
{
    if (plane->settings.is_pipelined) {
        put_piece(&plane->rings[stage], piece);
        return;
    }
    pthread_mutex_lock(&plane->lock);
    plane->parked_for = stage;
    plane->parked[plane->num_parked++] = piece;
    go_on_together(plane);
    pthread_mutex_unlock(&plane->lock);
}

static void end_piece(struct piece *piece, bool ok)
{
    struct fetch *fetch = piece->fetch;
    struct session *session = fetch->session;
    struct plane *plane = session->plane;
    for (int i = 0; i < NUM_BUFFERS; i++)
        release(plane, piece, i);
    pthread_mutex_lock(&plane->lock);
    if (plane->settings.is_pipelined && session->destination->can_stall) {
        session->num_stallable--;
        plane->num_stallable--;
    }
    fetch->num_under_way--;
    if (ok)
        fetch->missing[piece->block]--;
    else
        limit_to(fetch, piece->block);
    if (!plane->settings.is_pipelined) {
        if (!--plane->num_together)
            wake_receivers(plane);
        go_on_together(plane);
    }
    free(piece->brought);
    free(piece);
    bool ended = is_over(fetch);
    pthread_mutex_unlock(&plane->lock);
    if (ended)
        end_fetch(fetch);
}

void deliver_ended(struct piece *piece, bool is_delivered)
{
    const struct session *session = piece->fetch->session;
    if (is_delivered)
        count(session->plane, DELIVER, 1, raw_bytes_of(session, piece->index), 0);
    end_piece(piece, is_delivered);
}

void give_up(struct plane *plane, struct session *session, uint64_t operation)
{
    struct fetch *found = NULL;
    pthread_mutex_lock(&plane->lock);
    for (struct fetch *fetch = plane->fetches; fetch && !found; fetch = fetch->next)
        if (fetch->session == session && fetch->operation == operation)
            found = fetch;
    bool ended = false;
    if (found) {
        limit_to(found, 0);
        ended = is_over(found);
    }
    pthread_mutex_unlock(&plane->lock);
    if (ended)
        end_fetch(found);
}

static void fail(struct piece *piece, enum bad kind, const char *text)
{
    if (is_wanted(piece)) /* else another piece of the block has failed before */
        tell_bad(piece, kind, text);
    end_piece(piece, false);
}

/* ---- receive ---- */

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

static void wake_receivers(struct plane *plane)
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
    const struct counters *counters = receiver->plane->counters;
    uint64_t used = __atomic_load_n(&counters->slots_used[COMPRESSED], __ATOMIC_RELAXED);
    return lane->asked_bytes < SMALL_ASK_BYTES && 2 * used < counters->slots[COMPRESSED];
}

/* The next piece for a receiving thread, with plane->lock; NULL if there is none. */
static struct piece *next_piece(struct receiver *receiver)
{
    struct plane *plane = receiver->plane;
    if (plane->num_untaken)
        return receiver->num < (int)plane->settings.window ? plane->untaken[--plane->num_untaken] : NULL;
    if (!plane->settings.is_pipelined && plane->num_together)
        return NULL;
    for (struct fetch *fetch = plane->fetches; fetch; fetch = fetch->next) {
        if (!has_more(fetch) || !may_take(plane, fetch) || !has_room(receiver, fetch))
            continue;
        struct piece *piece = take_piece(fetch);
        if (plane->settings.is_pipelined) {
            if (fetch->session->destination->can_stall) {
                fetch->session->num_stallable++;
                plane->num_stallable++;
            }
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

/* Ask for a piece that has a slot. Without a connection the control plane is asked for one, and the piece waits. */
static void ask(struct receiver *receiver, struct piece *piece)
{
    struct plane *plane = receiver->plane;
    struct session *session = piece->fetch->session;
    struct session_thread *its = &session->threads[receiver->thread];
    uint32_t hash_slot = piece->fetch->hash_slots[piece->block];
    pthread_mutex_lock(&plane->lock);
    struct connection *connection = connection_to(session, receiver->thread, hash_slot);
    bool is_first = !connection && !its->is_waiting;
    if (is_first) {
        its->is_waiting = true;
        its->is_answered = its->is_refused = false;
        its->hash_slot = hash_slot;
    }
    pthread_mutex_unlock(&plane->lock);
    if (!connection) {
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
            piece = next_piece(receiver);
            note_reading(plane);
            is_starved = !piece && plane->num_stallable;
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
    receiver->num--;
    connection->asked_bytes -= raw_bytes;
    memmove(receiver->asked + at, receiver->asked + at + 1, (size_t)(receiver->num - at) * sizeof *receiver->asked);
    if (reply == REDIRECTED) {
        /* The control plane follows, and brings the piece: bring_piece. */
        release(plane, piece, COMPRESSED);
        tell_redirected(piece);
        free(piece);
        return;
    }
    pthread_mutex_lock(&plane->lock);
    fetch->num_read += reply == VALUE;
    fetch->num_missing += reply == NONE;
    fetch->bytes_read += size * (reply == VALUE);
    pthread_mutex_unlock(&plane->lock);
    if (reply != VALUE) {
        if (reply == TOO_LARGE)
            snprintf(text, sizeof text, "a value has %zu bytes, a piece of %u is expected", size, raw_bytes);
        fail(piece, reply == NONE ? INCOMPLETE : reply == TOO_LARGE ? DAMAGED : REFUSED, text);
        return;
    }
    if (plane->rates[RECEIVE].bytes_per_s)
        sleep_until(end_at_rate(&plane->rates[RECEIVE], began, size), plane->settings.poll_s);
    count(plane, RECEIVE, 1, size, now() - began);
    piece->stored_bytes = size;
    if (num_areas == 1)
        piece->tag = piece->header + size - TAG_BYTES;
    pass_on(plane, piece, DECOMPRESS);
    if (plane->read_limit.bytes_per_s)
        sleep_until(end_at_rate(&plane->read_limit, began, size), 0);
}

void bring_piece(struct plane *plane, struct fetch *fetch, uint32_t block, uint32_t index, uint8_t *bytes, size_t size)
{
    struct piece *piece = calloc(1, sizeof *piece);
    if (!piece)
        abort();
    piece->fetch = fetch;
    piece->block = block;
    piece->index = index;
    if (!bytes) {
        end_piece(piece, false);
        return;
    }
    piece->header = piece->brought = bytes;
    piece->payload = bytes + HEADER_BYTES;
    piece->tag = bytes + size - TAG_BYTES;
    piece->stored_bytes = size;
    count(plane, RECEIVE, 1, size, 0);
    pass_on(plane, piece, DECOMPRESS);
}

/* ---- the other stages ---- */

/* What a stage's thread has: pieces that its engine works on, in order; and one that found no slot. */
struct flight {
    struct piece *pieces[MAX_FLYING], *held;
    int num;
};

/* The slot that a stage fills. Returns false if there is none for now: with pieces in flight, which hold slots, a thread
 * does not wait. */
static bool find_room(struct worker *worker, const struct flight *flight, struct piece *piece)
{
    struct plane *plane = worker->plane;
    double patience = flight->num ? 0 : INFINITY;
    if (worker->stage == DECOMPRESS)
        return (piece->slots[DECOMPRESSED] = take_slot(&plane->slots[DECOMPRESSED], patience));
    if (worker->stage == DEQUANTIZE) {
        piece->out = plane->settings.is_direct ? piece->fetch->session->destination->window(piece) : NULL;
        piece->is_in_place = piece->out;
        if (!piece->out && (piece->slots[DEQUANTIZED] = take_slot(&plane->slots[DEQUANTIZED], patience)))
            piece->out = piece->slots[DEQUANTIZED]->memory;
        return piece->out;
    }
    return true;
}

/* The engine is done with a piece. */
static void land(struct worker *worker, struct piece *piece)
{
    struct plane *plane = worker->plane;
    const struct session *session = piece->fetch->session;
    uint32_t bytes = raw_bytes_of(session, piece->index);
    double begun_at = piece->begun_at;
    if (worker->stage == DELIVER) {
        if (piece->is_in_place)
            deliver_ended(piece, true);
        else
            session->destination->submit(piece);
        count(plane, DELIVER, 0, 0, now() - begun_at);
        return;
    }
    if (worker->stage == DECOMPRESS)
        bytes = piece->is_plain ? 0 : mid_bytes_of(session, bytes);
    else {
        release(plane, piece, COMPRESSED);
        release(plane, piece, DECOMPRESSED);
    }
    count(plane, worker->stage, 1, bytes, now() - begun_at);
    pass_on(plane, piece, worker->stage + 1);
}

/* Returns false if it has to be held. */
static bool work_on(struct worker *worker, struct flight *flight, struct piece *piece, void *zstd_context)
{
    struct plane *plane = worker->plane;
    char text[REASON_BYTES];
    const char *why = NULL;
    if (!is_wanted(piece)) {
        end_piece(piece, false);
        return true;
    }
    double began = now(), checked = began;
    if (worker->stage == DECOMPRESS && !piece->is_checked) {
        why = check_piece(piece, text);
        piece->is_checked = true;
        checked = now();
    }
    if (!why && !find_room(worker, flight, piece))
        return plane->is_stopping;
    /* Without the wait for room. */
    piece->begun_at = now() - (checked - began);
    if (!why)
        why = plane->engine->begin(plane, worker->stage, piece, zstd_context);
    if (why)
        fail(piece, DAMAGED, why);
    else
        flight->pieces[flight->num++] = piece;
    return true;
}

static void *run_stage(struct worker *worker)
{
    struct plane *plane = worker->plane;
    struct flight flight = {0};
    void *zstd_context = worker->stage == DECOMPRESS ? new_zstd_context() : NULL;
    while (!__atomic_load_n(&plane->is_stopping, __ATOMIC_RELAXED)) {
        struct piece *first = flight.num ? flight.pieces[0] : NULL, *piece = NULL;
        double left = first ? plane->engine->seconds_left(first) : INFINITY;
        if (left <= 0) {
            memmove(flight.pieces, flight.pieces + 1, (size_t)--flight.num * sizeof *flight.pieces);
            land(worker, first);
            continue;
        }
        left = left > plane->settings.poll_s ? left : plane->settings.poll_s;
        if (first && (flight.held || flight.num == MAX_FLYING)) {
            sleep_until(now() + left, 0);
            piece = flight.num < MAX_FLYING ? flight.held : NULL;
        } else
            piece = flight.held ? flight.held : get_piece(&plane->rings[worker->stage], left);
        if (piece) {
            flight.held = NULL;
            if (!work_on(worker, &flight, piece, zstd_context))
                flight.held = piece;
        }
    }
    free_zstd_context(zstd_context);
    return NULL;
}

static void *run_receiver(struct worker *worker)
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

static void *run_worker(void *argument)
{
    static const char *const names[NUM_STAGES] = {"receive", "decompress", "dequantize", "deliver"};
    struct worker *worker = argument;
    struct settings *settings = &worker->plane->settings;
    char name[16];
    snprintf(name, sizeof name, "%.10s-%d", names[worker->stage], worker->index % 1000);
    pthread_setname_np(pthread_self(), name);
    if (settings->num_cores[worker->stage]) {
        int core = settings->cores[worker->stage][(uint32_t)worker->index % settings->num_cores[worker->stage]];
        cpu_set_t cores;
        CPU_ZERO(&cores);
        CPU_SET(core, &cores);
        if (sched_setaffinity(0, sizeof cores, &cores))
            fprintf(stderr, "thread %s is not pinned to core %d: %s\n", name, core, strerror(errno));
    }
    return worker->stage == RECEIVE ? run_receiver(worker) : run_stage(worker);
}

bool start_pipeline(struct plane *plane)
{
    const struct settings *settings = &plane->settings;
    pthread_mutex_init(&plane->lock, NULL);
    pthread_cond_init(&plane->changed, NULL);
    plane->last_fetch = &plane->fetches;
    plane->num_slots = (int)settings->slots[COMPRESSED];
    plane->engine = &SOFTWARE;
    for (int i = 0; i < NUM_BUFFERS; i++) {
        int num = (int)settings->slots[i];
        if (!make_slots(&plane->slots[i], num, SLOT_BYTES, !settings->is_preallocated, &plane->counters->slots_used[i]))
            return false;
        plane->num_slots = num < plane->num_slots ? num : plane->num_slots;
        plane->counters->slots[i] = (uint64_t)num;
    }
    for (int i = 0; i < NUM_STAGES; i++) {
        pthread_mutex_init(&plane->rates[i].lock, NULL);
        plane->rates[i].bytes_per_s = settings->rates[i];
        if (settings->rates[i])
            plane->engine = &EMULATED;
        plane->num_workers += (int)settings->threads[i];
        if (!make_ring(&plane->rings[i], (int)settings->slots[COMPRESSED] + MAX_ASKED, &plane->counters->queued[i]))
            return false;
    }
    pthread_mutex_init(&plane->read_limit.lock, NULL);
    plane->read_limit.bytes_per_s = settings->read_limit;
    plane->workers = calloc((size_t)plane->num_workers, sizeof *plane->workers);
    if (!plane->workers)
        return false;
    plane->wakes = calloc(settings->threads[RECEIVE], sizeof *plane->wakes);
    for (uint32_t i = 0; plane->wakes && i < settings->threads[RECEIVE]; i++)
        plane->wakes[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!plane->wakes)
        return false;
    int at = 0;
    for (int stage = 0; stage < NUM_STAGES; stage++)
        for (uint32_t i = 0; i < settings->threads[stage]; i++, at++) {
            plane->workers[at] = (struct worker){.plane = plane, .stage = stage, .index = (int)i};
            if (pthread_create(&plane->workers[at].thread, NULL, run_worker, &plane->workers[at])) {
                plane->num_workers = at;
                return false;
            }
        }
    return true;
}

/* After all sessions have been closed, or with the process. */
void stop_pipeline(struct plane *plane)
{
    pthread_mutex_lock(&plane->lock);
    __atomic_store_n(&plane->is_stopping, true, __ATOMIC_RELAXED);
    wake_receivers(plane);
    pthread_mutex_unlock(&plane->lock);
    for (int i = 0; i < NUM_BUFFERS; i++)
        shut_slots(&plane->slots[i]);
    for (int i = 0; i < NUM_STAGES; i++)
        shut_ring(&plane->rings[i]);
    for (int i = 0; i < plane->num_workers; i++)
        pthread_join(plane->workers[i].thread, NULL);
    for (int i = 0; i < NUM_BUFFERS; i++)
        free_slots(&plane->slots[i]);
    for (int i = 0; i < NUM_STAGES; i++)
        free_ring(&plane->rings[i]);
    for (uint32_t i = 0; i < plane->settings.threads[RECEIVE]; i++)
        close(plane->wakes[i]);
    free(plane->wakes);
    free(plane->workers);
    free(plane->untaken);
    free(plane->parked);
}
