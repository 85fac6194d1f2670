/* Shares rows of a weight among threads. Results depend neither on threads nor on chunks. */
#pragma once

#include "common.h"

#include <pthread.h>

/* OpenMP's threads do not survive a fork: the child would wait for them forever. */
static int forked = 0;

static void after_fork(void) { forked = 1; }

static void __attribute__((constructor)) watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

/* Whether it was compiled with OpenMP: otherwise the number of threads is ignored. */
EXPORT int neuronal_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

typedef void (*Work)(void *context, int64_t first, int64_t last);

/* Calls `work` for all rows, `step` at a time, shared among threads. */
static void each_chunk(int64_t rows, int64_t step, int threads, Work work, void *context) {
    const int64_t chunks = (rows + step - 1) / step;
#ifdef _OPENMP
    if (threads > 1 && chunks > 1 && !forked) {
#pragma omp parallel for schedule(guided) num_threads((int)smaller(threads, chunks))
        for (int64_t index = 0; index < chunks; index++)
            work(context, index * step, smaller(index * step + step, rows));
        return;
    }
#endif
    (void)threads;
    for (int64_t index = 0; index < chunks; index++)
        work(context, index * step, smaller(index * step + step, rows));
}
