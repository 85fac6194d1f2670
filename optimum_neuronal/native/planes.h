/* Kernels for codes of 2 to 7 bits in bit planes, and those in plain C.
 *
 * Rows lie in blocks of 64, columns in groups of 4, both filled up with zeros:
 *
 *     codes[block][group][bit][i]: of row 64 * block + i the four bits of that place in the low half of the byte, the first
 *                                  column's lowest; of row 64 * block + 32 + i in the high half. i < 32.
 *
 * So one load holds what 64 rows have for four inputs and one bit. Of these inputs a table has all 16 sums of +x and -x, and a
 * byte shuffle looks up 32 rows of it at once (T-MAC, arXiv 2407.00088). Inputs are whole numbers, in tiles of 64 columns with
 * a scale: four of them sum to 2047 at most, so that 16 bits hold the sums of a tile. */

enum { PLANE_GROUP = 4, PLANE_TILE = 64, TILE_GROUPS = 16, PLANE_BYTES = 32, LARGEST_SUM = 2045 };

/* A job's `lookup` is [tile][row of x][group][32], low bytes of 16 sums, then high ones; its `x_scales` [tile][row of x]. */
INLINE int64_t tiles_of(const QuantizedJob *job)
{
    return (job->columns + PLANE_TILE - 1) / PLANE_TILE;
}

/* Columns that inputs are filled up to: whole tiles. */
INLINE int64_t padded_planes(int64_t columns)
{
    return (columns + PLANE_TILE - 1) / PLANE_TILE * PLANE_TILE;
}

INLINE int groups_of_tile(const QuantizedJob *job, int64_t tile)
{
    const int64_t left = (job->columns + PLANE_GROUP - 1) / PLANE_GROUP - tile * TILE_GROUPS;
    return left < TILE_GROUPS ? (int)left : TILE_GROUPS;
}

INLINE const uint8_t *planes_of_block(const QuantizedJob *job, int64_t block)
{
    return job->codes + block * ((job->columns + PLANE_GROUP - 1) / PLANE_GROUP) * job->bits * PLANE_BYTES;
}

/* Of each sum in a table, whether it has + or - of each of the four inputs. */
static const int16_t SIGN[PLANE_GROUP][16] = {{-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1},
                                              {-1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1},
                                              {-1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1},
                                              {-1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1}};

/* Fills the tables of one tile of 64 inputs, and returns the scale of their sums. */
INLINE float fill_tile(const float *x, uint8_t *lookup)
{
    float largest = 0;
    for (int group = 0; group < TILE_GROUPS; group++) {
        const float *four = x + PLANE_GROUP * group;
        const float sum = (__builtin_fabsf(four[0]) + __builtin_fabsf(four[1])) + (__builtin_fabsf(four[2]) + __builtin_fabsf(four[3]));
        largest = sum > largest ? sum : largest;
    }
    const int counts = largest >= 0x1p-60f; /* beside the largest input, of about 1 */
    const float inverse = counts ? LARGEST_SUM / largest : 0;
    int16_t whole[PLANE_TILE];
    for (int i = 0; i < PLANE_TILE; i++)
        whole[i] = (int16_t)(x[i] * inverse + 0x1.8p23f - 0x1.8p23f); /* to the nearest, of two to the even one */
    for (int group = 0; group < TILE_GROUPS; group++) {
        const int16_t *four = whole + PLANE_GROUP * group;
        uint8_t *low = lookup + PLANE_BYTES * group, *high = low + 16;
        for (int i = 0; i < 16; i++) {
            const int16_t sum = (int16_t)(four[0] * SIGN[0][i] + four[1] * SIGN[1][i] + four[2] * SIGN[2][i] + four[3] * SIGN[3][i]);
            low[i] = (uint8_t)sum;
            high[i] = (uint8_t)(sum >> 8);
        }
    }
    return counts ? largest / LARGEST_SUM : 0;
}

/* Defines a RoundInputs from a function like fill_tile. */
#define FILL_TABLES(TARGET, NAME, TILE)                                                                        \
    TARGET static void NAME(const float *x, int64_t apart, int taken, void *rounded, float *x_scales)    \
    {                                                                                                    \
        const int64_t tiles = apart / PLANE_TILE;                                                        \
        for (int64_t at = 0; at < tiles * taken; at++)                                                   \
            x_scales[at] = TILE(x + at % taken * apart + at / taken * PLANE_TILE,                        \
                                (uint8_t *)rounded + at * TILE_GROUPS * PLANE_BYTES);                    \
    }

/* Writes four bytes, the lowest first. */
INLINE void put_four(uint8_t *to, uint32_t four)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    four = __builtin_bswap32(four);
#endif
    memcpy(to, &four, 4);
}

/* Decodes one tile: codes[row][column]. */
INLINE void decode_tile(const uint8_t *planes, int groups, int bits, uint8_t codes[BLOCK_ROWS][PLANE_TILE])
{
    for (int group = 0; group < groups; group++) {
        uint32_t fours[BLOCK_ROWS] = {0};
        for (int bit = 0; bit < bits; bit++, planes += PLANE_BYTES)
            for (int i = 0; i < PLANE_BYTES; i++) { /* four bits to four bytes */
                fours[i] |= ((planes[i] & 15u) * 0x204081u & 0x1010101u) << bit;
                fours[i + 32] |= ((planes[i] >> 4) * 0x204081u & 0x1010101u) << bit;
            }
        for (int row = 0; row < BLOCK_ROWS; row++)
            put_four(codes[row] + PLANE_GROUP * group, fours[row]);
    }
}

/* Writes the elements of a tile. */
INLINE void write_tile(const QuantizedJob *job, const uint8_t codes[BLOCK_ROWS][PLANE_TILE], int64_t block, int64_t column,
                       const uint16_t *scales, const float *steps, void *dense, const int dtype)
{
    const int offset = (1 << job->bits) - 1;
    const int64_t here = job->columns - column < PLANE_TILE ? job->columns - column : PLANE_TILE;
    for (int64_t i = 0; i < rows_of_block(job, block); i++) {
        const int64_t row = block * BLOCK_ROWS + i;
        const float scale = from_bf16(scales[row]);
        for (int64_t j = 0; j < here; j++)
            store_element(dense, row * job->columns + column + j, (float)(2 * codes[i][j] - offset) * (scale * steps[column + j]), dtype);
    }
}

/* Defines a BlockElements. */
#define PLANE_ELEMENTS(TARGET, NAME)                                                                                    \
    TARGET static void NAME(const QuantizedJob *job, int64_t block, const uint16_t *scales, const float *steps,         \
                            void *dense, int dtype)                                                                     \
    {                                                                                                                   \
        const uint8_t *planes = planes_of_block(job, block);                                                            \
        for (int64_t tile = 0; tile < tiles_of(job); tile++, planes += TILE_GROUPS * job->bits * PLANE_BYTES) {         \
            uint8_t codes[BLOCK_ROWS][PLANE_TILE];                                                                      \
            decode_tile(planes, groups_of_tile(job, tile), job->bits, codes);                                           \
            if (dtype == BF16)                                                                                          \
                write_tile(job, codes, block, tile * PLANE_TILE, scales, steps, dense, BF16);                           \
            else if (dtype == FP16)                                                                                     \
                write_tile(job, codes, block, tile * PLANE_TILE, scales, steps, dense, FP16);                           \
            else                                                                                                        \
                write_tile(job, codes, block, tile * PLANE_TILE, scales, steps, dense, FP32);                           \
        }                                                                                                               \
    }

static void portable_planes(const QuantizedJob *job, int64_t block, float *sums)
{
    const uint8_t *planes = planes_of_block(job, block);
    memset(sums, 0, sizeof(float) * (size_t)(BLOCK_ROWS * job->taken));
    for (int64_t tile = 0; tile < tiles_of(job); tile++)
        for (int m = 0; m < job->taken; m++) {
            const uint8_t *from = planes + tile * TILE_GROUPS * job->bits * PLANE_BYTES;
            const uint8_t *lookup = job->lookup + (tile * job->taken + m) * TILE_GROUPS * PLANE_BYTES;
            int32_t found[BLOCK_ROWS] = {0};
            for (int group = 0; group < groups_of_tile(job, tile); group++, lookup += PLANE_BYTES)
                for (int bit = 0; bit < job->bits; bit++, from += PLANE_BYTES)
                    for (int row = 0; row < BLOCK_ROWS; row++) {
                        const int which = row < 32 ? from[row] & 15 : from[row - 32] >> 4;
                        found[row] += (int16_t)(lookup[which] | lookup[which + 16] << 8) * (1 << bit);
                    }
            for (int row = 0; row < BLOCK_ROWS; row++)
                sums[BLOCK_ROWS * m + row] += job->x_scales[tile * job->taken + m] * (float)found[row];
        }
}
FILL_TABLES(, portable_fill_tables, fill_tile)
PLANE_ELEMENTS(, portable_plane_elements)
