/* core/gemm: what the files of gemm_cuda share; for no one else. */
#pragma once

#include "core/gemm_cuda.h"

#include <cublasLt.h>

/* The functions that we use; each is a member of struct cublaslt. */
#define CUBLASLT_FUNCTIONS(X)                                                                                          \
    X(Create)                                                                                                          \
    X(Destroy)                                                                                                         \
    X(GetVersion)                                                                                                      \
    X(GetStatusName)                                                                                                   \
    X(MatmulDescCreate)                                                                                                \
    X(MatmulDescDestroy)                                                                                               \
    X(MatmulDescSetAttribute)                                                                                          \
    X(MatrixLayoutCreate)                                                                                              \
    X(MatrixLayoutDestroy)                                                                                             \
    X(MatmulPreferenceCreate)                                                                                          \
    X(MatmulPreferenceDestroy)                                                                                         \
    X(MatmulPreferenceSetAttribute)                                                                                    \
    X(MatmulAlgoGetHeuristic)                                                                                          \
    X(Matmul)

#define CUBLASLT_MEMBER(name) __typeof__(cublasLt##name) *name;
struct cublaslt {
    CUBLASLT_FUNCTIONS(CUBLASLT_MEMBER)
};
#undef CUBLASLT_MEMBER

/* What an algorithm depends on. Numbers only, without gaps: compared and written as an array. */
#define GEMM_SHAPE_NUMBERS(X)                                                                                          \
    X(m)                                                                                                               \
    X(n)                                                                                                               \
    X(k)                                                                                                               \
    X(lda)                                                                                                             \
    X(ldb)                                                                                                             \
    X(ldc)                                                                                                             \
    X(a_type)                                                                                                          \
    X(b_type)                                                                                                          \
    X(c_type)                                                                                                          \
    X(trans_a)                                                                                                         \
    X(trans_b)                                                                                                         \
    X(adds)                                                                                                            \
    X(fast)                                                                                                            \
    X(alignment)

#define GEMM_SHAPE_MEMBER(name) int64_t name;
struct gemm_shape {
    GEMM_SHAPE_NUMBERS(GEMM_SHAPE_MEMBER) /* adds: beta is not 0; alignment of all three pointers, 16 at most */
};
#undef GEMM_SHAPE_MEMBER

/* cuBLASLt stores by column: a row-major C is its C^T = op(B)^T op(A)^T, so that `a` describes our B. */
struct gemm_choice {
    struct gemm_shape shape;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
    bool timed;
};

struct gemm_cuda_state {
    void *library;
    struct cublaslt lt;
    cublasLtHandle_t handle;
    void *workspace;
    struct cuda_event *from, *to;
    struct gemm_choice *choices;
    int count, capacity;
    bool plan_all;
    char device[256];
};

enum { GEMM_WORKSPACE_BYTES = 64 << 20, GEMM_CANDIDATES = 8 };

/* The choice of this shape, or NULL. */
struct gemm_choice *gemm_choice_find(const struct gemm_cuda_state *state, const struct gemm_shape *shape);

/* The calls below return the library's status and print nothing: gemm_cuda keeps a refusal for cuda_sync,
 * gemm_cuda_plan reports it. */

/* A new choice with descriptors but no algorithm yet. The pointer holds until the next one is added. A failure leaves
 * nothing behind; CUBLAS_STATUS_ALLOC_FAILED also where the host has no memory. */
MUST_CHECK cublasStatus_t gemm_choice_add(struct gemm_cuda_state *state, const struct gemm_shape *shape,
                                          struct gemm_choice **choice);

/* Takes back the choice added last. */
void gemm_choice_drop(struct gemm_cuda_state *state);

/* Algorithms for the choice's shape, in the order that the library expects to be best: at least one, or
 * CUBLAS_STATUS_NOT_SUPPORTED. */
MUST_CHECK cublasStatus_t gemm_choice_propose(const struct gemm_cuda_state *state, const struct gemm_choice *c,
                                              cublasLtMatmulHeuristicResult_t results[GEMM_CANDIDATES], int *count);
