/* Products with quantised weights, and their dense copies.
 *
 * An element is scale[row] * step[column] * level. With 2 to 7 bits its level is the odd number 2 * code - (2^bits - 1), and
 * codes lie in bit planes, see planes.h. With 8 bits its level is its code, and codes lie row by row, see bytes.h.
 *
 * Kernels multiply whole numbers. A row of x and the steps are divided by powers of 2, so that the largest numbers are about 1,
 * multiplied with each other, and rounded with a scale for every 64 or 128 columns. Sums of whole numbers are exact, and sums of floats are added in one
 * order, so that all instruction sets find the same bits. */

enum { BLOCK_ROWS = 64, BYTE_BITS = 8 };

typedef struct {
    const uint8_t *codes;
    int bits;
    int64_t rows, columns;
    int taken;             /* rows of x */
    const float *x_scales; /* of tiles, see planes.h, or of groups, see bytes.h */
    const uint8_t *lookup; /* sums of x in tables: planes alone */
    const int8_t *whole_x; /* x as whole numbers: bytes alone */
} QuantizedJob;

/* Computes the sums of a block of up to 64 rows for all rows of x: sums[m * 64 + row]. */
typedef void (*BlockSums)(const QuantizedJob *job, int64_t block, float *sums);
/* Writes the elements of a block of up to 64 rows to a dense matrix of a dtype; one float of `steps` for each column. */
typedef void (*BlockElements)(const QuantizedJob *job, int64_t block, const uint16_t *scales, const float *steps, void *dense, int dtype);
/* Rounds `taken` rows of x, floats whose rows begin `apart` from each other, with zeros behind the columns. */
typedef void (*RoundInputs)(const float *x, int64_t apart, int taken, void *rounded, float *x_scales);

typedef struct {
    RoundInputs round;
    BlockSums sums;
    BlockElements elements;
} QuantizedKernel;

INLINE int64_t rows_of_block(const QuantizedJob *job, int64_t block)
{
    const int64_t left = job->rows - block * BLOCK_ROWS;
    return left < BLOCK_ROWS ? left : BLOCK_ROWS;
}

/* Returns the largest of some magnitudes, as bits: of NaN and infinity those of infinity or more. */
INLINE uint32_t largest_bits(const float *x, int64_t count)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t size = to_bits(x[i]) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* Writes a finite element: to bfloat16 without a look for NaN, so that compilers make vectors of a loop. */
INLINE void store_element(void *to, int64_t at, float element, const int dtype)
{
    element += 0.0f; /* no -0 of a scale of 0 */
    if (dtype == BF16) {
        const uint32_t whole = to_bits(element);
        ((uint16_t *)to)[at] = (uint16_t)((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
    } else
        store_number(to, at, dtype, element);
}

#include "planes.h"
#include "bytes.h"
#if defined(HAS_X86)
#include "planes_avx2.h"
#include "bytes_avx2.h"
#include "bytes_avx512.h"
#elif defined(HAS_NEON)
#include "planes_neon.h"
#include "bytes_neon.h"
#endif

static QuantizedKernel planes_kernel(int kernel)
{
#if defined(HAS_X86)
    if (kernel >= ON_AVX2)
        return (QuantizedKernel){avx2_fill_tables, avx2_planes, avx2_plane_elements};
#elif defined(HAS_NEON)
    if (kernel >= ON_NEON)
        return (QuantizedKernel){portable_fill_tables, neon_planes, portable_plane_elements};
#endif
    (void)kernel;
    return (QuantizedKernel){portable_fill_tables, portable_planes, portable_plane_elements};
}

static QuantizedKernel bytes_kernel(int kernel)
{
#if defined(HAS_X86)
    if (kernel >= ON_AVX512 && __builtin_cpu_supports("avx512vnni"))
        return (QuantizedKernel){avx2_round_bytes, vnni_bytes, avx2_byte_elements};
#if defined(HAS_AVX_VNNI)
    if (kernel >= ON_AVX2 && has_dot_products())
        return (QuantizedKernel){avx2_round_bytes, avx_vnni_bytes, avx2_byte_elements};
#endif
    if (kernel >= ON_AVX2)
        return (QuantizedKernel){avx2_round_bytes, avx2_bytes, avx2_byte_elements};
#elif defined(HAS_NEON)
    if (kernel >= ON_NEON)
        return (QuantizedKernel){portable_round_bytes, has_dot_products() ? neon_dot_bytes : neon_bytes, portable_byte_elements};
#endif
    (void)kernel;
    return (QuantizedKernel){portable_round_bytes, portable_bytes, portable_byte_elements};
}

static QuantizedKernel quantized_kernel(int kernel, int bits)
{
    return bits == BYTE_BITS ? bytes_kernel(kernel) : planes_kernel(kernel);
}

/* Returns the power of 2 that is at most a positive number, or the nearest one with which its inverse is normal. */
static float power_below(uint32_t bits)
{
    const uint32_t least = 1u << 23, most = 253u << 23;
    return from_bits(bits < least ? least : bits > most ? most : bits & 0x7f800000);
}

/* Writes steps as floats, all 1 if there are none. `normalize`: divides them by a power of 2, so that the largest is about 1.
 * Returns that power. */
static float widen_steps(const uint16_t *steps, int64_t columns, int normalize, float *to)
{
    for (int64_t i = 0; i < columns; i++)
        to[i] = steps ? from_bf16(steps[i]) : 1;
    const float power = normalize && steps ? power_below(largest_bits(to, columns)) : 1, inverse = 1 / power;
    for (int64_t i = 0; i < columns && power != 1; i++)
        to[i] *= inverse;
    return power;
}

/* Writes a row of x, divided by a power of 2 so that its largest number is about 1, times steps. Returns that power; or NaN,
 * having written zeros, if not all of x is finite: the row's results then are NaN. */
static float scale_inputs(const void *x, int dtype, int64_t row, int64_t columns, const float *steps, float *to)
{
    if (dtype == BF16)
        for (int64_t i = 0; i < columns; i++)
            to[i] = from_bf16(((const uint16_t *)x)[row * columns + i]);
    else
        for (int64_t i = 0; i < columns; i++)
            to[i] = load_number(x, row * columns + i, dtype);
    const uint32_t largest = largest_bits(to, columns);
    if (largest >= 0x7f800000) {
        memset(to, 0, sizeof(float) * (size_t)columns);
        return from_bits(0x7fc00000);
    }
    const float power = power_below(largest), inverse = 1 / power;
    for (int64_t i = 0; i < columns; i++)
        to[i] = to[i] * inverse * steps[i];
    return power;
}

/* A product, or a dense copy, for each_chunk. */
typedef struct {
    QuantizedJob job;
    QuantizedKernel kernel;
    const uint16_t *scales;
    int dtype;
    double powers[MOST_ROWS]; /* by which results of each row of x are multiplied */
    const void *bias;
    void *y;
    const float *steps;
    void *dense;
} QuantizedWork;

static void multiply_blocks(void *context, int64_t first, int64_t last)
{
    const QuantizedWork *work = context;
    float sums[BLOCK_ROWS * MOST_ROWS];
    for (int64_t block = first; block < last; block++) {
        work->kernel.sums(&work->job, block, sums);
        for (int m = 0; m < work->job.taken; m++)
            for (int64_t i = 0; i < rows_of_block(&work->job, block); i++) {
                const int64_t row = block * BLOCK_ROWS + i;
                /* as double, in which neither scale nor power overflows */
                float sum = (float)((double)sums[BLOCK_ROWS * m + i] * from_bf16(work->scales[row]) * work->powers[m]);
                if (work->bias)
                    sum += load_number(work->bias, row, work->dtype);
                store_number(work->y, m * work->job.rows + row, work->dtype, sum);
            }
    }
}

static void copy_blocks(void *context, int64_t first, int64_t last)
{
    const QuantizedWork *work = context;
    for (int64_t block = first; block < last; block++)
        work->kernel.elements(&work->job, block, work->scales, work->steps, work->dense, work->dtype);
}

/* y = x W^T + bias for `taken` rows of x, at most MOST_ROWS. x (taken, columns), bias (rows) or NULL, and y (taken, rows) have
 * one dtype; scales (rows) and steps (columns), or NULL where all are 1, are bfloat16. */
EXPORT int neuronal_quantized_linear(int kernel, int dtype, const void *x, int64_t taken, const uint8_t *codes, int bits,
                                     const uint16_t *scales, const uint16_t *steps, const void *bias, void *y, int64_t rows,
                                     int64_t columns, int threads)
{
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES || bits < 2 || bits > BYTE_BITS)
        return NO_SUCH_KERNEL;
    if (taken > MOST_ROWS)
        return TOO_MANY_ROWS;
    if (taken == 0 || rows == 0)
        return OK;
    const int64_t padded = bits == BYTE_BITS ? padded_bytes(columns) : padded_planes(columns), scale_count = taken * padded / PLANE_TILE;
    const int64_t rounded_bytes = taken * padded * (bits == BYTE_BITS ? 1 : PLANE_BYTES / PLANE_GROUP);
    char *memory = aligned_alloc(64, (size_t)(rounded_bytes + (columns + taken * padded + scale_count) * 4 + 64) / 64 * 64);
    if (!memory)
        return NO_MEMORY;
    float *wide_x = (float *)(void *)(memory + rounded_bytes), *x_scales = wide_x + taken * padded, *wide_steps = x_scales + scale_count;
    memset(wide_x, 0, sizeof(float) * (size_t)(taken * padded + scale_count));
    QuantizedWork work = {
        .job = {.codes = codes, .bits = bits, .rows = rows, .columns = columns, .taken = (int)taken, .x_scales = x_scales,
                .lookup = (const uint8_t *)memory, .whole_x = (const int8_t *)memory},
        .kernel = quantized_kernel(kernel, bits), .scales = scales, .dtype = dtype, .bias = bias, .y = y};
    const double of_steps = widen_steps(steps, columns, 1, wide_steps);
    for (int m = 0; m < taken; m++)
        work.powers[m] = of_steps * scale_inputs(x, dtype, m, columns, wide_steps, wide_x + m * padded);
    work.kernel.round(wide_x, padded, (int)taken, memory, x_scales);
    each_chunk((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, 1, threads, multiply_blocks, &work);
    free(memory);
    return OK;
}

/* Writes the dense matrix (rows, columns) of a dtype: every level times its scale and step, rounded once. */
EXPORT int neuronal_quantized_unpack(int kernel, int dtype, const uint8_t *codes, int bits, const uint16_t *scales,
                                     const uint16_t *steps, void *dense, int64_t rows, int64_t columns, int threads)
{
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES || bits < 2 || bits > BYTE_BITS)
        return NO_SUCH_KERNEL;
    float *wide_steps = malloc(sizeof(float) * (size_t)columns + 1);
    if (!wide_steps)
        return NO_MEMORY;
    widen_steps(steps, columns, 0, wide_steps);
    QuantizedWork work = {.job = {.codes = codes, .bits = bits, .rows = rows, .columns = columns},
                          .kernel = quantized_kernel(kernel, bits), .scales = scales, .dtype = dtype, .steps = wide_steps,
                          .dense = dense};
    each_chunk((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, 1, threads, copy_blocks, &work);
    free(wide_steps);
    return OK;
}
