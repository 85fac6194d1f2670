/* What kernels for AVX2 and AVX-512 share. */
#pragma once

#include "../processors.h"

#define TARGET(NAMES) __attribute__((target(NAMES)))
#define AVX2_NAMES "avx2,fma,f16c,bmi2,popcnt"
#define AVX512_NAMES "avx512f,avx512bw,avx512vl,avx512dq," AVX2_NAMES

#ifndef AVX2
#define AVX2 TARGET(AVX2_NAMES)
#endif

AVX2 INLINE float avx2_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
