/* Products with packed weights, and their dense copies: the one file that is compiled.
 *
 *     common.h     numbers, loops and instruction sets
 *     job.h        what a kernel is given and gives back
 *     reference.h  the kernels in plain C, for any processor: start reading here
 *     isa/         the kernels for one instruction set each
 *
 * Plain C11 for GCC and Clang, with OpenMP where there is one. One thread computes a row of the weight, always in the
 * same order: results depend neither on threads nor on other rows of x. Nothing is read past the end of a buffer.
 * The caller checks that the arguments fit each other. */

#include "job.h"
#include "reference.h"

#include <pthread.h>

#ifdef __x86_64__
#include "isa/avx2.h"
#include "isa/avx512.h"
#endif

/* The kernels of one instruction set. */
typedef struct {
    SparseKernel of[DTYPES];
    UnpackRow unpack2, unpack4; /* of values with 2 and with 4 bytes */
} SparseSet;

static const SparseSet SPARSE_SETS[KERNELS] = {
    [ON_ANY] = {.of = {[BF16] = {.block = 64, .rows = {ROWS_OF(portable_bf16)}},
                       [FP16] = {.block = 64, .rows = {ROWS_OF(portable_fp16)}},
                       [FP32] = {.block = 64, .rows = {ROWS_OF(portable_fp32)}}},
                .unpack2 = portable_unpack2,
                .unpack4 = portable_unpack4},
#ifdef __x86_64__
    [ON_AVX2] = {.of = {[BF16] = {.block = 16, .split = 1, .rows = {ROWS_OF(avx2_bf16)}},
                        [FP16] = {.block = 8, .rows = {ROWS_OF(avx2_fp16)}},
                        [FP32] = {.block = 8, .rows = {ROWS_OF(avx2_fp32)}}},
                 .unpack2 = avx2_unpack2,
                 .unpack4 = avx2_unpack4},
    [ON_AVX512] = {.of = {[BF16] = {.block = 16, .rows = {ROWS_OF(floats_bf16)}},
                          [FP16] = {.block = 16, .rows = {ROWS_OF(floats_fp16)}},
                          [FP32] = {.block = 16, .rows = {ROWS_OF(floats_fp32)}}},
                   .unpack2 = avx2_unpack2,
                   .unpack4 = avx512_unpack4},
    [ON_AVX512_VBMI2] = {.of = {[BF16] = {.block = 32, .split = 1, .rows = {ROWS_OF(halves_bf16)}},
                                [FP16] = {.block = 32, .rows = {ROWS_OF(halves_fp16)}},
                                [FP32] = {.block = 16, .rows = {ROWS_OF(floats_fp32)}}},
                         .unpack2 = vbmi2_unpack2,
                         .unpack4 = avx512_unpack4},
    [ON_AVX512_BF16] = {.of = {[BF16] = {.block = 32, .half = 1, .rows = {ROWS_OF(dot_bf16), dot_bf16_8}},
                               [FP16] = {.block = 32, .rows = {ROWS_OF(halves_fp16)}},
                               [FP32] = {.block = 16, .rows = {ROWS_OF(floats_fp32)}}},
                        .unpack2 = vbmi2_unpack2,
                        .unpack4 = avx512_unpack4},
#endif
};

/* OpenMP's threads do not survive a fork: the child would wait for them forever. */
static int forked = 0;

static void after_fork(void) { forked = 1; }

static void __attribute__((constructor)) watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

typedef void (*Work)(void *context, int64_t first, int64_t last);

/* Calls `work` for all rows, `step` at a time, shared among threads if it is compiled with OpenMP. */
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

/* Rows of a chunk: some chunks for every thread, none smaller than it is worth. Results do not depend on it. */
static int64_t chunk_rows(int64_t rows, int threads) {
    int64_t share = rows / (threads > 0 ? threads : 1);
    int64_t most = share / 4 < 32 ? (share < 32 ? share : 32) : share / 4;
    return most < 4 ? 4 : most > CHUNK_ROWS ? CHUNK_ROWS : most / 4 * 4;
}

/* Lays `taken` rows (taken, columns) of x out as a kernel wants them, for `count` of which it was compiled: the others
 * are zero. */
static void arrange(const void *x, int dtype, int64_t taken, int64_t columns, int count, const SparseKernel *kernel,
                    void *to) {
    const int block = kernel->block, half = block / 2;
    for (int m = 0; m < taken; m++)
        for (int64_t column = 0; column < columns; column += block) {
            const int64_t from = m * columns + column, at = column * count + m * block;
            const int64_t here = smaller(block, columns - column);
            for (int64_t i = 0; i < here; i++) {
                const int64_t place = kernel->split ? i / 2 + (i & 1) * half : i;
                if (kernel->half)
                    ((uint16_t *)to)[at + place] = ((const uint16_t *)x)[from + i];
                else
                    ((float *)to)[at + place] = load_number(x, from + i, dtype);
            }
        }
}

/* A product for each_chunk. */
typedef struct {
    SparseJob job;
    SparseRows compute;
    int count; /* rows of x that `compute` expects, of which `taken` count */
    int64_t taken, rows;
    int dtype; /* of bias and y */
    const void *bias;
    void *y;
} SparseProduct;

static void multiply_rows(void *context, int64_t first, int64_t last) {
    const SparseProduct *product = context;
    float sums[CHUNK_ROWS * MOST_ROWS];
    product->compute(&product->job, first, last, sums);
    for (int64_t row = first; row < last; row++)
        for (int m = 0; m < product->taken; m++) {
            float sum = sums[(row - first) * product->count + m];
            if (product->bias)
                sum += load_number(product->bias, row, product->dtype);
            store_number(product->y, m * product->rows + row, product->dtype, sum);
        }
}

/* y = x W^T + bias for `taken` rows of x, a few at a time; x (taken, columns), y (taken, rows), all of one dtype. */
EXPORT int neuronal_multiply(int kernel, int dtype, const void *x, int64_t taken, const uint8_t *bits,
                             const void *values, int64_t kept, const int64_t *offsets, const void *bias, void *y,
                             int64_t rows, int64_t columns, int threads) {
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES)
        return NO_SUCH_KERNEL;
    if (taken == 0 || rows == 0)
        return OK;
    const SparseKernel *how = &SPARSE_SETS[kernel].of[dtype];
    /* As floats, more rows of x would leave the first cache: twice a few are faster. */
    const int64_t few = taken <= (how->half ? MOST_ROWS : 6) ? taken : how->half ? MOST_ROWS : 4;
    int which = 0;
    while (ROW_COUNTS[which] < few)
        which++;
    const int count = ROW_COUNTS[which];
    const int64_t stride = (columns + 63) / 64 * 8;
    void *arranged = NULL;
    if (!(how->half && few == 1 && columns % 64 == 0)) {
        const size_t bytes = (size_t)(stride * 8 * count) * (how->half ? 2 : 4);
        arranged = aligned_alloc(64, bytes + 64 - bytes % 64);
        if (!arranged)
            return NO_MEMORY;
        memset(arranged, 0, bytes);
        arrange(x, dtype, few, columns, count, how, arranged);
    }
    SparseProduct product = {.job = {bits, stride, values, offsets, kept, arranged ? arranged : x},
                             .compute = how->rows[which],
                             .count = count,
                             .taken = few,
                             .rows = rows,
                             .dtype = dtype,
                             .bias = bias,
                             .y = y};
    each_chunk(rows, chunk_rows(rows, threads), threads, multiply_rows, &product);
    free(arranged);
    x = (const char *)x + few * columns * size_of(dtype);
    y = (char *)y + few * rows * size_of(dtype);
    return neuronal_multiply(kernel, dtype, x, taken - few, bits, values, kept, offsets, bias, y, rows, columns,
                             threads);
}

/* A dense copy for each_chunk. */
typedef struct {
    UnpackRow unpack;
    const uint8_t *bits;
    int64_t stride, columns; /* bytes of a row's bits; elements of a row */
    int size;                /* bytes of an element */
    const char *values, *end;
    const int64_t *offsets;
    char *dense;
} SparseCopy;

static void copy_rows(void *context, int64_t first, int64_t last) {
    const SparseCopy *c = context;
    for (int64_t row = first; row < last; row++)
        c->unpack(c->bits + row * c->stride, c->columns, c->values + c->offsets[row] * c->size, c->end,
                  c->dense + row * c->columns * c->size);
}

/* Writes the dense weight (rows, columns), whose elements have `size` bytes: 2 or 4. */
EXPORT int neuronal_unpack(int kernel, int size, const uint8_t *bits, const void *values, int64_t kept,
                           const int64_t *offsets, void *dense, int64_t rows, int64_t columns, int threads) {
    if (!neuronal_supports(kernel) || (size != 2 && size != 4))
        return NO_SUCH_KERNEL;
    const SparseSet *set = &SPARSE_SETS[kernel];
    SparseCopy copy = {.unpack = size == 2 ? set->unpack2 : set->unpack4,
                       .bits = bits,
                       .stride = (columns + 63) / 64 * 8,
                       .columns = columns,
                       .size = size,
                       .values = values,
                       .end = (const char *)values + kept * size,
                       .offsets = offsets,
                       .dense = dense};
    each_chunk(rows, chunk_rows(rows, threads), threads, copy_rows, &copy);
    return OK;
}
