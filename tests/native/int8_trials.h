/* Random dense matrices of 8-bit levels, whose buffers end exactly where they must, and kernels tried on them. */

static void try_int8_product(int kernel, int64_t taken, int bytes, const float *x, const int8_t *levels,
                             const uint16_t *scales, const float *dense, int64_t rows, int64_t columns)
{
    float *y = exactly(taken * rows * 4), *portable = exactly(taken * rows * 4);
    neuronal_int8_linear(kernel, FP32, bytes, x, taken, levels, scales, NULL, y, rows, columns, 1 + (int)(draw() % 3));
    neuronal_int8_linear(0, FP32, bytes, x, taken, levels, scales, NULL, portable, rows, columns, 1);
    for (int64_t m = 0; m < taken; m++)
        for (int64_t row = 0; row < rows; row++) {
            double sum = 0, size_of = 1, weights = 0;
            for (int64_t column = 0; column < columns; column++) {
                const double weight = dense[row * columns + column], term = weight * x[m * columns + column];
                weights += fabs(weight), sum += term, size_of += fabs(term);
            }
            /* with bytes off by half a step of the largest x, 2 */
            if (!(fabs(y[m * rows + row] - sum) <= 1e-5 * size_of + (bytes ? weights * 2.1 / 254 : 0)))
                fail(bytes ? "int8 bytes" : "int8 floats", kernel, FP32, rows, columns, taken);
        }
    if (bytes && memcmp(portable, y, (size_t)(taken * rows * 4)))
        fail("other bits than of the portable int8 kernel", kernel, FP32, rows, columns, taken);
    free(y), free(portable);
}

static void try_int8(int kernel, int64_t rows, int64_t columns, int64_t taken)
{
    const int64_t groups = (columns + 127) / 128;
    int8_t *levels = exactly(rows * columns);
    uint16_t *scales = exactly(rows * groups * 2);
    float *dense = exactly(rows * columns * 4), *again = exactly(rows * columns * 4), *x = exactly(taken * columns * 4);
    for (int64_t i = 0; i < rows * groups; i++)
        scales[i] = to_bf16((float)(1 + draw() % 8) / 8);
    for (int64_t i = 0; i < rows * columns; i++) {
        levels[i] = (int8_t)((int)(draw() % 255) - 127);
        dense[i] = (float)levels[i] * from_bf16(scales[i / columns * groups + i % columns / 128]);
    }
    for (int64_t i = 0; i < taken * columns; i++)
        x[i] = number();
    neuronal_int8_unpack(FP32, levels, scales, again, rows, columns, 1 + (int)(draw() % 3));
    if (memcmp(again, dense, (size_t)(rows * columns * 4)))
        fail("int8 unpack", kernel, FP32, rows, columns, 0);
    try_int8_product(kernel, taken, 0, x, levels, scales, dense, rows, columns);
    try_int8_product(kernel, taken, 1, x, levels, scales, dense, rows, columns);
    free(levels), free(scales), free(dense), free(again), free(x);
}

/* So many random matrices. */
static void try_int8_kernels(int trials, int kernel)
{
    for (int trial = 0; trial < trials; trial++)
        try_int8(kernel, draw() % 40, trial % 4 ? draw() % 400 : 64 * (draw() % 40), 1 + draw() % MOST_ROWS);
}
