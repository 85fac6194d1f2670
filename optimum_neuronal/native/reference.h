/* The kernels in plain C, for any processor. Sparse products are added in an order of each instruction set's own,
 * quantized ones are the same bit for bit in all. */
#pragma once

#include "quantized_job.h"
#include "sparse_job.h"

/* Spreads the values of 64 columns, whose kept ones begin at `p`, to dense (64) floats. Returns where the next ones
 * begin. */
INLINE const void *spread(uint64_t mask, const void *p, int dtype, float *dense) {
    memset(dense, 0, 64 * sizeof(float));
    int64_t used = 0;
    for (; mask; mask &= mask - 1)
        dense[__builtin_ctzll(mask)] = load_number(p, used++, dtype);
    return (const char *)p + used * size_of(dtype);
}

/* Multiplies one row of a sparse weight (rows, columns) with x (M, columns), which lies in blocks of 64 columns: sums
 * (M). Every 16th column is added to the same of 16 sums, as compilers make vectors of them. R is 1. */
INLINE void portable_step(const SparseJob *job, int64_t row, int64_t apart, float *sums, const int R, const int M,
                          const int careful, const int dtype) {
    float parts[MOST_ROWS][16] = {{0}}, dense[64];
    const uint8_t *bits = job->bits + row * job->stride;
    const void *p = (const char *)job->values + job->offsets[row] * size_of(dtype);
    const float *x = job->x;
    (void)R, (void)apart, (void)careful;
    for (int64_t byte = 0; byte < job->stride; byte += 8, x += 64 * M) {
        p = spread(load_word(bits + byte), p, dtype, dense);
        for (int m = 0; m < M; m++)
            for (int block = 0; block < 64; block += 16)
                for (int i = 0; i < 16; i++)
                    parts[m][i] += dense[block + i] * x[64 * m + block + i];
    }
    for (int m = 0; m < M; m++) {
        sums[m] = 0;
        for (int i = 0; i < 16; i++)
            sums[m] += parts[m][i];
    }
}
SPARSE_KERNEL(, portable_bf16, portable_step, BF16, 1, 1, 1, 1)
SPARSE_KERNEL(, portable_fp16, portable_step, FP16, 1, 1, 1, 1)
SPARSE_KERNEL(, portable_fp32, portable_step, FP32, 1, 1, 1, 1)

/* Writes 64 dense columns, whose elements have `size` bytes. */
INLINE void portable_unpack_word(uint64_t mask, const void *p, void *out, const int size) {
    memset(out, 0, (size_t)(64 * size));
    for (const char *from = p; mask; mask &= mask - 1, from += size)
        memcpy((char *)out + __builtin_ctzll(mask) * size, from, (size_t)size);
}
#define PORTABLE_WORD(mask, p, end, out, careful) portable_unpack_word(mask, p, out, sizeof(*p))

UNPACK_ROW(, portable_unpack2, uint16_t, PORTABLE_WORD)
UNPACK_ROW(, portable_unpack4, uint32_t, PORTABLE_WORD)

/* Rounds x (64), a tile of inputs, to whole numbers and writes their tables (16 groups, 32 bytes).
 * Returns the scale. */
static float portable_fill_tile(const float *x, uint8_t *tables) {
    float largest = 0;
    for (int group = 0; group < TILE_GROUPS; group++) {
        const float *four = x + PLANE_GROUP * group;
        const float sum = (__builtin_fabsf(four[0]) + __builtin_fabsf(four[1])) +
                          (__builtin_fabsf(four[2]) + __builtin_fabsf(four[3]));
        largest = sum > largest ? sum : largest;
    }
    const float inverse = largest >= LEAST_INPUT ? LARGEST_SUM / largest : 0;
    int16_t whole[PLANE_TILE];
    for (int i = 0; i < PLANE_TILE; i++)
        whole[i] = (int16_t)nearest_whole(x[i] * inverse);
    for (int group = 0; group < TILE_GROUPS; group++, tables += PLANE_BYTES) {
        const int16_t *four = whole + PLANE_GROUP * group;
        for (int i = 0; i < 16; i++) {
            const int16_t sum =
                (int16_t)(four[0] * SIGN[0][i] + four[1] * SIGN[1][i] + four[2] * SIGN[2][i] + four[3] * SIGN[3][i]);
            tables[i] = (uint8_t)sum;
            tables[i + 16] = (uint8_t)(sum >> 8);
        }
    }
    return largest >= LEAST_INPUT ? largest / LARGEST_SUM : 0;
}

static void portable_fill_tables(const float *x, int64_t apart, RoundedInputs *to) {
    fill_tables(x, apart, to, portable_fill_tile);
}

/* Multiplies up to 64 rows of planes with x: sums (rows of x, 64). */
static void portable_planes(const QuantizedMatrix *weight, const RoundedInputs *x, int64_t block, float *sums) {
    memset(sums, 0, sizeof(float) * (size_t)(BLOCK_ROWS * x->count));
    for (int64_t tile = 0; tile < tiles_of(weight); tile++)
        for (int m = 0; m < x->count; m++) {
            const uint8_t *planes = planes_of(weight, block, tile), *table = tables_of(x, tile, m);
            int32_t found[BLOCK_ROWS] = {0};
            for (int group = 0; group < groups_of_tile(weight, tile); group++, table += PLANE_BYTES)
                for (int bit = 0; bit < weight->bits; bit++, planes += PLANE_BYTES)
                    for (int row = 0; row < BLOCK_ROWS; row++) {
                        const int which = row < 32 ? planes[row] & 15 : planes[row - 32] >> 4;
                        found[row] += (int16_t)(table[which] | table[which + 16] << 8) * (1 << bit);
                    }
            for (int row = 0; row < BLOCK_ROWS; row++)
                sums[BLOCK_ROWS * m + row] += tile_scale(x, tile, m) * (float)found[row];
        }
}

/* Decodes one tile of planes: codes (64 rows, 64 columns). */
INLINE void decode_tile(const uint8_t *planes, int groups, int bits, int8_t codes[BLOCK_ROWS][PLANE_TILE]) {
    for (int group = 0; group < groups; group++) {
        uint32_t fours[BLOCK_ROWS] = {0};
        for (int bit = 0; bit < bits; bit++, planes += PLANE_BYTES)
            for (int i = 0; i < PLANE_BYTES; i++) { /* four bits to four bytes */
                fours[i] |= ((planes[i] & 15u) * 0x204081u & 0x1010101u) << bit;
                fours[i + 32] |= ((planes[i] >> 4) * 0x204081u & 0x1010101u) << bit;
            }
        for (int row = 0; row < BLOCK_ROWS; row++)
            memcpy(codes[row] + PLANE_GROUP * group, &fours[row], 4);
    }
}

/* Writes elements of one row from column `first` on, whose levels are factor * code - offset: codes (count), steps
 * (columns). No -0 of a scale of 0. To bfloat16 without a look for NaN, so that compilers make vectors of the loop. */
INLINE void write_row(const QuantizedMatrix *weight, int64_t row, int64_t first, const int8_t *codes, int64_t count,
                      const int factor, const int offset, const float *steps, void *dense, int dtype) {
    const float scale = from_bf16(weight->scales[row]);
    const int64_t at = row * weight->columns + first;
    steps += first;
    for (int64_t i = 0; i < count && dtype == BF16; i++) {
        const uint32_t element = to_bits((float)(factor * codes[i] - offset) * (scale * steps[i]) + 0.0f);
        ((uint16_t *)dense)[at + i] = (uint16_t)((element + 0x7fff + (element >> 16 & 1)) >> 16);
    }
    for (int64_t i = 0; i < count && dtype != BF16; i++)
        store_number(dense, at + i, dtype, (float)(factor * codes[i] - offset) * (scale * steps[i]) + 0.0f);
}

/* Writes the elements of one tile, of codes (64 rows, 64 columns). */
INLINE void write_tile(const QuantizedMatrix *weight, const float *steps, int64_t block, int64_t tile,
                       int8_t codes[BLOCK_ROWS][PLANE_TILE], void *dense, int dtype) {
    const int64_t first = tile * PLANE_TILE, here = smaller(PLANE_TILE, weight->columns - first);
    for (int64_t i = 0; i < rows_of_block(weight, block); i++)
        write_row(weight, block * BLOCK_ROWS + i, first, codes[i], here, 2, (1 << weight->bits) - 1, steps, dense,
                  dtype);
}

/* Writes the elements of up to 64 rows of planes to dense (rows, columns); steps (columns). */
static void portable_plane_elements(const QuantizedMatrix *weight, const float *steps, int64_t block, void *dense,
                                    int dtype) {
    for (int64_t tile = 0; tile < tiles_of(weight); tile++) {
        int8_t codes[BLOCK_ROWS][PLANE_TILE];
        decode_tile(planes_of(weight, block, tile), groups_of_tile(weight, tile), weight->bits, codes);
        write_tile(weight, steps, block, tile, codes, dense, dtype);
    }
}

/* Rounds rows of x (count, apart) to whole numbers of 8 bits (count, apart), with a scale for every 128. */
INLINE void portable_round_bytes(const float *x, int64_t apart, RoundedInputs *to) {
    int8_t *whole = to->numbers;
    for (int64_t group = 0; group < to->count * apart / BYTE_GROUP; group++, x += BYTE_GROUP, whole += BYTE_GROUP) {
        const float largest = from_bits(largest_bits(x, BYTE_GROUP));
        const float inverse = largest >= LEAST_INPUT ? LARGEST_BYTE / largest : 0;
        for (int i = 0; i < BYTE_GROUP; i++)
            whole[i] = (int8_t)nearest_whole(x[i] * inverse);
        to->scales[group] = largest >= LEAST_INPUT ? largest / LARGEST_BYTE : 0;
    }
}

/* Multiplies up to 64 rows of bytes with x: sums (rows of x, 64). */
static void portable_bytes(const QuantizedMatrix *weight, const RoundedInputs *x, int64_t block, float *sums) {
    for (int64_t i = 0; i < rows_of_block(weight, block); i++)
        for (int m = 0; m < x->count; m++) {
            const int8_t *codes = bytes_of_row(weight, block * BLOCK_ROWS + i), *whole = byte_inputs(weight, x, m);
            float lanes[BYTE_LANES] = {0};
            for (int64_t first = 0; first < weight->columns; first += BYTE_GROUP) {
                int32_t sum = 0;
                for (int64_t j = first; j < smaller(first + BYTE_GROUP, weight->columns); j++)
                    sum += codes[j] * whole[j];
                const int64_t group = first / BYTE_GROUP;
                lanes[group % BYTE_LANES] += byte_scales(weight, x, m)[group] * (float)sum;
            }
            sums[BLOCK_ROWS * m + i] = sum_lanes(lanes);
        }
}

/* Writes the elements of up to 64 rows of bytes to dense (rows, columns); steps (columns). */
INLINE void portable_byte_elements(const QuantizedMatrix *weight, const float *steps, int64_t block, void *dense,
                                   int dtype) {
    for (int64_t i = 0; i < rows_of_block(weight, block); i++) {
        const int64_t row = block * BLOCK_ROWS + i;
        write_row(weight, row, 0, bytes_of_row(weight, row), weight->columns, 1, 0, steps, dense, dtype);
    }
}
