/* Kernels for bit planes with NEON: a byte shuffle looks up 16 rows. */
#pragma once

#include "../processors.h"
#include "../quantized_job.h"

static void neon_planes(const QuantizedMatrix *weight, const RoundedInputs *x, int64_t block, float *sums) {
    const uint8x16_t half = vdupq_n_u8(15);
    memset(sums, 0, sizeof(float) * (size_t)(BLOCK_ROWS * x->count));
    for (int64_t tile = 0; tile < tiles_of(weight); tile++)
        for (int m = 0; m < x->count; m++) {
            const uint8_t *planes = planes_of(weight, block, tile);
            int32x4_t found[16];
            for (int i = 0; i < 16; i++)
                found[i] = vdupq_n_s32(0);
            for (int bit = 0; bit < weight->bits; bit++) {
                const uint8_t *from = planes + bit * PLANE_BYTES, *table = tables_of(x, tile, m);
                int16x8_t parts[8];
                for (int i = 0; i < 8; i++)
                    parts[i] = vdupq_n_s16(0);
                for (int group = 0; group < groups_of_tile(weight, tile);
                     group++, from += weight->bits * PLANE_BYTES, table += PLANE_BYTES) {
                    const uint8x16_t low = vld1q_u8(table), high = vld1q_u8(table + 16);
                    EACH(i, 4) {
                        const uint8x16_t both = vld1q_u8(from + 16 * (i & 1)),
                                         which = i < 2 ? vandq_u8(both, half) : vshrq_n_u8(both, 4);
                        const uint8x16_t lows = vqtbl1q_u8(low, which), highs = vqtbl1q_u8(high, which);
                        parts[2 * i] = vaddq_s16(parts[2 * i], vreinterpretq_s16_u8(vzip1q_u8(lows, highs)));
                        parts[2 * i + 1] = vaddq_s16(parts[2 * i + 1], vreinterpretq_s16_u8(vzip2q_u8(lows, highs)));
                    }
                }
                const int16x4_t place = vdup_n_s16((int16_t)(1 << bit));
                EACH(i, 8) {
                    found[2 * i] = vmlal_s16(found[2 * i], vget_low_s16(parts[i]), place);
                    found[2 * i + 1] = vmlal_s16(found[2 * i + 1], vget_high_s16(parts[i]), place);
                }
            }
            for (int i = 0; i < 16; i++) {
                float *to = sums + BLOCK_ROWS * m + 4 * i;
                vst1q_f32(to, vaddq_f32(vld1q_f32(to), vmulq_n_f32(vcvtq_f32_s32(found[i]), tile_scale(x, tile, m))));
            }
        }
}
