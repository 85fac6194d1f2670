/* Kernels for codes of 8 bits with NEON. Sums of products of bytes take one instruction where the processor has dot
 * products, else three. */
#pragma once

#include "../processors.h"
#include "../quantized_job.h"

#define NEON_DOT __attribute__((target("arch=armv8.2-a+dotprod")))

/* Adds 16 products. Products of two bytes fit 15 bits, so that a sum of two fits 16. */
INLINE int32x4_t neon_products(int32x4_t sum, int8x16_t levels, int8x16_t x) {
    int16x8_t products = vmull_s8(vget_low_s8(levels), vget_low_s8(x));
    return vpadalq_s16(sum, vmlal_s8(products, vget_high_s8(levels), vget_high_s8(x)));
}

/* Defines the loop over a row, from a way to multiply bytes. */
#define NEON_BYTES(TARGET, NAME, DOT)                                                                             \
    TARGET INLINE void NAME##_row(const QuantizedMatrix *weight, const RoundedInputs *inputs, int64_t row, int m, \
                                  float *sums, const int M) {                                                     \
        const int8_t *codes = bytes_of_row(weight, row), *stop = codes + weight->columns,                         \
                     *x = byte_inputs(weight, inputs, m);                                                         \
        const int64_t apart = padded_columns(weight);                                                             \
        float lanes[4][BYTE_LANES] = {{0}};                                                                       \
        for (int64_t group = 0; codes < stop; group++) {                                                          \
            int32x4_t parts[4];                                                                                   \
            for (int r = 0; r < M; r++)                                                                           \
                parts[r] = vdupq_n_s32(0);                                                                        \
            for (int word = 0; word < BYTE_GROUP / 64 && codes < stop; word++, codes += 64, x += 64) {            \
                int8_t buffer[64];                                                                                \
                const int8_t *from = whole_codes(codes, stop, buffer);                                            \
                for (int i = 0; i < 64; i += 16) {                                                                \
                    const int8x16_t levels = vld1q_s8(from + i);                                                  \
                    for (int r = 0; r < M; r++)                                                                   \
                        parts[r] = DOT(parts[r], levels, vld1q_s8(x + r * apart + i));                            \
                }                                                                                                 \
            }                                                                                                     \
            for (int r = 0; r < M; r++)                                                                           \
                lanes[r][group % BYTE_LANES] +=                                                                   \
                    byte_scales(weight, inputs, m + r)[group] * (float)vaddvq_s32(parts[r]);                      \
        }                                                                                                         \
        for (int r = 0; r < M; r++)                                                                               \
            sums[BLOCK_ROWS * r] = sum_lanes(lanes[r]);                                                           \
    }                                                                                                             \
    BYTE_SUMS(TARGET, NAME)

NEON_BYTES(, neon_bytes, neon_products)
NEON_BYTES(NEON_DOT, neon_dot_bytes, vdotq_s32)
