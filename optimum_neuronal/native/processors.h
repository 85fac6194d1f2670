/* The instruction sets, and which of them this processor can run. */
#pragma once

#include "common.h"

#if defined(HAS_X86) /* a test, which brings its own */
#elif defined(__x86_64__)
#define HAS_X86 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define HAS_NEON 1
#include <arm_neon.h>
#endif

#if defined(HAS_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(HAS_X86) && !defined(NEURONAL_NO_DOT) && defined(__has_include)
#if __has_include(<avxvnniintrin.h>) /* GCC 11, Clang 12 */
#define HAS_AVX_VNNI 1
#include <cpuid.h>
#endif
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

#if defined(HAS_AVX_VNNI)
static int avx_vnni = 0;

/* Asks once, since CPUID is slow in virtual machines. Not every compiler's __builtin_cpu_supports knows the name. */
static void __attribute__((constructor)) look_for_avx_vnni(void) {
    unsigned eax = 0, ebx, ecx, edx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx))
        avx_vnni = eax >> 4 & 1;
}
#endif

/* Whether a processor with AVX2 or NEON multiplies and adds four bytes at once. Not used if NEURONAL_NO_DOT is
 * defined, for tests and for assemblers that do not know AVX-VNNI. */
INLINE int has_dot_products(void) {
#if defined(NEURONAL_NO_DOT)
    return 0;
#elif defined(HAS_AVX_VNNI)
    return avx_vnni;
#elif defined(HAS_NEON) && defined(__APPLE__)
    return 1;
#elif defined(HAS_NEON) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 0;
#endif
}
