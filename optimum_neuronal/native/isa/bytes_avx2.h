/* Kernels for codes of 8 bits with AVX2. Sums of products of bytes take one instruction where the processor has
 * AVX-VNNI, else three. */
#pragma once

#include "../reference.h"
#include "avx2.h"

#ifndef AVX_VNNI
#define AVX_VNNI TARGET("avxvnni," AVX2_NAMES)
#endif

/* The sums of eight registers' numbers. */
AVX2 INLINE __m256i avx2_whole_sums(const __m256i *v) {
    __m256i one = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    __m256i two = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(one, two, 0x20), _mm256_permute2x128_si256(one, two, 0x31));
}

/* What eight groups add to the lanes. */
AVX2 INLINE __m256 avx2_scaled(const __m256i *whole, const float *x_scales) {
    return _mm256_mul_ps(_mm256_loadu_ps(x_scales), _mm256_cvtepi32_ps(avx2_whole_sums(whole)));
}

/* Adds to eight sums four products each, of bytes without a sign and bytes with one. Products of levels fit 15 bits,
 * so that a sum of two fits 16. */
AVX2 INLINE __m256i avx2_dot(__m256i sums, __m256i sizes, __m256i x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, x), _mm256_set1_epi16(1)));
}

/* Defines NAME, the loop over a row, from WORD(parts, codes, x, apart, M), which adds the products of 64 codes with M
 * rows of x to `parts`, VECTORs of which the last is a correction of all, and WHOLE(part, correction), eight sums. */
#define BYTES_KERNEL(TARGET, NAME, VECTOR, ZERO, WORD, WHOLE)                                                     \
    TARGET INLINE void NAME##_row(const QuantizedMatrix *weight, const RoundedInputs *inputs, int64_t row, int m, \
                                  float *sums, const int M) {                                                     \
        const int8_t *codes = bytes_of_row(weight, row), *stop = codes + weight->columns,                         \
                     *x = byte_inputs(weight, inputs, m);                                                         \
        const int64_t apart = padded_columns(weight);                                                             \
        __m256 totals[4];                                                                                         \
        EACH(r, M)                                                                                                \
            totals[r] = _mm256_setzero_ps();                                                                      \
        for (int64_t group = 0; codes < stop; group += BYTE_LANES) {                                              \
            __m256i whole[4][BYTE_LANES];                                                                         \
            for (int lane = 0; lane < BYTE_LANES; lane++) {                                                       \
                VECTOR parts[5];                                                                                  \
                EACH(r, 5)                                                                                        \
                    parts[r] = ZERO;                                                                              \
                for (int word = 0; word < BYTE_GROUP / 64 && codes < stop; word++, codes += 64, x += 64) {        \
                    int8_t buffer[64];                                                                            \
                    prefetch(codes, 2048);                                                                        \
                    WORD(parts, whole_codes(codes, stop, buffer), x, apart, M);                                   \
                }                                                                                                 \
                EACH(r, M)                                                                                        \
                    whole[r][lane] = WHOLE(parts[r], parts[4]);                                                   \
            }                                                                                                     \
            EACH(r, M)                                                                                            \
                totals[r] =                                                                                       \
                    _mm256_add_ps(totals[r], avx2_scaled(whole[r], byte_scales(weight, inputs, m + r) + group));  \
        }                                                                                                         \
        EACH(r, M)                                                                                                \
            sums[BLOCK_ROWS * r] = avx2_sum(totals[r]);                                                           \
    }                                                                                                             \
    BYTE_SUMS(TARGET, NAME)

AVX2 INLINE __m256i avx2_whole(__m256i part, __m256i correction) {
    (void)correction;
    return part;
}

/* Defines NAME from a way to multiply bytes. */
#define AVX2_BYTES(TARGET, NAME, DOT)                                                                   \
    TARGET INLINE void NAME##_word(__m256i *parts, const int8_t *codes, const int8_t *x, int64_t apart, \
                                   const int M) {                                                       \
        EACH(half, 2) {                                                                                 \
            const __m256i levels = _mm256_loadu_si256((const __m256i *)(codes + 32 * half));            \
            const __m256i sizes = _mm256_abs_epi8(levels);                                              \
            EACH(r, M) {                                                                                \
                const __m256i of_x = _mm256_load_si256((const __m256i *)(x + r * apart + 32 * half));   \
                parts[r] = DOT(parts[r], sizes, _mm256_sign_epi8(of_x, levels));                        \
            }                                                                                           \
        }                                                                                               \
    }                                                                                                   \
    BYTES_KERNEL(TARGET, NAME, __m256i, _mm256_setzero_si256(), NAME##_word, avx2_whole)

AVX2_BYTES(AVX2, avx2_bytes, avx2_dot)
#if defined(HAS_AVX_VNNI)
AVX2_BYTES(AVX_VNNI, avx_vnni_bytes, _mm256_dpbusd_avx_epi32)
#endif

AVX2 static void avx2_round_bytes(const float *x, int64_t apart, RoundedInputs *to) {
    portable_round_bytes(x, apart, to);
}

AVX2 static void avx2_byte_elements(const QuantizedMatrix *weight, const float *steps, int64_t block, void *dense,
                                    int dtype) {
    portable_byte_elements(weight, steps, block, dense, dtype);
}
