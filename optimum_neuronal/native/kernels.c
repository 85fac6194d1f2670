/* Products and dense copies of sparse and of quantized weights: the one file that is compiled.
 *
 *     common.h, processors.h, threads.h  numbers and loops, instruction sets, rows shared among threads
 *     sparse.h, quantized.h              what Python calls; they choose among the kernels
 *     sparse_job.h, quantized_job.h      what a kernel is given and gives back
 *     reference.h                        all kernels in plain C, for any processor: start reading here
 *     isa/                               kernels of one format for one instruction set each
 *
 * Plain C11 for GCC and Clang, with OpenMP where there is one. One thread computes a row of the weight, always in the
 * same order: results depend neither on threads nor on other rows of x. Nothing is read behind the end of a buffer.
 * The caller checks that the arguments fit each other. */

#include "common.h"
#include "processors.h"
#include "threads.h"
#include "sparse.h"
#include "quantized.h"
