/* y = W x for a dense bfloat16 W and one x, as fast as memory gives W: what a packed weight has to be held against. */
#include <immintrin.h>
#include <stdint.h>

void dense_loop(const uint16_t *w, const uint16_t *x, float *y, int64_t rows, int64_t columns, int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows / 4; row++) { /* columns: a multiple of 64, rows of 4 */
        const uint16_t *p = w + 4 * row * columns;
        __m512 sums[4][2];
        for (int r = 0; r < 4; r++)
            sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        for (int64_t column = 0; column < columns; column += 64) {
            __m512i one = _mm512_loadu_si512(x + column), two = _mm512_loadu_si512(x + column + 32);
            for (int r = 0; r < 4; r++) {
                const uint16_t *q = p + r * columns + column;
                _mm_prefetch((const char *)q + 1024, _MM_HINT_T0);
                _mm_prefetch((const char *)q + 1088, _MM_HINT_T0);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], (__m512bh)_mm512_loadu_si512(q), (__m512bh)one);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], (__m512bh)_mm512_loadu_si512(q + 32), (__m512bh)two);
            }
        }
        for (int r = 0; r < 4; r++)
            y[4 * row + r] = _mm512_reduce_add_ps(_mm512_add_ps(sums[r][0], sums[r][1]));
    }
}
