#ifndef SGL_CPU_POOL_H
#define SGL_CPU_POOL_H

#include <stdint.h>

typedef void (*cpu_work)(const void *arguments, int64_t task);

/* Call work(arguments, task) for every task 0 .. tasks - 1, on up to `threads` threads, this one among them. Returns
   when all are done. */
void cpu_run(cpu_work work, const void *arguments, int64_t tasks, int threads);

#endif
