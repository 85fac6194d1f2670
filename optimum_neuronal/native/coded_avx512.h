/* Kernels for codes of few bits with AVX-512: 64 columns at a time, for processors that have VBMI, VBMI2 and VNNI. */

#ifndef VNNI
#define VNNI \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vnni,avx2,fma,f16c,bmi2,popcnt")))
#endif

/* For each number of bits: which bytes hold eight codes, in eight bytes each, and at which of their bits each code is. */
static uint8_t SPANS[5][64] __attribute__((aligned(64))), STARTS[5][64] __attribute__((aligned(64)));

static void __attribute__((constructor)) fill_spans(void)
{
    for (int bits = 2; bits <= 4; bits++)
        for (int i = 0; i < 64; i++) {
            SPANS[bits][i] = (uint8_t)(i / 8 * bits + i % 8);
            STARTS[bits][i] = (uint8_t)(i % 8 * bits);
        }
}

/* 64 columns' levels, zero where nothing is kept. */
VNNI INLINE __m512i vnni_spread_levels(const Job *job, uint64_t mask, const uint8_t *codes, const uint8_t *end)
{
    __m512i v = end - codes < 64 ? _mm512_maskz_loadu_epi8(_bzhi_u64(~0ULL, (uint32_t)(end - codes)), codes)
                                 : _mm512_loadu_si512(codes);
    if (job->value_bits < 8) {
        v = _mm512_permutexvar_epi8(_mm512_load_si512(SPANS[job->value_bits]), v);
        v = _mm512_multishift_epi64_epi8(_mm512_load_si512(STARTS[job->value_bits]), v);
        v = _mm512_permutexvar_epi8(v, _mm512_loadu_si512(job->table)); /* by six bits, of which the table knows those of a code */
    }
    return _mm512_mask_expand_epi8(zeros(), mask, v);
}

VNNI static void vnni_spread(const Job *job, uint64_t mask, const uint8_t *codes, int8_t *dense)
{
    _mm512_storeu_si512(dense, vnni_spread_levels(job, mask, codes, codes + SLACK));
}

/* 64 columns with M rows of x, as whole numbers: 128 is added to each, and what that adds to a sum is in `offset`. */
VNNI INLINE void vnni_add_bytes(__m512i levels, const int8_t *x, __m512i *sums, __m512i *offset, const int M)
{
    const __m512i high = _mm512_set1_epi8((char)0x80);
    *offset = _mm512_dpbusd_epi32(*offset, high, levels);
    UNROLL for (int m = 0; m < M; m++) {
        __m512i raised = _mm512_xor_si512(_mm512_load_si512(x + 64 * m), high);
        sums[m] = _mm512_dpbusd_epi32(sums[m], raised, levels);
    }
}

/* The same with floats, in blocks of 16 columns; those of two blocks are summed apart from those of the other two. */
VNNI INLINE void vnni_add_floats(__m512i levels, const float *x, __m512 sums[][2], const int M)
{
    const __m128i quarters[4] = {_mm512_castsi512_si128(levels), _mm512_extracti32x4_epi32(levels, 1),
                                 _mm512_extracti32x4_epi32(levels, 2), _mm512_extracti32x4_epi32(levels, 3)};
    UNROLL for (int part = 0; part < 4; part++, x += 16 * M) {
        __m512 v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(quarters[part]));
        UNROLL for (int m = 0; m < M; m++)
            sums[m][part & 1] = _mm512_fmadd_ps(v, _mm512_load_ps(x + 16 * m), sums[m][part & 1]);
    }
}

VNNI INLINE __m256i vnni_halves(__m512i v)
{
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}

/* All rows with M rows of x, which is `bytes` or floats. */
VNNI INLINE void vnni_coded(const Job *job, int64_t first, int64_t last, float *sums, const int M, const int bytes)
{
    const uint8_t *codes = (const uint8_t *)job->values + job->offsets[first];
    const uint8_t *end = (const uint8_t *)job->values + job->kept;
    for (int64_t row = first; row < last; row++, sums += M) {
        const uint8_t *bits = job->bits + row * job->stride, *stop = bits + job->stride;
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
                const int words = stop - bits > 8 ? 2 : 1;
                for (int word = 0; word < words; word++, bits += 8) {
                    const uint64_t mask = load_word(bits);
                    prefetch(codes, bits);
                    __m512i levels = vnni_spread_levels(job, mask, codes, end);
                    codes += code_bytes(job, (int64_t)_mm_popcnt_u64(mask));
                    if (bytes)
                        vnni_add_bytes(levels, whole_x, whole_parts, &offset, M);
                    else
                        vnni_add_floats(levels, x, parts, M);
                    whole_x += 64 * M;
                    x += 64 * M;
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

CODED_FUNCTIONS(VNNI, vnni)
