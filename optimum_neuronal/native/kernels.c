/* Products and dense copies of sparse and of quantised weights: the one file that is compiled.
 *
 *     common.h       numbers and loops that all share
 *     processors.h   which instruction sets there are, and which the processor can run
 *     threads.h      rows shared among threads
 *     sparse.h       products and dense copies of sparse weights; sparse_job.h says what their
 * kernels get quantized.h    and of quantised weights; quantized_job.h says how codes and rounded
 * inputs lie reference.h    the kernels in plain C, for any processor: start reading here isa/ the
 * kernels for one instruction set and format each, included by sparse.h and quantized.h
 *
 * Plain C11 for GCC and Clang, without any library but OpenMP's, if there is one. A row of the
 * weight is computed by one thread, always in the same order, so that results depend neither on the
 * number of threads nor on the other rows of x. Nothing is read behind the end of a buffer. The
 * caller vouches for what the arguments say of each other. */

#include "common.h"
#include "processors.h"
#include "threads.h"
#include "sparse.h"
#include "quantized.h"

enum { ABI = 4 };

EXPORT int neuronal_abi(void) { return ABI; }
