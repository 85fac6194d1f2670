/* What kernels are given and give back. A weight (rows, columns) has a bit for each element, set where it is kept, and
 * the kept values row by row. */
#pragma once

#include "common.h"

enum { CHUNK_ROWS = 256 }; /* of the weight, at most, that a thread takes at a time */
/* Values that may be read past a row's last one, where so many follow: kernels read whole vectors. The last few rows
 * are read with care. */
enum { SLACK = 64 };

/* One product with a sparse weight. */
typedef struct {
    const uint8_t *bits;    /* (rows, stride); bits past `columns` are 0 */
    int64_t stride;         /* bytes of a row's bits, a multiple of 8 */
    const void *values;     /* (kept) */
    const int64_t *offsets; /* (rows + 1): where each row's values begin */
    int64_t kept;
    const void *x; /* as `SparseKernel` says, zeros past `columns` */
} SparseJob;

/* Computes rows first to last - 1 for all M rows of x: sums[(row - first) * M + m]. */
typedef void (*SparseRows)(const SparseJob *job, int64_t first, int64_t last, float *sums);
/* Writes one dense row (columns); its values lie from `p` on, and may be read up to `end`. */
typedef void (*UnpackRow)(const uint8_t *bits, int64_t columns, const void *p, const void *end, void *dense);

/* Numbers of rows of x that kernels are compiled for; 8 only for halves. */
static const int ROW_COUNTS[] = {1, 2, 4, 6, 8};

/* A product's functions, and how these want x: in blocks of `block` columns, in each of them all rows of x one after
 * the other. `split`: the block's even columns come before its odd ones. `half`: x stays in 16 bits;
 * else it is float. */
typedef struct {
    int block, split, half;
    SparseRows rows[sizeof(ROW_COUNTS) / sizeof(int)];
} SparseKernel;

/* Fetches what a stream of values and one of bits will need soon. It may be outside of the buffers. */
INLINE void prefetch_row(const void *values, const uint8_t *bits) {
    __builtin_prefetch((const void *)((uintptr_t)values + 2048));
    __builtin_prefetch((const void *)((uintptr_t)bits + 512));
}

INLINE uint64_t load_word(const uint8_t *bits) {
    uint64_t word;
    memcpy(&word, bits, 8);
    return word;
}

/* Defines NAME, an inlined step that computes R rows of the weight, `apart` rows from each other: their streams of
 * values then have no gaps, which speeds prefetching up. COLUMNS multiplies their next 64 columns, where p[r] stands
 * at the first value of mask[r], and moves p on. SUM adds the numbers of a VECTOR. `careful`: no value past the end
 * of the buffer is read. */
#define SPARSE_STEP(TARGET, NAME, X, VECTOR, ZERO, SUM, COLUMNS)                                                     \
    TARGET INLINE void NAME(const SparseJob *job, int64_t row, int64_t apart, float *sums, const int R, const int M, \
                            const int careful, const int dtype) {                                                    \
        const char *p[4], *end = (const char *)job->values + job->kept * size_of(dtype);                             \
        const uint8_t *bits = job->bits + row * job->stride;                                                         \
        const X *x = job->x;                                                                                         \
        VECTOR parts[4][MOST_ROWS];                                                                                  \
        EACH(r, R) {                                                                                                 \
            p[r] = (const char *)job->values + job->offsets[row + r * apart] * size_of(dtype);                       \
            EACH(m, M)                                                                                               \
                parts[r][m] = ZERO;                                                                                  \
        }                                                                                                            \
        for (int64_t byte = 0; byte < job->stride; byte += 8, x += 64 * M) {                                         \
            uint64_t mask[4];                                                                                        \
            EACH(r, R) {                                                                                             \
                mask[r] = load_word(bits + r * apart * job->stride + byte);                                          \
                prefetch_row(p[r], bits + r * apart * job->stride + byte);                                           \
            }                                                                                                        \
            COLUMNS(mask, p, end, x, parts, R, M, careful, dtype);                                                   \
        }                                                                                                            \
        EACH(r, R)                                                                                                   \
            EACH(m, M)                                                                                               \
                sums[r * apart * M + m] = SUM(parts[r][m]);                                                          \
    }
/* Defines NAME_M, a SparseRows for M rows of x, from a STEP for R rows of the weight. */
#define SPARSE_ROWS(TARGET, NAME, STEP, DTYPE, R, M)                                                   \
    TARGET static void NAME##_##M(const SparseJob *job, int64_t row, int64_t last, float *sums) {      \
        const int64_t apart = (last - row) / R, end = row + apart, *offsets = job->offsets;            \
        for (; row < end && offsets[row + (R - 1) * apart + 1] + SLACK <= job->kept; row++, sums += M) \
            STEP(job, row, apart, sums, R, M, 0, DTYPE);                                               \
        for (; row < end; row++, sums += M)                                                            \
            for (int r = 0; r < R; r++)                                                                \
                STEP(job, row + r * apart, 0, sums + r * apart * M, 1, M, 1, DTYPE);                   \
        for (row += (R - 1) * apart, sums += (R - 1) * apart * M; row < last; row++, sums += M)        \
            STEP(job, row, 0, sums, 1, M, 1, DTYPE);                                                   \
    }
/* Defines NAME_1 to NAME_6; R1 to R6 are as many rows of the weight as registers allow. */
#define SPARSE_KERNEL(TARGET, NAME, STEP, DTYPE, R1, R2, R4, R6) \
    SPARSE_ROWS(TARGET, NAME, STEP, DTYPE, R1, 1)                \
    SPARSE_ROWS(TARGET, NAME, STEP, DTYPE, R2, 2)                \
    SPARSE_ROWS(TARGET, NAME, STEP, DTYPE, R4, 4)                \
    SPARSE_ROWS(TARGET, NAME, STEP, DTYPE, R6, 6)
#define ROWS_OF(NAME) NAME##_1, NAME##_2, NAME##_4, NAME##_6

/* Defines NAME, an UnpackRow for values of a TYPE, from WORD(mask, p, end, out, careful), which writes 64 columns. */
#define UNPACK_ROW(TARGET, NAME, TYPE, WORD)                                                                          \
    TARGET static void NAME(const uint8_t *bits, int64_t columns, const void *values, const void *end, void *dense) { \
        const TYPE *p = values, *stop = end;                                                                          \
        TYPE *out = dense, last[64];                                                                                  \
        int64_t column = 0;                                                                                           \
        for (; column + 64 <= columns && stop - p >= 64 + SLACK; column += 64) {                                      \
            const uint64_t mask = load_word(bits + column / 8);                                                       \
            prefetch_row(p, bits + column / 8);                                                                       \
            WORD(mask, p, stop, out + column, 0);                                                                     \
            p += __builtin_popcountll(mask);                                                                          \
        }                                                                                                             \
        for (; column < columns; column += 64) {                                                                      \
            const uint64_t mask = load_word(bits + column / 8);                                                       \
            WORD(mask, p, stop, last, 1);                                                                             \
            memcpy(out + column, last, (size_t)smaller(64, columns - column) * sizeof(TYPE));                         \
            p += __builtin_popcountll(mask);                                                                          \
        }                                                                                                             \
    }
