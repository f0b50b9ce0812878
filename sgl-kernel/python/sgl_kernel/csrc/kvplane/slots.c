/* One buffer of the plane, allocated once and divided into slots, one per piece on its way; and the rings between
 * stages. A buffer has a free list and is no ring: with several threads per stage, pieces end in another order than they
 * began. */
#include "plane.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static void make_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Returns false when the time is over. seconds: infinite, or a time from now that begins with the first call. */
static bool wait_until(pthread_cond_t *condition, pthread_mutex_t *lock, double end)
{
    if (end > 1e17)
        return pthread_cond_wait(condition, lock) == 0;
    struct timespec t = {(time_t)end, (long)((end - (double)(time_t)end) * 1e9)};
    return pthread_cond_timedwait(condition, lock, &t) != ETIMEDOUT;
}

static void note(uint64_t *counter, int value)
{
    __atomic_store_n(counter, (uint64_t)value, __ATOMIC_RELAXED);
}

static uint8_t *map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

bool make_slots(struct slots *slots, int num, size_t slot_bytes, bool is_fresh, uint64_t *used)
{
    pthread_mutex_init(&slots->lock, NULL);
    make_condition(&slots->freed);
    slots->num = slots->num_free = num;
    slots->slot_bytes = slot_bytes;
    slots->is_fresh = is_fresh;
    slots->used = used;
    slots->all = calloc((size_t)num, sizeof *slots->all);
    slots->memory = is_fresh ? NULL : map((size_t)num * slot_bytes);
    if (!slots->all || (!is_fresh && !slots->memory))
        return false;
    /* Touched now, so that no page fault delays a fetch. */
    if (!is_fresh)
        for (size_t at = 0; at < (size_t)num * slot_bytes; at += 4096)
            slots->memory[at] = 0;
    for (int i = 0; i < num; i++) {
        slots->all[i].memory = is_fresh ? NULL : slots->memory + (size_t)i * slot_bytes;
        slots->all[i].next = slots->free;
        slots->free = &slots->all[i];
    }
    return true;
}

void shut_slots(struct slots *slots)
{
    pthread_mutex_lock(&slots->lock);
    slots->is_shut = true;
    pthread_cond_broadcast(&slots->freed);
    pthread_mutex_unlock(&slots->lock);
}

void free_slots(struct slots *slots)
{
    if (slots->memory)
        munmap(slots->memory, (size_t)slots->num * slots->slot_bytes);
    free(slots->all);
}

struct slot *take_slot(struct slots *slots, double seconds)
{
    double end = seconds > 1e17 ? seconds : now() + seconds;
    pthread_mutex_lock(&slots->lock);
    while (!slots->free && !slots->is_shut && seconds > 0)
        if (!wait_until(&slots->freed, &slots->lock, end))
            break;
    struct slot *slot = slots->is_shut ? NULL : slots->free;
    if (slot) {
        slots->free = slot->next;
        note(slots->used, slots->num - --slots->num_free);
    }
    pthread_mutex_unlock(&slots->lock);
    if (slot && slots->is_fresh && !(slot->memory = map(slots->slot_bytes)))
        abort();
    return slot;
}

void give_slot(struct slots *slots, struct slot *slot)
{
    if (slots->is_fresh)
        munmap(slot->memory, slots->slot_bytes);
    pthread_mutex_lock(&slots->lock);
    slot->next = slots->free;
    slots->free = slot;
    note(slots->used, slots->num - ++slots->num_free);
    pthread_cond_signal(&slots->freed);
    pthread_mutex_unlock(&slots->lock);
}

bool make_ring(struct ring *ring, int capacity, uint64_t *queued)
{
    pthread_mutex_init(&ring->lock, NULL);
    make_condition(&ring->filled);
    make_condition(&ring->emptied);
    ring->capacity = capacity;
    ring->queued = queued;
    ring->pieces = calloc((size_t)capacity, sizeof *ring->pieces);
    return ring->pieces;
}

void shut_ring(struct ring *ring)
{
    pthread_mutex_lock(&ring->lock);
    ring->is_shut = true;
    pthread_cond_broadcast(&ring->filled);
    pthread_cond_broadcast(&ring->emptied);
    pthread_mutex_unlock(&ring->lock);
}

void free_ring(struct ring *ring)
{
    free(ring->pieces);
}

void put_piece(struct ring *ring, struct piece *piece)
{
    pthread_mutex_lock(&ring->lock);
    while (ring->num == ring->capacity && !ring->is_shut)
        pthread_cond_wait(&ring->emptied, &ring->lock);
    if (ring->num < ring->capacity) {
        ring->pieces[(ring->first + ring->num++) % ring->capacity] = piece;
        note(ring->queued, ring->num);
        pthread_cond_signal(&ring->filled);
    }
    pthread_mutex_unlock(&ring->lock);
}

struct piece *get_piece(struct ring *ring, double seconds)
{
    double end = seconds > 1e17 ? seconds : now() + seconds;
    struct piece *piece = NULL;
    pthread_mutex_lock(&ring->lock);
    while (!ring->num && !ring->is_shut && seconds > 0)
        if (!wait_until(&ring->filled, &ring->lock, end))
            break;
    if (ring->num && !ring->is_shut) {
        piece = ring->pieces[ring->first];
        ring->first = (ring->first + 1) % ring->capacity;
        note(ring->queued, --ring->num);
        pthread_cond_signal(&ring->emptied);
    }
    pthread_mutex_unlock(&ring->lock);
    return piece;
}
