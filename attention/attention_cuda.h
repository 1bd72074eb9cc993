/* attention: the inside of the variant "cuda", what its two passes share. Others use attention/attention.h.
 *
 * Represented operands are exact in BF16, so one kind of kernel carries every route: S = Q K^T and O += P V through
 * mma.sync m16n8k16 with FP32 accumulation, P published in between (attention/probability_cuda.cuh). Tiled: no T x T
 * array. Codes differ from those of the CPU reference only where the order of summation moves a score.
 *
 * Scores. t = fl32(c s), c = (float)((double)softmax_scale * M_LOG2E), s the accumulator after the k16 steps of D in
 * ascending order: both passes find the same bits. Keys come in ascending blocks of 32 at absolute positions.
 *
 * Views must allow 16-byte accesses: data aligned to 16 bytes, strides multiples of 8 elements. */
#pragma once

#include "attention/attention_cpu.h"
#include "core/cuda.h"

enum { ATTENTION_CUDA_HEAD_DIM_MAX = 128 };

extern const struct attention_variant attention_variant_cuda;

/* ---- memory ----------------------------------------------------------------------------------------------- */

/* The saved state: that of the CPU (attention_saved_carve, the same layout, so that passes of the two may be mixed),
 * then the forward's row anchors where the backward cannot find them from its own tiles. */
struct attention_saved_cuda {
    struct attention_saved operands;
    float *anchor; /* (B, H, T), anchor = sampled only, else NULL; -inf never, NaN for a broken row */
};
struct attention_saved_cuda attention_saved_cuda_carve(const struct attention_shape *shape,
                                                       const struct attention_recipe *recipe, struct carve *carve);

/* Scratch of a pass: each carves its own from the start of the same memory. */
size_t attention_fwd_cuda_scratch(const struct attention_shape *shape, const struct attention_recipe *recipe);
size_t attention_bwd_cuda_scratch(const struct attention_shape *shape, const struct attention_recipe *recipe);

void attention_fwd_cuda(const struct attention_fwd *a);
void attention_bwd_cuda(const struct attention_bwd *a);

/* ---- operands (attention_cuda_operands.cu); y is (B, heads, T, D) contiguous ------------------------------ */

/* A tensor of heads, as operand kernels see it. */
struct head_tensor {
    struct head_view view;
    int64_t batch, tokens, heads, head_dim;
};

/* A contiguous (B, heads, T, D) tensor. */
static inline struct head_view own_view(const struct attention_shape *shape, bf16 *data, int64_t heads)
{
    const int64_t head = shape->tokens * shape->head_dim;
    const struct head_view view = {data, heads * head, shape->head_dim, head};
    return view;
}

/* What is known of one (batch, head). Written by attention_measure_cuda; maxima and integer counts only, so the order
 * of the atomics does not matter. */
struct head_facts {
    uint32_t amax;       /* bits of max |x| as FP32; those of Inf if anything is not finite */
    uint32_t non_finite; /* NaNs and infinities */
};

/* facts[b * heads + head] of the first `tokens` tokens of x. */
void attention_measure_cuda(const struct cuda *on, const struct head_tensor *x, struct head_facts *facts);

/* K less its mean over keys, rounded to BF16, the same bits as the CPU's publish_centred. */
void attention_centre_cuda(const struct cuda *on, const struct head_tensor *k, bf16 *y);

/* V in E4M3, decoded, times `unit` (publish_value_e4m3 of the CPU); facts: of x. */
void attention_value_e4m3_cuda(const struct cuda *on, const struct head_tensor *x, const struct head_facts *facts,
                               float unit, bf16 *y);

/* The score operand (publish_scores; qk other than bf16), facts: of x. `decoded` (B * heads) is scratch. */
void attention_scores_cuda(const struct cuda *on, const struct attention_recipe *recipe, const struct head_tensor *x,
                           const struct head_facts *facts, struct head_facts *decoded, bf16 *y);

/* V of the forward (publish_value; pv other than bf16). sinks: facts of the first min(sink_keys_fp8, T) tokens; not
 * read without sinks. */
void attention_values_cuda(const struct cuda *on, const struct attention_recipe *recipe, const struct head_tensor *x,
                           const struct head_facts *facts, const struct head_facts *sinks, bf16 *y);

/* ---- statistics ------------------------------------------------------------------------------------------- */

/* stats += parts[0] + parts[1] + .. in one fixed order, logit_max by maximum (NaN wins). One small kernel. */
void attention_stats_cuda(const struct cuda *on, const struct attention_stats *parts, int64_t count,
                          struct attention_stats *stats);

/* stats->non_finite += the counts of n facts, as attention_stats_cuda. */
void attention_stats_facts_cuda(const struct cuda *on, const struct head_facts *facts, int64_t count,
                                struct attention_stats *stats);
