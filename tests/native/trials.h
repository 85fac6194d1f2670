/* What random trials of kernels share. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 88172645463325252ULL;

static uint32_t draw(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}

/* A buffer of exactly so many bytes: behind its end lies what a sanitizer guards. */
static void *exactly(int64_t bytes) { return malloc((size_t)bytes); /* of none too: no byte of it may be touched */ }

static void fail(const char *what, int kernel, int dtype, int64_t rows, int64_t columns, int64_t taken) {
    printf("%s: kernel %d, dtype %d, %lld x %lld, %lld rows of x\n", what, kernel, dtype, (long long)rows,
           (long long)columns, (long long)taken);
    exit(1);
}

static float number(void) {
    return (float)((int)(draw() % 129) - 64) / 32; /* exact in all dtypes, never a rounding error in a short sum */
}
