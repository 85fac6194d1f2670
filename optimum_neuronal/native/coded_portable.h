/* Kernels for codes of few bits in plain C: 64 columns' levels are spread into an array. */

INLINE const uint8_t *portable_spread_levels(const Job *job, uint64_t mask, const uint8_t *codes, int8_t *dense)
{
    const int bits = job->value_bits, most = (1 << bits) - 1;
    int64_t at = 0;
    memset(dense, 0, 64);
    for (; mask; mask &= mask - 1, at += bits) {
        const int shift = at & 7;
        int code = codes[at >> 3] >> shift;
        if (shift + bits > 8)
            code |= codes[(at >> 3) + 1] << (8 - shift);
        dense[__builtin_ctzll(mask)] = bits == 8 ? (int8_t)code : job->table[code & most];
    }
    return codes + ((at + 7) >> 3);
}

static void portable_spread(const Job *job, uint64_t mask, const uint8_t *codes, int8_t *dense)
{
    portable_spread_levels(job, mask, codes, dense);
}

INLINE void portable_floats_step(const Job *job, int64_t row, int64_t apart, float *sums, const int R, const int M,
                                 const int careful)
{
    float totals[MOST_ROWS][16] = {{0}}, parts[MOST_ROWS][16];
    int8_t dense[64];
    const uint8_t *bits = job->bits + row * job->stride, *codes = (const uint8_t *)job->values + job->offsets[row];
    const float *x = job->x;
    (void)R, (void)apart, (void)careful;
    for (int64_t group = 0, byte = 0; group < job->groups; group++) {
        const float scale = group_scale(job, row, group);
        memset(parts, 0, sizeof(parts));
        for (int word = 0; word < GROUP / 64 && byte < job->stride; word++, byte += 8, x += 64 * M) {
            codes = portable_spread_levels(job, load_word(bits + byte), codes, dense);
            for (int m = 0; m < M; m++)
                for (int block = 0; block < 64; block += 16)
                    for (int i = 0; i < 16; i++)
                        parts[m][i] += dense[block + i] * x[64 * m + block + i];
        }
        for (int m = 0; m < M; m++)
            for (int i = 0; i < 16; i++)
                totals[m][i] += scale * parts[m][i];
    }
    for (int m = 0; m < M; m++) {
        sums[m] = 0;
        for (int i = 0; i < 16; i++)
            sums[m] += totals[m][i];
    }
}

INLINE void portable_bytes_step(const Job *job, int64_t row, int64_t apart, float *sums, const int R, const int M,
                                const int careful)
{
    int8_t dense[64];
    const uint8_t *bits = job->bits + row * job->stride, *codes = (const uint8_t *)job->values + job->offsets[row];
    const int8_t *x = job->x;
    (void)R, (void)apart, (void)careful;
    float lanes[MOST_ROWS][8] = {{0}};
    for (int64_t group = 0, byte = 0; group < job->groups; group++) {
        int32_t parts[MOST_ROWS] = {0};
        for (int word = 0; word < GROUP / 64 && byte < job->stride; word++, byte += 8, x += 64 * M) {
            codes = portable_spread_levels(job, load_word(bits + byte), codes, dense);
            for (int m = 0; m < M; m++)
                for (int i = 0; i < 64; i++)
                    parts[m] += dense[i] * x[64 * m + i];
        }
        for (int m = 0; m < M; m++)
            add_scaled(lanes[m], group, parts[m], group_scale(job, row, group), scales_of_x(job, m)[group]);
    }
    for (int m = 0; m < M; m++)
        sums[m] = sum_lanes(lanes[m]);
}

FUNCTIONS(, portable_floats, 1, 1, 1, 1)
FUNCTIONS(, portable_bytes, 1, 1, 1, 1)
