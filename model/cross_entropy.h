/* model: the head and its cross entropy in one, so that the logits (N, V) never exist at once: they are made
 * `columns` vocabulary entries at a time, in forward and again in backward. One sample a call.
 *
 * Logits are FP32 from BF16 operands. Cutting the vocabulary rather than the rows keeps each weight gradient one
 * product over all tokens of the sample. `columns` is part of the order of sums, so of the bits. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

struct cuda;

enum { CROSS_ENTROPY_COLUMNS = 512 };

struct cross_entropy {
    int64_t rows, width, vocab, columns;
    const bf16 *hidden;     /* (rows, C) */
    const bf16 *weight;     /* (V, C) */
    const int32_t *targets; /* (rows); -1 is ignored, others lie in [0, V) */
    float *lse;             /* (rows): natural log of the sum of exp(logits), FP32; out in forward, in in backward */
    float *logits;          /* scratch (rows, columns) */
};

/* Returns the sum of (lse - target's logit) over valid rows, in double in row order; *valid: their number. */
struct cross_entropy_fwd {
    struct cross_entropy shape;
    float *sum, *target_logit; /* scratch (rows) */
};
double cross_entropy_fwd_cpu(const struct cross_entropy_fwd *a, int64_t *valid);

/* Of loss_scale times that sum. dlogits are rounded to BF16; exactly zero in ignored rows.
 *   dhidden  (rows, C) bf16 out
 *   dweight  (V, C) fp32 overwritten, or added to with `accumulate` */
struct cross_entropy_bwd {
    struct cross_entropy shape;
    float loss_scale;
    bf16 *dhidden;
    void *dweight;
    enum dtype grad_type; /* of dweight: FP32, on CUDA also BF16 */
    bool accumulate;
    bf16 *dlogits;      /* scratch (rows, columns) */
    float *dhidden_sum; /* scratch (rows, C) */
};
void cross_entropy_bwd_cpu(const struct cross_entropy_bwd *a);

/* CUDA: forward and backward in one pass over chunks of rows, so that each logit is made once. All pointers are device
 * memory.
 *   losses     (rows) fp32 out: lse - target's logit, 0 in ignored rows
 *   dhidden    (rows, C) bf16 out, NULL: forward only
 *   dweight    (V, C) FP32 or BF16: overwritten, or added to with `accumulate`; chunks are added in order
 *   lse      -Inf in ignored rows
 *   vocab    at most 262144
 *   loss_scale is read from on->step at run time
 *   logits, dlogits: scratch (chunk, V) fp32 and bf16 */
struct cross_entropy_cuda {
    int64_t rows, width, vocab, chunk; /* chunk rows at a time; width, vocab: multiples of 8 */
    const bf16 *hidden, *weight;
    const int32_t *targets;
    float *losses, *lse;
    bf16 *dhidden;
    void *dweight;
    enum dtype grad_type;
    bool accumulate;
    float *logits;
    bf16 *dlogits;
};
void cross_entropy_cuda(const struct cross_entropy_cuda *a, const struct cuda *on);

/* The part of it between the products: loss, lse and gradient of rows whose logits are there. */
struct cross_entropy_rows {
    int64_t rows, vocab;
    const float *logits; /* (rows, V) */
    const int32_t *targets;
    float *losses, *lse;
    bf16 *dlogits; /* (rows, V); NULL: none wanted */
};
void cross_entropy_rows_cuda(const struct cross_entropy_rows *a, const struct cuda *on);

/* logits (rows, vocab) fp32 of a few rows, for tests and export checks. */
void cross_entropy_logits_cpu(const bf16 *hidden, const bf16 *weight, int64_t rows, int64_t width, int64_t vocab,
                              float *logits);
