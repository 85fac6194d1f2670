/* Kernels for dense matrices of 8-bit levels, with a scale for each row and group of columns: what kernels of codes do, but
 * that there is nothing to spread. `Job.stride` is the number of columns, and `Job.values` the levels. Sums of groups are
 * those of every other kernel, to the bit. */

/* The levels of 64 columns, in a buffer where fewer are left. */
INLINE const int8_t *whole_levels(const int8_t *levels, const int8_t *stop, int8_t *buffer)
{
    return stop - levels < 64 ? copy_last(levels, stop, 64, buffer) : levels;
}

INLINE void portable_int8_coded(const Job *job, int64_t first, int64_t last, float *sums, const int M, const int bytes)
{
    for (int64_t row = first; row < last; row++, sums += M) {
        const int8_t *levels = (const int8_t *)job->values + row * job->stride, *stop = levels + job->stride;
        const int8_t *whole_x = job->x;
        const float *x = job->x;
        float lanes[MOST_ROWS][8] = {{0}}, totals[MOST_ROWS][16] = {{0}};
        for (int64_t group = 0; group < job->groups; group++) {
            const float scale = group_scale(job, row, group);
            int32_t whole[MOST_ROWS] = {0};
            float parts[MOST_ROWS][16] = {{0}};
            for (int word = 0; word < GROUP / 64 && levels < stop; word++, levels += 64, x += 64 * M, whole_x += 64 * M) {
                int8_t buffer[64];
                const int8_t *from = whole_levels(levels, stop, buffer);
                for (int m = 0; m < M; m++)
                    for (int i = 0; i < 64; i++)
                        if (bytes)
                            whole[m] += from[i] * whole_x[64 * m + i];
                        else
                            parts[m][i & 15] += from[i] * x[64 * m + i];
            }
            for (int m = 0; m < M; m++)
                if (bytes)
                    add_scaled(lanes[m], group, whole[m], scale, scales_of_x(job, m)[group]);
                else
                    for (int i = 0; i < 16; i++)
                        totals[m][i] += scale * parts[m][i];
        }
        for (int m = 0; m < M; m++) {
            sums[m] = bytes ? sum_lanes(lanes[m]) : 0;
            for (int i = 0; i < 16 && !bytes; i++)
                sums[m] += totals[m][i];
        }
    }
}

#if defined(HAS_X86)
#define TARGET AVX2
#define NAME(what) avx2_##what
#include "int8_avx2_loop.h"

#if defined(HAS_AVX_VNNI)
#define TARGET AVX_VNNI
#define NAME(what) avx_vnni_##what
#include "int8_avx2_loop.h"
#endif

VNNI INLINE void vnni_int8_coded(const Job *job, int64_t first, int64_t last, float *sums, const int M, const int bytes)
{
    for (int64_t row = first; row < last; row++, sums += M) {
        const int8_t *levels = (const int8_t *)job->values + row * job->stride, *stop = levels + job->stride;
        const int8_t *whole_x = job->x;
        const float *x = job->x;
        __m256 totals[MOST_ROWS];
        __m512 float_totals[MOST_ROWS];
        UNROLL for (int m = 0; m < M; m++) {
            totals[m] = _mm256_setzero_ps();
            float_totals[m] = _mm512_setzero_ps();
        }
        for (int64_t block = 0; block < job->groups; block += 8) {
            __m256i whole[MOST_ROWS][8];
            uint16_t scales[8];
            const int groups = scales_of_block(job, row, block, scales);
            if (bytes && groups < 8)
                memset(whole, 0, sizeof(whole));
            for (int group = 0; group < groups; group++) {
                __m512i whole_parts[MOST_ROWS], offset = _mm512_setzero_si512();
                __m512 parts[MOST_ROWS][2];
                UNROLL for (int m = 0; m < M; m++) {
                    whole_parts[m] = _mm512_setzero_si512();
                    parts[m][0] = parts[m][1] = _mm512_setzero_ps();
                }
                for (int word = 0; word < GROUP / 64 && levels < stop; word++, levels += 64, x += 64 * M, whole_x += 64 * M) {
                    int8_t buffer[64];
                    __builtin_prefetch((const void *)((uintptr_t)levels + 2048));
                    const __m512i v = _mm512_loadu_si512(whole_levels(levels, stop, buffer));
                    if (bytes)
                        vnni_add_bytes(v, whole_x, whole_parts, &offset, M);
                    else
                        vnni_add_floats(v, x, parts, M);
                }
                const __m512 scale = _mm512_set1_ps(from_bf16(scales[group]));
                UNROLL for (int m = 0; m < M; m++)
                    if (bytes)
                        whole[m][group] = vnni_halves(_mm512_sub_epi32(whole_parts[m], offset));
                    else
                        float_totals[m] = _mm512_fmadd_ps(_mm512_add_ps(parts[m][0], parts[m][1]), scale, float_totals[m]);
            }
            if (bytes)
                UNROLL for (int m = 0; m < M; m++)
                    totals[m] = _mm256_add_ps(totals[m], avx2_scaled(whole[m], scales, scales_of_x(job, m) + block));
        }
        UNROLL for (int m = 0; m < M; m++)
            sums[m] = bytes ? avx2_sum(totals[m]) : _mm512_reduce_add_ps(float_totals[m]);
    }
}
#elif defined(HAS_NEON)
#define NEON_INT8(TARGET, NAME, DOT)                                                                                   \
    TARGET INLINE void NAME##_coded(const Job *job, int64_t first, int64_t last, float *sums, const int M, const int bytes) \
    {                                                                                                                  \
        for (int64_t row = first; row < last; row++, sums += M) {                                                      \
            const int8_t *levels = (const int8_t *)job->values + row * job->stride, *stop = levels + job->stride;      \
            const int8_t *whole_x = job->x;                                                                            \
            const float *x = job->x;                                                                                   \
            float lanes[MOST_ROWS][8] = {{0}};                                                                         \
            float32x4_t totals[MOST_ROWS];                                                                             \
            for (int m = 0; m < M; m++)                                                                                \
                totals[m] = vdupq_n_f32(0);                                                                            \
            for (int64_t group = 0; group < job->groups; group++) {                                                    \
                const float scale = group_scale(job, row, group);                                                      \
                int32x4_t whole[MOST_ROWS];                                                                            \
                float32x4_t parts[MOST_ROWS];                                                                          \
                for (int m = 0; m < M; m++) {                                                                          \
                    whole[m] = vdupq_n_s32(0);                                                                         \
                    parts[m] = vdupq_n_f32(0);                                                                         \
                }                                                                                                      \
                for (int word = 0; word < GROUP / 64 && levels < stop; word++, levels += 64, whole_x += 64 * M) {      \
                    int8_t buffer[64];                                                                                 \
                    const int8_t *from = whole_levels(levels, stop, buffer);                                           \
                    for (int part = 0; part < 4; part++, x += 16 * M) {                                                \
                        const int8x16_t v = vld1q_s8(from + 16 * part);                                                \
                        if (bytes)                                                                                     \
                            for (int m = 0; m < M; m++)                                                                \
                                whole[m] = DOT(whole[m], v, vld1q_s8(whole_x + 64 * m + 16 * part));                   \
                        else                                                                                           \
                            neon_add_floats(v, x, parts, M);                                                           \
                    }                                                                                                  \
                }                                                                                                      \
                for (int m = 0; m < M; m++)                                                                            \
                    if (bytes)                                                                                         \
                        add_scaled(lanes[m], group, vaddvq_s32(whole[m]), scale, scales_of_x(job, m)[group]);          \
                    else                                                                                               \
                        totals[m] = vfmaq_n_f32(totals[m], parts[m], scale);                                           \
            }                                                                                                          \
            for (int m = 0; m < M; m++)                                                                                \
                sums[m] = bytes ? sum_lanes(lanes[m]) : vaddvq_f32(totals[m]);                                         \
        }                                                                                                              \
    }                                                                                                                  \
    CODED_FUNCTIONS(TARGET, NAME)
#endif

CODED_FUNCTIONS(, portable_int8)
#if defined(HAS_X86)
CODED_FUNCTIONS(AVX2, avx2_int8)
#if defined(HAS_AVX_VNNI)
CODED_FUNCTIONS(AVX_VNNI, avx_vnni_int8)
#endif
CODED_FUNCTIONS(VNNI, vnni_int8)
#elif defined(HAS_NEON)
NEON_INT8(, neon_int8, neon_dot)
NEON_INT8(NEON_DOT, neon_one_int8, neon_one_dot)
#endif
