/* Products with quantised weights, and their dense copies. */
#pragma once

#include "processors.h"
#include "quantized_job.h"
#include "reference.h"
#include "threads.h"
#if defined(HAS_X86)
#include "isa/bytes_avx2.h"
#include "isa/bytes_avx512.h"
#include "isa/planes_avx2.h"
#elif defined(HAS_NEON)
#include "isa/bytes_neon.h"
#include "isa/planes_neon.h"
#endif

static QuantizedKernel planes_kernel(int kernel) {
    QuantizedKernel found = {.round = portable_fill_tables,
                             .sums = portable_planes,
                             .elements = portable_plane_elements};
#if defined(HAS_X86)
    if (kernel >= ON_AVX2)
        found = (QuantizedKernel){
            .round = avx2_fill_tables, .sums = avx2_planes, .elements = avx2_plane_elements};
#elif defined(HAS_NEON)
    if (kernel >= ON_NEON)
        found.sums = neon_planes;
#endif
    (void)kernel;
    return found;
}

static QuantizedKernel bytes_kernel(int kernel) {
    QuantizedKernel found = {
        .round = portable_round_bytes, .sums = portable_bytes, .elements = portable_byte_elements};
#if defined(HAS_X86)
    if (kernel >= ON_AVX2)
        found = (QuantizedKernel){
            .round = avx2_round_bytes, .sums = avx2_bytes, .elements = avx2_byte_elements};
#if defined(HAS_AVX_VNNI)
    if (kernel >= ON_AVX2 && has_dot_products())
        found.sums = avx_vnni_bytes;
#endif
    if (kernel >= ON_AVX512 && __builtin_cpu_supports("avx512vnni"))
        found.sums = vnni_bytes;
#elif defined(HAS_NEON)
    if (kernel >= ON_NEON)
        found.sums = has_dot_products() ? neon_dot_bytes : neon_bytes;
#endif
    (void)kernel;
    return found;
}

static QuantizedKernel quantized_kernel(int kernel, int bits) {
    return bits == BYTE_BITS ? bytes_kernel(kernel) : planes_kernel(kernel);
}

/* Returns the power of 2 that is at most a positive number, or the nearest one with which its
 * inverse is normal. */
static float power_below(uint32_t bits) {
    const uint32_t least = 1u << 23, most = 253u << 23;
    return from_bits(bits < least ? least : bits > most ? most : bits & 0x7f800000);
}

/* Writes steps as floats, all 1 if there are none. `normalize`: divides them by a power of 2, so
 * that the largest is about 1. Returns that power. */
static float widen_steps(const uint16_t *steps, int64_t columns, int normalize, float *to) {
    for (int64_t i = 0; i < columns; i++)
        to[i] = steps ? from_bf16(steps[i]) : 1;
    const float power = normalize && steps ? power_below(largest_bits(to, columns)) : 1,
                inverse = 1 / power;
    for (int64_t i = 0; i < columns && power != 1; i++)
        to[i] *= inverse;
    return power;
}

/* Writes a row of x, divided by a power of 2 so that its largest number is about 1, times steps.
 * Returns that power; or NaN, having written zeros, if not all of x is finite: the row's results
 * then are NaN. */
static float scale_inputs(const void *x, int dtype, int64_t row, int64_t columns,
                          const float *steps, float *to) {
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

/* A product for each_chunk. */
typedef struct {
    QuantizedMatrix weight;
    RoundedInputs inputs;
    BlockSums compute;
    double powers[MOST_ROWS]; /* by which results of each row of x are multiplied */
    int dtype;                /* of bias and y */
    const void *bias;
    void *y;
} QuantizedProduct;

static void multiply_blocks(void *context, int64_t first, int64_t last) {
    const QuantizedProduct *product = context;
    const QuantizedMatrix *weight = &product->weight;
    float sums[BLOCK_ROWS * MOST_ROWS];
    for (int64_t block = first; block < last; block++) {
        product->compute(weight, &product->inputs, block, sums);
        for (int m = 0; m < product->inputs.count; m++)
            for (int64_t i = 0; i < rows_of_block(weight, block); i++) {
                const int64_t row = block * BLOCK_ROWS + i;
                /* as double, in which neither scale nor power overflows */
                float sum = (float)((double)sums[BLOCK_ROWS * m + i] *
                                    from_bf16(weight->scales[row]) * product->powers[m]);
                if (product->bias)
                    sum += load_number(product->bias, row, product->dtype);
                store_number(product->y, m * weight->rows + row, product->dtype, sum);
            }
    }
}

/* y = x W^T + bias for `taken` rows of x, at most MOST_ROWS. x (taken, columns), bias (rows) or
 * NULL, and y (taken, rows) have one dtype; scales (rows) and steps (columns), or NULL where all
 * are 1, are bfloat16. */
EXPORT int neuronal_quantized_linear(int kernel, int dtype, const void *x, int64_t taken,
                                     const uint8_t *codes, int bits, const uint16_t *scales,
                                     const uint16_t *steps, const void *bias, void *y, int64_t rows,
                                     int64_t columns, int threads) {
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES || bits < 2 || bits > BYTE_BITS)
        return NO_SUCH_KERNEL;
    if (taken > MOST_ROWS)
        return TOO_MANY_ROWS;
    if (taken == 0 || rows == 0)
        return OK;
    const QuantizedKernel how = quantized_kernel(kernel, bits);
    QuantizedProduct product = {.weight = {.codes = codes,
                                           .bits = bits,
                                           .rows = rows,
                                           .columns = columns,
                                           .scales = scales,
                                           .steps = steps},
                                .compute = how.sums,
                                .dtype = dtype,
                                .bias = bias,
                                .y = y};
    const int64_t padded = padded_columns(&product.weight), numbers = taken * padded;
    const int64_t rounded_bytes = numbers * (bits == BYTE_BITS ? 1 : PLANE_BYTES / PLANE_GROUP);
    const int64_t scale_count = numbers / (bits == BYTE_BITS ? BYTE_GROUP : PLANE_TILE);
    char *memory = aligned_alloc(
        64, (size_t)(rounded_bytes + (columns + numbers + scale_count) * 4 + 64) / 64 * 64);
    if (!memory)
        return NO_MEMORY;
    float *wide_x = (float *)(void *)(memory + rounded_bytes), *wide_steps = wide_x + numbers;
    product.inputs =
        (RoundedInputs){.count = (int)taken, .numbers = memory, .scales = wide_steps + columns};
    memset(wide_x, 0, sizeof(float) * (size_t)numbers);
    const double of_steps = widen_steps(steps, columns, 1, wide_steps);
    for (int m = 0; m < taken; m++)
        product.powers[m] =
            of_steps * scale_inputs(x, dtype, m, columns, wide_steps, wide_x + m * padded);
    how.round(wide_x, padded, &product.inputs);
    each_chunk((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, 1, threads, multiply_blocks, &product);
    free(memory);
    return OK;
}

/* A dense copy for each_chunk. */
typedef struct {
    QuantizedMatrix weight;
    const float *steps;
    BlockElements write;
    void *dense;
    int dtype; /* of dense */
} QuantizedCopy;

static void copy_blocks(void *context, int64_t first, int64_t last) {
    const QuantizedCopy *copy = context;
    for (int64_t block = first; block < last; block++)
        copy->write(&copy->weight, copy->steps, block, copy->dense, copy->dtype);
}

/* Writes the dense matrix (rows, columns) of a dtype: every level times its scale and step, rounded
 * once. */
EXPORT int neuronal_quantized_unpack(int kernel, int dtype, const uint8_t *codes, int bits,
                                     const uint16_t *scales, const uint16_t *steps, void *dense,
                                     int64_t rows, int64_t columns, int threads) {
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES || bits < 2 || bits > BYTE_BITS)
        return NO_SUCH_KERNEL;
    float *wide_steps = malloc(sizeof(float) * (size_t)columns + 1);
    if (!wide_steps)
        return NO_MEMORY;
    widen_steps(steps, columns, 0, wide_steps);
    QuantizedCopy copy = {.weight = {.codes = codes,
                                     .bits = bits,
                                     .rows = rows,
                                     .columns = columns,
                                     .scales = scales,
                                     .steps = steps},
                          .steps = wide_steps,
                          .write = quantized_kernel(kernel, bits).elements,
                          .dense = dense,
                          .dtype = dtype};
    each_chunk((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, 1, threads, copy_blocks, &copy);
    free(wide_steps);
    return OK;
}
