/* Products and dense copies of sparse weights that are kept as a bitmask and codes of few bits, row by row. */

#include "coded.h"
#include "coded_portable.h"
#if defined(HAS_X86)
#include "coded_avx2.h"
#include "coded_avx512.h"
#elif defined(HAS_NEON)
#include "coded_neon.h"
#endif

/* Writes the levels of 64 columns, zero where nothing is kept. */
typedef void (*Spread)(const Job *job, uint64_t mask, const uint8_t *codes, int8_t *dense);

typedef struct {
    Kernel floats, bytes; /* by what x is */
    Spread spread;
} CodedSet;

static const CodedSet CODED[KERNELS] = {
    [ON_ANY] = {{64, 0, 0, ROWS_OF(portable_floats)}, {64, 0, 0, ROWS_OF(portable_bytes)}, portable_spread},
#if defined(HAS_X86)
    [ON_AVX2] = {{8, 0, 0, ROWS_OF(avx2_floats)}, {64, 0, 0, ROWS_OF(avx2_bytes)}, avx2_spread},
    [ON_AVX512_VBMI2] = {{16, 0, 0, ROWS_OF(vnni_floats)}, {64, 0, 0, ROWS_OF(vnni_bytes)}, vnni_spread},
    [ON_AVX512_BF16] = {{16, 0, 0, ROWS_OF(vnni_floats)}, {64, 0, 0, ROWS_OF(vnni_bytes)}, vnni_spread},
#elif defined(HAS_NEON)
    [ON_NEON] = {{8, 0, 0, ROWS_OF(neon_floats)}, {64, 0, 0, ROWS_OF(neon_bytes)}, neon_spread},
#endif
};

/* Those for processors with dot products of bytes, where that makes a difference. */
static const CodedSet CODED_WITH_DOT[KERNELS] = {
    [ON_ANY] = {.spread = NULL},
#if defined(HAS_AVX_VNNI)
    [ON_AVX2] = {{8, 0, 0, ROWS_OF(avx2_floats)}, {64, 0, 0, ROWS_OF(avx_vnni_bytes)}, avx2_spread},
#elif defined(HAS_NEON)
    [ON_NEON] = {{8, 0, 0, ROWS_OF(neon_floats)}, {64, 0, 0, ROWS_OF(neon_one_bytes)}, neon_spread},
#endif
};

/* The kernel, or a simpler one where those for codes need more than its name says. */
static int with_codes(int kernel)
{
#if defined(HAS_X86)
    if (kernel >= ON_AVX512_VBMI2 && !(__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni")))
        return ON_AVX2;
#endif
    return kernel;
}

/* The kernels to use: those of a simpler processor where a kernel has none of its own. */
static const CodedSet *coded_set(int kernel)
{
    kernel = with_codes(kernel);
    while (!CODED[kernel].spread)
        kernel--;
    return CODED_WITH_DOT[kernel].spread && has_dot_products() ? &CODED_WITH_DOT[kernel] : &CODED[kernel];
}

/* Lays rows of x out as whole numbers from -127 to 127, and a scale for each and group of columns: the largest magnitude
 * / 127. Rounds half to even. A group that is not finite has the scale NaN; one that is nearly zero becomes zero. */
static void arrange_bytes(const void *x, int dtype, int64_t taken, int64_t columns, int count, int8_t *to, float *scales)
{
    for (int64_t first = 0; first < columns; first += GROUP)
        for (int m = 0; m < taken; m++) {
            const int here = columns - first < GROUP ? (int)(columns - first) : GROUP;
            float numbers[GROUP] = {0};
            uint32_t largest = 0;
            for (int i = 0; i < here; i++)
                numbers[i] = load_number(x, m * columns + first + i, dtype);
            for (int i = 0; i < GROUP; i++) {
                const uint32_t size = to_bits(numbers[i]) & 0x7fffffff;
                largest = size > largest ? size : largest;
            }
            const float scale = from_bits(largest) / 127.0f;
            scales[m * ((columns + 8 * GROUP - 1) / (8 * GROUP) * 8) + first / GROUP] = largest >= 0x7f800000 ? from_bits(0x7fc00000) : scale >= 0x1p-126f ? scale : 0;
            if (largest >= 0x7f800000 || !(scale >= 0x1p-126f))
                continue; /* `to` is zero */
            for (int i = 0; i < here; i++) {
                const float near = numbers[i] / scale + 0x1.8p23f; /* whose last bit counts ones */
                to[(first + i / 64 * 64) * count + m * 64 + i % 64] = (int8_t)(int)(near - 0x1.8p23f);
            }
        }
}

/* y = x W^T + bias for `taken` rows of x, which a job has all but x of; see neuronal_coded_linear. */
static int coded_product(const Job *weight, const Kernel *how, int dtype, int bytes, const void *x, int64_t taken,
                         const void *bias, void *y, int64_t rows, int64_t columns, int threads)
{
    if (taken > MOST_ROWS)
        return TOO_MANY_ROWS;
    if (taken == 0 || rows == 0)
        return OK;
    if (taken > 6) { /* as in neuronal_linear */
        const int64_t item = dtype == FP32 ? 4 : 2;
        int result = coded_product(weight, how, dtype, bytes, x, 4, bias, y, rows, columns, threads);
        x = (const char *)x + 4 * columns * item;
        y = (char *)y + 4 * rows * item;
        return result ? result : coded_product(weight, how, dtype, bytes, x, taken - 4, bias, y, rows, columns, threads);
    }
    int which = 0;
    while (COUNT[which] < taken)
        which++;
    const int count = COUNT[which];
    const size_t numbers = (size_t)(weight->groups * GROUP * count) * (bytes ? 1 : 4);
    const size_t all = numbers + (size_t)((weight->groups + 7) * count) * 4;
    char *arranged = aligned_alloc(64, all + 64 - all % 64);
    if (!arranged)
        return NO_MEMORY;
    memset(arranged, 0, all);
    float *x_scales = (float *)(void *)(arranged + numbers), factors[MOST_ROWS];
    if (bytes)
        arrange_bytes(x, dtype, taken, columns, count, (int8_t *)arranged, x_scales);
    else {
        arrange(x, dtype, taken, columns, count, how, arranged);
        lower((float *)(void *)arranged, taken, columns, count, how, factors);
    }
    Product product = {*weight, how->rows[which], count, dtype, taken, rows, bias, y, bytes ? NULL : factors};
    product.job.x = arranged;
    product.job.x_scales = x_scales;
    each_chunk(rows, chunk_rows(rows, threads), threads, multiply, &product);
    free(arranged);
    return OK;
}

/* y = x W^T + bias for `taken` rows of x, at most MOST_ROWS; x (taken, columns), y (taken, rows), both and bias of one
 * dtype. `bytes`: x is rounded to whole numbers of 8 bits. `size`: bytes of codes. `scale_bytes`: of a scale, 2 or 1. */
EXPORT int neuronal_coded_linear(int kernel, int dtype, int bytes, const void *x, int64_t taken, const uint8_t *bits,
                                 const uint8_t *codes, int64_t size, const int64_t *offsets, const void *scales,
                                 int scale_bytes, const int8_t *table, int value_bits, const void *bias, void *y,
                                 int64_t rows, int64_t columns, int threads)
{
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES)
        return NO_SUCH_KERNEL;
    const CodedSet *set = coded_set(kernel);
    int8_t levels[64] = {0};
    for (int i = 0; i < 64 && value_bits < 8; i++)
        levels[i] = table[i & ((1 << value_bits) - 1)];
    const int64_t groups = (columns + GROUP - 1) / GROUP, stride = (columns + 63) / 64 * 8;
    const Job job = {bits, codes, offsets, size, stride, NULL, value_bits, levels, scales, scale_bytes, groups, NULL};
    return coded_product(&job, bytes ? &set->bytes : &set->floats, dtype, bytes, x, taken, bias, y, rows, columns, threads);
}

/* A dense copy for each_chunk. */
typedef struct {
    Job job;
    Spread spread;
    int64_t columns;
    int dtype;
    void *dense;
} CodedCopy;

static void copy_coded(void *context, int64_t first, int64_t last)
{
    const CodedCopy *c = context;
    const Job *job = &c->job;
    const uint8_t *end = (const uint8_t *)job->values + job->kept;
    for (int64_t row = first; row < last; row++) {
        const uint8_t *codes = (const uint8_t *)job->values + job->offsets[row];
        for (int64_t column = 0; column < c->columns; column += 64) {
            const int64_t here = c->columns - column < 64 ? c->columns - column : 64, at = row * c->columns + column;
            const uint64_t mask = load_word(job->bits + row * job->stride + column / 8);
            const float scale = group_scale(job, row, column / GROUP);
            uint8_t last_codes[SLACK];
            int8_t levels[64];
            c->spread(job, mask, whole_codes(codes, end, last_codes, 1), levels);
            codes += code_bytes(job, __builtin_popcountll(mask));
            for (int i = 0; i < here; i++)
                store_number(c->dense, at + i, c->dtype, levels[i] * scale);
        }
    }
}

/* Writes the dense weight (rows, columns) of a dtype: every level times its scale, rounded. */
EXPORT int neuronal_coded_unpack(int kernel, int dtype, const uint8_t *bits, const uint8_t *codes, int64_t size,
                                 const int64_t *offsets, const void *scales, int scale_bytes, const int8_t *table,
                                 int value_bits, void *dense, int64_t rows, int64_t columns, int threads)
{
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES)
        return NO_SUCH_KERNEL;
    int8_t levels[64] = {0};
    for (int i = 0; i < 64 && value_bits < 8; i++)
        levels[i] = table[i & ((1 << value_bits) - 1)];
    const int64_t groups = (columns + GROUP - 1) / GROUP, stride = (columns + 63) / 64 * 8;
    CodedCopy c = {{bits, codes, offsets, size, stride, NULL, value_bits, levels, scales, scale_bytes, groups, NULL},
                   coded_set(kernel)->spread, columns, dtype, dense};
    each_chunk(rows, chunk_rows(rows, threads), threads, copy_coded, &c);
    return OK;
}
