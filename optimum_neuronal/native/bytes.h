/* Kernels for codes of 8 bits, which are their levels, row by row; and those in plain C.
 *
 * Inputs are whole numbers of 8 bits, 128 columns with a scale. The exact sums of these groups times their scales are added in
 * eight lanes, group i to lane i % 8. */

enum { BYTE_GROUP = 128, BYTE_LANES = 8, LARGEST_BYTE = 127 };

/* Columns that inputs are filled up to: whole groups in all lanes. A job's `whole_x` is [row of x][these]; its `x_scales`
 * [row of x][group]. */
INLINE int64_t padded_bytes(int64_t columns)
{
    return (columns + BYTE_LANES * BYTE_GROUP - 1) / (BYTE_LANES * BYTE_GROUP) * (BYTE_LANES * BYTE_GROUP);
}

INLINE const float *byte_scales(const QuantizedJob *job, int m)
{
    return job->x_scales + m * (padded_bytes(job->columns) / BYTE_GROUP);
}

INLINE const int8_t *byte_inputs(const QuantizedJob *job, int m)
{
    return job->whole_x + m * padded_bytes(job->columns);
}

/* The codes of 64 columns, in a buffer where fewer are left. */
INLINE const int8_t *whole_codes(const int8_t *codes, const int8_t *stop, int8_t *buffer)
{
    return stop - codes < 64 ? copy_last(codes, stop, 64, buffer) : codes;
}

INLINE float sum_lanes(const float *l)
{
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

/* Rounds a group of inputs, and returns its scale. */
INLINE float round_group(const float *x, int8_t *whole)
{
    const float largest = from_bits(largest_bits(x, BYTE_GROUP));
    const int counts = largest >= 0x1p-60f; /* as in fill_tile */
    const float inverse = counts ? LARGEST_BYTE / largest : 0;
    for (int i = 0; i < BYTE_GROUP; i++)
        whole[i] = (int8_t)(int)(x[i] * inverse + 0x1.8p23f - 0x1.8p23f);
    return counts ? largest / LARGEST_BYTE : 0;
}

/* Defines a RoundInputs. */
#define ROUND_BYTES(TARGET, NAME)                                                                        \
    TARGET static void NAME(const float *x, int64_t apart, int taken, void *rounded, float *x_scales)    \
    {                                                                                                    \
        for (int64_t group = 0; group < taken * apart / BYTE_GROUP; group++)                             \
            x_scales[group] = round_group(x + group * BYTE_GROUP, (int8_t *)rounded + group * BYTE_GROUP); \
    }

/* Writes the elements of a row. */
INLINE void write_row(const QuantizedJob *job, int64_t row, float scale, const float *steps, void *dense, const int dtype)
{
    const int8_t *codes = (const int8_t *)job->codes + row * job->columns;
    for (int64_t i = 0; i < job->columns; i++)
        store_element(dense, row * job->columns + i, (float)codes[i] * (scale * steps[i]), dtype);
}

/* Defines a BlockElements. */
#define BYTE_ELEMENTS(TARGET, NAME)                                                                                     \
    TARGET static void NAME(const QuantizedJob *job, int64_t block, const uint16_t *scales, const float *steps,         \
                            void *dense, int dtype)                                                                     \
    {                                                                                                                   \
        for (int64_t row = block * BLOCK_ROWS; row < block * BLOCK_ROWS + rows_of_block(job, block); row++)             \
            if (dtype == BF16)                                                                                          \
                write_row(job, row, from_bf16(scales[row]), steps, dense, BF16);                                        \
            else if (dtype == FP16)                                                                                     \
                write_row(job, row, from_bf16(scales[row]), steps, dense, FP16);                                        \
            else                                                                                                        \
                write_row(job, row, from_bf16(scales[row]), steps, dense, FP32);                                        \
    }

/* Defines a BlockSums from an inlined NAME_row(job, codes, m, sums, M), which multiplies a row with M rows of x from row m on,
 * and writes sums 64 apart. */
#define BYTE_SUMS(TARGET, NAME)                                                                  \
    TARGET static void NAME(const QuantizedJob *job, int64_t block, float *sums)                 \
    {                                                                                            \
        for (int64_t i = 0; i < rows_of_block(job, block); i++) {                                \
            const int8_t *codes = (const int8_t *)job->codes + (block * BLOCK_ROWS + i) * job->columns; \
            int m = 0;                                                                           \
            for (; m + 4 <= job->taken; m += 4)                                                  \
                NAME##_row(job, codes, m, sums + BLOCK_ROWS * m + i, 4);                         \
            for (; m + 2 <= job->taken; m += 2)                                                  \
                NAME##_row(job, codes, m, sums + BLOCK_ROWS * m + i, 2);                         \
            if (m < job->taken)                                                                  \
                NAME##_row(job, codes, m, sums + BLOCK_ROWS * m + i, 1);                         \
        }                                                                                        \
    }

INLINE void portable_bytes_row(const QuantizedJob *job, const int8_t *codes, int m, float *sums, const int M)
{
    for (int r = 0; r < M; r++) {
        const int8_t *x = byte_inputs(job, m + r);
        float lanes[BYTE_LANES] = {0};
        for (int64_t first = 0; first < job->columns; first += BYTE_GROUP) {
            const int64_t last = first + BYTE_GROUP < job->columns ? first + BYTE_GROUP : job->columns, group = first / BYTE_GROUP;
            int32_t sum = 0;
            for (int64_t i = first; i < last; i++)
                sum += codes[i] * x[i];
            lanes[group % BYTE_LANES] += byte_scales(job, m + r)[group] * (float)sum;
        }
        sums[BLOCK_ROWS * r] = sum_lanes(lanes);
    }
}
BYTE_SUMS(, portable_bytes)
ROUND_BYTES(, portable_round_bytes)
BYTE_ELEMENTS(, portable_byte_elements)
