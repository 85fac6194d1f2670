/* The kernels for codes with AVX-512, and with AVX2 and AVX-VNNI, on processors without AVX-512 and AVX-VNNI: SIMDe
 * (https://github.com/simd-everywhere/simde) does what their instructions would. Each product and copy has to be that of
 * the portable kernels, the former to the bit where x is bytes; buffers end exactly where they must. */

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include "common.h"

#include <cpuid.h>
#include <math.h>
#include <stdio.h>

#undef _mm512_mask_expand_epi8 /* SIMDe has none, and of some others it has only those that mask */
#define _mm512_mask_expand_epi8 emulated_expand
#undef _mm_popcnt_u64
#define _mm_popcnt_u64 __builtin_popcountll
#undef _mm_popcnt_u32
#define _mm_popcnt_u32 __builtin_popcount
#undef _bzhi_u64
#define _bzhi_u64(word, bits) ((bits) < 64 ? (word) & ((1ULL << (bits)) - 1) : (word))
#undef _mm512_maskz_loadu_epi8
#define _mm512_maskz_loadu_epi8 emulated_load
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 emulated_widening
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps emulated_conversion
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps emulated_sum
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 emulated_dot
#define __get_cpuid_count emulated_cpuid

static __m512i emulated_expand(__m512i from, uint64_t mask, __m512i v)
{
    uint8_t in[64], out[64];
    simde_mm512_storeu_si512(in, v);
    simde_mm512_storeu_si512(out, from);
    for (int i = 0, next = 0; i < 64; i++)
        if (mask >> i & 1)
            out[i] = in[next++];
    return simde_mm512_loadu_si512(out);
}

static __m512i emulated_load(uint64_t mask, const void *p)
{
    uint8_t out[64] = {0};
    for (int i = 0; i < 64; i++)
        if (mask >> i & 1)
            out[i] = ((const uint8_t *)p)[i];
    return simde_mm512_loadu_si512(out);
}

static __m512i emulated_widening(__m128i v)
{
    int8_t in[16];
    int32_t out[16];
    memcpy(in, &v, 16);
    for (int i = 0; i < 16; i++)
        out[i] = in[i];
    return simde_mm512_loadu_si512(out);
}

static __m512 emulated_conversion(__m512i v)
{
    int32_t in[16];
    float out[16];
    simde_mm512_storeu_si512(in, v);
    for (int i = 0; i < 16; i++)
        out[i] = (float)in[i];
    return simde_mm512_loadu_ps(out);
}

static float emulated_sum(__m512 v)
{
    float numbers[16], sum = 0;
    simde_mm512_storeu_ps(numbers, v);
    for (int i = 0; i < 16; i++)
        sum += numbers[i];
    return sum;
}

/* Counts its calls: without any, other kernels ran than those that are to be tried. */
static int avx_vnni_calls = 0;

static __m256i emulated_dot(__m256i sums, __m256i sizes, __m256i x)
{
    avx_vnni_calls++;
    return simde_mm256_dpbusd_epi32(sums, sizes, x);
}

/* A processor that has AVX-VNNI and nothing else of this leaf. */
static int emulated_cpuid(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx)
{
    *eax = leaf != 7 ? 0 : subleaf == 0 ? 1 : subleaf == 1 ? 1 << 4 : 0;
    *ebx = *ecx = *edx = 0;
    return 1;
}

static __m512i zeros(void)
{
    return simde_mm512_setzero_si512();
}

#define HAS_X86 1
#define HAS_AVX_VNNI 1
#define EXPORT static
#define VNNI
#define AVX_VNNI
#include "portable.h"
#include "shuffles.h"
#define __builtin_cpu_supports(name) 1
#include "processors.h"
#include "threads.h"
#undef AVX2
#include "avx2.h"
#undef AVX2
#define AVX2
#include "product.h"
enum { OK = 0, NO_SUCH_KERNEL = 1, NO_MEMORY = 2, TOO_MANY_ROWS = 3 };
#include "coded_rows.h"
#include "int8_rows.h"

#include "coded_trials.h"
#include "int8_trials.h"

int main(int count, char **arguments)
{
    const int trials = count > 1 ? atoi(arguments[1]) : 20;
    try_kernels_of_codes(trials, ON_AVX512_VBMI2);
    try_int8_kernels(trials, ON_AVX512_VBMI2);
    printf("kernel %d\n", ON_AVX512_VBMI2);
    if (avx_vnni_calls)
        fail("AVX-VNNI instead of AVX-512", ON_AVX512_VBMI2, 0, 0, 0, 0);
    try_kernels_of_codes(trials, ON_AVX2);
    if (!avx_vnni_calls)
        fail("codes without AVX-VNNI", ON_AVX2, 0, 0, 0, 0);
    avx_vnni_calls = 0;
    try_int8_kernels(trials, ON_AVX2);
    if (!avx_vnni_calls)
        fail("int8 without AVX-VNNI", ON_AVX2, 0, 0, 0, 0);
    printf("kernel %d\n", ON_AVX2);
    return 0;
}
