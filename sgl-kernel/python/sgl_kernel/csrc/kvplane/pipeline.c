/* The other stages, and the threads of all. */
#include "plane.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

void count_work(struct plane *plane, enum stage stage, uint64_t pieces, uint64_t bytes, double seconds)
{
    struct counters *c = plane->counters;
    __atomic_fetch_add(&c->pieces[stage], pieces, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->bytes[stage], bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->us[stage], (uint64_t)(1e6 * seconds), __ATOMIC_RELAXED);
}

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
        count_work(plane, DELIVER, 0, 0, now() - begun_at);
        return;
    }
    if (worker->stage == DECOMPRESS)
        bytes = piece->is_plain ? 0 : mid_bytes_of(session, bytes);
    else {
        release_slot(plane, piece, COMPRESSED);
        release_slot(plane, piece, DECOMPRESSED);
    }
    count_work(plane, worker->stage, 1, bytes, now() - begun_at);
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
        fail_piece(piece, DAMAGED, why);
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

const char *start_pipeline(struct plane *plane)
{
    const char *no_memory = "there is not enough memory: lower compressed_buffer_bytes, decompressed_buffer_bytes "
                            "or dequantized_buffer_bytes";
    const struct settings *settings = &plane->settings;
    pthread_mutex_init(&plane->lock, NULL);
    pthread_cond_init(&plane->changed, NULL);
    plane->last_fetch = &plane->fetches;
    int num_workers = 0;
    plane->num_slots = (int)settings->slots[COMPRESSED];
    plane->engine = &SOFTWARE;
    for (int i = 0; i < NUM_BUFFERS; i++) {
        int num = (int)settings->slots[i];
        if (!make_slots(&plane->slots[i], num, SLOT_BYTES, !settings->is_preallocated, &plane->counters->slots_used[i]))
            return no_memory;
        plane->num_slots = num < plane->num_slots ? num : plane->num_slots;
        plane->counters->slots[i] = (uint64_t)num;
    }
    for (int i = 0; i < NUM_STAGES; i++) {
        pthread_mutex_init(&plane->rates[i].lock, NULL);
        plane->rates[i].bytes_per_s = settings->rates[i];
        if (settings->rates[i])
            plane->engine = &EMULATED;
        num_workers += (int)settings->threads[i];
        if (!make_ring(&plane->rings[i], (int)settings->slots[COMPRESSED] + MAX_ASKED, &plane->counters->queued[i]))
            return no_memory;
    }
    pthread_mutex_init(&plane->read_limit.lock, NULL);
    plane->read_limit.bytes_per_s = settings->read_limit;
    plane->workers = calloc((size_t)num_workers, sizeof *plane->workers);
    plane->wakes = calloc(settings->threads[RECEIVE], sizeof *plane->wakes);
    bool has_wakes = plane->wakes;
    for (uint32_t i = 0; plane->wakes && i < settings->threads[RECEIVE]; i++)
        has_wakes &= (plane->wakes[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) >= 0;
    if (!plane->workers || !plane->wakes)
        return no_memory;
    if (!has_wakes)
        return "no descriptor is left: raise the limit of open files (ulimit -n)";
    for (int stage = 0; stage < NUM_STAGES; stage++)
        for (uint32_t i = 0; i < settings->threads[stage]; i++) {
            struct worker *worker = &plane->workers[plane->num_workers];
            *worker = (struct worker){.plane = plane, .stage = stage, .index = (int)i};
            if (pthread_create(&worker->thread, NULL, run_worker, worker))
                return "no thread can be started: raise ulimit -u, or lower the numbers of threads";
            plane->num_workers++;
        }
    return "";
}

void stop_pipeline(struct plane *plane)
{
    pthread_mutex_lock(&plane->lock);
    __atomic_store_n(&plane->is_stopping, true, __ATOMIC_RELAXED);
    if (plane->wakes)
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
    for (uint32_t i = 0; plane->wakes && i < plane->settings.threads[RECEIVE]; i++)
        if (plane->wakes[i] >= 0)
            close(plane->wakes[i]);
    free(plane->wakes);
    free(plane->workers);
    free(plane->untaken);
    free(plane->parked);
}
