/* Random quantized weights, whose buffers end exactly where they must, and trials of kernels. */
#pragma once

#include <math.h>
#include "trials.h"

typedef struct {
    int bits;
    int64_t rows, columns;
    uint8_t *codes;
    uint16_t *scales, *steps; /* no steps in half of all weights */
    float *dense;
} Quantized;

/* Writes a code into planes. */
static void put_code(Quantized q, int64_t row, int64_t column, int code) {
    const int64_t group = row / 64 * ((q.columns + 3) / 4) + column / 4;
    for (int bit = 0; bit < q.bits; bit++)
        q.codes[(group * q.bits + bit) * 32 + row % 32] |=
            (uint8_t)((code >> bit & 1) << (column % 4 + row % 64 / 32 * 4));
}

static Quantized make_quantized(int64_t rows, int64_t columns, int bits) {
    const int64_t bytes = bits == 8 ? rows * columns : (rows + 63) / 64 * ((columns + 3) / 4) * bits * 32;
    Quantized q = {.bits = bits,
                   .rows = rows,
                   .columns = columns,
                   .codes = exactly(bytes),
                   .scales = exactly(rows * 2),
                   .steps = draw() % 2 ? exactly(columns * 2) : NULL,
                   .dense = exactly(rows * columns * 4)};
    memset(q.codes, 0, (size_t)bytes);
    for (int64_t i = 0; i < rows; i++)
        q.scales[i] = to_bf16((float)(draw() % 8) / 8);
    for (int64_t i = 0; q.steps && i < columns; i++)
        q.steps[i] = to_bf16((float)(1 + draw() % 8) / 4);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < columns; column++) {
            const int code = (int)(draw() % (bits == 8 ? 255 : 1u << bits));
            const int level = bits == 8 ? code - 127 : 2 * code - (1 << bits) + 1;
            if (bits == 8)
                q.codes[row * columns + column] = (uint8_t)(int8_t)level;
            else
                put_code(q, row, column, code);
            q.dense[row * columns + column] =
                (float)level * from_bf16(q.scales[row]) * (q.steps ? from_bf16(q.steps[column]) : 1) + 0.0f;
        }
    return q;
}

static void try_product(int kernel, Quantized q, int64_t taken) {
    float *x = exactly(taken * q.columns * 4), *bias = exactly(q.rows * 4);
    float *y = exactly(taken * q.rows * 4), *portable = exactly(taken * q.rows * 4);
    for (int64_t i = 0; i < taken * q.columns; i++)
        x[i] = number();
    for (int64_t i = 0; i < q.rows; i++)
        bias[i] = number();
    neuronal_quantized_linear(kernel, FP32, x, taken, q.codes, q.bits, q.scales, q.steps, bias, y, q.rows, q.columns,
                              1 + (int)(draw() % 3));
    neuronal_quantized_linear(0, FP32, x, taken, q.codes, q.bits, q.scales, q.steps, bias, portable, q.rows, q.columns,
                              1);
    if (memcmp(portable, y, (size_t)(taken * q.rows * 4)))
        fail("other bits than of the portable kernel", kernel, q.bits, q.rows, q.columns, taken);
    for (int64_t m = 0; m < taken; m++)
        for (int64_t row = 0; row < q.rows; row++) {
            double sum = bias[row], weights = 0;
            for (int64_t column = 0; column < q.columns; column++) {
                weights += fabs(q.dense[row * q.columns + column]) / (q.steps ? from_bf16(q.steps[column]) : 1);
                sum += (double)q.dense[row * q.columns + column] * x[m * q.columns + column];
            }
            /* off by half a step of the largest input, 2, times the largest of steps, 2; or of four
             * of them */
            const double largest = q.steps ? 4 : 2, off = q.bits == 8 ? largest / 254 : 4 * largest / 2 / LARGEST_SUM;
            if (!(fabs(y[m * q.rows + row] - sum) <= 1e-5 + 1.01 * weights * off))
                fail("quantized product", kernel, q.bits, q.rows, q.columns, taken);
        }
    free(x), free(bias), free(y), free(portable);
}

static void try_quantized(int kernel, int64_t rows, int64_t columns, int64_t taken, int bits) {
    Quantized q = make_quantized(rows, columns, bits);
    float *again = exactly(rows * columns * 4);
    neuronal_quantized_unpack(kernel, FP32, q.codes, bits, q.scales, q.steps, again, rows, columns,
                              1 + (int)(draw() % 3));
    if (memcmp(again, q.dense, (size_t)(rows * columns * 4)))
        fail("quantized unpack", kernel, bits, rows, columns, 0);
    try_product(kernel, q, taken);
    free(q.codes), free(q.scales), free(q.steps), free(q.dense), free(again);
}

/* Twice so many random weights, every fourth of whole tiles. */
static void try_quantized_kernels(int trials, int kernel) {
    for (int trial = 0; trial < 2 * trials; trial++)
        try_quantized(kernel, draw() % 140, trial % 4 ? draw() % 300 : 64 * (draw() % 20),
                      1 + draw() % (2 * MOST_ROWS), 2 + trial % 7);
}
