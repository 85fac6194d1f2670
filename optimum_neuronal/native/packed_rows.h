/* Products and dense copies of sparse weights that are kept as a bitmask and the kept values, row by row. */

typedef struct {
    Kernel of[DTYPES];
    UnpackRow unpack2, unpack4; /* of values with 2 and with 4 bytes */
} Set;

static const Set SETS[KERNELS] = {
    [ON_ANY] = {{{64, 0, 0, ROWS_OF(portable_bf16)}, {64, 0, 0, ROWS_OF(portable_fp16)}, {64, 0, 0, ROWS_OF(portable_fp32)}},
                  portable_unpack2, portable_unpack4},
#ifdef HAS_NEON
    [ON_NEON] = {{{8, 1, 0, ROWS_OF(neon_bf16)}, {8, 0, 0, ROWS_OF(neon_fp16)}, {8, 0, 0, ROWS_OF(neon_fp32)}},
              neon_unpack2, neon_unpack4},
#endif
#ifdef HAS_X86
    [ON_AVX2] = {{{16, 1, 0, ROWS_OF(avx2_bf16)}, {8, 0, 0, ROWS_OF(avx2_fp16)}, {8, 0, 0, ROWS_OF(avx2_fp32)}},
               avx2_unpack2, avx2_unpack4},
    [ON_AVX512] = {{{16, 0, 0, ROWS_OF(floats_bf16)}, {16, 0, 0, ROWS_OF(floats_fp16)}, {16, 0, 0, ROWS_OF(floats_fp32)}},
                 avx2_unpack2, avx512_unpack4},
    [ON_AVX512_VBMI2] = {{{32, 1, 0, ROWS_OF(halves_bf16)}, {32, 0, 0, ROWS_OF(halves_fp16)}, {16, 0, 0, ROWS_OF(floats_fp32)}},
                      vbmi2_unpack2, avx512_unpack4},
    [ON_AVX512_BF16] = {{{32, 0, 1, {dot_bf16_1, dot_bf16_2, dot_bf16_4, dot_bf16_6, dot_bf16_8}}, {32, 0, 0, ROWS_OF(halves_fp16)}, {16, 0, 0, ROWS_OF(floats_fp32)}},
                     vbmi2_unpack2, avx512_unpack4},
#endif
};

/* y = x W^T + bias for `taken` rows of x, at most MOST_ROWS; x (taken, columns), y (taken, rows), all of one dtype. */
EXPORT int neuronal_linear(int kernel, int dtype, const void *x, int64_t taken, const uint8_t *bits, const void *values,
                           int64_t kept, const int64_t *offsets, const void *bias, void *y, int64_t rows,
                           int64_t columns, int threads)
{
    if (!neuronal_supports(kernel) || dtype < 0 || dtype >= DTYPES)
        return NO_SUCH_KERNEL;
    if (taken > MOST_ROWS)
        return TOO_MANY_ROWS;
    if (taken == 0 || rows == 0)
        return OK;
    const Kernel *how = &SETS[kernel].of[dtype];
    if (taken > 6 && !how->half) { /* as floats, x would leave the first cache: twice a few rows are faster */
        const int64_t size = dtype == FP32 ? 4 : 2;
        int result = neuronal_linear(kernel, dtype, x, 4, bits, values, kept, offsets, bias, y, rows, columns, threads);
        x = (const char *)x + 4 * columns * size;
        y = (char *)y + 4 * rows * size;
        return result ? result : neuronal_linear(kernel, dtype, x, taken - 4, bits, values, kept, offsets, bias, y, rows,
                                                 columns, threads);
    }
    int which = 0;
    while (COUNT[which] < taken)
        which++;
    const int count = COUNT[which];
    const int64_t stride = (columns + 63) / 64 * 8;
    void *arranged = NULL;
    if (!(how->half && taken == 1 && columns % 64 == 0)) {
        const size_t bytes = (size_t)(stride * 8 * count) * (how->half ? 2 : 4);
        arranged = aligned_alloc(64, bytes + 64 - bytes % 64);
        if (!arranged)
            return NO_MEMORY;
        memset(arranged, 0, bytes);
        arrange(x, dtype, taken, columns, count, how, arranged);
    }
    const Job job = {.bits = bits, .values = values, .offsets = offsets, .kept = kept, .stride = stride, .x = arranged ? arranged : x};
    Product product = {.job = job, .compute = how->rows[which], .count = count, .dtype = dtype, .taken = taken, .rows = rows, .bias = bias, .y = y};
    each_chunk(rows, chunk_rows(rows, threads), threads, multiply, &product);
    free(arranged);
    return OK;
}

/* A dense copy for each_chunk; a flat one has rows of PIECE elements, the last perhaps fewer. */
typedef struct {
    UnpackRow unpack;
    const uint8_t *bits;
    int64_t stride, columns, numel; /* bytes, elements, elements */
    int size;
    const char *values, *end;
    const int64_t *offsets;
    char *dense;
} Copy;

static void copy(void *context, int64_t first, int64_t last)
{
    const Copy *c = context;
    for (int64_t row = first; row < last; row++) {
        const int64_t from = row * c->columns, columns = c->numel - from < c->columns ? c->numel - from : c->columns;
        c->unpack(c->bits + row * c->stride, columns, c->values + c->offsets[row] * c->size, c->end,
                  c->dense + from * c->size);
    }
}

/* Writes the dense weight (rows, columns), whose elements have `size` bytes: 2 or 4. */
EXPORT int neuronal_unpack(int kernel, int size, const uint8_t *bits, const void *values, int64_t kept,
                           const int64_t *offsets, void *dense, int64_t rows, int64_t columns, int threads)
{
    if (!neuronal_supports(kernel) || (size != 2 && size != 4))
        return NO_SUCH_KERNEL;
    Copy c = {size == 2 ? SETS[kernel].unpack2 : SETS[kernel].unpack4, bits, (columns + 63) / 64 * 8, columns,
              rows * columns, size, values, (const char *)values + kept * size, offsets, dense};
    each_chunk(rows, chunk_rows(rows, threads), threads, copy, &c);
    return OK;
}

/* How many bits are set in so many bytes. */
EXPORT int64_t neuronal_count_bits(const uint8_t *bits, int64_t bytes)
{
    int64_t count = 0;
    for (int64_t byte = 0; byte < bytes; byte += 8)
        count += __builtin_popcountll(load_columns(bits + byte, 8 * (bytes - byte)));
    return count;
}

/* Elements of a weight that is one long row, which are unpacked together. */
enum { PIECE = 4096 };

/* Writes `numel` elements of `size` bytes, whose bits and values lie one after the other without any alignment. Returns
 * DISAGREE, having written nothing, if not exactly `kept` bits are set. */
EXPORT int neuronal_unpack_flat(int kernel, int size, const uint8_t *bits, const void *values, int64_t kept, void *dense,
                                int64_t numel, int threads)
{
    if (!neuronal_supports(kernel) || (size != 2 && size != 4))
        return NO_SUCH_KERNEL;
    const int64_t pieces = (numel + PIECE - 1) / PIECE;
    int64_t *offsets = malloc((size_t)(pieces + 1) * sizeof(int64_t)), next = 0;
    if (!offsets)
        return NO_MEMORY;
    for (int64_t from = 0; from < numel; from += 64) {
        if (from % PIECE == 0)
            offsets[from / PIECE] = next;
        next += __builtin_popcountll(load_columns(bits + from / 8, numel - from));
    }
    if (next == kept) {
        Copy c = {size == 2 ? SETS[kernel].unpack2 : SETS[kernel].unpack4, bits, PIECE / 8, PIECE, numel, size, values,
                  (const char *)values + kept * size, offsets, dense};
        each_chunk(pieces, 16, threads, copy, &c);
    }
    free(offsets);
    return next == kept ? OK : DISAGREE;
}
