/* y = W x with dense bfloat16 weights, as fast as memory allows: what packed weights are measured against.
 *
 * Built by `benchmarks/packed_kernels.py` for the processor at hand; a plain loop, which the compiler vectorises. */

#include <stdint.h>
#include <string.h>

/* A bfloat16 is the upper half of a float. */
static inline float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void dense_rows(const uint16_t *weight, const float *x, float *y, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r += 4) { /* four rows share each load of x */
        const uint16_t *w = weight + r * columns;
        float a = 0, b = 0, c = 0, d = 0;
        for (int64_t j = 0; j < columns; j++) {
            a += widen(w[j]) * x[j];
            b += widen(w[columns + j]) * x[j];
            c += widen(w[2 * columns + j]) * x[j];
            d += widen(w[3 * columns + j]) * x[j];
        }
        y[r] = a, y[r + 1] = b, y[r + 2] = c, y[r + 3] = d;
    }
}

/* Reads bytes and does next to nothing with them: the bandwidth that there is. */
uint64_t read_all(const uint64_t *words, int64_t count, int threads) {
    uint64_t found = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : found)
    for (int64_t i = 0; i < count; i++) found += words[i];
    return found;
}
