/* core: matrix products on the GPU, through cuBLASLt (loaded at run time). Only core/gemm names it.
 *
 * C (m, n) = alpha op(A) (m, k) op(B) (k, n) + beta C, row-major, FP32 accumulation. BF16 operands in any orientation;
 * E4M3 and E5M2 with A as it lies and B transposed only, that is both with k contiguous, and m, n, k and strides
 * multiples of 16.
 *
 * Per shape the algorithm is chosen once, from several candidates that are timed, and kept: bits repeat within a run,
 * and over runs that read the choices back (gemm_cuda_load). */
#pragma once

#include "core/cuda.h"

#include <stdbool.h>

struct gemm_cuda {
    int64_t m, n, k;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;             /* row strides in elements */
    enum dtype a_type, b_type, c_type; /* BF16 and BF16, or E4M3/E5M2 and E4M3/E5M2 (not both E5M2); C: BF16 or FP32 */
    bool trans_a, trans_b;             /* a is (k, m), b is (n, k) */
    float alpha, beta;                 /* beta 0 never reads C */
    const float *a_scale, *b_scale; /* FP8 only, device memory, one number each: the value of a code is code * scale */
};
void gemm_cuda(const struct cuda *cuda, const struct gemm_cuda *g);

/* Loads cuBLASLt, takes a workspace. Part of cuda_open. ERR_UNSUPPORTED: the library is not there, with where it was
 * looked for. */
MUST_CHECK enum status gemm_cuda_open(struct cuda *cuda);
void gemm_cuda_close(struct cuda *cuda);

/* Chooses the algorithm of a shape now (the pointers must be valid memory: C is overwritten). During graph capture a
 * shape without a choice takes the first candidate untimed; plan shapes before. */
MUST_CHECK enum status gemm_cuda_plan(const struct cuda *cuda, const struct gemm_cuda *g);

/* The choices as a small JSON file, written into the run folder and each checkpoint, and read back: a file of another
 * device or library version is ignored with a notice. */
MUST_CHECK enum status gemm_cuda_save(const struct cuda *cuda, const char *path);
MUST_CHECK enum status gemm_cuda_load(const struct cuda *cuda, const char *path);
