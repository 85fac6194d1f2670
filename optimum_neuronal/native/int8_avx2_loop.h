/* The loop over levels of 8 bits with AVX2, once for each way to multiply bytes: TARGET and NAME(what) as for
 * coded_avx2_loop.h, which has to be included before. */

TARGET INLINE void NAME(int8_coded)(const Job *job, int64_t first, int64_t last, float *sums, const int M, const int bytes)
{
    for (int64_t row = first; row < last; row++, sums += M) {
        const int8_t *levels = (const int8_t *)job->values + row * job->stride, *stop = levels + job->stride;
        const int8_t *whole_x = job->x;
        const float *x = job->x;
        __m256 totals[MOST_ROWS];
        UNROLL for (int m = 0; m < M; m++)
            totals[m] = _mm256_setzero_ps();
        for (int64_t block = 0; block < job->groups; block += 8) {
            __m256i whole[MOST_ROWS][8];
            uint16_t scales[8];
            const int groups = scales_of_block(job, row, block, scales);
            if (bytes && groups < 8)
                memset(whole, 0, sizeof(whole));
            for (int group = 0; group < groups; group++) {
                __m256i whole_parts[MOST_ROWS];
                __m256 parts[MOST_ROWS][2];
                UNROLL for (int m = 0; m < M; m++) {
                    whole_parts[m] = _mm256_setzero_si256();
                    parts[m][0] = parts[m][1] = _mm256_setzero_ps();
                }
                for (int word = 0; word < GROUP / 64 && levels < stop; word++, levels += 64, x += 64 * M, whole_x += 64 * M) {
                    int8_t buffer[64];
                    __builtin_prefetch((const void *)((uintptr_t)levels + 2048));
                    const __m256i *from = (const __m256i *)whole_levels(levels, stop, buffer);
                    __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
                    NAME(add_word)(low, high, whole_x, x, whole_parts, parts, M, bytes);
                }
                const __m256 scale = _mm256_set1_ps(from_bf16(scales[group]));
                UNROLL for (int m = 0; m < M; m++)
                    if (bytes)
                        whole[m][group] = whole_parts[m];
                    else
                        totals[m] = _mm256_fmadd_ps(_mm256_add_ps(parts[m][0], parts[m][1]), scale, totals[m]);
            }
            if (bytes)
                UNROLL for (int m = 0; m < M; m++)
                    totals[m] = _mm256_add_ps(totals[m], avx2_scaled(whole[m], scales, scales_of_x(job, m) + block));
        }
        UNROLL for (int m = 0; m < M; m++)
            sums[m] = avx2_sum(totals[m]);
    }
}

#undef TARGET
#undef NAME
