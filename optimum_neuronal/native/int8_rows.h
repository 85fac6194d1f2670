/* Products and dense copies of dense matrices of 8-bit levels. */

#include "int8_kernels.h"

typedef struct {
    Kernel floats, bytes; /* by what x is; none where a simpler processor's serve */
} Int8Set;

static const Int8Set INT8[KERNELS] = {
    [ON_ANY] = {{64, 0, 0, ROWS_OF(portable_int8_floats)}, {64, 0, 0, ROWS_OF(portable_int8_bytes)}},
#if defined(HAS_X86)
    [ON_AVX2] = {{8, 0, 0, ROWS_OF(avx2_int8_floats)}, {64, 0, 0, ROWS_OF(avx2_int8_bytes)}},
    [ON_AVX512_VBMI2] = {{16, 0, 0, ROWS_OF(vnni_int8_floats)}, {64, 0, 0, ROWS_OF(vnni_int8_bytes)}},
    [ON_AVX512_BF16] = {{16, 0, 0, ROWS_OF(vnni_int8_floats)}, {64, 0, 0, ROWS_OF(vnni_int8_bytes)}},
#elif defined(HAS_NEON)
    [ON_NEON] = {{8, 0, 0, ROWS_OF(neon_int8_floats)}, {64, 0, 0, ROWS_OF(neon_int8_bytes)}},
#endif
};

/* As CODED_WITH_DOT. */
static const Int8Set INT8_WITH_DOT[KERNELS] = {
    [ON_ANY] = {.bytes = {0}},
#if defined(HAS_AVX_VNNI)
    [ON_AVX2] = {{8, 0, 0, ROWS_OF(avx2_int8_floats)}, {64, 0, 0, ROWS_OF(avx_vnni_int8_bytes)}},
#elif defined(HAS_NEON)
    [ON_NEON] = {{8, 0, 0, ROWS_OF(neon_int8_floats)}, {64, 0, 0, ROWS_OF(neon_one_int8_bytes)}},
#endif
};

/* As coded_set. */
static const Int8Set *int8_set(int kernel)
{
    kernel = with_codes(kernel);
    while (!INT8[kernel].bytes.block)
        kernel--;
    return INT8_WITH_DOT[kernel].bytes.block && has_dot_products() ? &INT8_WITH_DOT[kernel] : &INT8[kernel];
}

/* y = x W^T + bias, as neuronal_coded_linear; levels (rows, columns), scales (rows, groups). */
EXPORT int neuronal_int8_linear(int kernel, int dtype, int bytes, const void *x, int64_t taken, const int8_t *levels,
                                const uint16_t *scales, const void *bias, void *y, int64_t rows, int64_t columns,
                                int threads)
{
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES)
        return NO_SUCH_KERNEL;
    const Int8Set *set = int8_set(kernel);
    const int64_t groups = (columns + GROUP - 1) / GROUP;
    const Job job = {NULL, levels, NULL, rows * columns, columns, NULL, 8, NULL, scales, 2, groups, NULL};
    return coded_product(&job, bytes ? &set->bytes : &set->floats, dtype, bytes, x, taken, bias, y, rows, columns, threads);
}

/* A dense copy for each_chunk. */
static void copy_int8(void *context, int64_t first, int64_t last)
{
    const CodedCopy *c = context;
    const int8_t *levels = (const int8_t *)c->job.values;
    for (int64_t row = first; row < last; row++)
        for (int64_t group = 0; group < c->job.groups; group++) {
            const float scale = group_scale(&c->job, row, group);
            const int64_t end = (group + 1) * GROUP < c->columns ? (group + 1) * GROUP : c->columns;
            for (int64_t at = row * c->columns + group * GROUP; at < row * c->columns + end; at++)
                store_number(c->dense, at, c->dtype, levels[at] * scale);
        }
}

/* Writes the dense weight (rows, columns) of a dtype: every level times its scale, rounded. */
EXPORT int neuronal_int8_unpack(int dtype, const int8_t *levels, const uint16_t *scales, void *dense, int64_t rows,
                                int64_t columns, int threads)
{
    if (dtype < 0 || dtype >= DTYPES)
        return NO_SUCH_KERNEL;
    const int64_t groups = (columns + GROUP - 1) / GROUP;
    CodedCopy c = {{NULL, levels, NULL, rows * columns, columns, NULL, 8, NULL, scales, 2, groups, NULL}, NULL, columns, dtype, dense};
    each_chunk(rows, chunk_rows(rows, threads), threads, copy_int8, &c);
    return OK;
}
