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

/* Divides the rows of x that hold numbers of 2^112 and more by 2^16, once they are arranged as floats. Kernels for codes
 * multiply x with levels of up to 127, and sum a group, before the scale makes these small: that would be infinite. */
static void lower(float *x, int64_t taken, int64_t columns, int count, const Kernel *kernel, float *factors)
{
    const int block = kernel->block;
    for (int m = 0; m < taken; m++) {
        float largest = 0;
        for (int64_t column = 0; column < columns; column += block)
            for (int i = 0; i < block; i++) {
                const float size = __builtin_fabsf(x[column * count + m * block + i]);
                largest = size > largest ? size : largest;
            }
        factors[m] = largest >= 0x1p112f ? 0x1p16f : 1;
        for (int64_t column = 0; column < columns && factors[m] != 1; column += block)
            for (int i = 0; i < block; i++)
                x[column * count + m * block + i] *= 0x1p-16f;
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
    const float *factors; /* of the sums of each row of x, see `lower`; NULL if there are none */
} Product;

static void multiply(void *context, int64_t first, int64_t last)
{
    const Product *product = context;
    float sums[CHUNK_ROWS * MOST_ROWS];
    product->compute(&product->job, first, last, sums);
    for (int64_t row = first; row < last; row++)
        for (int m = 0; m < product->taken; m++) {
            float sum = sums[(row - first) * product->count + m];
            if (product->factors)
                sum *= product->factors[m];
            if (product->bias)
                sum += load_number(product->bias, row, product->dtype);
            store_number(product->y, m * product->rows + row, product->dtype, sum);
        }
}
