/* Kernels for AVX-512: with F, BW and VL, vexpandps expands 16 floats; with VBMI2, vpexpandw expands
 * 32 values of 16 bits; with BF16 also, vdpbf16ps multiplies them. An expansion that zeroes waits for its register's
 * old content on Zen 4 and 5: hence one that merges into zero, which the empty asm keeps the compiler from changing.
 */
#pragma once

#include "../job.h"
#include "avx2.h"

#define AVX512_NAMES "avx512f,avx512bw,avx512vl,avx512dq," AVX2_NAMES
#define AVX512 TARGET(AVX512_NAMES)
#define VBMI2 TARGET("avx512vbmi2," AVX512_NAMES)
#define VDPBF16 TARGET("avx512vbmi2,avx512bf16," AVX512_NAMES)

AVX512 INLINE __m512i zeros(void) {
    __m512i zero = _mm512_setzero_si512();
    __asm__("" : "+v"(zero));
    return zero;
}

/* A mask of the lanes that may be loaded from `p`, of `lanes`. */
AVX512 INLINE uint32_t readable(const void *p, const void *end, int size, int lanes) {
    int64_t left = ((const char *)end - (const char *)p) / size;
    return left >= lanes ? (uint32_t)(~0ULL >> (64 - lanes)) : _bzhi_u32(~0U, (uint32_t)left);
}

VBMI2 INLINE __m512i expand32(uint32_t mask, const void *p, const void *end, const int careful) {
    __m512i v = careful ? _mm512_maskz_loadu_epi16(readable(p, end, 2, 32), p) : _mm512_loadu_si512(p);
    __asm__("" : "+v"(v));
    return _mm512_mask_expand_epi16(zeros(), mask, v);
}

/* 16 columns of any dtype, as floats. */
AVX512 INLINE __m512 expand16(uint16_t mask, const void *p, const void *end, const int careful, const int dtype) {
    __m512 v;
    if (dtype == FP32) {
        v = careful ? _mm512_maskz_loadu_ps((__mmask16)readable(p, end, 4, 16), p) : _mm512_loadu_ps(p);
    } else {
        __m256i h = careful ? _mm256_maskz_loadu_epi16((__mmask16)readable(p, end, 2, 16), p)
                            : _mm256_loadu_si256((const __m256i *)p);
        v = dtype == FP16 ? _mm512_cvtph_ps(h) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
    __asm__("" : "+v"(v));
    return _mm512_mask_expand_ps(_mm512_castsi512_ps(zeros()), mask, v);
}

/* Three ways to multiply R rows' next 64 columns. */

VDPBF16 INLINE void dot_columns(const uint64_t *mask, const char **p, const char *end, const uint16_t *x,
                                __m512 parts[][MOST_ROWS], const int R, const int M, const int careful,
                                const int dtype) {
    (void)dtype; /* bfloat16 alone */
    EACH(half, 2) {
        __m512i v[4];
        EACH(r, R) {
            uint32_t part = (uint32_t)(mask[r] >> 32 * half);
            v[r] = expand32(part, p[r], end, careful);
            p[r] += 2 * (int64_t)__builtin_popcount(part);
        }
        EACH(m, M) {
            __m512bh xs = (__m512bh)_mm512_loadu_si512(x + 32 * (M * half + m));
            EACH(r, R)
                parts[r][m] = _mm512_dpbf16_ps(parts[r][m], (__m512bh)v[r], xs);
        }
    }
}

VBMI2 INLINE void halves_columns(const uint64_t *mask, const char **p, const char *end, const float *x,
                                 __m512 parts[][MOST_ROWS], const int R, const int M, const int careful,
                                 const int dtype) {
    EACH(half, 2)
        EACH(r, R) {
            uint32_t part = (uint32_t)(mask[r] >> 32 * half);
            __m512i v = expand32(part, p[r], end, careful);
            p[r] += 2 * (int64_t)__builtin_popcount(part);
            /* The even and the odd columns of bfloat16, else the first and the last 16. */
            __m512 one, two;
            if (dtype == BF16) {
                one = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
                two = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
            } else {
                one = _mm512_cvtph_ps(_mm512_castsi512_si256(v));
                two = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1));
            }
            EACH(m, M) {
                const float *here = x + 32 * (M * half + m);
                parts[r][m] = _mm512_fmadd_ps(one, _mm512_load_ps(here), parts[r][m]);
                parts[r][m] = _mm512_fmadd_ps(two, _mm512_load_ps(here + 16), parts[r][m]);
            }
        }
}

AVX512 INLINE void floats_columns(const uint64_t *mask, const char **p, const char *end, const float *x,
                                  __m512 parts[][MOST_ROWS], const int R, const int M, const int careful,
                                  const int dtype) {
    EACH(quarter, 4)
        EACH(r, R) {
            uint16_t part = (uint16_t)(mask[r] >> 16 * quarter);
            __m512 v = expand16(part, p[r], end, careful, dtype);
            p[r] += __builtin_popcount(part) * size_of(dtype);
            EACH(m, M)
                parts[r][m] = _mm512_fmadd_ps(v, _mm512_load_ps(x + 16 * (M * quarter + m)), parts[r][m]);
        }
}

SPARSE_STEP(VDPBF16, dot_step, uint16_t, __m512, _mm512_setzero_ps(), _mm512_reduce_add_ps, dot_columns)
SPARSE_STEP(VBMI2, halves_step, float, __m512, _mm512_setzero_ps(), _mm512_reduce_add_ps, halves_columns)
SPARSE_STEP(AVX512, floats_step, float, __m512, _mm512_setzero_ps(), _mm512_reduce_add_ps, floats_columns)

SPARSE_KERNEL(VDPBF16, dot_bf16, dot_step, BF16, 4, 4, 4, 4)
SPARSE_ROWS(VDPBF16, dot_bf16, dot_step, BF16, 2, 8)
SPARSE_KERNEL(VBMI2, halves_bf16, halves_step, BF16, 4, 4, 4, 4)
SPARSE_KERNEL(VBMI2, halves_fp16, halves_step, FP16, 4, 4, 4, 4)
SPARSE_KERNEL(AVX512, floats_bf16, floats_step, BF16, 4, 4, 4, 4)
SPARSE_KERNEL(AVX512, floats_fp16, floats_step, FP16, 4, 4, 4, 4)
SPARSE_KERNEL(AVX512, floats_fp32, floats_step, FP32, 4, 4, 4, 4)

VBMI2 INLINE void vbmi2_unpack_word2(uint64_t mask, const uint16_t *p, const uint16_t *end, uint16_t *out,
                                     const int careful) {
    _mm512_storeu_si512(out, expand32((uint32_t)mask, p, end, careful));
    _mm512_storeu_si512(out + 32,
                        expand32((uint32_t)(mask >> 32), p + __builtin_popcount((uint32_t)mask), end, careful));
}

AVX512 INLINE void avx512_unpack_word4(uint64_t mask, const uint32_t *p, const uint32_t *end, uint32_t *out,
                                       const int careful) {
    EACH(quarter, 4) {
        uint16_t part = (uint16_t)(mask >> 16 * quarter);
        __m512i v = careful ? _mm512_maskz_loadu_epi32((__mmask16)readable(p, end, 4, 16), p) : _mm512_loadu_si512(p);
        _mm512_storeu_si512(out + 16 * quarter, _mm512_mask_expand_epi32(zeros(), part, v));
        p += __builtin_popcount(part);
    }
}

UNPACK_ROW(VBMI2, vbmi2_unpack2, uint16_t, vbmi2_unpack_word2)
UNPACK_ROW(AVX512, avx512_unpack4, uint32_t, avx512_unpack_word4)
