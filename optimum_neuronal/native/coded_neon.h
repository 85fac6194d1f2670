/* Kernels for codes of few bits with NEON: 16 codes are looked up at a time, and 16 columns spread by a byte shuffle.
 * Sums of products of bytes take one instruction where the processor has dot products, else three. */

#define NEON_DOT __attribute__((target("arch=armv8.2-a+dotprod")))

/* Of 16 codes, for each number of bits: which two bytes hold each, as a word, and how far to the right it lies there. */
static uint8_t NEON_WINDOWS[5][2][16];
static int16_t NEON_SHIFTS[5][2][8];

static void __attribute__((constructor)) fill_neon_windows(void)
{
    for (int bits = 2; bits <= 4; bits++)
        for (int code = 0; code < 16; code++) {
            NEON_WINDOWS[bits][code / 8][2 * (code % 8)] = (uint8_t)(code * bits / 8);
            NEON_WINDOWS[bits][code / 8][2 * (code % 8) + 1] = (uint8_t)(code * bits / 8 + 1);
            NEON_SHIFTS[bits][code / 8][code % 8] = (int16_t)-(code * bits % 8);
        }
}

/* Looks 16 codes up; reads 16 bytes. */
INLINE void neon_levels(const Job *job, const uint8_t *codes, int8_t *to)
{
    const int bits = job->value_bits;
    const uint8x16_t v = vld1q_u8(codes);
    uint16x8_t one = vreinterpretq_u16_u8(vqtbl1q_u8(v, vld1q_u8(NEON_WINDOWS[bits][0])));
    uint16x8_t two = vreinterpretq_u16_u8(vqtbl1q_u8(v, vld1q_u8(NEON_WINDOWS[bits][1])));
    one = vshlq_u16(one, vld1q_s16(NEON_SHIFTS[bits][0]));
    two = vshlq_u16(two, vld1q_s16(NEON_SHIFTS[bits][1]));
    uint8x16_t found = vuzp1q_u8(vreinterpretq_u8_u16(one), vreinterpretq_u8_u16(two));
    found = vandq_u8(found, vdupq_n_u8((uint8_t)((1 << bits) - 1)));
    vst1q_s8(to, vqtbl1q_s8(vld1q_s8(job->table), found));
}

/* Looks up the codes of a word, of which there are `count`. */
INLINE void neon_word_levels(const Job *job, const uint8_t *codes, const uint8_t *end, int64_t count, int8_t *to)
{
    const int step = 2 * job->value_bits;
    if (job->value_bits == 8) {
        memcpy(to, codes, (size_t)count);
        return;
    }
    for (; count > 0; count -= 16, codes += step, to += 16) {
        uint8_t last[16];
        neon_levels(job, end - codes < 16 ? copy_last(codes, end, 16, last) : codes, to);
    }
}

/* 16 columns' levels, zero where nothing is kept. */
INLINE int8x16_t neon_spread_levels(uint32_t mask, const int8_t *levels)
{
    const uint8x16_t second = vextq_u8(vdupq_n_u8(0), vld1q_u8(PLACES[mask >> 8 & 0xff]), 8);
    return vqtbl1q_s8(vld1q_s8(levels), vaddq_u8(vld1q_u8(PLACES[mask & 0xff]), second));
}

static void neon_spread(const Job *job, uint64_t mask, const uint8_t *codes, int8_t *dense)
{
    int8_t levels[64 + 16] = {0};
    uint64_t all, before = neon_before(mask, &all);
    neon_word_levels(job, codes, codes + SLACK, (int64_t)all, levels);
    for (int part = 0; part < 4; part++)
        vst1q_s8(dense + 16 * part, neon_spread_levels((uint32_t)(mask >> 16 * part), levels + (uint8_t)(before >> 16 * part)));
}

/* 16 columns with one row of x, as whole numbers. Products of two bytes fit 15 bits, so that a sum of two fits 16. */
INLINE int32x4_t neon_dot(int32x4_t sum, int8x16_t levels, int8x16_t x)
{
    int16x8_t products = vmull_s8(vget_low_s8(levels), vget_low_s8(x));
    return vpadalq_s16(sum, vmlal_s8(products, vget_high_s8(levels), vget_high_s8(x)));
}

NEON_DOT INLINE int32x4_t neon_one_dot(int32x4_t sum, int8x16_t levels, int8x16_t x)
{
    return vdotq_s32(sum, levels, x);
}

/* 16 columns as floats, in blocks of 8 columns. */
INLINE void neon_add_floats(int8x16_t levels, const float *x, float32x4_t *sums, const int M)
{
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(levels)), vmovl_s8(vget_high_s8(levels))};
    UNROLL for (int half = 0; half < 2; half++, x += 8 * M) {
        float32x4_t one = vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[half])));
        float32x4_t two = vcvtq_f32_s32(vmovl_s16(vget_high_s16(halves[half])));
        UNROLL for (int m = 0; m < M; m++) {
            sums[m] = vfmaq_f32(sums[m], one, vld1q_f32(x + 8 * m));
            sums[m] = vfmaq_f32(sums[m], two, vld1q_f32(x + 8 * m + 4));
        }
    }
}

/* All rows with M rows of x, which is `bytes` or floats. A group's levels are looked up while the group before it is
 * multiplied. */
#define NEON_CODED(TARGET, NAME, DOT)                                                                                  \
    TARGET INLINE void NAME##_coded(const Job *job, int64_t first, int64_t last, float *sums, const int M, const int bytes) \
    {                                                                                                                  \
        const uint8_t *codes = (const uint8_t *)job->values + job->offsets[first];                                     \
        const uint8_t *end = (const uint8_t *)job->values + job->kept;                                                 \
        for (int64_t row = first; row < last; row++, sums += M) {                                                      \
            const uint8_t *bits = job->bits + row * job->stride;                                                       \
            const int64_t words = job->stride / 8;                                                                     \
            const int8_t *whole_x = job->x;                                                                            \
            const float *x = job->x;                                                                                   \
            float lanes[MOST_ROWS][8] = {{0}};                                                                         \
            float32x4_t totals[MOST_ROWS], parts[MOST_ROWS];                                                           \
            int32x4_t whole[MOST_ROWS];                                                                                \
            int8_t levels[2][64 + 16];                                                                                 \
            for (int m = 0; m < M; m++)                                                                                \
                totals[m] = vdupq_n_f32(0);                                                                            \
            for (int64_t word = -1; word < words; word++) {                                                            \
                if (word + 1 < words) {                                                                                \
                    const int64_t count = (int64_t)neon_popcount(load_word(bits + 8 * (word + 1)));                    \
                    prefetch(codes, bits + 8 * (word + 1));                                                            \
                    neon_word_levels(job, codes, end, count, levels[(word + 1) & 1]);                                  \
                    codes += code_bytes(job, count);                                                                   \
                }                                                                                                      \
                if (word < 0)                                                                                          \
                    continue;                                                                                          \
                uint64_t all, mask = load_word(bits + 8 * word), before = neon_before(mask, &all);                     \
                if (word % 2 == 0)                                                                                     \
                    for (int m = 0; m < M; m++) {                                                                      \
                        whole[m] = vdupq_n_s32(0);                                                                     \
                        parts[m] = vdupq_n_f32(0);                                                                     \
                    }                                                                                                  \
                for (int part = 0; part < 4; part++, x += 16 * M) {                                                    \
                    const int8_t *next = levels[word & 1] + (uint8_t)(before >> 16 * part);                            \
                    int8x16_t v = neon_spread_levels((uint32_t)(mask >> 16 * part), next);                             \
                    if (bytes)                                                                                         \
                        for (int m = 0; m < M; m++)                                                                    \
                            whole[m] = DOT(whole[m], v, vld1q_s8(whole_x + 64 * m + 16 * part));                       \
                    else                                                                                               \
                        neon_add_floats(v, x, parts, M);                                                               \
                }                                                                                                      \
                whole_x += 64 * M;                                                                                     \
                if (word % 2 == 0 && word + 1 < words)                                                                 \
                    continue;                                                                                          \
                const int64_t group = word / 2;                                                                        \
                const float scale = group_scale(job, row, group);                                                      \
                for (int m = 0; m < M; m++)                                                                            \
                    if (bytes)                                                                                         \
                        add_scaled(lanes[m], group, vaddvq_s32(whole[m]), scale, scales_of_x(job, m)[group]);          \
                    else                                                                                               \
                        totals[m] = vfmaq_n_f32(totals[m], parts[m], scale);                                           \
            }                                                                                                          \
            for (int m = 0; m < M; m++)                                                                                \
                sums[m] = bytes ? sum_lanes(lanes[m]) : vaddvq_f32(totals[m]);                                         \
        }                                                                                                              \
    }                                                                                                                  \
    CODED_FUNCTIONS(TARGET, NAME)
NEON_CODED(, neon, neon_dot)
NEON_CODED(NEON_DOT, neon_one, neon_one_dot)
