/* attention: the Hopper variant "sm90", D = 128; the inside, for its own files and tests. Others use
 * attention/attention.h. Views must allow TMA: data and all strides multiples of 16 bytes. */
#pragma once

#include "attention/attention_cuda.h"

extern const struct attention_variant attention_variant_sm90;

/* NULL, or why the hand-written forward does not run (shape, recipe). */
const char *attention_fwd_refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
size_t attention_fwd_scratch_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
/* As attention_variant.fwd. */
void attention_fwd_sm90(const struct attention_fwd *a);

/* ---- kernels ----------------------------------------------------------------------------------------------- */

/* pv = bf16: q, k, v as published. counter: one word of device memory. */
void attention_fwd_bf16_sm90(const struct attention_fwd *a, const struct head_view *q, const struct head_view *k,
                             const struct head_view *v, uint32_t *counter);

/* Tokens of a column view: whole tiles. */
static inline int64_t attention_padded_sm90(int64_t tokens)
{
    return (tokens + 127) / 128 * 128;
}

/* What the forward with codes multiplies. Column views are (B, Hkv, 128, padded T), E4M3, each 16 tokens in the order
 * 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15 (called pi1); tokens behind T are zero. */
struct attention_operands_sm90 {
    struct head_view q, k;  /* exact in BF16; or, qk = nvfp4_e4m3: */
    const uint8_t *q8, *k8; /* (B, heads, T, 128) E4M3, else NULL */
    const uint8_t *v_column;
    const float *q_inverse, *k_inverse, *v_inverse; /* per (batch, head): value = code times this */
    uint32_t *counter;
};
void attention_fwd_codes_sm90(const struct attention_fwd *a, const struct attention_operands_sm90 *x);

/* v_column and v_inverse from V as the forward represents it (saved.v: (B, Hkv, T, 128), times attention_unit); facts:
 * of the V that it was made from. Exact for pv = fp8, and for mxfp4 within 15 binades of a head's largest block. */
void attention_value_column_sm90(const struct cuda *on, const struct attention_shape *shape,
                                 const struct attention_recipe *recipe, const bf16 *v, const struct head_facts *facts,
                                 uint8_t *column, float *inverse);

/* x (B, heads, T, 128) becomes E4M3(m x) / m, m the largest power of two with m amax <= 448 of a head; the codes, and
 * 1 / m. facts: of x. The step from qk = nvfp4 to nvfp4_e4m3. */
void attention_lower_rows_sm90(const struct cuda *on, bf16 *x, int64_t heads, int64_t tokens,
                               const struct head_facts *facts, uint8_t *rows, float *inverse);
