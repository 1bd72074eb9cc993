/* attention: the Hopper variant "sm90", D = 128; the inside, for its own files and tests. Others use
 * attention/attention.h. Views must allow TMA: data and all strides multiples of 16 bytes. */
#pragma once

#include "attention/attention_cuda.h"

extern const struct attention_variant attention_variant_sm90;

/* NULL, or why the hand-written forward does not run (shape, recipe). */
const char *attention_fwd_refuses_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
size_t attention_fwd_scratch_bytes_sm90(const struct attention_shape *shape, const struct attention_recipe *recipe);
/* As attention_variant.fwd, for what is not refused. stats is ignored, and views are not checked. */
void attention_fwd_sm90(const struct attention_fwd *a);

/* ---- saved state ------------------------------------------------------------------------------------------- */

/* The saved state of the variant "cuda" (its anchors are not used here). Behind it, with qk = nvfp4_e4m3 and a backward
 * that is written for Hopper, the E4M3 rows that the forward's scores multiplied, so that P is rebuilt from the same
 * products; else NULL. */
struct attention_saved_sm90 {
    struct attention_saved operands;
    uint8_t *q8, *k8;             /* (B, heads, T, 128) E4M3 */
    float *q_inverse, *k_inverse; /* per (batch, head): value = code times this */
};
struct attention_saved_sm90 attention_saved_sm90_carve(const struct attention_shape *shape,
                                                       const struct attention_recipe *recipe, struct carve *carve);

/* Makes q8, k8 and their inverses from the operands that another forward (variant "cuda", CPU) saved. scratch: as for
 * the forward. */
void attention_complete_sm90(const struct cuda *on, const struct attention_shape *shape,
                             const struct attention_recipe *recipe, void *saved, void *scratch);

/* The forward does not write operands.q and k where q8 and k8 hold them exactly (k then has the centred original, if
 * k_center is on). This makes them, bit for bit, for the
 * variant "cuda", which reads them. */
void attention_restore_sm90(const struct cuda *on, const struct attention_shape *shape,
                            const struct attention_recipe *recipe, void *saved);

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
 * 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15 (called pi1); tokens behind T are zero. pv = mxfp4: the 32 words of each 128
 * tokens are transposed after that, word w at 4 (w % 8) + w / 8. */
struct attention_operands_sm90 {
    struct head_view q, k;  /* exact in BF16; or, qk = nvfp4_e4m3: */
    const uint8_t *q8, *k8; /* (B, heads, T, 128) E4M3, else NULL */
    const uint8_t *v_column;
    const float *q_inverse, *k_inverse, *v_inverse; /* per (batch, head): value = code times this */
    uint32_t *counter;
};
void attention_fwd_codes_sm90(const struct attention_fwd *a, const struct attention_operands_sm90 *x);

/* ---- publishing (attention_publish_sm90.cu, attention_publish_rows_sm90.cu) -------------------------------- */

/* One call: what the recipe quantises of Q, K and V, and where it goes. own_q, own_k, own_v: (B, heads, T, 128), the
 * represented operands of docs/numerics.md (v times attention_unit), bit for bit those of the CPU; a source may be its
 * own destination. With pv other than bf16 also v_column and v_inverse: exact for pv = fp8, and for mxfp4 within 15
 * binades of a head's largest block. With qk = nvfp4_e4m3 also q8, k8 and their inverses; own_q and own_k
 * may then be NULL if qk_scale = amax. */
struct attention_publish_sm90 {
    struct attention_shape shape;
    const struct attention_recipe *recipe; /* not both qk and pv bf16 */
    struct head_view q, k, v;
    const float *amax; /* (B, H + 2 Hkv): as attention_fwd.amax, of the three above; of BF16 tensors it is not read */
    bf16 *own_q, *own_k, *own_v;
    uint8_t *q8, *k8, *v_column;
    float *q_inverse, *k_inverse, *v_inverse;
    struct head_facts *decoded; /* scratch, B (H + Hkv): qk = nvfp4_e4m3 with a qk_scale other than amax */
};
void attention_publish_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a);

/* Only q8, k8 and their inverses, from own_q and own_k, which hold represented values already. Uses decoded. */
void attention_code_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a);

/* The other way round: own_q and own_k from q8, k8 and their inverses. */
void attention_decode_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a);

/* amax of what attention_publish_heads_sm90 reads; a->amax is ignored. */
void attention_measure_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a, float *amax);

/* The whole first half of the forward: everything that attention_fwd_codes_sm90 multiplies, into a->scratch and
 * a->saved. recipe: pv other than bf16. */
struct attention_operands_sm90 attention_fwd_publish_sm90(const struct attention_fwd *a);
