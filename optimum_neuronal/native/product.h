/* One product with a weight, shared by threads: x laid out for a kernel, and what follows the sums. */

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
