/* What kernels of quantized weights are given and give back: how codes and rounded inputs lie.
 *
 * An element is scale[row] * step[column] * level. With 2 to 7 bits its level is 2 * code - (2^bits - 1), and codes
 * lie in bit planes. With 8 bits its level is its code, and codes lie row by row.
 *
 * Kernels multiply whole numbers: x and steps are scaled by powers of 2, multiplied, and rounded with a scale for
 * every 64 or 128 columns. Sums of floats are added in one order, so all instruction sets find the same bits. */
#pragma once

#include "common.h"

enum { BLOCK_ROWS = 64, BYTE_BITS = 8 };
/* Inputs that are all smaller, beside the row's largest of about 1, are rounded to 0. */
#define LEAST_INPUT 0x1p-60f

/* A quantized weight. */
typedef struct {
    const void *codes; /* planes or bytes, as `bits` says */
    int bits;
    int64_t rows, columns;
    const uint16_t *scales; /* (rows), bfloat16 */
    const uint16_t *steps;  /* (columns), bfloat16; NULL: all are 1 */
} QuantizedMatrix;

/* Rows of x as whole numbers. Planes: numbers (tiles, count, groups of a tile, 32), tables of sums; scales (tiles,
 * count). Bytes: numbers (count, padded columns); scales (count, groups). */
typedef struct {
    int count; /* rows of x */
    void *numbers;
    float *scales;
} RoundedInputs;

/* Rounds rows of x, floats (count, apart) with zeros behind the columns. */
typedef void (*RoundInputs)(const float *x, int64_t apart, RoundedInputs *to);
/* Computes the products of a block of up to 64 rows with all rows of x, less the weight's scales: sums (count, 64). */
typedef void (*BlockSums)(const QuantizedMatrix *weight, const RoundedInputs *x, int64_t block, float *sums);
/* Writes the elements of a block of up to 64 rows to dense (rows, columns) of a dtype; steps (columns). */
typedef void (*BlockElements)(const QuantizedMatrix *weight, const float *steps, int64_t block, void *dense,
                              int dtype);

/* How one instruction set multiplies and copies weights of one format. */
typedef struct {
    RoundInputs round;
    BlockSums sums;
    BlockElements elements;
} QuantizedKernel;

INLINE int64_t rows_of_block(const QuantizedMatrix *weight, int64_t block) {
    return smaller(BLOCK_ROWS, weight->rows - block * BLOCK_ROWS);
}

/* Returns the bits of the largest magnitude; if a number is infinite or NaN, at least the bits of infinity. */
INLINE uint32_t largest_bits(const float *x, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t size = to_bits(x[i]) & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    return largest;
}

/* Rounds to the nearest whole number, of two to the even one. */
INLINE int nearest_whole(float number) { return (int)(number + 0x1.8p23f - 0x1.8p23f); }

/* Planes, of 2 to 7 bits. Rows lie in blocks of 64, columns in groups of 4, both filled up with zeros:
 *
 *     codes[block][group][bit][i], i < 32: four bits of row 64 * block + i in the low half of the byte, the first
 *                                          column's lowest; of row 64 * block + 32 + i in the high half.
 *
 * A table has all 16 sums of +x and -x of four inputs, low bytes before high ones; a byte shuffle looks up 32 rows at
 * once (T-MAC, arXiv 2407.00088). Four inputs sum to 2047 at most, so that 16 bits hold the sums of a tile of 64. */

enum { PLANE_GROUP = 4, PLANE_TILE = 64, TILE_GROUPS = 16, PLANE_BYTES = 32, LARGEST_SUM = 2045 };

INLINE int64_t tiles_of(const QuantizedMatrix *weight) { return (weight->columns + PLANE_TILE - 1) / PLANE_TILE; }

INLINE int64_t groups_of(const QuantizedMatrix *weight) { return (weight->columns + PLANE_GROUP - 1) / PLANE_GROUP; }

INLINE int groups_of_tile(const QuantizedMatrix *weight, int64_t tile) {
    return (int)smaller(TILE_GROUPS, groups_of(weight) - tile * TILE_GROUPS);
}

/* Where a tile's planes begin, one after the other. */
INLINE const uint8_t *planes_of(const QuantizedMatrix *weight, int64_t block, int64_t tile) {
    const int64_t group = block * groups_of(weight) + tile * TILE_GROUPS;
    return (const uint8_t *)weight->codes + group * weight->bits * PLANE_BYTES;
}

INLINE const uint8_t *tables_of(const RoundedInputs *x, int64_t tile, int m) {
    return (const uint8_t *)x->numbers + (tile * x->count + m) * TILE_GROUPS * PLANE_BYTES;
}

INLINE float tile_scale(const RoundedInputs *x, int64_t tile, int m) { return x->scales[tile * x->count + m]; }

/* Of each sum in a table, whether it has + or - of each of the four inputs. */
static const int16_t SIGN[PLANE_GROUP][16] = {{-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1},
                                              {-1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1},
                                              {-1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1},
                                              {-1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1}};

/* Fills the tables of all rows of x (count, apart), by a function for one tile of x (64) that returns its scale. */
INLINE void fill_tables(const float *x, int64_t apart, RoundedInputs *to,
                        float (*fill_tile)(const float *x, uint8_t *tables)) {
    for (int64_t tile = 0; tile < apart / PLANE_TILE; tile++)
        for (int m = 0; m < to->count; m++)
            to->scales[tile * to->count + m] =
                fill_tile(x + m * apart + tile * PLANE_TILE, (uint8_t *)tables_of(to, tile, m));
}

/* Bytes: codes (rows, columns). Inputs are whole numbers of 8 bits, 128 columns with a scale. The exact sums of these
 * groups times their scales are added in eight lanes, group i to lane i % 8. */

enum { BYTE_GROUP = 128, BYTE_LANES = 8, LARGEST_BYTE = 127 };

/* Columns that inputs are filled up to: whole tiles for planes, whole groups in all lanes else. */
INLINE int64_t padded_columns(const QuantizedMatrix *weight) {
    const int64_t unit = weight->bits == BYTE_BITS ? BYTE_LANES * BYTE_GROUP : PLANE_TILE;
    return (weight->columns + unit - 1) / unit * unit;
}

INLINE const int8_t *bytes_of_row(const QuantizedMatrix *weight, int64_t row) {
    return (const int8_t *)weight->codes + row * weight->columns;
}

INLINE const float *byte_scales(const QuantizedMatrix *weight, const RoundedInputs *x, int m) {
    return x->scales + m * (padded_columns(weight) / BYTE_GROUP);
}

INLINE const int8_t *byte_inputs(const QuantizedMatrix *weight, const RoundedInputs *x, int m) {
    return (const int8_t *)x->numbers + m * padded_columns(weight);
}

/* The codes of 64 columns, in a buffer where fewer are left. */
INLINE const int8_t *whole_codes(const int8_t *codes, const int8_t *stop, int8_t *buffer) {
    return stop - codes < 64 ? copy_last(codes, stop, 64, buffer) : codes;
}

INLINE float sum_lanes(const float *l) { return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7])); }

/* Defines NAME, a BlockSums for bytes, from an inlined NAME_row(weight, inputs, row, m, sums, M), which multiplies a
 * row with M rows of x from row m on, and writes sums 64 apart. */
#define BYTE_SUMS(TARGET, NAME)                                                                                       \
    TARGET static void NAME(const QuantizedMatrix *weight, const RoundedInputs *inputs, int64_t block, float *sums) { \
        for (int64_t i = 0; i < rows_of_block(weight, block); i++, sums++) {                                          \
            const int64_t row = block * BLOCK_ROWS + i;                                                               \
            int m = 0;                                                                                                \
            for (; m + 4 <= inputs->count; m += 4)                                                                    \
                NAME##_row(weight, inputs, row, m, sums + BLOCK_ROWS * m, 4);                                         \
            for (; m + 2 <= inputs->count; m += 2)                                                                    \
                NAME##_row(weight, inputs, row, m, sums + BLOCK_ROWS * m, 2);                                         \
            if (m < inputs->count)                                                                                    \
                NAME##_row(weight, inputs, row, m, sums + BLOCK_ROWS * m, 1);                                         \
        }                                                                                                             \
    }
