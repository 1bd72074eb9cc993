/* model: rotary position embedding in Hugging Face's half-split layout: feature i pairs with feature i + D/2. */
#pragma once

#include "core/tensor.h"
#include "model/model_config.h"

struct cuda;

/* Inverse frequencies (D/2), computed in FP64 with llama3 scaling where asked, rounded once to FP32. */
void rope_inverse_frequencies(const struct rope_config *rope, int head_dim, float *inverse);

/* cosine, sine (positions, D/2) fp32 of the angles fl32(position * inverse frequency). */
void rope_table(const struct rope_config *rope, int head_dim, int64_t positions, float *cosine, float *sine);

/* Rotates every head of x (rows, heads, D) bf16 in place; row r is position r; FP32, one rounding to BF16. `inverse`
 * rotates back: the backward pass. */
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

/* The same, and the amax of the results, Infinity if anything is not finite. Heads of `beside` are measured, not
 * rotated. Wants rope_measures(head_dim). */
struct rope_largest {
    const bf16 *beside; /* (rows, beside_heads, D) */
    int64_t beside_stride, beside_heads;
    float *amax; /* of_all: one number. Else (samples, heads + beside_heads), of each head of each sample; rows are a
                    multiple of `length` */
    bool of_all;
};
static inline bool rope_measures(int64_t head_dim)
{
    int64_t vectors = head_dim / 16;
    return head_dim % 16 == 0 && vectors >= 1 && vectors <= 32 && (vectors & (vectors - 1)) == 0;
}
void rope_measure_cuda(const struct rope_apply *a, const struct rope_largest *largest, int64_t length,
                       const struct cuda *on);
