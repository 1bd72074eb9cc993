/* optim: AdamW over flat arrays, in one pass. Knows elements and segments, no model. */
#pragma once

#include "core/tensor.h"

#include <stdbool.h>

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
