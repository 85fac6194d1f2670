/* Random weights whose buffers end exactly where they must, and kernels of codes tried on them. */

static uint64_t state = 88172645463325252ULL;

static uint32_t draw(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}

/* A buffer of exactly so many bytes: behind its end lies what a sanitizer guards. */
static void *exactly(int64_t bytes)
{
    return malloc((size_t)bytes); /* of none too: no byte of it may be touched */
}

static void fail(const char *what, int kernel, int dtype, int64_t rows, int64_t columns, int64_t taken)
{
    printf("%s: kernel %d, dtype %d, %lld x %lld, %lld rows of x\n", what, kernel, dtype, (long long)rows,
           (long long)columns, (long long)taken);
    exit(1);
}

static float number(void)
{
    return (float)((int)(draw() % 129) - 64) / 32; /* exact in all dtypes, never a rounding error in a short sum */
}

static const int VALUE_BITS[] = {2, 3, 4, 8};

/* What is given of a weight with codes, all in buffers of exactly their sizes. */
typedef struct {
    int value_bits;
    int64_t rows, columns, size;
    uint8_t *bits, *codes;
    int64_t *offsets;
    void *scales;
    int scale_bytes; /* 2 or 1 */
    int8_t *table;
    float *dense;
} Coded;

static Coded make_coded(int value_bits, int64_t rows, int64_t columns, unsigned density)
{
    const int64_t stride = (columns + 63) / 64 * 8, groups = (columns + 127) / 128;
    const int scale_bytes = 1 + (int)(draw() % 2);
    Coded c = {value_bits, rows, columns, 0, exactly(rows * stride), NULL, exactly((rows + 1) * 8),
               exactly(rows * groups * scale_bytes), scale_bytes, exactly(value_bits < 8 ? 1 << value_bits : 0),
               exactly(rows * columns * 4)};
    float *scales = calloc((size_t)(rows * groups + 1), 4);
    uint8_t *codes = calloc((size_t)(rows * stride * 8 + 1), 1);
    memset(c.bits, 0, (size_t)(rows * stride));
    memset(c.dense, 0, (size_t)(rows * columns * 4));
    for (int i = 0; i < 1 << value_bits && value_bits < 8; i++)
        c.table[i] = (int8_t)(254 * i / ((1 << value_bits) - 1) - 127);
    for (int64_t i = 0; i < rows * groups; i++) {
        const int eighths = 1 + (int)(draw() % 8);
        if (scale_bytes == 1) { /* eighths of 2^-5: an exponent of 107 + 15, and 16 steps between two powers of 2 */
            ((uint8_t *)c.scales)[i] = (uint8_t)(15 * 16 + 2 * (eighths - 1));
            scales[i] = (float)(7 + eighths) / 8 / 32;
        } else {
            scales[i] = (float)eighths / 8;
            ((uint16_t *)c.scales)[i] = to_bf16(scales[i]);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        const unsigned here = row % 7 == 3 ? 0 : row % 7 == 5 ? 100 : density;
        c.offsets[row] = c.size;
        for (int64_t column = 0, at = 0; column < columns; column++) {
            if (draw() % 100 < here) {
                unsigned code = draw() % (1u << value_bits);
                code = value_bits == 8 && code == 128 ? 127 : code;
                const int level = value_bits == 8 ? (int8_t)code : c.table[code];
                c.bits[row * stride + column / 8] |= (uint8_t)(1 << column % 8);
                c.dense[row * columns + column] = (float)level * scales[row * groups + column / 128];
                for (int bit = 0; bit < value_bits; bit++, at++)
                    codes[c.size + at / 8] |= (uint8_t)((code >> bit & 1) << at % 8);
            }
            if (column % 64 == 63 || column + 1 == columns)
                c.size += (at + 7) / 8, at = 0;
        }
    }
    c.offsets[rows] = c.size;
    c.codes = exactly(c.size);
    memcpy(c.codes, codes, (size_t)c.size);
    free(codes), free(scales);
    return c;
}

static void try_product(int kernel, Coded c, int64_t taken, int bytes, const float *x)
{
    float *y = exactly(taken * c.rows * 4), *portable = exactly(taken * c.rows * 4);
    neuronal_coded_linear(kernel, FP32, bytes, x, taken, c.bits, c.codes, c.size, c.offsets, c.scales,
                          c.scale_bytes, c.table, c.value_bits, NULL, y, c.rows, c.columns, 1 + (int)(draw() % 3));
    neuronal_coded_linear(0, FP32, bytes, x, taken, c.bits, c.codes, c.size, c.offsets, c.scales,
                          c.scale_bytes, c.table, c.value_bits, NULL, portable, c.rows, c.columns, 1);
    for (int64_t m = 0; m < taken; m++)
        for (int64_t row = 0; row < c.rows; row++) {
            double sum = 0, size_of = 1, weights = 0;
            for (int64_t column = 0; column < c.columns; column++) {
                weights += fabs(c.dense[row * c.columns + column]);
                const double term = (double)c.dense[row * c.columns + column] * x[m * c.columns + column];
                sum += term;
                size_of += fabs(term);
            }
            /* with bytes off by half a step of the largest x, 2 */
            if (!(fabs(y[m * c.rows + row] - sum) <= 1e-5 * size_of + (bytes ? weights * 2.1 / 254 : 0)))
                fail(bytes ? "coded bytes" : "coded floats", kernel, c.value_bits, c.rows, c.columns, taken);
        }
    if (bytes && memcmp(portable, y, (size_t)(taken * c.rows * 4)))
        fail("other bits than of the portable kernel", kernel, c.value_bits, c.rows, c.columns, taken);
    free(y), free(portable);
}

static void try_codes(int kernel, int value_bits, int64_t rows, int64_t columns, int64_t taken, unsigned density)
{
    Coded c = make_coded(value_bits, rows, columns, density);
    float *x = exactly(taken * columns * 4), *again = exactly(rows * columns * 4);
    for (int64_t i = 0; i < taken * columns; i++)
        x[i] = number();
    neuronal_coded_unpack(kernel, FP32, c.bits, c.codes, c.size, c.offsets, c.scales, c.scale_bytes, c.table,
                          value_bits, again, rows, columns, 1 + (int)(draw() % 3));
    if (memcmp(again, c.dense, (size_t)(rows * columns * 4)))
        fail("coded unpack", kernel, value_bits, rows, columns, 0);
    try_product(kernel, c, taken, 0, x);
    try_product(kernel, c, taken, 1, x);
    free(c.bits), free(c.codes), free(c.offsets), free(c.scales), free(c.table), free(c.dense);
    free(x), free(again);
}

/* So many random weights of every number of bits. */
static void try_kernels_of_codes(int trials, int kernel)
{
    for (int which = 0; which < 4; which++)
        for (int trial = 0; trial < trials; trial++) {
            const int64_t columns = trial % 4 ? draw() % 400 : 64 * (draw() % 40), rows = draw() % 40;
            try_codes(kernel, VALUE_BITS[which], rows, columns, 1 + draw() % MOST_ROWS, draw() % 101);
        }
}
