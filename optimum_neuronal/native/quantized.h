/* Products with quantized weights, and their dense copies. */
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

static QuantizedKernel quantized_kernel(int kernel, int bits) {
    const int bytes = bits == BYTE_BITS;
    QuantizedKernel found = {portable_fill_tables, portable_planes, portable_plane_elements};
    if (bytes)
        found = (QuantizedKernel){portable_round_bytes, portable_bytes, portable_byte_elements};
#if defined(HAS_X86)
    if (kernel >= ON_AVX2)
        found = bytes ? (QuantizedKernel){avx2_round_bytes, avx2_bytes, avx2_byte_elements}
                      : (QuantizedKernel){avx2_fill_tables, avx2_planes, avx2_plane_elements};
#if defined(HAS_AVX_VNNI)
    if (bytes && kernel >= ON_AVX2 && has_dot_products())
        found.sums = avx_vnni_bytes;
#endif
    if (bytes && kernel >= ON_AVX512 && __builtin_cpu_supports("avx512vnni"))
        found.sums = vnni_bytes;
#elif defined(HAS_NEON)
    if (kernel >= ON_NEON)
        found.sums = !bytes ? neon_planes : has_dot_products() ? neon_dot_bytes : neon_bytes;
#endif
    (void)kernel;
    return found;
}

/* Returns the power of 2 that is at most a positive number, or the nearest one with which its inverse is normal. */
static float power_below(uint32_t bits) {
    const uint32_t least = 1u << 23, most = 253u << 23;
    return from_bits(bits < least ? least : bits > most ? most : bits & 0x7f800000);
}

/* Writes steps as floats, all 1 if there are none. `normalize`: divides them by a power of 2, so that the largest is
 * about 1. Returns that power. */
static float widen_steps(const uint16_t *steps, int64_t columns, int normalize, float *to) {
    for (int64_t i = 0; i < columns; i++)
        to[i] = steps ? from_bf16(steps[i]) : 1;
    const float power = normalize && steps ? power_below(largest_bits(to, columns)) : 1, inverse = 1 / power;
    for (int64_t i = 0; i < columns && power != 1; i++)
        to[i] *= inverse;
    return power;
}

/* Writes a row of x, divided by a power of 2 so that its largest number is about 1, times steps. Returns that power;
 * or NaN, having written zeros, if not all of x is finite. */
static float scale_inputs(const void *x, int dtype, int64_t row, int64_t columns, const float *steps, float *to) {
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

/* A product for each_chunk. A thread rounds inputs for itself: that takes less time than to fetch tables from another
 * one's cache. */
typedef struct {
    QuantizedMatrix weight;
    QuantizedKernel how;
    RoundedInputs inputs;
    double powers[MOST_ROWS]; /* by which results of each row of x are multiplied */
    int dtype;                /* of x, bias and y */
    const void *x, *bias;
    void *y;
    char *memory; /* of all threads, so many bytes each */
    int64_t bytes;
} QuantizedProduct;

/* The places in a thread's memory, behind its product: tables or bytes, then floats. */
enum { OF_PRODUCT = (sizeof(QuantizedProduct) + 63) / 64 * 64, MOST_MEMORY = 1 << 22 };

static int64_t table_bytes(const QuantizedProduct *product) {
    const int64_t numbers = product->inputs.count * padded_columns(&product->weight);
    return product->weight.bits == BYTE_BITS ? numbers : numbers * PLANE_BYTES / PLANE_GROUP;
}

static int64_t bytes_of_thread(const QuantizedProduct *product) {
    const int64_t numbers = product->inputs.count * padded_columns(&product->weight),
                  unit = product->weight.bits == BYTE_BITS ? BYTE_GROUP : PLANE_TILE,
                  floats = numbers + product->weight.columns + numbers / unit;
    return (OF_PRODUCT + table_bytes(product) + 4 * floats + 63) / 64 * 64;
}

static void *round_for_thread(void *context, int thread) {
    const QuantizedProduct *shared = context;
    char *memory = shared->memory + thread * shared->bytes;
    QuantizedProduct *own = (QuantizedProduct *)(void *)memory;
    *own = *shared;
    const int64_t columns = own->weight.columns, padded = padded_columns(&own->weight),
                  numbers = own->inputs.count * padded;
    float *wide_x = (float *)(void *)(memory + OF_PRODUCT + table_bytes(own)), *wide_steps = wide_x + numbers;
    own->inputs.numbers = memory + OF_PRODUCT;
    own->inputs.scales = wide_steps + columns;
    memset(wide_x, 0, sizeof(float) * (size_t)numbers);
    const double of_steps = widen_steps(own->weight.steps, columns, 1, wide_steps);
    for (int m = 0; m < own->inputs.count; m++)
        own->powers[m] = of_steps * scale_inputs(own->x, own->dtype, m, columns, wide_steps, wide_x + m * padded);
    own->how.round(wide_x, padded, &own->inputs);
    return own;
}

static void multiply_blocks(void *context, int64_t first, int64_t last) {
    const QuantizedProduct *product = context;
    const QuantizedMatrix *weight = &product->weight;
    float sums[BLOCK_ROWS * MOST_ROWS];
    for (int64_t block = first; block < last; block++) {
        product->how.sums(weight, &product->inputs, block, sums);
        for (int m = 0; m < product->inputs.count; m++)
            for (int64_t i = 0; i < rows_of_block(weight, block); i++) {
                const int64_t row = block * BLOCK_ROWS + i;
                /* as double, in which neither scale nor power overflows */
                float sum =
                    (float)((double)sums[BLOCK_ROWS * m + i] * from_bf16(weight->scales[row]) * product->powers[m]);
                if (product->bias)
                    sum += load_number(product->bias, row, product->dtype);
                store_number(product->y, m * weight->rows + row, product->dtype, sum);
            }
    }
}

/* y = x W^T + bias for `taken` rows of x, a few at a time. x (taken, columns), bias (rows) or NULL, and y (taken,
 * rows) have one dtype; scales (rows) and steps (columns), or NULL where all are 1, are bfloat16. */
EXPORT int neuronal_quantized_linear(int kernel, int dtype, const void *x, int64_t taken, const uint8_t *codes,
                                     int bits, const uint16_t *scales, const uint16_t *steps, const void *bias,
                                     void *y, int64_t rows, int64_t columns, int threads) {
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES || bits < 2 || bits > BYTE_BITS)
        return NO_SUCH_KERNEL;
    if (taken == 0 || rows == 0)
        return OK;
    const int64_t few = smaller(taken, MOST_ROWS);
    QuantizedProduct product = {
        .weight = {.codes = codes, .bits = bits, .rows = rows, .columns = columns, .scales = scales, .steps = steps},
        .how = quantized_kernel(kernel, bits),
        .inputs = {.count = (int)few},
        .dtype = dtype,
        .x = x,
        .bias = bias,
        .y = y};
    const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    product.bytes = bytes_of_thread(&product);
    const int64_t every = product.bytes * smaller(threads > 1 ? threads : 1, blocks);
    const int alone = every > MOST_MEMORY; /* then one thread rounds for all */
    product.memory = aligned_alloc(64, (size_t)(alone ? product.bytes : every));
    if (!product.memory)
        return NO_MEMORY;
    each_chunk(blocks, 1, threads, alone ? NULL : round_for_thread, multiply_blocks,
               alone ? round_for_thread(&product, 0) : &product);
    free(product.memory);
    x = (const char *)x + few * columns * size_of(dtype);
    y = (char *)y + few * rows * size_of(dtype);
    return neuronal_quantized_linear(kernel, dtype, x, taken - few, codes, bits, scales, steps, bias, y, rows, columns,
                                     threads);
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

/* Writes the dense matrix (rows, columns) of a dtype: every level times its scale and step, rounded once. */
EXPORT int neuronal_quantized_unpack(int kernel, int dtype, const uint8_t *codes, int bits, const uint16_t *scales,
                                     const uint16_t *steps, void *dense, int64_t rows, int64_t columns, int threads) {
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES || bits < 2 || bits > BYTE_BITS)
        return NO_SUCH_KERNEL;
    float *wide_steps = malloc(sizeof(float) * (size_t)columns + 1);
    if (!wide_steps)
        return NO_MEMORY;
    widen_steps(steps, columns, 0, wide_steps);
    QuantizedCopy copy = {
        .weight = {.codes = codes, .bits = bits, .rows = rows, .columns = columns, .scales = scales, .steps = steps},
        .steps = wide_steps,
        .write = quantized_kernel(kernel, bits).elements,
        .dense = dense,
        .dtype = dtype};
    each_chunk((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, 1, threads, NULL, copy_blocks, &copy);
    free(wide_steps);
    return OK;
}
