/* Computes random weights whose buffers end exactly where they must: under an address sanitizer, every
 * read or write past an end stops the program. Prints the kernels that ran. */

#include "kernels.c"

#include <math.h>
#include <stdio.h>

static uint64_t state = 88172645463325252ULL;

static uint32_t draw(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}

/* A buffer of exactly so many bytes: past its end lies what a sanitizer guards. */
static void *exactly(int64_t bytes) { return malloc((size_t)bytes); /* of none too: no byte of it may be touched */ }

static void fail(const char *what, int kernel, int dtype, int64_t rows, int64_t columns, int64_t taken) {
    printf("%s: kernel %d, dtype %d, %lld x %lld, %lld rows of x\n", what, kernel, dtype, (long long)rows,
           (long long)columns, (long long)taken);
    exit(1);
}

static float number(void) {
    return (float)((int)(draw() % 129) - 64) / 32; /* exact in all dtypes, never a rounding error in a short sum */
}

static void try_one(int kernel, int dtype, int64_t rows, int64_t columns, int64_t taken, unsigned density) {
    const int size = size_of(dtype);
    const int64_t stride = (columns + 63) / 64 * 8;
    uint8_t *bits = exactly(rows * stride);
    char *dense = exactly(rows * columns * size), *again = exactly(rows * columns * size);
    char *every = exactly(rows * columns * size);
    int64_t *offsets = exactly((rows + 1) * 8), kept = 0;
    memset(bits, 0, (size_t)(rows * stride));
    memset(dense, 0, (size_t)(rows * columns * size));
    for (int64_t row = 0; row < rows; row++) {
        /* empty and full rows too */
        const unsigned here = row % 7 == 3 ? 0 : row % 7 == 5 ? 100 : density;
        offsets[row] = kept;
        for (int64_t column = 0; column < columns; column++)
            if (draw() % 100 < here) {
                const int64_t at = row * columns + column;
                bits[row * stride + column / 8] |= (uint8_t)(1 << column % 8);
                store_number(dense, at, dtype, number());
                memcpy(every + size * kept++, dense + size * at, (size_t)size);
            }
    }
    offsets[rows] = kept;
    char *values = exactly(kept * size);
    memcpy(values, every, (size_t)(kept * size));

    for (int threads = 1; threads <= 3; threads += 2) {
        memset(again, 0x5a, (size_t)(rows * columns * size));
        neuronal_unpack(kernel, size, bits, values, kept, offsets, again, rows, columns, threads);
        if (memcmp(again, dense, (size_t)(rows * columns * size)))
            fail("unpack", kernel, dtype, rows, columns, 0);
    }

    char *x = exactly(taken * columns * size), *y = exactly(taken * rows * size), *bias = exactly(rows * size);
    for (int64_t i = 0; i < taken * columns; i++)
        store_number(x, i, dtype, number());
    for (int64_t i = 0; i < rows; i++)
        store_number(bias, i, dtype, number());
    neuronal_multiply(kernel, dtype, x, taken, bits, values, kept, offsets, bias, y, rows, columns,
                      1 + (int)(draw() % 3));
    for (int64_t m = 0; m < taken; m++)
        for (int64_t row = 0; row < rows; row++) {
            double sum = load_number(bias, row, dtype), size_of = 1;
            for (int64_t column = 0; column < columns; column++) {
                double term = (double)load_number(dense, row * columns + column, dtype) *
                              load_number(x, m * columns + column, dtype);
                sum += term;
                size_of += fabs(term);
            }
            const double rounding = dtype == BF16 ? 1.0 / 128 : dtype == FP16 ? 1.0 / 1024 : 1.0 / 1000000;
            if (!(fabs(load_number(y, m * rows + row, dtype) - sum) <= rounding * (fabs(sum) + 1e-6 * size_of)))
                fail("linear", kernel, dtype, rows, columns, taken);
        }
    free(bits), free(every), free(dense), free(again), free(offsets), free(values), free(x), free(y), free(bias);
}

int main(int count, char **arguments) {
    const int trials = count > 1 ? atoi(arguments[1]) : 100;
    for (int kernel = 0; kernel < KERNELS; kernel++) {
        if (!neuronal_supports(kernel))
            continue;
        for (int dtype = 0; dtype < DTYPES; dtype++)
            for (int trial = 0; trial < trials; trial++) {
                const int64_t columns = trial % 4 ? draw() % 200 : 64 * (draw() % 5), rows = draw() % 40;
                try_one(kernel, dtype, rows, columns, 1 + draw() % (2 * MOST_ROWS), draw() % 101);
            }
        printf("kernel %d\n", kernel);
    }
    return 0;
}
