/* The loop over codes of few bits with AVX2, once for each way to multiply bytes. Who includes it defines TARGET, the
 * processors it is compiled for, and NAME(what), of which there has to be NAME(dot). */

/* 32 columns with M rows of x, as whole numbers. */
TARGET INLINE void NAME(add_bytes)(__m256i levels, const int8_t *x, __m256i *sums, const int M)
{
    const __m256i size = _mm256_abs_epi8(levels);
    UNROLL for (int m = 0; m < M; m++) {
        __m256i signed_x = _mm256_sign_epi8(_mm256_load_si256((const __m256i *)(x + 64 * m)), levels);
        sums[m] = NAME(dot)(sums[m], size, signed_x);
    }
}

/* 64 columns with M rows of x, which is `bytes` or floats: adds to the sums of a group. */
TARGET INLINE void NAME(add_word)(__m256i low, __m256i high, const int8_t *whole_x, const float *x, __m256i *whole,
                                  __m256 parts[][2], const int M, const int bytes)
{
    if (bytes) {
        NAME(add_bytes)(low, whole_x, whole, M);
        NAME(add_bytes)(high, whole_x + 32, whole, M);
    } else {
        avx2_add_floats(low, x, parts, M);
        avx2_add_floats(high, x + 32 * M, parts, M);
    }
}

/* All rows with M rows of x, which is `bytes` or floats; codes of 3 bits are no `stream`. */
TARGET INLINE void NAME(coded_in)(const Job *job, int64_t first, int64_t last, float *sums, const int M, const int bytes,
                                  const int stream)
{
    const uint8_t *codes = (const uint8_t *)job->values + job->offsets[first];
    const uint8_t *end = (const uint8_t *)job->values + job->kept;
    const int per_byte = stream ? 8 / job->value_bits : 1;
    Levels levels;
    const int8_t *next = levels + AHEAD; /* the level of the first code that is not used yet; none is looked up */
    if (stream)
        codes -= AHEAD / per_byte; /* the code of levels[0] */
    for (int64_t row = first; row < last; row++, sums += M) {
        const uint8_t *bits = job->bits + row * job->stride, *stop = bits + job->stride;
        const int8_t *whole_x = job->x;
        const float *x = job->x;
        __m256 totals[MOST_ROWS];
        UNROLL for (int m = 0; m < M; m++)
            totals[m] = _mm256_setzero_ps();
        for (int64_t block = 0; block < job->groups; block += 8) {
            __m256i whole[MOST_ROWS][8];
            uint16_t scales[8];
            const int groups = scales_of_block(job, row, block, scales);
            if (!stream) {
                codes = avx2_look_at_words(job, bits, (stop - bits) / 8, codes, end, levels);
                next = levels;
            }
            if (bytes && groups < 8)
                memset(whole, 0, sizeof(whole));
            for (int group = 0; group < groups; group++) {
                __m256i whole_parts[MOST_ROWS];
                __m256 parts[MOST_ROWS][2];
                UNROLL for (int m = 0; m < M; m++) {
                    whole_parts[m] = _mm256_setzero_si256();
                    parts[m][0] = parts[m][1] = _mm256_setzero_ps();
                }
                if (stream && next > levels + AHEAD - GROUP) {
                    codes += (next - levels) / per_byte;
                    avx2_look_ahead(job, codes, end, levels);
                    next = levels;
                }
                UNROLL for (int word = 0; word < GROUP / 64; word++) {
                    if (bits == stop)
                        break;
                    const uint64_t mask = load_word(bits);
                    __m256i low = avx2_spread_levels((uint32_t)mask, next);
                    __m256i high = avx2_spread_levels((uint32_t)(mask >> 32), next + _mm_popcnt_u32((uint32_t)mask));
                    next += stream ? (_mm_popcnt_u64(mask) + per_byte - 1) & -per_byte : 64;
                    NAME(add_word)(low, high, whole_x, x, whole_parts, parts, M, bytes);
                    bits += 8;
                    whole_x += 64 * M;
                    x += 64 * M;
                }
                UNROLL for (int m = 0; m < M; m++)
                    if (bytes)
                        whole[m][group] = whole_parts[m];
                    else
                        totals[m] = _mm256_fmadd_ps(_mm256_add_ps(parts[m][0], parts[m][1]), _mm256_set1_ps(from_bf16(scales[group])), totals[m]);
            }
            if (bytes)
                UNROLL for (int m = 0; m < M; m++) {
                    const float *x_scales = scales_of_x(job, m) + block;
                    totals[m] = _mm256_add_ps(totals[m], avx2_scaled(whole[m], scales, x_scales));
                }
        }
        UNROLL for (int m = 0; m < M; m++)
            sums[m] = avx2_sum(totals[m]);
    }
}

TARGET INLINE void NAME(coded)(const Job *job, int64_t first, int64_t last, float *sums, const int M, const int bytes)
{
    if (job->value_bits == 3)
        NAME(coded_in)(job, first, last, sums, M, bytes, 0);
    else
        NAME(coded_in)(job, first, last, sums, M, bytes, 1);
}

#undef TARGET
#undef NAME
