/* Kernels for bit planes with AVX2: a byte shuffle looks up 32 rows. */
#pragma once

#include "../reference.h"
#include "avx2.h"

/* As portable_fill_tile. */
AVX2 static float avx2_fill_tile(const float *x, uint8_t *tables) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 most = _mm256_setzero_ps(), pairs[4];
    for (int i = 0; i < PLANE_TILE; i += 32) {
        EACH(j, 2) {
            const __m256 one = _mm256_loadu_ps(x + i + 16 * j), two = _mm256_loadu_ps(x + i + 16 * j + 8);
            pairs[j] = _mm256_hadd_ps(_mm256_and_ps(one, magnitude), _mm256_and_ps(two, magnitude));
        }
        most = _mm256_max_ps(most, _mm256_hadd_ps(pairs[0], pairs[1]));
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    const float largest = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    const __m256 inverse = _mm256_set1_ps(largest >= LEAST_INPUT ? LARGEST_SUM / largest : 0);
    int16_t whole[PLANE_TILE];
    for (int i = 0; i < PLANE_TILE; i += 16) {
        const __m256i one = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
        const __m256i two = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), inverse));
        _mm256_storeu_si256((__m256i *)(whole + i), _mm256_permute4x64_epi64(_mm256_packs_epi32(one, two), 0xd8));
    }
    /* Low bytes of eight sums, then high ones. */
    const __m256i apart =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    for (int group = 0; group < TILE_GROUPS; group++) {
        int64_t inputs;
        memcpy(&inputs, whole + PLANE_GROUP * group, 8);
        const __m256i all = _mm256_set1_epi64x(inputs);
        __m256i sums = _mm256_setzero_si256();
        EACH(i, PLANE_GROUP) {
            const __m256i input = _mm256_shuffle_epi8(all, _mm256_set1_epi16((short)(2 * i | (2 * i + 1) << 8)));
            sums = _mm256_add_epi16(sums, _mm256_sign_epi16(input, _mm256_loadu_si256((const __m256i *)SIGN[i])));
        }
        _mm256_store_si256((__m256i *)(tables + PLANE_BYTES * group),
                           _mm256_permute4x64_epi64(_mm256_shuffle_epi8(sums, apart), 0xd8));
    }
    return largest >= LEAST_INPUT ? largest / LARGEST_SUM : 0;
}

AVX2 static void avx2_fill_tables(const float *x, int64_t apart, RoundedInputs *to) {
    fill_tables(x, apart, to, avx2_fill_tile);
}

/* Adds what a tile's tables say of one bit, or of two, to 64 sums of 16 bits each: in each register rows 0 to 7 and 16
 * to 23 of 32, or 8 to 15 and 24 to 31. */
AVX2 INLINE void avx2_plane(const uint8_t *planes, int apart, const uint8_t *lookup, int groups, const int bits,
                            __m256i sums[2][4]) {
    const __m256i four_bits = _mm256_set1_epi8(15);
    for (int bit = 0; bit < 2; bit++)
        for (int i = 0; i < 4; i++)
            sums[bit][i] = _mm256_setzero_si256();

    TWICE
    for (int group = 0; group < groups; group++, planes += apart, lookup += PLANE_BYTES) {
        const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)lookup));
        const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(lookup + 16)));
        EACH(bit, bits) {
            const __m256i both = _mm256_loadu_si256((const __m256i *)(planes + PLANE_BYTES * bit));
            EACH(half, 2) {
                const __m256i which = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, four_bits);
                const __m256i lows = _mm256_shuffle_epi8(low, which), highs = _mm256_shuffle_epi8(high, which);
                __m256i *two = sums[bit] + 2 * half;
                two[0] = _mm256_add_epi16(two[0], _mm256_unpacklo_epi8(lows, highs));
                two[1] = _mm256_add_epi16(two[1], _mm256_unpackhi_epi8(lows, highs));
            }
        }
    }
}

/* One tile's sums of 32 bits, eight in each register. */
AVX2 INLINE void avx2_tile(const uint8_t *planes, const uint8_t *lookup, int groups, int bits, __m256i *found) {
    for (int i = 0; i < 8; i++)
        found[i] = _mm256_setzero_si256();
    const int together = bits < 4 ? 2 : 1; /* planes at a time, as measured */
    for (int bit = 0; bit < bits; bit += together) {
        const int some = bits - bit < together ? 1 : together;
        __m256i sums[2][4];
        if (groups == TILE_GROUPS)
            avx2_plane(planes + bit * PLANE_BYTES, bits * PLANE_BYTES, lookup, TILE_GROUPS, some, sums);
        else
            avx2_plane(planes + bit * PLANE_BYTES, bits * PLANE_BYTES, lookup, groups, some, sums);
        const __m256i places = _mm256_set1_epi32(1 << bit | 2 << bit << 16);
        EACH(i, 4) {
            found[2 * i] = _mm256_add_epi32(found[2 * i],
                                            _mm256_madd_epi16(_mm256_unpacklo_epi16(sums[0][i], sums[1][i]), places));
            found[2 * i + 1] = _mm256_add_epi32(
                found[2 * i + 1], _mm256_madd_epi16(_mm256_unpackhi_epi16(sums[0][i], sums[1][i]), places));
        }
    }
}

AVX2 INLINE void avx2_block(const QuantizedMatrix *weight, const RoundedInputs *x, int64_t block, const int bits,
                            float *sums) {
    __m256 totals[MOST_ROWS][8];
    for (int m = 0; m < x->count; m++)
        for (int i = 0; i < 8; i++)
            totals[m][i] = _mm256_setzero_ps();
    for (int64_t tile = 0; tile < tiles_of(weight); tile++) {
        const uint8_t *planes = planes_of(weight, block, tile);
        for (int m = 0; m < x->count; m++) {
            __m256i found[8];
            avx2_tile(planes, tables_of(x, tile, m), groups_of_tile(weight, tile), bits, found);
            const __m256 scale = _mm256_set1_ps(tile_scale(x, tile, m));
            EACH(i, 8)
                totals[m][i] = _mm256_add_ps(totals[m][i], _mm256_mul_ps(scale, _mm256_cvtepi32_ps(found[i])));
        }
    }
    for (int m = 0; m < x->count; m++)
        for (int i = 0; i < 8; i++) {
            float eight[8]; /* of register i, see avx2_plane: four rows, and the four 16 rows further */
            _mm256_storeu_ps(eight, totals[m][i]);
            memcpy(sums + BLOCK_ROWS * m + i / 4 * 32 + i % 4 * 4, eight, 16);
            memcpy(sums + BLOCK_ROWS * m + i / 4 * 32 + i % 4 * 4 + 16, eight + 4, 16);
        }
}

AVX2 static void avx2_planes(const QuantizedMatrix *weight, const RoundedInputs *x, int64_t block, float *sums) {
    switch (weight->bits) { /* so that compilers know the number */
    case 2: avx2_block(weight, x, block, 2, sums); break;
    case 3: avx2_block(weight, x, block, 3, sums); break;
    case 4: avx2_block(weight, x, block, 4, sums); break;
    default: avx2_block(weight, x, block, weight->bits, sums);
    }
}

/* Of a whole tile and of each bit and 16 columns: the four bytes that rows i and 32 + i share. */
typedef uint32_t SharedBytes[BYTE_BITS - 1][4][PLANE_BYTES];

AVX2 INLINE void avx2_share_bytes(const uint8_t *planes, int bits, SharedBytes shared) {
    for (int bit = 0; bit < bits; bit++)
        for (int quarter = 0; quarter < 4; quarter++) {
            __m256i group[4], pairs[4];
            EACH(i, 4)
                group[i] =
                    _mm256_loadu_si256((const __m256i *)(planes + ((4 * quarter + i) * bits + bit) * PLANE_BYTES));
            EACH(i, 2) {
                pairs[i] = _mm256_unpacklo_epi8(group[2 * i], group[2 * i + 1]);
                pairs[2 + i] = _mm256_unpackhi_epi8(group[2 * i], group[2 * i + 1]);
            }
            EACH(i, 4) { /* rows 4 i to 4 i + 3, and the four 16 rows further */
                const __m256i fours = i % 2 ? _mm256_unpackhi_epi16(pairs[i / 2 * 2], pairs[i / 2 * 2 + 1])
                                            : _mm256_unpacklo_epi16(pairs[i / 2 * 2], pairs[i / 2 * 2 + 1]);
                uint32_t *to = shared[bit][quarter] + 4 * i;
                _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(fours));
                _mm_storeu_si128((__m128i *)(to + 16), _mm256_extracti128_si256(fours, 1));
            }
        }
}

/* The codes of 16 columns: of row i, and of row 32 + i in the other half. */
AVX2 INLINE __m256i avx2_codes(SharedBytes shared, const int bits, int quarter, int i) {
    const __m256i spread = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    const __m256i places = _mm256_setr_epi32(0x8040201, 0x8040201, 0x8040201, 0x8040201, (int)0x80402010,
                                             (int)0x80402010, (int)0x80402010, (int)0x80402010);
    __m256i codes = _mm256_setzero_si256();
    EACH(bit, bits) {
        const __m256i four = _mm256_set1_epi32((int)shared[bits - 1 - bit][quarter][i]);
        const __m256i one = _mm256_and_si256(_mm256_shuffle_epi8(four, spread), places);
        codes = _mm256_sub_epi8(_mm256_add_epi8(codes, codes), _mm256_cmpeq_epi8(one, places));
    }
    return codes;
}

/* As write_tile, of a whole tile, up to 4 bits and without steps: a shuffle finds each byte of an element in elements
 * (32, 2 bytes, 2 rows, 16 codes) of rows i and 32 + i. */
AVX2 INLINE void avx2_look_up_tile(SharedBytes shared, const int bits, int8_t (*elements)[64], int64_t rows,
                                   int64_t columns, char *dense) {
    for (int i = 0; i < smaller(rows, PLANE_BYTES); i++) {
        const __m256i low = _mm256_loadu_si256((const __m256i *)elements[i]),
                      high = _mm256_loadu_si256((const __m256i *)(elements[i] + 32));
        EACH(quarter, 4) {
            const __m256i codes = avx2_codes(shared, bits, quarter, i);
            const __m256i lows = _mm256_shuffle_epi8(low, codes), highs = _mm256_shuffle_epi8(high, codes);
            const __m256i first = _mm256_unpacklo_epi8(lows, highs), last = _mm256_unpackhi_epi8(lows, highs);
            char *to = dense + 2 * (i * columns + 16 * quarter);
            _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(first, last, 0x20));
            if (i + PLANE_BYTES < rows)
                _mm256_storeu_si256((__m256i *)(to + 2 * PLANE_BYTES * columns),
                                    _mm256_permute2x128_si256(first, last, 0x31));
        }
    }
}

AVX2 INLINE void avx2_elements(const QuantizedMatrix *weight, const float *steps, int64_t block, void *dense,
                               int dtype, const int bits) {
    const int64_t rows = rows_of_block(weight, block);
    const int looked_up = bits <= 4 && dtype != FP32 && !weight->steps;
    int8_t elements[PLANE_BYTES][64] = {{0}};
    for (int64_t i = 0; looked_up && i < rows; i++)
        for (int code = 0; code < 1 << bits; code++) {
            const float scale = from_bf16(weight->scales[block * BLOCK_ROWS + i]);
            uint16_t element;
            store_number(&element, 0, dtype, (float)(2 * code - (1 << bits) + 1) * scale + 0.0f);
            elements[i % 32][i / 32 * 16 + code] = (int8_t)element;
            elements[i % 32][i / 32 * 16 + code + 32] = (int8_t)(element >> 8);
        }
    for (int64_t tile = 0; tile < tiles_of(weight); tile++) {
        const uint8_t *planes = planes_of(weight, block, tile);
        const int groups = groups_of_tile(weight, tile);
        const int64_t first = tile * PLANE_TILE;
        int8_t codes[BLOCK_ROWS][PLANE_TILE];
        SharedBytes shared;
        if (first + PLANE_TILE > weight->columns) {
            decode_tile(planes, groups, bits, codes);
            write_tile(weight, steps, block, tile, codes, dense, dtype);
            continue;
        }
        avx2_share_bytes(planes, bits, shared);
        if (looked_up) {
            avx2_look_up_tile(shared, bits, elements, rows, weight->columns,
                              (char *)dense + 2 * (block * BLOCK_ROWS * weight->columns + first));
            continue;
        }
        for (int i = 0; i < PLANE_BYTES; i++)
            EACH(quarter, 4) {
                const __m256i both = avx2_codes(shared, bits, quarter, i);
                _mm_storeu_si128((__m128i *)(codes[i] + 16 * quarter), _mm256_castsi256_si128(both));
                _mm_storeu_si128((__m128i *)(codes[i + PLANE_BYTES] + 16 * quarter),
                                 _mm256_extracti128_si256(both, 1));
            }
        write_tile(weight, steps, block, tile, codes, dense, dtype);
    }
}

AVX2 static void avx2_plane_elements(const QuantizedMatrix *weight, const float *steps, int64_t block, void *dense,
                                     int dtype) {
    switch (weight->bits) { /* so that compilers know the number */
    case 2: avx2_elements(weight, steps, block, dense, dtype, 2); break;
    case 3: avx2_elements(weight, steps, block, dense, dtype, 3); break;
    case 4: avx2_elements(weight, steps, block, dense, dtype, 4); break;
    default: avx2_elements(weight, steps, block, dense, dtype, weight->bits);
    }
}
