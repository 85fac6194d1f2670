/* Kernels for bit planes with AVX2: a byte shuffle looks up 32 rows. */

/* Adds what a tile's tables say of one bit to 64 sums of 16 bits: in each register rows 0 to 7 and 16 to 23 of 32, or 8 to
 * 15 and 24 to 31. */
AVX2 INLINE void avx2_plane(const uint8_t *planes, int apart, const uint8_t *lookup, int groups, __m256i *sums)
{
    const __m256i half = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; i++)
        sums[i] = _mm256_setzero_si256();
    for (int group = 0; group < groups; group++, planes += apart, lookup += PLANE_BYTES) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)planes);
        const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)lookup));
        const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(lookup + 16)));
        UNROLL for (int i = 0; i < 4; i += 2) {
            const __m256i which = _mm256_and_si256(i ? _mm256_srli_epi16(both, 4) : both, half);
            const __m256i lows = _mm256_shuffle_epi8(low, which), highs = _mm256_shuffle_epi8(high, which);
            sums[i] = _mm256_add_epi16(sums[i], _mm256_unpacklo_epi8(lows, highs));
            sums[i + 1] = _mm256_add_epi16(sums[i + 1], _mm256_unpackhi_epi8(lows, highs));
        }
    }
}

/* One tile's sums of 32 bits, eight in each register. */
AVX2 INLINE void avx2_tile(const uint8_t *planes, const uint8_t *lookup, int groups, int bits, __m256i *found)
{
    for (int i = 0; i < 8; i++)
        found[i] = _mm256_setzero_si256();
    for (int bit = 0; bit < bits; bit++) {
        __m256i sums[4];
        if (groups == TILE_GROUPS)
            avx2_plane(planes + bit * PLANE_BYTES, bits * PLANE_BYTES, lookup, TILE_GROUPS, sums);
        else
            avx2_plane(planes + bit * PLANE_BYTES, bits * PLANE_BYTES, lookup, groups, sums);
        const __m256i place = _mm256_set1_epi32(1 << bit); /* beside it 0, for the second of two equal numbers */
        UNROLL for (int i = 0; i < 4; i++) {
            found[2 * i] = _mm256_add_epi32(found[2 * i], _mm256_madd_epi16(_mm256_unpacklo_epi16(sums[i], sums[i]), place));
            found[2 * i + 1] = _mm256_add_epi32(found[2 * i + 1], _mm256_madd_epi16(_mm256_unpackhi_epi16(sums[i], sums[i]), place));
        }
    }
}

AVX2 INLINE void avx2_block(const QuantizedJob *job, int64_t block, const int bits, float *sums)
{
    const uint8_t *planes = planes_of_block(job, block);
    __m256 totals[MOST_ROWS][8];
    for (int m = 0; m < job->taken; m++)
        for (int i = 0; i < 8; i++)
            totals[m][i] = _mm256_setzero_ps();
    for (int64_t tile = 0; tile < tiles_of(job); tile++, planes += TILE_GROUPS * bits * PLANE_BYTES) {
        for (int line = 0; line < TILE_GROUPS * bits * PLANE_BYTES; line += 64)
            __builtin_prefetch((const void *)((uintptr_t)planes + 8192 + (uintptr_t)line));
        for (int m = 0; m < job->taken; m++) {
            const int64_t at = tile * job->taken + m;
            __m256i found[8];
            avx2_tile(planes, job->lookup + at * TILE_GROUPS * PLANE_BYTES, groups_of_tile(job, tile), bits, found);
            const __m256 scale = _mm256_set1_ps(job->x_scales[at]);
            UNROLL for (int i = 0; i < 8; i++)
                totals[m][i] = _mm256_add_ps(totals[m][i], _mm256_mul_ps(scale, _mm256_cvtepi32_ps(found[i])));
        }
    }
    for (int m = 0; m < job->taken; m++)
        for (int i = 0; i < 8; i++) {
            float eight[8]; /* of register i, see avx2_plane: four rows, and those 16 behind */
            _mm256_storeu_ps(eight, totals[m][i]);
            memcpy(sums + BLOCK_ROWS * m + i / 4 * 32 + i % 4 * 4, eight, 16);
            memcpy(sums + BLOCK_ROWS * m + i / 4 * 32 + i % 4 * 4 + 16, eight + 4, 16);
        }
}

AVX2 static void avx2_planes(const QuantizedJob *job, int64_t block, float *sums)
{
    switch (job->bits) { /* so that compilers know the number */
    case 2: avx2_block(job, block, 2, sums); break;
    case 3: avx2_block(job, block, 3, sums); break;
    case 4: avx2_block(job, block, 4, sums); break;
    default: avx2_block(job, block, job->bits, sums);
    }
}
FILL_TABLES(AVX2, avx2_fill_tables)
PLANE_ELEMENTS(AVX2, avx2_plane_elements)
