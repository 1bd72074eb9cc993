/* core: matrix products on the GPU, through cuBLASLt (loaded at run time). Only core/gemm names it.
 *
 * C (m, n) = alpha op(A) (m, k) op(B) (k, n) + beta C, row-major, FP32 accumulation. BF16 operands in any orientation.
 * E4M3 and E5M2 with A as it lies and B transposed only, that is both with k contiguous; n, k and strides multiples of
 * 16, any m. Pointers of FP8 products, scales too, are multiples of 16 bytes; BF16 runs at full speed where pointers
 * and strides are.
 *
 * Each shape (sizes, strides, types, orientation, whether C is added to, alignment) has one algorithm: the first that
 * the library proposes, or once planned the fastest of several that were timed. It stays the same within a run and over
 * runs that read the choices back, so bits repeat; another choice may change the order of a sum. Sums split over k are
 * added in FP32 in a fixed order. A product that is added to C in BF16 may be rounded to BF16 before. */
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
    bool fast; /* FP8: leaves sums in the tensor cores (about 14 bits on Hopper): 6 to 14 % faster, but long sums of one
                * sign shrink by percents (docs/results/gemm_cuda.md) */
};
/* Enqueues. What cuBLASLt refuses is kept for cuda_sync, with the sizes. */
void gemm_cuda(const struct cuda *cuda, const struct gemm_cuda *g);

/* Loads cuBLASLt, takes a workspace of 64 MiB. Part of cuda_open. ERR_UNSUPPORTED: the library was not found; names the
 * places searched. */
MUST_CHECK enum status gemm_cuda_open(struct cuda *cuda);
void gemm_cuda_close(struct cuda *cuda);

/* Chooses the algorithm of a shape by timing, unless that was done. The pointers must be valid memory, best with data
 * as they will be (zeros run faster than real numbers); C is left undefined. Waits. Not during graph capture.
 * ERR_UNSUPPORTED: cuBLASLt refuses the product; ERR_DEVICE: the GPU had failed before. */
MUST_CHECK enum status gemm_cuda_plan(const struct cuda *cuda, const struct gemm_cuda *g);

/* While on, gemm_cuda plans the shapes that it meets, and what it leaves in C is undefined: run a step once like this
 * to plan all its products. A failed plan is kept for cuda_sync. */
void gemm_cuda_plan_all(const struct cuda *cuda, bool on);

/* The planned choices as a small JSON file, for the run folder and each checkpoint, and read back: a file of another
 * device or library version is ignored with a notice; ERR_DATA if it is damaged or names an algorithm that the library
 * does not propose. */
MUST_CHECK enum status gemm_cuda_save(const struct cuda *cuda, const char *path);
MUST_CHECK enum status gemm_cuda_load(const struct cuda *cuda, const char *path);

/* The same as text, for ranks that share no folder: export gives the caller a string to free; `from` stands for the
 * file in messages. */
MUST_CHECK enum status gemm_cuda_export(const struct cuda *cuda, char **text);
MUST_CHECK enum status gemm_cuda_import(const struct cuda *cuda, const char *from, const char *text);

/* How many shapes have a planned choice. */
int gemm_cuda_planned(const struct cuda *cuda);
