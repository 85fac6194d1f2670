/* The kernels for codes with AVX-512 on processors without it: SIMDe (https://github.com/simd-everywhere/simde) does what
 * their instructions would. Each product and copy has to be that of the portable kernels, the former to the bit where x is
 * bytes; buffers end exactly where they must. */

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include "common.h"

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

static __m512i zeros(void)
{
    return simde_mm512_setzero_si512();
}

#define HAS_X86 1
#define EXPORT static
#define VNNI
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
    try_kernels_of_codes(count > 1 ? atoi(arguments[1]) : 20, ON_AVX512_VBMI2);
    try_int8_kernels(count > 1 ? atoi(arguments[1]) : 20, ON_AVX512_VBMI2);
    printf("kernel %d\n", ON_AVX512_VBMI2);
    return 0;
}
