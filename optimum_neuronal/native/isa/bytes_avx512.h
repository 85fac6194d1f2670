/* Kernels for codes of 8 bits with AVX-512 and VNNI. */
#pragma once

#include "bytes_avx2.h"

#ifndef VNNI
#define VNNI TARGET("avx512vnni," AVX512_NAMES)
#endif

VNNI INLINE __m256i vnni_halves(__m512i v) {
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}

/* The instruction multiplies bytes without a sign by bytes with one: x is raised by 128, and 128 times the levels' sum
 * taken off again. */
VNNI INLINE void vnni_bytes_row(const QuantizedMatrix *weight, const RoundedInputs *inputs, int64_t row, int m,
                                float *sums, const int M) {
    const int8_t *codes = bytes_of_row(weight, row), *stop = codes + weight->columns,
                 *x = byte_inputs(weight, inputs, m);
    const int64_t apart = padded_columns(weight);
    const __m512i high = _mm512_set1_epi8((char)0x80);
    __m256 totals[4];
    EACH(r, M)
        totals[r] = _mm256_setzero_ps();
    for (int64_t group = 0; codes < stop; group += BYTE_LANES) {
        __m256i whole[4][BYTE_LANES];
        for (int lane = 0; lane < BYTE_LANES; lane++) {
            __m512i parts[4], offset = _mm512_setzero_si512();
            EACH(r, M)
                parts[r] = _mm512_setzero_si512();
            for (int word = 0; word < BYTE_GROUP / 64 && codes < stop; word++, codes += 64, x += 64) {
                int8_t buffer[64];
                prefetch(codes, 2048);
                const __m512i levels = _mm512_loadu_si512(whole_codes(codes, stop, buffer));
                offset = _mm512_dpbusd_epi32(offset, high, levels);
                EACH(r, M)
                    parts[r] = _mm512_dpbusd_epi32(parts[r], _mm512_xor_si512(_mm512_load_si512(x + r * apart), high),
                                                   levels);
            }
            EACH(r, M)
                whole[r][lane] = vnni_halves(_mm512_sub_epi32(parts[r], offset));
        }
        EACH(r, M)
            totals[r] = _mm256_add_ps(totals[r], avx2_scaled(whole[r], byte_scales(weight, inputs, m + r) + group));
    }
    EACH(r, M)
        sums[BLOCK_ROWS * r] = avx2_sum(totals[r]);
}
BYTE_SUMS(VNNI, vnni_bytes)
