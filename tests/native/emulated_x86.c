/* The kernels for quantized weights with AVX-512 and VNNI, and with AVX2 and AVX-VNNI, on
 * processors without them: SIMDe (https://github.com/simd-everywhere/simde) does what their
 * instructions would. Each product has to be that of the portable kernels, to the bit; buffers end
 * exactly where they must. */

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cpuid.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 emulated_wide_dot
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 emulated_dot
#undef _mm_popcnt_u64
#define _mm_popcnt_u64 __builtin_popcountll
#define __get_cpuid_count emulated_cpuid

/* Counted calls: without any, other kernels ran than those that are to be tried. */
static int vnni_calls = 0, avx_vnni_calls = 0;

static __m512i emulated_wide_dot(__m512i sums, __m512i sizes, __m512i x) {
    vnni_calls++;
    return simde_mm512_dpbusd_epi32(sums, sizes, x);
}

static __m256i emulated_dot(__m256i sums, __m256i sizes, __m256i x) {
    avx_vnni_calls++;
    return simde_mm256_dpbusd_epi32(sums, sizes, x);
}

/* A processor that has AVX-VNNI and nothing else of this leaf. */
static int emulated_cpuid(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx,
                          unsigned *edx) {
    *eax = leaf != 7 ? 0 : subleaf == 0 ? 1 : subleaf == 1 ? 1 << 4 : 0;
    *ebx = *ecx = *edx = 0;
    return 1;
}

#define __builtin_cpu_supports(name) 1
#define HAS_X86 1
#define HAS_AVX_VNNI 1
#define EXPORT static
#define VNNI
#define AVX_VNNI
#define AVX2
#include "quantized.h"

#include "trials.h"
#include "quantized_trials.h"

int main(int count, char **arguments) {
    const int trials = count > 1 ? atoi(arguments[1]) : 20;
    try_quantized_kernels(trials, ON_AVX512);
    if (avx_vnni_calls || !vnni_calls)
        fail("without AVX-512's VNNI", ON_AVX512, 0, 0, 0, 0);
    printf("kernel %d\n", ON_AVX512);
    vnni_calls = 0;
    try_quantized_kernels(trials, ON_AVX2);
    if (!avx_vnni_calls || vnni_calls)
        fail("without AVX-VNNI", ON_AVX2, 0, 0, 0, 0);
    printf("kernel %d\n", ON_AVX2);
    return 0;
}
