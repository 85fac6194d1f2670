/* The instruction sets, and which of them this processor can run. */
#pragma once

#include "common.h"

#if defined(__x86_64__)
#define HAS_X86 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define HAS_NEON 1
#include <arm_neon.h>
#endif

/* As in library.py. A processor that can run one can run all before it. */
enum { ON_ANY, ON_NEON, ON_AVX2, ON_AVX512, ON_AVX512_VBMI2, ON_AVX512_BF16, KERNELS };

/* Whether this processor can run a kernel. */
EXPORT int neuronal_supports(int kernel) {
    if (kernel == ON_ANY)
        return 1;
#if defined(HAS_NEON)
    return kernel == ON_NEON;
#elif defined(HAS_X86)
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
