/* Fetches: which piece is next, how pieces go on and end, and when a fetch is over. */
#include "plane.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- fetches: all with plane->lock ---- */

bool may_take(const struct plane *plane, const struct fetch *fetch)
{
    /* A session whose server or engine is silent has half of what is left. An engine never has the last slot. */
    const struct session *session = fetch->session;
    int left = plane->num_slots - plane->num_dependent - session->destination->can_stall;
    return !plane->settings.is_pipelined || session->num_dependent < left;
}

bool has_more(const struct fetch *fetch)
{
    return fetch->next_piece < (uint64_t)fetch->limit * fetch->session->num_pieces;
}

void note_reading(struct plane *plane)
{
    bool is_reading = plane->num_untaken;
    for (struct fetch *fetch = plane->fetches; fetch && !is_reading; fetch = fetch->next)
        is_reading = has_more(fetch) && may_take(plane, fetch);
    __atomic_store_n(&plane->counters->is_reading, is_reading, __ATOMIC_RELAXED);
}

struct piece *take_piece(struct fetch *fetch)
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

void set_dependent(struct piece *piece, bool is_dependent)
{
    struct session *session = piece->fetch->session;
    int change = is_dependent - piece->is_dependent;
    piece->is_dependent = is_dependent;
    session->num_dependent += change;
    session->plane->num_dependent += change;
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

void release_slot(struct plane *plane, struct piece *piece, enum buffer buffer)
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

void pass_on(struct plane *plane, struct piece *piece, enum stage stage)
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

void end_piece(struct piece *piece, bool ok)
{
    struct fetch *fetch = piece->fetch;
    struct session *session = fetch->session;
    struct plane *plane = session->plane;
    for (int i = 0; i < NUM_BUFFERS; i++)
        release_slot(plane, piece, i);
    pthread_mutex_lock(&plane->lock);
    set_dependent(piece, false);
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
        count_work(session->plane, DELIVER, 1, raw_bytes_of(session, piece->index), 0);
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

void fail_piece(struct piece *piece, enum bad kind, const char *text)
{
    if (is_wanted(piece)) /* else another piece of the block has failed before */
        tell_bad(piece, kind, text);
    end_piece(piece, false);
}

void bring_piece(struct plane *plane, struct fetch *fetch, uint32_t block, uint32_t index, uint8_t *bytes, size_t size)
{
    struct piece *piece = calloc(1, sizeof *piece);
    if (!piece)
        abort();
    piece->fetch = fetch;
    piece->block = block;
    piece->index = index;
    piece->is_dependent = plane->settings.is_pipelined && fetch->session->destination->can_stall; /* counted before */
    if (!bytes) {
        end_piece(piece, false);
        return;
    }
    piece->header = piece->brought = bytes;
    piece->payload = bytes + HEADER_BYTES;
    piece->tag = bytes + size - TAG_BYTES;
    piece->stored_bytes = size;
    count_work(plane, RECEIVE, 1, size, 0);
    pass_on(plane, piece, DECOMPRESS);
}
