/* Kernels for codes of 8 bits with AVX-512 and VNNI. */
#pragma once

#include "bytes_avx2.h"

#ifndef VNNI
#define VNNI TARGET("avx512vnni," AVX512_NAMES)
#endif

/* The instruction multiplies bytes without a sign by bytes with one: x is raised by 128, and 128 times the levels' sum
 * taken off again. */
VNNI INLINE void vnni_word(__m512i *parts, const int8_t *codes, const int8_t *x, int64_t apart, const int M) {
    const __m512i levels = _mm512_loadu_si512(codes), high = _mm512_set1_epi8((char)0x80);
    parts[4] = _mm512_dpbusd_epi32(parts[4], high, levels);
    EACH(r, M)
        parts[r] = _mm512_dpbusd_epi32(parts[r], _mm512_xor_si512(_mm512_load_si512(x + r * apart), high), levels);
}

VNNI INLINE __m256i vnni_whole(__m512i part, __m512i correction) {
    const __m512i v = _mm512_sub_epi32(part, correction);
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}

BYTES_KERNEL(VNNI, vnni_bytes, __m512i, _mm512_setzero_si512(), vnni_word, vnni_whole)
