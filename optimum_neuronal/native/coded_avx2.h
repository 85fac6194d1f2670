/* Kernels for codes of few bits with AVX2: 32 codes are looked up at a time, and 16 columns spread by a byte shuffle.
 * Sums of products of bytes take one instruction where the processor has AVX-VNNI, else three. */

#ifndef AVX_VNNI
#define AVX_VNNI __attribute__((target("avx2,fma,f16c,bmi2,popcnt,avxvnni")))
#endif

/* Of 32 codes in 16 bytes, for each number of bits: which two bytes hold each, as a word, and what moves it to the word's
 * top. The order is that in which two registers of words are packed to one of bytes. */
static uint8_t WINDOWS[5][2][32] __attribute__((aligned(64)));
static uint16_t LIFTS[5][2][16] __attribute__((aligned(64)));

static void __attribute__((constructor)) fill_windows(void)
{
    for (int bits = 2; bits <= 4; bits++)
        for (int code = 0; code < 32; code++) {
            const int which = code >> 3 & 1, lane = (code >> 4) * 8 + (code & 7), at = code * bits;
            WINDOWS[bits][which][2 * lane] = (uint8_t)(at / 8);
            WINDOWS[bits][which][2 * lane + 1] = at / 8 < 15 ? (uint8_t)(at / 8 + 1) : 0x80;
            LIFTS[bits][which][lane] = (uint16_t)(1 << (16 - bits - at % 8));
        }
}

/* What looking codes up takes, held in registers. */
typedef struct {
    __m256i table, windows[2], lifts[2];
    __m128i down;
} Lookup;

AVX2 INLINE Lookup avx2_lookup(const Job *job)
{
    const __m256i *windows = (const __m256i *)WINDOWS[job->value_bits & 7], *lifts = (const __m256i *)LIFTS[job->value_bits & 7];
    Lookup how = {_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)job->table)),
                  {windows[0], windows[1]},
                  {lifts[0], lifts[1]},
                  _mm_cvtsi32_si128(16 - job->value_bits)};
    return how;
}

/* Looks 32 codes up; reads 16 bytes. */
AVX2 INLINE void avx2_levels(const Lookup how, const void *codes, int8_t *to)
{
    const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128(codes));
    __m256i one = _mm256_srl_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(v, how.windows[0]), how.lifts[0]), how.down);
    __m256i two = _mm256_srl_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(v, how.windows[1]), how.lifts[1]), how.down);
    _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(how.table, _mm256_packus_epi16(one, two)));
}

/* The same of codes of 4 bits, in fewer steps. */
AVX2 INLINE void avx2_levels_of_4_bits(__m256i table, const void *codes, int8_t *to)
{
    __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes));
    v = _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16(v, 4)), _mm256_set1_epi8(15));
    _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(table, v));
}

/* Looks up what of the next AHEAD codes there is before `end`. */
AVX2 INLINE void avx2_look_ahead(const Job *job, const uint8_t *codes, const uint8_t *end, int8_t *to)
{
    for (int line = 0; line < AHEAD * job->value_bits / 8; line += 64)
        __builtin_prefetch((const void *)((uintptr_t)codes + 2048 + line));
    if (job->value_bits == 8) {
        memcpy(to, codes, (size_t)(end - codes < AHEAD ? end - codes : AHEAD));
        return;
    }
    const Lookup how = avx2_lookup(job);
    const int step = 4 * job->value_bits; /* bytes of 32 codes */
    const int8_t *stop = to + AHEAD;
    if (job->value_bits == 4)
        for (; to < stop && end - codes >= 16; to += 32, codes += 16)
            avx2_levels_of_4_bits(how.table, codes, to);
    for (; to < stop && end - codes >= 16; to += 32, codes += step)
        avx2_levels(how, codes, to);
    for (; to < stop && codes < end; to += 32, codes += step) {
        uint8_t last[16];
        avx2_levels(how, copy_last(codes, end, 16, last), to);
    }
}

/* Looks the codes of up to AHEAD columns of a row up, those of each word at a multiple of 64; returns what follows them. */
AVX2 INLINE const uint8_t *avx2_look_at_words(const Job *job, const uint8_t *bits, int64_t words, const uint8_t *codes,
                                              const uint8_t *end, int8_t *to)
{
    const Lookup how = avx2_lookup(job);
    const int step = 4 * job->value_bits;
    for (int64_t word = 0; word < words && word < AHEAD / 64; word++, to += 64) {
        __builtin_prefetch((const void *)((uintptr_t)codes + 2048));
        uint8_t last[32];
        const int64_t count = _mm_popcnt_u64(load_word(bits + 8 * word));
        const uint8_t *from = end - codes < 32 ? copy_last(codes, end, 32, last) : codes;
        avx2_levels(how, from, to);
        if (count > 32)
            avx2_levels(how, from + step, to + 32);
        codes += code_bytes(job, count);
    }
    return codes;
}

/* 32 columns' levels, zero where nothing is kept. */
AVX2 INLINE __m256i avx2_spread_levels(uint32_t mask, const int8_t *levels)
{
    /* Rotated rather than shifted: a rotation can go to another register. */
    const char *places = (const char *)PLACES;
    __m256i low = _mm256_castsi128_si256(_mm_load_si128((const __m128i *)(places + ((mask << 4 | mask >> 28) & 0xff0))));
    __m256i high = _mm256_castsi128_si256(_mm_load_si128((const __m128i *)(places + ((mask >> 4 | mask << 28) & 0xff0))));
    low = _mm256_inserti128_si256(low, _mm_load_si128((const __m128i *)(places + ((mask >> 12 | mask << 20) & 0xff0))), 1);
    high = _mm256_inserti128_si256(high, _mm_load_si128((const __m128i *)(places + ((mask >> 20 | mask << 12) & 0xff0))), 1);
    __m256i windows = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)levels));
    levels += _mm_popcnt_u32(mask << 16);
    windows = _mm256_inserti128_si256(windows, _mm_loadu_si128((const __m128i *)levels), 1);
    return _mm256_shuffle_epi8(windows, _mm256_add_epi8(low, _mm256_slli_si256(high, 8)));
}

AVX2 static void avx2_spread(const Job *job, uint64_t mask, const uint8_t *codes, int8_t *dense)
{
    int8_t levels[64 + 16];
    if (job->value_bits == 8)
        memcpy(levels, codes, 64);
    else
        for (int half = 0; half < 2; half++)
            avx2_levels(avx2_lookup(job), codes + half * 4 * job->value_bits, levels + 32 * half);
    _mm256_storeu_si256((__m256i *)dense, avx2_spread_levels((uint32_t)mask, levels));
    _mm256_storeu_si256((__m256i *)(dense + 32),
                        avx2_spread_levels((uint32_t)(mask >> 32), levels + _mm_popcnt_u32((uint32_t)mask)));
}

/* The sums of eight registers' numbers. */
AVX2 INLINE __m256i avx2_whole_sums(const __m256i *v)
{
    __m256i one = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    __m256i two = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(one, two, 0x20), _mm256_permute2x128_si256(one, two, 0x31));
}

/* 32 columns with M rows of x, as floats in blocks of 8 columns, every other one of which is summed apart: additions wait
 * for each other. */
AVX2 INLINE void avx2_add_floats(__m256i levels, const float *x, __m256 sums[][2], const int M)
{
    UNROLL for (int part = 0; part < 4; part++, x += 8 * M) {
        __m128i half = part < 2 ? _mm256_castsi256_si128(levels) : _mm256_extracti128_si256(levels, 1);
        __m256 v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part & 1 ? _mm_srli_si128(half, 8) : half));
        UNROLL for (int m = 0; m < M; m++)
            sums[m][part & 1] = _mm256_fmadd_ps(v, _mm256_load_ps(x + 8 * m), sums[m][part & 1]);
    }
}

/* What a row of x adds to eight groups' sums. */
AVX2 INLINE __m256 avx2_scaled(const __m256i *whole, const uint16_t *scales, const float *x_scales)
{
    __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)scales)), 16);
    __m256 both = _mm256_mul_ps(_mm256_castsi256_ps(wide), _mm256_loadu_ps(x_scales));
    return _mm256_mul_ps(both, _mm256_cvtepi32_ps(avx2_whole_sums(whole)));
}

/* Adds to eight sums four products each, of bytes without a sign and bytes with one. Products of levels fit 15 bits, so that
 * a sum of two fits 16. */
AVX2 INLINE __m256i avx2_dot(__m256i sums, __m256i sizes, __m256i x)
{
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, x), _mm256_set1_epi16(1)));
}

#define TARGET AVX2
#define NAME(what) avx2_##what
#include "coded_avx2_loop.h"
CODED_FUNCTIONS(AVX2, avx2)

#if defined(HAS_AVX_VNNI)
AVX_VNNI INLINE __m256i avx_vnni_dot(__m256i sums, __m256i sizes, __m256i x)
{
    return _mm256_dpbusd_avx_epi32(sums, sizes, x);
}

#define TARGET AVX_VNNI
#define NAME(what) avx_vnni_##what
#include "coded_avx2_loop.h"
CODED_FUNCTIONS(AVX_VNNI, avx_vnni)
#endif
