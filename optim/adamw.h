/* optim: AdamW over flat arrays, in one pass. Knows elements and segments, no model. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

struct cuda;

struct adamw_config {
    float lr_peak;                               /* the schedule scales it */
    float beta1, beta2, eps, weight_decay, clip; /* clip <= 0: off */
    bool master_fp32;                            /* FP32 master weights; else BF16 weights are the parameters */
    bool moments_bf16;
    bool stochastic_rounding; /* of BF16 writes that keep state: weights without a master, BF16 moments */
    bool grads_bf16;          /* gradients are kept and reduced in BF16 (dist does it; they arrive here as FP32) */
    uint64_t seed;
};

/* A run of elements with one name: a parameter. */
struct adamw_segment {
    const char *name; /* keys the random numbers of stochastic rounding together with seed, update and element */
    size_t offset, elements;
    bool decays;
    float *amax; /* CUDA: see adamw_step_cuda; NULL: not wanted */
};

/* Flat arrays of equal length. NULL where the mode has none. */
struct adamw_state {
    float *master; /* master_fp32 */
    bf16 *weights; /* always: what the model computes with; RNE(master) when there is a master */
    void *m, *v;   /* FP32 or BF16 by moments_bf16; zeros before the first update */
};

size_t adamw_moment_bytes(const struct adamw_config *config); /* per element, of each of m and v */

/* One update. `update` counts from 1 (bias correction). grads: FP32, already averaged; each is multiplied by
 * `grad_scale` (the clip factor) on the fly. All must be finite: gradnorm_of is asked first.
 *   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
 * FP32 arithmetic in this order; decoupled decay uses the old w (Loshchilov and Hutter), segments that do not decay
 * have decay 0. The step uses m and v before they are rounded for storage. Elements outside all segments are not
 * touched. Bits do not depend on the number of threads. */
void adamw_step(const struct adamw_config *config, const struct adamw_state *state,
                const struct adamw_segment *segments, int n_segments, const float *grads, float grad_scale, float lr,
                uint32_t update);

/* CUDA: the same update, with the bits of adamw_step.
 * A BF16 weight w and a signed 16-bit remainder stand for the FP32 master with the bits (w << 16) + remainder: 2 bytes
 * an element instead of 4, and every bit of the master is kept. For that w is the nearest BF16 number with exact ties
 * away from zero: it differs from RNE(master) in ties whose lower neighbour is even, one master in 2^17.
 *   adamw_plan_cuda   fills `memory` (adamw_plan_bytes_cuda) with the tables of blocks and segments for the kernels
 *   grads             FP32 or BF16 by grad_type
 *   grad_scale        as above; finite: the caller has looked at the norm
 *   segment.amax      device memory: raised to the largest magnitude of the segment's new BF16 weights; magnitudes are
 *                     compared as bits, NaN above Inf above all. Segments of one matrix may share a place. Whoever
 *                     asks zeroes it before the update
 * Arrays aligned to 16 bytes; segments may start anywhere, those at multiples of four elements are fast. */
struct adamw_cuda {
    int16_t *remainder; /* master_fp32; else NULL */
    bf16 *weights;
    void *m, *v;
    const void *plan; /* device */
    int64_t blocks;   /* of the plan */
    bool finds_amax;  /* some segment wants it */
};
size_t adamw_plan_bytes_cuda(const struct adamw_segment *segments, int n_segments);
void adamw_plan_cuda(struct adamw_cuda *state, const struct adamw_config *config, const struct adamw_segment *segments,
                     int n_segments, void *memory, const struct cuda *on);
void adamw_step_cuda(const struct adamw_config *config, const struct adamw_cuda *state, const void *grads,
                     enum dtype grad_type, float grad_scale, float lr, uint32_t update, const struct cuda *on);

/* Master weights as FP32 values (a checkpoint's form) and back. n elements, device memory. A NaN is split into 0x7fff
 * and remainder 0. */
void adamw_master_join_cuda(const bf16 *weights, const int16_t *remainder, float *master, size_t n,
                            const struct cuda *on);
void adamw_master_split_cuda(const float *master, bf16 *weights, int16_t *remainder, size_t n, const struct cuda *on);
