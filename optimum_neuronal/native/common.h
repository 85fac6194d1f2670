/* What all kernels share: the job they are given, loads of words, and conversions of half-precision numbers. */
#ifndef NEURONAL_COMMON_H
#define NEURONAL_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BF16 = 0, FP16 = 1, FP32 = 2, DTYPES = 3 };

/* Rows whose values end at least so many of them before the buffer does are read in whole vectors; the last few rows
 * are read with care. */
#define SLACK 64
#define MOST_ROWS 8    /* of x in one call */
#define CHUNK_ROWS 256 /* of the weight, at most, that a thread takes at a time */
#define INLINE static inline __attribute__((always_inline))

/* One product, as kernels see it. */
typedef struct {
    const uint8_t *bits;    /* row r begins at r * stride; stride is a multiple of 8, bits behind `columns` are 0 */
    const void *values;     /* kept values, row by row */
    const int64_t *offsets; /* rows + 1 */
    int64_t kept;           /* values that may be read */
    int64_t stride;         /* bytes */
    const void *x;          /* as `Kernel.block` tells, zeros behind `columns` */
} Job;

/* Computes rows first to last - 1 for all rows of x: sums[(row - first) * M + m]. */
typedef void (*Rows)(const Job *job, int64_t first, int64_t last, float *sums);
/* Writes one dense row; values lie from `p` on, and may be read up to `end`. */
typedef void (*UnpackRow)(const uint8_t *bits, int64_t columns, const void *p, const void *end, void *out);

enum { COUNTS = 5 };
static const int COUNT[COUNTS] = {1, 2, 4, 6, 8}; /* numbers of rows of x that kernels are compiled for; 8 only for halves */

/* x is given to a kernel in blocks of `block` columns, in each of them all rows of x one after the other. `split`: the
 * block's even columns come before its odd ones. `half`: x stays in 16 bits; else it is float. */
typedef struct {
    int block, split, half;
    Rows rows[COUNTS];
} Kernel;

/* Defines NAME_1 to NAME_6, a function for each of COUNT but 8, from an inlined NAME_step(job, row, apart, sums, R, M, careful),
 * which computes R rows of the weight; R1 to R6 are as many as registers allow.
 *
 * R rows at a time share every load of x. They are not neighbours but `apart` rows from each other, so that each of the
 * R streams of values goes on without a gap: prefetching then reaches across the ends of rows, in software and in
 * hardware. With neighbours, rows of 2048 columns took half as long again. */
#define FUNCTION(TARGET, NAME, R, M)                                                                        \
    TARGET static void NAME##_##M(const Job *job, int64_t row, int64_t last, float *sums)                   \
    {                                                                                                       \
        const int64_t apart = (last - row) / R, end = row + apart, *offsets = job->offsets;                 \
        for (; row < end && offsets[row + (R - 1) * apart + 1] + SLACK <= job->kept; row++, sums += M)      \
            NAME##_step(job, row, apart, sums, R, M, 0);                                                    \
        for (; row < end; row++, sums += M)                                                                 \
            for (int r = 0; r < R; r++)                                                                     \
                NAME##_step(job, row + r * apart, 0, sums + r * apart * M, 1, M, 1);                        \
        for (row += (R - 1) * apart, sums += (R - 1) * apart * M; row < last; row++, sums += M)             \
            NAME##_step(job, row, 0, sums, 1, M, 1);                                                        \
    }
#define FUNCTIONS(TARGET, NAME, R1, R2, R4, R6) \
    FUNCTION(TARGET, NAME, R1, 1)               \
    FUNCTION(TARGET, NAME, R2, 2)               \
    FUNCTION(TARGET, NAME, R4, 4)               \
    FUNCTION(TARGET, NAME, R6, 6)
#define ROWS_OF(NAME) {NAME##_1, NAME##_2, NAME##_4, NAME##_6}

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* Fetches what a stream of values and one of bits will need some hundred nanoseconds from now; may point anywhere. */
INLINE void prefetch(const void *values, const uint8_t *bits)
{
    __builtin_prefetch((const void *)((uintptr_t)values + 2048));
    __builtin_prefetch((const void *)((uintptr_t)bits + 512));
}

INLINE uint64_t load_word(const uint8_t *bits)
{
    uint64_t word;
    memcpy(&word, bits, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* The bits of up to 64 columns, reading no byte behind the last that holds one. */
INLINE uint64_t load_columns(const uint8_t *bits, int64_t columns)
{
    if (columns >= 64)
        return load_word(bits);
    uint8_t bytes[8] = {0};
    memcpy(bytes, bits, (size_t)(columns + 7) / 8);
    uint64_t word = load_word(bytes);
    return columns ? word & (~0ULL >> (64 - columns)) : 0;
}

INLINE float from_bits(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint32_t to_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

INLINE float from_bf16(uint16_t h)
{
    return from_bits((uint32_t)h << 16);
}

INLINE uint16_t to_bf16(float number)
{
    uint32_t bits = to_bits(number);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40); /* NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float from_fp16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 0)
        return from_bits(to_bits((float)fraction * 0x1p-24f) | sign);
    return from_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

INLINE uint16_t to_fp16(float number)
{
    uint32_t bits = to_bits(number), size = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (size > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff)); /* NaN */
    if (size >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (size < 0x38800000)
        return (uint16_t)(sign | (to_bits(from_bits(size) + 0.5f) - 0x3f000000)); /* subnormal: 0.5 has ulp 2^-24 */
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

INLINE float load_number(const void *numbers, int64_t index, int dtype)
{
    if (dtype == FP32)
        return ((const float *)numbers)[index];
    uint16_t h = ((const uint16_t *)numbers)[index];
    return dtype == BF16 ? from_bf16(h) : from_fp16(h);
}

INLINE void store_number(void *numbers, int64_t index, int dtype, float number)
{
    if (dtype == FP32)
        ((float *)numbers)[index] = number;
    else
        ((uint16_t *)numbers)[index] = dtype == BF16 ? to_bf16(number) : to_fp16(number);
}

/* The values of up to `most` columns from `p` on, in a buffer of 16 or 32 bytes, where fewer may be left. */
INLINE const void *copy_last(const void *p, const void *end, size_t most, void *buffer)
{
    size_t left = (size_t)((const char *)end - (const char *)p);
    memset(buffer, 0, most);
    memcpy(buffer, p, left < most ? left : most);
    return buffer;
}

/* Defines a function that writes one dense row, from one that writes 64 columns. */
#define UNPACK(TARGET, NAME, TYPE, WORD, POPCOUNT)                                                                   \
    TARGET static void NAME(const uint8_t *bits, int64_t columns, const void *values, const void *end, void *dense)  \
    {                                                                                                                \
        const TYPE *p = values, *stop = end;                                                                         \
        TYPE *out = dense, last[64];                                                                                 \
        int64_t column = 0;                                                                                          \
        for (; column + 64 <= columns && stop - p >= 64 + SLACK; column += 64) {                                     \
            uint64_t mask = load_word(bits + column / 8);                                                            \
            prefetch(p, bits + column / 8);                                                                          \
            WORD(mask, p, stop, out + column, 0);                                                                    \
            p += POPCOUNT(mask);                                                                                     \
        }                                                                                                            \
        for (; column < columns; column += 64) {                                                                     \
            const int64_t here = columns - column < 64 ? columns - column : 64;                                      \
            uint64_t mask = load_columns(bits + column / 8, here);                                                   \
            WORD(mask, p, stop, last, 1);                                                                            \
            memcpy(out + column, last, (size_t)here * sizeof(TYPE));                                                 \
            p += POPCOUNT(mask);                                                                                     \
        }                                                                                                            \
    }

#endif
