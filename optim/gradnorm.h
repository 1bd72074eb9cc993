/* optim: the global gradient norm and what clipping makes of it. */
#pragma once

#include "optim/adamw.h"

enum { GRADNORM_BLOCK = 4096 }; /* elements of a block, whose squares are summed first; part of the bits */

struct gradnorm {
    double norm;        /* sqrt of the sum of squares; NaN or Inf if any gradient is */
    int64_t non_finite; /* gradients that are NaN or Inf */
    int bad_segment;    /* first segment that has one, -1 if none */
    size_t bad_element; /* its first bad element, within the segment */
};

/* Squares are summed in FP64 over fixed blocks of GRADNORM_BLOCK elements, the blocks of a segment by a binary tree
 * padded with zeros, the segments likewise: bits depend on the gradients only. */
struct gradnorm gradnorm_of(const float *grads, const struct adamw_segment *segments, int n_segments);

/* CUDA: the same over FP32 or BF16 gradients, with the same bits: *result, device memory, holds what gradnorm_of
 * returns once the stream is done. Scratch of gradnorm_scratch_bytes_cuda, aligned to 16 bytes; the plan is
 * adamw_plan_cuda's. */
struct gradnorm_cuda {
    const void *plan;
    int64_t blocks;
    int n_segments;
    const void *grads;
    enum dtype grad_type;
    void *scratch;
    struct gradnorm *result;
};
size_t gradnorm_scratch_bytes_cuda(int64_t blocks, int n_segments);
void gradnorm_cuda(const struct gradnorm_cuda *a, const struct cuda *on);

/* min(1, clip / norm); 1 when clip <= 0. The norm must be finite. */
float gradnorm_clip_scale(double norm, float clip);
