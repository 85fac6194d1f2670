/* Kernels for AVX-512. Three: with F, BW and VL alone, 16 values at a time are widened to floats and spread by vexpandps;
 * with VBMI2, vpexpandw spreads 32 values of 16 bits; with BF16 also, vdpbf16ps multiplies them with an x of 16 bits.
 *
 * An expansion that zeroes falsely depends on what its register held, on Zen 4 and 5: hence one that merges into zero,
 * which the empty asm keeps the compiler from making a zeroing one of. */

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2,popcnt")))
#define VBMI2 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx2,fma,f16c,bmi2,popcnt")))
#define VDPBF16 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx512bf16,avx2,fma,f16c,bmi2,popcnt")))

AVX512 INLINE __m512i zeros(void)
{
    __m512i zero = _mm512_setzero_si512();
    __asm__("" : "+v"(zero));
    return zero;
}

/* A mask of the lanes that may be loaded from `p`, of `lanes`. */
AVX512 INLINE uint32_t readable(const void *p, const void *end, int size, int lanes)
{
    int64_t left = ((const char *)end - (const char *)p) / size;
    return left >= lanes ? (uint32_t)(~0ULL >> (64 - lanes)) : _bzhi_u32(~0U, (uint32_t)left);
}

VBMI2 INLINE __m512i spread32(uint32_t mask, const uint16_t *p, const uint16_t *end, const int careful)
{
    __m512i v = careful ? _mm512_maskz_loadu_epi16(readable(p, end, 2, 32), p) : _mm512_loadu_si512(p);
    __asm__("" : "+v"(v));
    return _mm512_mask_expand_epi16(zeros(), mask, v);
}

/* 16 columns of any dtype, as floats. */
AVX512 INLINE __m512 spread16(uint16_t mask, const void *p, const void *end, const int careful, const int dtype)
{
    __m512 v;
    if (dtype == FP32) {
        v = careful ? _mm512_maskz_loadu_ps((__mmask16)readable(p, end, 4, 16), p) : _mm512_loadu_ps(p);
    } else {
        __m256i h = careful ? _mm256_maskz_loadu_epi16((__mmask16)readable(p, end, 2, 16), p)
                            : _mm256_loadu_si256((const __m256i *)p);
        v = dtype == FP16 ? _mm512_cvtph_ps(h)
                          : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
    __asm__("" : "+v"(v));
    return _mm512_mask_expand_ps(_mm512_castsi512_ps(zeros()), mask, v);
}

/* Three ways to multiply R rows' next 64 columns; p[r] stands at the first value of mask[r]. */

VDPBF16 INLINE void dot_columns(const uint64_t *mask, const uint16_t **p, const uint16_t *end, const uint16_t *x,
                                   __m512 parts[][MOST_ROWS], const int R, const int M, const int careful)
{
    UNROLL for (int half = 0; half < 2; half++, x += 32 * M) {
        __m512i v[4];
        UNROLL for (int r = 0; r < R; r++) {
            uint32_t part = (uint32_t)(mask[r] >> 32 * half);
            v[r] = spread32(part, p[r], end, careful);
            p[r] += _mm_popcnt_u32(part);
        }
        UNROLL for (int m = 0; m < M; m++) {
            __m512bh xs = (__m512bh)_mm512_loadu_si512(x + 32 * m);
            UNROLL for (int r = 0; r < R; r++)
                parts[r][m] = _mm512_dpbf16_ps(parts[r][m], (__m512bh)v[r], xs);
        }
    }
}

VBMI2 INLINE void halves_columns(const uint64_t *mask, const uint16_t **p, const uint16_t *end, const float *x,
                                 __m512 parts[][MOST_ROWS], const int R, const int M, const int careful, const int dtype)
{
    UNROLL for (int half = 0; half < 2; half++, x += 32 * M)
        UNROLL for (int r = 0; r < R; r++) {
            uint32_t part = (uint32_t)(mask[r] >> 32 * half);
            __m512i v = spread32(part, p[r], end, careful);
            p[r] += _mm_popcnt_u32(part);
            __m512 one, two; /* of bfloat16 the even and the odd columns, else the first and the last 16 */
            if (dtype == BF16) {
                one = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
                two = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
            } else {
                one = _mm512_cvtph_ps(_mm512_castsi512_si256(v));
                two = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1));
            }
            UNROLL for (int m = 0; m < M; m++) {
                parts[r][m] = _mm512_fmadd_ps(one, _mm512_load_ps(x + 32 * m), parts[r][m]);
                parts[r][m] = _mm512_fmadd_ps(two, _mm512_load_ps(x + 32 * m + 16), parts[r][m]);
            }
        }
}

AVX512 INLINE void floats_columns(const uint64_t *mask, const char **p, const char *end, const float *x,
                                  __m512 parts[][MOST_ROWS], const int R, const int M, const int careful, const int dtype)
{
    UNROLL for (int quarter = 0; quarter < 4; quarter++, x += 16 * M)
        UNROLL for (int r = 0; r < R; r++) {
            uint16_t part = (uint16_t)(mask[r] >> 16 * quarter);
            __m512 v = spread16(part, p[r], end, careful, dtype);
            p[r] += _mm_popcnt_u32(part) * (dtype == FP32 ? 4 : 2);
            UNROLL for (int m = 0; m < M; m++)
                parts[r][m] = _mm512_fmadd_ps(v, _mm512_load_ps(x + 16 * m), parts[r][m]);
        }
}

/* The loop over columns that all three share. */
#define AVX512_STEP(TARGET, NAME, TYPE, X, COLUMNS, R1, R2, R4, R6)                                                    \
    TARGET INLINE void NAME##_step(const Job *job, int64_t row, int64_t apart, float *sums, const int R, const int M, const int careful) \
    {                                                                                                                  \
        const TYPE *p[4], *end = (const TYPE *)job->values + job->kept * (int64_t)(NAME##_size / sizeof(TYPE));         \
        const uint8_t *bits = job->bits + row * job->stride;                                                           \
        const X *x = job->x;                                                                                           \
        __m512 parts[4][MOST_ROWS];                                                                                    \
        UNROLL for (int r = 0; r < R; r++)                                                                             \
        {                                                                                                              \
            p[r] = (const TYPE *)job->values + job->offsets[row + r * apart] * (int64_t)(NAME##_size / sizeof(TYPE));           \
            UNROLL for (int m = 0; m < M; m++) parts[r][m] = _mm512_setzero_ps();                                      \
        }                                                                                                              \
        for (int64_t byte = 0; byte < job->stride; byte += 8, x += 64 * M) {                                           \
            uint64_t mask[4];                                                                                          \
            UNROLL for (int r = 0; r < R; r++)                                                                         \
            {                                                                                                          \
                mask[r] = load_word(bits + r * apart * job->stride + byte);                                                    \
                prefetch(p[r], bits + r * apart * job->stride + byte); \
            }                                                                                                          \
            COLUMNS;                                                                                                   \
        }                                                                                                              \
        UNROLL for (int r = 0; r < R; r++)                                                                             \
            UNROLL for (int m = 0; m < M; m++) sums[r * apart * M + m] = _mm512_reduce_add_ps(parts[r][m]);                    \
    }                                                                                                                  \
    FUNCTIONS(TARGET, NAME, R1, R2, R4, R6)

enum { dot_bf16_size = 2, halves_bf16_size = 2, halves_fp16_size = 2 };
enum { floats_bf16_size = 2, floats_fp16_size = 2, floats_fp32_size = 4 };

AVX512_STEP(VDPBF16, dot_bf16, uint16_t, uint16_t, dot_columns(mask, p, end, x, parts, R, M, careful), 4, 4, 4, 4)
FUNCTION(VDPBF16, dot_bf16, 2, 8)
AVX512_STEP(VBMI2, halves_bf16, uint16_t, float, halves_columns(mask, p, end, x, parts, R, M, careful, BF16), 4, 4, 4, 4)
AVX512_STEP(VBMI2, halves_fp16, uint16_t, float, halves_columns(mask, p, end, x, parts, R, M, careful, FP16), 4, 4, 4, 4)
AVX512_STEP(AVX512, floats_bf16, char, float, floats_columns(mask, p, end, x, parts, R, M, careful, BF16), 4, 4, 4, 4)
AVX512_STEP(AVX512, floats_fp16, char, float, floats_columns(mask, p, end, x, parts, R, M, careful, FP16), 4, 4, 4, 4)
AVX512_STEP(AVX512, floats_fp32, char, float, floats_columns(mask, p, end, x, parts, R, M, careful, FP32), 4, 4, 4, 4)

VBMI2 INLINE void vbmi2_unpack_word2(uint64_t mask, const uint16_t *p, const uint16_t *end, uint16_t *out, const int careful)
{
    _mm512_storeu_si512(out, spread32((uint32_t)mask, p, end, careful));
    _mm512_storeu_si512(out + 32, spread32((uint32_t)(mask >> 32), p + _mm_popcnt_u32((uint32_t)mask), end, careful));
}

AVX512 INLINE void avx512_unpack_word4(uint64_t mask, const uint32_t *p, const uint32_t *end, uint32_t *out, const int careful)
{
    UNROLL for (int quarter = 0; quarter < 4; quarter++) {
        uint16_t part = (uint16_t)(mask >> 16 * quarter);
        __m512i v = careful ? _mm512_maskz_loadu_epi32((__mmask16)readable(p, end, 4, 16), p) : _mm512_loadu_si512(p);
        _mm512_storeu_si512(out + 16 * quarter, _mm512_mask_expand_epi32(zeros(), part, v));
        p += _mm_popcnt_u32(part);
    }
}

UNPACK(VBMI2, vbmi2_unpack2, uint16_t, vbmi2_unpack_word2, _mm_popcnt_u64)
UNPACK(AVX512, avx512_unpack4, uint32_t, avx512_unpack_word4, _mm_popcnt_u64)
