/* What all kernels share: the results of calls, instruction sets, numbers of three dtypes, and loops that compilers
 * unroll. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kernels read bits as little-endian numbers"
#endif
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { OK = 0, NO_SUCH_KERNEL = 1, NO_MEMORY = 2 };
enum { BF16 = 0, FP16 = 1, FP32 = 2, DTYPES = 3 };
enum { MOST_ROWS = 8 }; /* of x at a time */
/* As in library.py. A processor that can run one can run all before it. */
enum { ON_ANY, ON_AVX2, ON_AVX512, ON_AVX512_VBMI2, ON_AVX512_BF16, KERNELS };

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif
#define EACH(i, count) UNROLL for (int i = 0; i < (count); i++)

INLINE int64_t smaller(int64_t one, int64_t two) { return one < two ? one : two; }

/* Bytes of an element. */
INLINE int size_of(int dtype) { return dtype == FP32 ? 4 : 2; }

INLINE float from_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint32_t to_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

INLINE float from_bf16(uint16_t h) { return from_bits((uint32_t)h << 16); }

INLINE uint16_t to_bf16(float number) {
    uint32_t bits = to_bits(number);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40); /* NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float from_fp16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 0)
        return from_bits(to_bits((float)fraction * 0x1p-24f) | sign);
    return from_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

INLINE uint16_t to_fp16(float number) {
    uint32_t bits = to_bits(number), size = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (size > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff)); /* NaN */
    if (size >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (size < 0x38800000)                /* subnormal: 0.5 has ulp 2^-24 */
        return (uint16_t)(sign | (to_bits(from_bits(size) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

INLINE float load_number(const void *numbers, int64_t index, int dtype) {
    if (dtype == FP32)
        return ((const float *)numbers)[index];
    uint16_t h = ((const uint16_t *)numbers)[index];
    return dtype == BF16 ? from_bf16(h) : from_fp16(h);
}

INLINE void store_number(void *numbers, int64_t index, int dtype, float number) {
    if (dtype == FP32)
        ((float *)numbers)[index] = number;
    else
        ((uint16_t *)numbers)[index] = dtype == BF16 ? to_bf16(number) : to_fp16(number);
}

/* Whether this processor can run a kernel. */
EXPORT int neuronal_supports(int kernel) {
    if (kernel == ON_ANY)
        return 1;
#ifdef __x86_64__
    if (kernel < ON_AVX2 || kernel >= KERNELS)
        return 0;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt") &&
           (kernel < ON_AVX512 || (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))) &&
           (kernel < ON_AVX512_VBMI2 || __builtin_cpu_supports("avx512vbmi2")) &&
           (kernel < ON_AVX512_BF16 || __builtin_cpu_supports("avx512bf16"));
#else
    return 0;
#endif
}
