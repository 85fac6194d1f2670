/* Products and dense copies of sparse weights that are kept as a bitmask and the kept values, row by row.
 *
 * Plain C11 for GCC and Clang, without any library but OpenMP's, if there is one. A row of the weight is computed by one
 * thread, always in the same order, so that results depend neither on the number of threads nor on the other rows of x.
 * Nothing is read behind the end of a buffer. The caller vouches for what the arguments say of each other. */

#include "common.h"
#include "portable.h"

#if defined(__x86_64__)
#define HAS_X86 1
#include <immintrin.h>
#include "shuffles.h"
#include "avx2.h"
#include "avx512.h"
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAS_NEON 1
#include <arm_neon.h>
#include "shuffles.h"
#include "neon.h"
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { ABI = 1 };
enum { OK = 0, NO_SUCH_KERNEL = 1, NO_MEMORY = 2, TOO_MANY_ROWS = 3, DISAGREE = 4 };
/* As in library.py; a processor that can run one can run those before it. */
enum { ON_ANY, ON_NEON, ON_AVX2, ON_AVX512, ON_AVX512_VBMI2, ON_AVX512_BF16, KERNELS };

typedef struct {
    Kernel of[DTYPES];
    UnpackRow unpack2, unpack4; /* of values with 2 and with 4 bytes */
} Set;

static const Set SETS[KERNELS] = {
    [ON_ANY] = {{{64, 0, 0, ROWS_OF(portable_bf16)}, {64, 0, 0, ROWS_OF(portable_fp16)}, {64, 0, 0, ROWS_OF(portable_fp32)}},
                  portable_unpack2, portable_unpack4},
#ifdef HAS_NEON
    [ON_NEON] = {{{8, 1, 0, ROWS_OF(neon_bf16)}, {8, 0, 0, ROWS_OF(neon_fp16)}, {8, 0, 0, ROWS_OF(neon_fp32)}},
              neon_unpack2, neon_unpack4},
#endif
#ifdef HAS_X86
    [ON_AVX2] = {{{16, 1, 0, ROWS_OF(avx2_bf16)}, {8, 0, 0, ROWS_OF(avx2_fp16)}, {8, 0, 0, ROWS_OF(avx2_fp32)}},
               avx2_unpack2, avx2_unpack4},
    [ON_AVX512] = {{{16, 0, 0, ROWS_OF(floats_bf16)}, {16, 0, 0, ROWS_OF(floats_fp16)}, {16, 0, 0, ROWS_OF(floats_fp32)}},
                 avx2_unpack2, avx512_unpack4},
    [ON_AVX512_VBMI2] = {{{32, 1, 0, ROWS_OF(halves_bf16)}, {32, 0, 0, ROWS_OF(halves_fp16)}, {16, 0, 0, ROWS_OF(floats_fp32)}},
                      vbmi2_unpack2, avx512_unpack4},
    [ON_AVX512_BF16] = {{{32, 0, 1, {dot_bf16_1, dot_bf16_2, dot_bf16_4, dot_bf16_6, dot_bf16_8}}, {32, 0, 0, ROWS_OF(halves_fp16)}, {16, 0, 0, ROWS_OF(floats_fp32)}},
                     vbmi2_unpack2, avx512_unpack4},
#endif
};

/* A forked child has OpenMP's threads in its books, but not in life: it would wait for them for ever. */
static int forked = 0;

#if defined(__unix__) || defined(__APPLE__)
static void after_fork(void)
{
    forked = 1;
}

static void __attribute__((constructor)) watch_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork);
}
#endif

EXPORT int neuronal_abi(void)
{
    return ABI;
}

/* Whether it was compiled with OpenMP: otherwise the number of threads is ignored. */
EXPORT int neuronal_has_threads(void)
{
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* Whether this processor can run a kernel. */
EXPORT int neuronal_supports(int kernel)
{
    if (kernel < 0 || kernel >= KERNELS || !SETS[kernel].unpack2)
        return 0;
#ifdef HAS_X86
    __builtin_cpu_init();
    int can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt");
    if (kernel >= ON_AVX2 && !can)
        return 0;
    can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("bmi2");
    if (kernel >= ON_AVX512 && !can)
        return 0;
    if (kernel >= ON_AVX512_VBMI2 && !__builtin_cpu_supports("avx512vbmi2"))
        return 0;
    if (kernel >= ON_AVX512_BF16 && !__builtin_cpu_supports("avx512bf16"))
        return 0;
#endif
    return 1;
}

typedef void (*Work)(void *context, int64_t first, int64_t last);

static void chunk(int64_t index, int64_t rows, int64_t step, Work work, void *context)
{
    const int64_t first = index * step, last = first + step < rows ? first + step : rows;
    work(context, first, last);
}

/* Calls `work` for all rows, `step` at a time, shared among threads. */
static void each_chunk(int64_t rows, int64_t step, int threads, Work work, void *context)
{
    const int64_t chunks = (rows + step - 1) / step;
#ifdef _OPENMP
    if (threads > 1 && chunks > 1 && !forked) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int64_t index = 0; index < chunks; index++)
            chunk(index, rows, step, work, context);
        return;
    }
#endif
    (void)threads;
    for (int64_t index = 0; index < chunks; index++)
        chunk(index, rows, step, work, context);
}

/* Rows of a chunk: some chunks for every thread, none smaller than it is worth. Results do not depend on it. */
static int64_t chunk_rows(int64_t rows, int threads)
{
    int64_t share = rows / (threads > 0 ? threads : 1);
    int64_t most = share / 4 < 32 ? (share < 32 ? share : 32) : share / 4;
    return most < 4 ? 4 : most > CHUNK_ROWS ? CHUNK_ROWS : most / 4 * 4;
}

/* Lays `taken` rows of x out as a kernel wants them, for `count` of which it was compiled: the others are zero. */
static void arrange(const void *x, int dtype, int64_t taken, int64_t columns, int count, const Kernel *kernel, void *to)
{
    const int block = kernel->block, half = block / 2;
    for (int m = 0; m < taken; m++)
        for (int64_t column = 0; column < columns; column += block) {
            const int64_t from = m * columns + column, at = column * count + m * block;
            const int here = columns - column < block ? (int)(columns - column) : block;
            for (int i = 0; i < here; i++) {
                int place = kernel->split ? i / 2 + (i & 1) * half : i;
                if (kernel->half)
                    ((uint16_t *)to)[at + place] = ((const uint16_t *)x)[from + i];
                else
                    ((float *)to)[at + place] = load_number(x, from + i, dtype);
            }
        }
}

/* A product for each_chunk. */
typedef struct {
    Job job;
    Rows compute;
    int count, dtype; /* rows of x that `compute` expects; dtype of bias and y */
    int64_t taken, rows;
    const void *bias;
    void *y;
} Product;

static void multiply(void *context, int64_t first, int64_t last)
{
    const Product *product = context;
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

/* y = x W^T + bias for `taken` rows of x, at most MOST_ROWS; x (taken, columns), y (taken, rows), all of one dtype. */
EXPORT int neuronal_linear(int kernel, int dtype, const void *x, int64_t taken, const uint8_t *bits, const void *values,
                           int64_t kept, const int64_t *offsets, const void *bias, void *y, int64_t rows,
                           int64_t columns, int threads)
{
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES)
        return NO_SUCH_KERNEL;
    if (taken > MOST_ROWS)
        return TOO_MANY_ROWS;
    if (taken == 0 || rows == 0)
        return OK;
    const Kernel *how = &SETS[kernel].of[dtype];
    if (taken > 6 && !how->half) { /* as floats, x would leave the first cache: twice a few rows are faster */
        const int64_t size = dtype == FP32 ? 4 : 2;
        int result = neuronal_linear(kernel, dtype, x, 4, bits, values, kept, offsets, bias, y, rows, columns, threads);
        x = (const char *)x + 4 * columns * size;
        y = (char *)y + 4 * rows * size;
        return result ? result : neuronal_linear(kernel, dtype, x, taken - 4, bits, values, kept, offsets, bias, y, rows,
                                                 columns, threads);
    }
    int which = 0;
    while (COUNT[which] < taken)
        which++;
    const int count = COUNT[which];
    const int64_t stride = (columns + 63) / 64 * 8;
    void *arranged = NULL;
    if (!(how->half && taken == 1 && columns % 64 == 0)) {
        const size_t bytes = (size_t)(stride * 8 * count) * (how->half ? 2 : 4);
        arranged = aligned_alloc(64, bytes + 64 - bytes % 64);
        if (!arranged)
            return NO_MEMORY;
        memset(arranged, 0, bytes);
        arrange(x, dtype, taken, columns, count, how, arranged);
    }
    Product product = {{bits, values, offsets, kept, stride, arranged ? arranged : x},
                       how->rows[which], count, dtype, taken, rows, bias, y};
    each_chunk(rows, chunk_rows(rows, threads), threads, multiply, &product);
    free(arranged);
    return OK;
}

/* A dense copy for each_chunk; a flat one has rows of PIECE elements, the last perhaps fewer. */
typedef struct {
    UnpackRow unpack;
    const uint8_t *bits;
    int64_t stride, columns, numel; /* bytes, elements, elements */
    int size;
    const char *values, *end;
    const int64_t *offsets;
    char *dense;
} Copy;

static void copy(void *context, int64_t first, int64_t last)
{
    const Copy *c = context;
    for (int64_t row = first; row < last; row++) {
        const int64_t from = row * c->columns, columns = c->numel - from < c->columns ? c->numel - from : c->columns;
        c->unpack(c->bits + row * c->stride, columns, c->values + c->offsets[row] * c->size, c->end,
                  c->dense + from * c->size);
    }
}

/* Writes the dense weight (rows, columns), whose elements have `size` bytes: 2 or 4. */
EXPORT int neuronal_unpack(int kernel, int size, const uint8_t *bits, const void *values, int64_t kept,
                           const int64_t *offsets, void *dense, int64_t rows, int64_t columns, int threads)
{
    if (!neuronal_supports(kernel) || (size != 2 && size != 4))
        return NO_SUCH_KERNEL;
    Copy c = {size == 2 ? SETS[kernel].unpack2 : SETS[kernel].unpack4, bits, (columns + 63) / 64 * 8, columns,
              rows * columns, size, values, (const char *)values + kept * size, offsets, dense};
    each_chunk(rows, chunk_rows(rows, threads), threads, copy, &c);
    return OK;
}

/* How many bits are set in so many bytes. */
EXPORT int64_t neuronal_count_bits(const uint8_t *bits, int64_t bytes)
{
    int64_t count = 0;
    for (int64_t byte = 0; byte < bytes; byte += 8)
        count += __builtin_popcountll(load_columns(bits + byte, 8 * (bytes - byte)));
    return count;
}

/* Elements of a weight that is one long row, which are unpacked together. */
enum { PIECE = 4096 };

/* Writes `numel` elements of `size` bytes, whose bits and values lie one after the other without any alignment. Returns
 * DISAGREE, having written nothing, if not exactly `kept` bits are set. */
EXPORT int neuronal_unpack_flat(int kernel, int size, const uint8_t *bits, const void *values, int64_t kept, void *dense,
                                int64_t numel, int threads)
{
    if (!neuronal_supports(kernel) || (size != 2 && size != 4))
        return NO_SUCH_KERNEL;
    const int64_t pieces = (numel + PIECE - 1) / PIECE;
    int64_t *offsets = malloc((size_t)(pieces + 1) * sizeof(int64_t)), next = 0;
    if (!offsets)
        return NO_MEMORY;
    for (int64_t from = 0; from < numel; from += 64) {
        if (from % PIECE == 0)
            offsets[from / PIECE] = next;
        next += __builtin_popcountll(load_columns(bits + from / 8, numel - from));
    }
    if (next == kept) {
        Copy c = {size == 2 ? SETS[kernel].unpack2 : SETS[kernel].unpack4, bits, PIECE / 8, PIECE, numel, size, values,
                  (const char *)values + kept * size, offsets, dense};
        each_chunk(pieces, 16, threads, copy, &c);
    }
    free(offsets);
    return next == kept ? OK : DISAGREE;
}
