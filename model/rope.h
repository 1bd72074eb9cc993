/* model: rotary position embedding in Hugging Face's half-split layout: feature i pairs with feature i + D/2. */
#pragma once

#include "core/tensor.h"
#include "model/model_config.h"

struct cuda;

/* Inverse frequencies (D/2), computed in FP64 with llama3 scaling where asked, rounded once to FP32. */
void rope_inverse_frequencies(const struct rope_config *rope, int head_dim, float *inverse);

/* cosine, sine (positions, D/2) fp32 of the angles fl32(position * inverse frequency). */
void rope_table(const struct rope_config *rope, int head_dim, int64_t positions, float *cosine, float *sine);

/* Turns every head of x (rows, heads, D) bf16 in place, row r being position r; FP32, one rounding to BF16.
 * `inverse` turns back: the backward pass. */
struct rope_apply {
    bf16 *x;
    int64_t rows, row_stride, heads, head_dim;
    const float *cosine, *sine;
    bool inverse;
};
void rope_apply_cpu(const struct rope_apply *a);

/* Rows of several samples: row r is position r mod `length`. D a multiple of 16, row_stride of 8, x aligned to 16
 * bytes. The bits of rope_apply_cpu. */
void rope_apply_cuda(const struct rope_apply *a, int64_t length, const struct cuda *on);

/* The same, and amax (samples, heads + beside heads) fp32: the largest |x| of each head of each sample once turned,
 * then of the heads beside, which are only read; Infinity if anything is not finite. Whole samples: rows a multiple of
 * `length`. D / 16 a power of two, at most 32; D a multiple of 16, strides of 8, addresses of 16 bytes. */
struct rope_beside {
    const bf16 *x; /* (rows, heads, D) */
    int64_t row_stride, heads;
};
void rope_measure_cuda(const struct rope_apply *a, const struct rope_beside *beside, int64_t length, float *amax,
                       const struct cuda *on);
