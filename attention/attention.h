/* attention: softmax(scale Q K^T) V, forward and backward, in the formats of a recipe.
 *
 * Knows no model: rotary embedding, projections and norms happen outside; Q and K arrive rotated, all inputs in BF16.
 * Variants live in attention_table.c; attention_cpu defines the meaning of each recipe. */
#pragma once

#include "attention/recipe.h"
#include "core/device.h"
#include "core/tensor.h"

struct cuda;

struct attention_shape {
    int64_t batch, tokens, heads, kv_heads, head_dim; /* query head h reads kv head h / (heads / kv_heads) */
    bool causal;
    float softmax_scale; /* 1 / sqrt(head_dim) in the model */
};

/* A (B, T, heads, D) tensor with D contiguous and any strides, in elements: a slice of a fused projection will do. */
struct head_view {
    bf16 *data;
    int64_t batch_stride, token_stride, head_stride;
};

/* What a call observed. Sums are FP64, added in one fixed order: equal bits for any thread count.
 * Pairs (sum, count) add over calls; attention_stats_add does so. */
struct attention_stats {
    double logit_max;        /* largest |softmax_scale q.k| of the represented Q and K, natural units */
    double leak_abs, ds_abs; /* sum_i |rho_i|, sum_ij |dS_ij|, FP32 dS before it is stored */
    double leak_stored_abs, ds_stored_abs;
    double leak_r, r_r;          /* sum_i rho_i r_i, sum_i r_i^2: slope b = leak_r / r_r */
    double do_count, do_flushed; /* non-zero dO elements, and those that became zero */
    double ds_count, ds_flushed, ds_saturated;
    double p_rows, p_lost_mass; /* rows, and the sum of probability mass whose code is zero */
    double non_finite;          /* NaN or Inf among Q, K, V, O, dO, dQ, dK, dV */
};
void attention_stats_add(struct attention_stats *sum, const struct attention_stats *one);

/* Forward.
 *   q          (B, T, H, D)    bf16  in
 *   k, v       (B, T, Hkv, D)  bf16  in
 *   out        (B, T, H, D)    bf16  out
 *   lse_log2   (B, H, T)       fp32  out; LSE2: row anchor plus log2 of the sum of the represented P (pv = bf16: of
 *                                    P before its rounding, as flash attention does)
 *   saved      attention_saved_bytes, out; what backward needs beside the tensors above. NULL for inference.
 *   scratch    attention_scratch_bytes, undefined before and after
 *   stats      added to; may be NULL
 *   amax       (B, H + 2 Hkv)   fp32  in; largest |x| of each head of Q, then of K, then of V, Infinity if anything in
 *                                     it is not finite: for variants that take it (takes_amax), if the caller knows it
 *                                     already. NULL: found inside, the same result
 * A row with no visible key gives out = 0, lse_log2 = -INFINITY. Bits depend on neither B nor threads.
 * On CUDA all pointers (stats too) are device memory and the call only enqueues on cuda->stream. */
struct attention_fwd {
    const struct cuda *cuda; /* NULL on the CPU */
    struct attention_shape shape;
    const struct attention_recipe *recipe;
    struct head_view q, k, v, out;
    float *lse_log2;
    void *saved, *scratch;
    struct attention_stats *stats;
    const float *amax;
};

/* Backward: as above, with dout in, dq, dk, dv out (bf16, FP32 accumulation, one rounding; overwritten). amax: as the
 * forward's, of the same q, k and v. */
struct attention_bwd {
    const struct cuda *cuda;
    struct attention_shape shape;
    const struct attention_recipe *recipe;
    struct head_view q, k, v, out, dout, dq, dk, dv;
    const float *lse_log2;
    const void *saved;
    void *scratch;
    struct attention_stats *stats;
    const float *amax;
    bool unordered; /* CUDA, run.deterministic = off: FP32 sums of dQ may be added in any order where that is faster
                       (pv = bf16 on Hopper): two runs then differ in last bits. false: equal bits */
};

/* One implementation of both passes; they share the saved state, so they are chosen together. */
struct attention_variant {
    const char *name;
    enum device_kind device; /* where its tensors live */
    /* NULL if this variant runs (shape, recipe) on this build and machine, else why not. */
    const char *(*refuses)(const struct attention_shape *shape, const struct attention_recipe *recipe);
    size_t (*saved_bytes)(const struct attention_shape *shape, const struct attention_recipe *recipe);
    size_t (*scratch_bytes)(const struct attention_shape *shape, const struct attention_recipe *recipe);
    /* Whether a known amax saves work in either pass; the pointer itself NULL: never. */
    bool (*takes_amax)(const struct attention_recipe *recipe);
    /* Why another variant runs the backward of (shape, recipe), else NULL. The pointer itself NULL: none ever does. */
    const char *(*bwd_refuses)(const struct attention_shape *shape, const struct attention_recipe *recipe);
    void (*fwd)(const struct attention_fwd *a);
    void (*bwd)(const struct attention_bwd *a);
};

/* All variants in order of preference, NULL-terminated. */
extern const struct attention_variant *const attention_variants[];

/* Chooses once, at start, among the variants of one kind of device. name "auto": the first that does not refuse. Fails
 * with ERR_UNSUPPORTED naming the reason. */
MUST_CHECK enum status attention_choose(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                        enum device_kind device, const char *name,
                                        const struct attention_variant **variant);

/* For logs: the chosen variant, what of the recipe another one runs, and why a preferred one was not chosen, such as
 * "sm90", "sm90 (backward by cuda: ...)", "cuda (sm90: ...)". */
void attention_route_print(const struct attention_shape *shape, const struct attention_recipe *recipe,
                           const struct attention_variant *variant, char *text, size_t bytes);
