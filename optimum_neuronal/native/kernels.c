/* Products and dense copies of sparse and of quantized weights: the one file that is compiled.
 *
 *     common.h         results of calls, conversions of numbers, unrolled loops: for all files
 *     processors.h     which instruction sets there are, and which the processor can run
 *     threads.h        shares rows among threads
 *     sparse.h         what Python calls for sparse weights; chooses among their kernels
 *     quantized.h      what Python calls for quantized weights; chooses among their kernels
 *     sparse_job.h     what a kernel of sparse weights is given and gives back
 *     quantized_job.h  what a kernel of quantized weights is given and gives back
 *     reference.h      all kernels in plain C, for any processor: start reading here
 *     isa/             kernels of one format (sparse, planes, bytes) for one instruction set each
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
