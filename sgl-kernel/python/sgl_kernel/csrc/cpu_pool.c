/* Threads that share the tasks of one job after the other.

   The caller works too, and waits only for tasks that other threads have begun: a thread that has no core delays no
   job. OpenMP's barriers wait for every thread, which costs a time slice each where other processes share the cores.
   One job runs at a time. A caller that finds the threads busy does all its tasks alone, and so does a child of a
   fork, which has no threads.

   `ticket` has the number of the job in its upper half and the tasks that are not begun in its lower half. A thread
   that takes a task off holds the job: its other fields do not change before `done` counts that task. */

#include "cpu_pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MAX_WORKERS 255
/* Looks for work before a thread sleeps: some 100 us, longer than Python needs between two kernels. */
#define LOOKS 4000

static struct {
    cpu_work work;
    const void *arguments;
    int64_t tasks;
} job;
static _Atomic uint64_t ticket;
static _Atomic int64_t done;
static _Atomic int sleepers;
static int workers;
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER, sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t there_is_work = PTHREAD_COND_INITIALIZER;

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Run tasks of the current job while there are any. Returns whether there was one. */
static int help(void) {
    int found = 0;
    uint64_t seen = atomic_load(&ticket);
    while ((uint32_t)seen) {
        if (!atomic_compare_exchange_weak(&ticket, &seen, seen - 1))
            continue;
        job.work(job.arguments, job.tasks - (uint32_t)seen);
        atomic_fetch_add(&done, 1);
        found = 1;
        seen = atomic_load(&ticket);
    }
    return found;
}

static void *serve(void *unused) {
    for (int looks = 0;; looks++) {
        if (help())
            looks = 0;
        if (looks < LOOKS) {
            pause_briefly();
            continue;
        }
        pthread_mutex_lock(&sleeping);
        atomic_fetch_add(&sleepers, 1);
        while (!(uint32_t)atomic_load(&ticket))
            pthread_cond_wait(&there_is_work, &sleeping);
        atomic_fetch_sub(&sleepers, 1);
        pthread_mutex_unlock(&sleeping);
        looks = 0;
    }
    return unused;
}

static void hire(int wanted) {
    for (; workers < wanted && workers < MAX_WORKERS; workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, NULL))
            return;
        pthread_detach(thread);
    }
}

void cpu_run(cpu_work work, const void *arguments, int64_t tasks, int threads) {
    if (threads < 2 || tasks < 2 || tasks > UINT32_MAX || pthread_mutex_trylock(&in_use)) {
        for (int64_t task = 0; task < tasks; task++)
            work(arguments, task);
        return;
    }
    hire(threads - 1);
    job.work = work, job.arguments = arguments, job.tasks = tasks;
    atomic_store(&done, 0);
    atomic_store(&ticket, ((atomic_load(&ticket) >> 32) + 1) << 32 | (uint64_t)tasks);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&sleeping);
        pthread_cond_broadcast(&there_is_work);
        pthread_mutex_unlock(&sleeping);
    }
    help();
    for (int looks = 0; atomic_load(&done) < tasks; looks++) {
        pause_briefly();
        if (looks > LOOKS)
            sched_yield();
    }
    pthread_mutex_unlock(&in_use);
}
