/* Products and dense copies of sparse and of quantised weights.
 *
 * Plain C11 for GCC and Clang, without any library but OpenMP's, if there is one. A row of the weight is computed by one
 * thread, always in the same order, so that results depend neither on the number of threads nor on the other rows of x.
 * Nothing is read behind the end of a buffer. The caller vouches for what the arguments say of each other. */

#include "common.h"

#if defined(__x86_64__)
#define HAS_X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAS_NEON 1
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { ABI = 4 };
enum { OK = 0, NO_SUCH_KERNEL = 1, NO_MEMORY = 2, TOO_MANY_ROWS = 3, DISAGREE = 4 };

EXPORT int neuronal_abi(void)
{
    return ABI;
}

#include "processors.h"
#include "threads.h"

#include "portable.h"
#include "shuffles.h"
#if defined(HAS_X86)
#include "avx2.h"
#include "avx512.h"
#elif defined(HAS_NEON)
#include "neon.h"
#endif
#include "product.h"

#include "packed_rows.h"
#include "quantized.h"
