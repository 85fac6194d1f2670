/* Kernels for codes of 8 bits with AVX-512 and VNNI. */

#ifndef VNNI
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2,popcnt")))
#endif

VNNI INLINE __m256i vnni_halves(__m512i v)
{
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}

/* The instruction multiplies bytes without a sign by bytes with one: x is raised by 128, and 128 times the levels' sum taken
 * off again. */
VNNI INLINE void vnni_bytes_row(const QuantizedJob *job, const int8_t *codes, int m, float *sums, const int M)
{
    const int8_t *stop = codes + job->columns, *x = byte_inputs(job, m);
    const int64_t apart = padded_bytes(job->columns);
    const __m512i high = _mm512_set1_epi8((char)0x80);
    __m256 totals[4];
    UNROLL for (int r = 0; r < M; r++)
        totals[r] = _mm256_setzero_ps();
    for (int64_t group = 0; codes < stop; group += BYTE_LANES) {
        __m256i whole[4][BYTE_LANES];
        for (int lane = 0; lane < BYTE_LANES; lane++) {
            __m512i parts[4], offset = _mm512_setzero_si512();
            UNROLL for (int r = 0; r < M; r++)
                parts[r] = _mm512_setzero_si512();
            for (int word = 0; word < BYTE_GROUP / 64 && codes < stop; word++, codes += 64, x += 64) {
                int8_t buffer[64];
                __builtin_prefetch((const void *)((uintptr_t)codes + 2048));
                const __m512i levels = _mm512_loadu_si512(whole_codes(codes, stop, buffer));
                offset = _mm512_dpbusd_epi32(offset, high, levels);
                UNROLL for (int r = 0; r < M; r++)
                    parts[r] = _mm512_dpbusd_epi32(parts[r], _mm512_xor_si512(_mm512_load_si512(x + r * apart), high), levels);
            }
            UNROLL for (int r = 0; r < M; r++)
                whole[r][lane] = vnni_halves(_mm512_sub_epi32(parts[r], offset));
        }
        UNROLL for (int r = 0; r < M; r++)
            totals[r] = _mm256_add_ps(totals[r], avx2_scaled(whole[r], byte_scales(job, m + r) + group));
    }
    UNROLL for (int r = 0; r < M; r++)
        sums[BLOCK_ROWS * r] = avx2_sum(totals[r]);
}
BYTE_SUMS(VNNI, vnni_bytes)
