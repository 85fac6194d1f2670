/* Which instruction sets there are, and which of them the processor at hand can run. */

#if defined(HAS_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

/* As in library.py; a processor that can run one can run those before it. */
enum { ON_ANY, ON_NEON, ON_AVX2, ON_AVX512, ON_AVX512_VBMI2, ON_AVX512_BF16, KERNELS };

/* Whether this processor can run a kernel. */
EXPORT int neuronal_supports(int kernel)
{
    if (kernel == ON_ANY)
        return 1;
#if defined(HAS_NEON)
    return kernel == ON_NEON;
#elif defined(HAS_X86)
    if (kernel < ON_AVX2 || kernel >= KERNELS)
        return 0;
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
          __builtin_cpu_supports("popcnt")))
        return 0;
    int can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512dq");
    if (kernel >= ON_AVX512 && !can)
        return 0;
    if (kernel >= ON_AVX512_VBMI2 && !__builtin_cpu_supports("avx512vbmi2"))
        return 0;
    return kernel < ON_AVX512_BF16 || __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
}

#if defined(HAS_NEON)
/* Whether an Arm processor multiplies and adds four bytes at once; NEURONAL_NO_DOT in a build says no, for tests. */
static int has_dot_products(void)
{
#if defined(NEURONAL_NO_DOT)
    return 0;
#elif defined(__APPLE__)
    return 1;
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 0;
#endif
}
#endif
