/* Time, and rates of links and accelerators. */
#include "plane.h"

#include <time.h>

double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double end_at_rate(struct rate *rate, double began, uint64_t bytes)
{
    pthread_mutex_lock(&rate->lock);
    rate->free_at = (rate->free_at > began ? rate->free_at : began) + (double)bytes / rate->bytes_per_s;
    double end = rate->free_at;
    pthread_mutex_unlock(&rate->lock);
    return end;
}

void sleep_until(double end, double least)
{
    for (double left = end - now(); left > 0; left = end - now()) {
        left = left > least ? left : least;
        struct timespec t = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
        nanosleep(&t, NULL);
    }
}
