/* core: matrix products.
 *
 * The bits of a product depend on its operands and on K only: not on M, N, strides, the blocking, the number of threads
 * or the instruction set. Every element of C is a chain of FP32 fused multiply-adds in the order of k, cut into partial
 * sums of GEMM_K_BLOCK terms that are added in order. Only core/gemm names BLAS or cuBLASLt. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

enum { GEMM_K_BLOCK = 256 };

/* C (m, n) = alpha op(A) (m, k) op(B) (k, n) + beta C, row-major.
 *   a   (m, k), or (k, m) if trans_a; row stride lda elements; FP32 or BF16
 *   b   (k, n), or (n, k) if trans_b; row stride ldb
 *   c   (m, n); row stride ldc; FP32, or BF16 (the FP32 result, rounded once). c overlaps neither a nor b.
 *   alpha, beta: the result is alpha * sum, then fma(beta, c, that). beta 0 never reads C (NaN in it does not matter).
 *   Any m, n, k >= 0; k = 0 gives beta C.
 * Uses all OpenMP threads, or the calling thread alone inside a parallel region; scratch is a small per-thread buffer.
 */
struct gemm {
    int64_t m, n, k;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    enum dtype a_type, b_type, c_type;
    bool trans_a, trans_b;
    float alpha, beta;
};

void gemm_cpu(const struct gemm *g);
