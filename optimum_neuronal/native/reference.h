/* The kernels in plain C, for any processor. Each instruction set sums products in its own order. */
#pragma once

#include "job.h"

/* Expands the values of 64 columns, whose kept ones begin at `p`, to dense (64) floats. Returns where the next ones
 * begin. */
INLINE const void *expand(uint64_t mask, const void *p, int dtype, float *dense) {
    memset(dense, 0, 64 * sizeof(float));
    int64_t used = 0;
    for (; mask; mask &= mask - 1)
        dense[__builtin_ctzll(mask)] = load_number(p, used++, dtype);
    return (const char *)p + used * size_of(dtype);
}

/* Multiplies one row of a sparse weight (rows, columns) with x (M, columns), which lies in blocks of 64 columns: sums
 * (M). Every 16th column is added to the same of 16 sums, as compilers make vectors of them. R is 1. */
INLINE void portable_step(const SparseJob *job, int64_t row, int64_t apart, float *sums, const int R, const int M,
                          const int careful, const int dtype) {
    float parts[MOST_ROWS][16] = {{0}}, dense[64];
    const uint8_t *bits = job->bits + row * job->stride;
    const void *p = (const char *)job->values + job->offsets[row] * size_of(dtype);
    const float *x = job->x;
    (void)R, (void)apart, (void)careful;
    for (int64_t byte = 0; byte < job->stride; byte += 8, x += 64 * M) {
        p = expand(load_word(bits + byte), p, dtype, dense);
        for (int m = 0; m < M; m++)
            for (int block = 0; block < 64; block += 16)
                for (int i = 0; i < 16; i++)
                    parts[m][i] += dense[block + i] * x[64 * m + block + i];
    }
    for (int m = 0; m < M; m++) {
        sums[m] = 0;
        for (int i = 0; i < 16; i++)
            sums[m] += parts[m][i];
    }
}
SPARSE_KERNEL(, portable_bf16, portable_step, BF16, 1, 1, 1, 1)
SPARSE_KERNEL(, portable_fp16, portable_step, FP16, 1, 1, 1, 1)
SPARSE_KERNEL(, portable_fp32, portable_step, FP32, 1, 1, 1, 1)

/* Writes 64 dense columns, whose elements have `size` bytes. */
INLINE void portable_unpack_word(uint64_t mask, const void *p, void *out, const int size) {
    memset(out, 0, (size_t)(64 * size));
    for (const char *from = p; mask; mask &= mask - 1, from += size)
        memcpy((char *)out + __builtin_ctzll(mask) * size, from, (size_t)size);
}
#define PORTABLE_WORD(mask, p, end, out, careful) portable_unpack_word(mask, p, out, sizeof(*p))

UNPACK_ROW(, portable_unpack2, uint16_t, PORTABLE_WORD)
UNPACK_ROW(, portable_unpack4, uint32_t, PORTABLE_WORD)
