/* Kernels in plain C: 64 columns are spread into an array, which compilers multiply in whatever vectors there are. */

INLINE const void *spread(uint64_t mask, const void *p, int dtype, float *dense)
{
    memset(dense, 0, 64 * sizeof(float));
    int64_t used = 0;
    for (; mask; mask &= mask - 1)
        dense[__builtin_ctzll(mask)] = load_number(p, used++, dtype);
    return (const char *)p + used * (dtype == FP32 ? 4 : 2);
}

INLINE void portable_step(const Job *job, int64_t row, float *sums, const int M, const int dtype)
{
    float parts[MOST_ROWS][16] = {{0}}, dense[64];
    const uint8_t *bits = job->bits + row * job->stride;
    const void *p = (const char *)job->values + job->offsets[row] * (dtype == FP32 ? 4 : 2);
    const float *x = job->x;
    for (int64_t byte = 0; byte < job->stride; byte += 8, x += 64 * M) {
        p = spread(load_word(bits + byte), p, dtype, dense);
        for (int m = 0; m < M; m++)
            for (int block = 0; block < 64; block += 16)
                for (int i = 0; i < 16; i++)
                    parts[m][i] += dense[block + i] * x[64 * m + block + i];
    }
    for (int m = 0; m < M; m++) {
        float sum = 0;
        for (int i = 0; i < 16; i++)
            sum += parts[m][i];
        sums[m] = sum;
    }
}

#define PORTABLE_STEP(NAME, DTYPE)                                                                                  \
    INLINE void NAME##_step(const Job *job, int64_t row, int64_t apart, float *sums, const int R, const int M, const int careful)   \
    {                                                                                                               \
        (void)R, (void)apart, (void)careful;                                                                                     \
        portable_step(job, row, sums, M, DTYPE);                                                                    \
    }                                                                                                               \
    FUNCTIONS(, NAME, 1, 1, 1, 1)
PORTABLE_STEP(portable_bf16, BF16)
PORTABLE_STEP(portable_fp16, FP16)
PORTABLE_STEP(portable_fp32, FP32)

#define PORTABLE_UNPACK(TYPE, NAME)                                                                           \
    static void NAME(const uint8_t *bits, int64_t columns, const void *values, const void *end, void *dense)   \
    {                                                                                                         \
        const TYPE *p = values;                                                                               \
        TYPE *out = dense;                                                                                    \
        (void)end;                                                                                            \
        memset(out, 0, (size_t)columns * sizeof(TYPE));                                                       \
        for (int64_t column = 0; column < columns; column += 64)                                              \
            for (uint64_t mask = load_columns(bits + column / 8, columns - column); mask; mask &= mask - 1)   \
                out[column + __builtin_ctzll(mask)] = *p++;                                                   \
    }
PORTABLE_UNPACK(uint16_t, portable_unpack2)
PORTABLE_UNPACK(uint32_t, portable_unpack4)
