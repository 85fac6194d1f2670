/* Kernels for NEON (every 64-bit Arm): eight columns are expanded by a byte shuffle that is looked up
 * for eight bits. */
#pragma once

#include "../job.h"

/* How many bits are set in the bytes of a mask before each byte: byte k of the result. The last is in `all`. */
INLINE uint64_t neon_before(uint64_t mask, uint64_t *all) {
    uint64_t counts = vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(vcreate_u8(mask))), 0) * 0x0101010101010101ULL;
    *all = counts >> 56;
    return counts << 8;
}

INLINE uint8x16_t neon_expand16(uint8_t mask, const uint16_t *p, const uint16_t *end, const int careful) {
    uint16_t last[8];
    const void *from = careful && end - p < 8 ? copy_last(p, end, 16, last) : p;
    return vqtbl1q_u8(vld1q_u8(from), vld1q_u8(SHUFFLE16[mask]));
}

/* Eight columns of 32 bits: a lane's bytes are four times its number and 0 to 3; of -1 they lie past the table,
 * which gives 0. */
INLINE uint8x16x2_t neon_expand32(uint8_t mask, const uint32_t *p, const uint32_t *end, const int careful) {
    uint32_t last[8];
    const uint8_t *from = careful && end - p < 8 ? copy_last(p, end, 32, last) : (const void *)p;
    const uint8x16x2_t values = {{vld1q_u8(from), vld1q_u8(from + 16)}};
    const uint32x4_t four = vdupq_n_u32(0x04040404), bytes = vdupq_n_u32(0x03020100);
    int16x8_t lanes = vmovl_s8(vld1_s8(SHUFFLE32[mask]));
    uint32x4_t low = vmlaq_u32(bytes, vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(lanes))), four);
    uint32x4_t high = vmlaq_u32(bytes, vreinterpretq_u32_s32(vmovl_s16(vget_high_s16(lanes))), four);
    uint8x16x2_t expand = {
        {vqtbl2q_u8(values, vreinterpretq_u8_u32(low)), vqtbl2q_u8(values, vreinterpretq_u8_u32(high))}};
    return expand;
}

/* One row's 64 columns: x has blocks of 8, for bfloat16 the even columns before the odd ones. */
INLINE void neon_word(uint64_t mask, uint64_t before, const void *values, const void *end, const float *x,
                      float32x4_t *sums, const int M, const int dtype, const int careful) {
    EACH(byte, 8) {
        uint8_t part = (uint8_t)(mask >> 8 * byte), first = (uint8_t)(before >> 8 * byte);
        float32x4_t one, two;
        if (dtype == FP32) {
            uint8x16x2_t v = neon_expand32(part, (const uint32_t *)values + first, end, careful);
            one = vreinterpretq_f32_u8(v.val[0]);
            two = vreinterpretq_f32_u8(v.val[1]);
        } else {
            uint8x16_t v = neon_expand16(part, (const uint16_t *)values + first, end, careful);
            if (dtype == BF16) {
                one = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(v), 16));
                two = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(v), vdupq_n_u32(0xffff0000)));
            } else {
                one = vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u8(v)));
                two = vcvt_f32_f16(vget_high_f16(vreinterpretq_f16_u8(v)));
            }
        }
        EACH(m, M) {
            sums[m] = vfmaq_f32(sums[m], one, vld1q_f32(x + 8 * (M * byte + m)));
            sums[m] = vfmaq_f32(sums[m], two, vld1q_f32(x + 8 * (M * byte + m) + 4));
        }
    }
}

INLINE void neon_columns(const uint64_t *mask, const char **p, const char *end, const float *x,
                         float32x4_t parts[][MOST_ROWS], const int R, const int M, const int careful,
                         const int dtype) {
    EACH(r, R) {
        uint64_t all, before = neon_before(mask[r], &all);
        neon_word(mask[r], before, p[r], end, x, parts[r], M, dtype, careful);
        p[r] += all * size_of(dtype);
    }
}

SPARSE_STEP(, neon_step, float, float32x4_t, vdupq_n_f32(0), vaddvq_f32, neon_columns)
SPARSE_KERNEL(, neon_bf16, neon_step, BF16, 4, 4, 2, 2)
SPARSE_KERNEL(, neon_fp16, neon_step, FP16, 4, 4, 2, 2)
SPARSE_KERNEL(, neon_fp32, neon_step, FP32, 4, 4, 2, 2)

INLINE void neon_unpack_word2(uint64_t mask, const uint16_t *p, const uint16_t *end, uint16_t *out,
                              const int careful) {
    uint64_t all, before = neon_before(mask, &all);
    EACH(byte, 8) {
        uint8x16_t v = neon_expand16((uint8_t)(mask >> 8 * byte), p + (uint8_t)(before >> 8 * byte), end, careful);
        vst1q_u8((uint8_t *)(out + 8 * byte), v);
    }
}

INLINE void neon_unpack_word4(uint64_t mask, const uint32_t *p, const uint32_t *end, uint32_t *out,
                              const int careful) {
    uint64_t all, before = neon_before(mask, &all);
    EACH(byte, 8) {
        uint8x16x2_t v = neon_expand32((uint8_t)(mask >> 8 * byte), p + (uint8_t)(before >> 8 * byte), end, careful);
        vst1q_u8((uint8_t *)(out + 8 * byte), v.val[0]);
        vst1q_u8((uint8_t *)(out + 8 * byte + 4), v.val[1]);
    }
}

UNPACK_ROW(, neon_unpack2, uint16_t, neon_unpack_word2)
UNPACK_ROW(, neon_unpack4, uint32_t, neon_unpack_word4)
