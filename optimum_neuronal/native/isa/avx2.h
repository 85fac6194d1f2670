/* Kernels for AVX2, FMA and F16C: eight columns are expanded by a byte shuffle that is looked up for eight bits. */
#pragma once

#include "../job.h"

#define TARGET(NAMES) __attribute__((target(NAMES)))
#define AVX2_NAMES "avx2,fma,f16c,bmi2,popcnt"
#define AVX2 TARGET(AVX2_NAMES)

/* For every byte of a mask, which bytes of the next eight 16-bit values go where: a table for byte shuffles, in which
 * 0x80 gives zero. */
static uint8_t SHUFFLE16[256][16] __attribute__((aligned(64)));
static int8_t SHUFFLE32[256][8]
    __attribute__((aligned(64))); /* the same for eight 32-bit values: their numbers, or -1 */

static void __attribute__((constructor)) fill_shuffles(void) {
    for (int mask = 0; mask < 256; mask++) {
        int next = 0;
        for (int column = 0; column < 8; column++) {
            int kept = mask >> column & 1;
            SHUFFLE16[mask][2 * column] = kept ? (uint8_t)(2 * next) : 0x80;
            SHUFFLE16[mask][2 * column + 1] = kept ? (uint8_t)(2 * next + 1) : 0x80;
            SHUFFLE32[mask][column] = kept ? (int8_t)next : -1;
            next += kept;
        }
    }
}

/* Copies what is left between `p` and `end` to a buffer of `most` bytes, and fills it up with zeros. Returns the
 * buffer. */
INLINE const void *copy_last(const void *p, const void *end, size_t most, void *buffer) {
    size_t left = (size_t)((const char *)end - (const char *)p);
    memset(buffer, 0, most);
    memcpy(buffer, p, left < most ? left : most);
    return buffer;
}

AVX2 INLINE float avx2_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* How many bits are set before a byte of a mask. */
AVX2 INLINE int64_t avx2_before(uint64_t mask, const int byte) {
    return byte ? __builtin_popcountll(mask << (64 - 8 * byte)) : 0;
}

AVX2 INLINE __m128i avx2_expand16(uint8_t mask, const uint16_t *p, const uint16_t *end, const int careful) {
    uint16_t last[8];
    const void *from = careful && end - p < 8 ? copy_last(p, end, 16, last) : p;
    return _mm_shuffle_epi8(_mm_loadu_si128(from), _mm_load_si128((const __m128i *)SHUFFLE16[mask]));
}

AVX2 INLINE __m256i avx2_expand32(uint8_t mask, const uint32_t *p, const uint32_t *end, const int careful) {
    uint32_t last[8];
    const void *from = careful && end - p < 8 ? copy_last(p, end, 32, last) : p;
    __m256i where = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)SHUFFLE32[mask]));
    __m256i expand = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(from), where);
    return _mm256_andnot_si256(_mm256_srai_epi32(where, 31), expand);
}

/* One row's 64 columns: x has blocks of 16 columns for bfloat16, the even ones before the odd ones, else of 8. */
AVX2 INLINE void avx2_word(uint64_t mask, const void *values, const void *end, const float *x, __m256 *sums,
                           const int M, const int dtype, const int careful) {
    if (dtype == BF16) {
        const uint16_t *p = values;
        const __m256i high = _mm256_set1_epi32((int)0xffff0000);
        EACH(pair, 4) {
            const int byte = 2 * pair;
            const float *here = x + 16 * M * pair;
            __m128i one = avx2_expand16((uint8_t)(mask >> 8 * byte), p + avx2_before(mask, byte), end, careful);
            __m128i two =
                avx2_expand16((uint8_t)(mask >> 8 * (byte + 1)), p + avx2_before(mask, byte + 1), end, careful);
            __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(one), two, 1);
            __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(both, high));
            EACH(m, M) {
                sums[m] = _mm256_fmadd_ps(even, _mm256_load_ps(here + 16 * m), sums[m]);
                sums[m] = _mm256_fmadd_ps(odd, _mm256_load_ps(here + 16 * m + 8), sums[m]);
            }
        }
        return;
    }
    EACH(byte, 8) {
        uint8_t part = (uint8_t)(mask >> 8 * byte);
        __m256 v;
        if (dtype == FP16)
            v = _mm256_cvtph_ps(avx2_expand16(part, (const uint16_t *)values + avx2_before(mask, byte), end, careful));
        else
            v = _mm256_castsi256_ps(
                avx2_expand32(part, (const uint32_t *)values + avx2_before(mask, byte), end, careful));
        EACH(m, M)
            sums[m] = _mm256_fmadd_ps(v, _mm256_load_ps(x + 8 * (M * byte + m)), sums[m]);
    }
}

AVX2 INLINE void avx2_columns(const uint64_t *mask, const char **p, const char *end, const float *x,
                              __m256 parts[][MOST_ROWS], const int R, const int M, const int careful,
                              const int dtype) {
    EACH(r, R) {
        avx2_word(mask[r], p[r], end, x, parts[r], M, dtype, careful);
        p[r] += __builtin_popcountll(mask[r]) * size_of(dtype);
    }
}

SPARSE_STEP(AVX2, avx2_step, float, __m256, _mm256_setzero_ps(), avx2_sum, avx2_columns)
SPARSE_KERNEL(AVX2, avx2_bf16, avx2_step, BF16, 4, 4, 2, 1)
SPARSE_KERNEL(AVX2, avx2_fp16, avx2_step, FP16, 4, 4, 2, 1)
SPARSE_KERNEL(AVX2, avx2_fp32, avx2_step, FP32, 4, 4, 2, 1)

AVX2 INLINE void avx2_unpack_word2(uint64_t mask, const uint16_t *p, const uint16_t *end, uint16_t *out,
                                   const int careful) {
    EACH(byte, 8)
        _mm_storeu_si128((__m128i *)(out + 8 * byte),
                         avx2_expand16((uint8_t)(mask >> 8 * byte), p + avx2_before(mask, byte), end, careful));
}

AVX2 INLINE void avx2_unpack_word4(uint64_t mask, const uint32_t *p, const uint32_t *end, uint32_t *out,
                                   const int careful) {
    EACH(byte, 8)
        _mm256_storeu_si256((__m256i *)(out + 8 * byte),
                            avx2_expand32((uint8_t)(mask >> 8 * byte), p + avx2_before(mask, byte), end, careful));
}

UNPACK_ROW(AVX2, avx2_unpack2, uint16_t, avx2_unpack_word2)
UNPACK_ROW(AVX2, avx2_unpack4, uint32_t, avx2_unpack_word4)
