/* model: what a planned model holds. For model_plan.c and model_cpu.c only; everybody else knows model.h. */
#pragma once

#include "model/linear.h"
#include "model/model.h"

enum projection { PROJECTION_QKV, PROJECTION_O, PROJECTION_GATE_UP, PROJECTION_DOWN, PROJECTIONS };

/* Places are offsets into a flat array of parameters. */
struct layer {
    size_t input_norm, q_norm, k_norm, mlp_norm, matrix[PROJECTIONS];
    struct linear linear[PROJECTIONS];
    bf16 *represented[PROJECTIONS]; /* weights in their format; NULL for BF16, which is the weight itself */
};

/* What backward reads of one layer and one sample. */
struct block {
    bf16 *normed;         /* (T, C) */
    bf16 *qkv;            /* (T, (H + 2 Hkv) D); without qk_norm Q and K are rotated in place */
    bf16 *rotated;        /* (T, (H + Hkv) D): Q and K after qk_norm and RoPE; qkv itself without qk_norm */
    bf16 *attended;       /* (T, H D) */
    bf16 *middle;         /* (T, C): the residual stream between attention and feed-forward */
    bf16 *mlp_normed;     /* (T, C) */
    bf16 *gate_up;        /* (T, 2 F) */
    bf16 *activated;      /* (T, F) */
    float *inv_rms;       /* (T) of the input norm */
    float *q_inv, *k_inv; /* (T, H), (T, Hkv) */
    float *mlp_inv_rms;   /* (T) */
    float *lse_log2;      /* (H, T) */
    void *attention;      /* attention's own saved state */
};

/* Undefined between calls. */
struct model_scratch {
    bf16 *branch;                           /* (T, C): a branch before it joins the residual stream */
    float *logits, *exp_sum, *target_logit; /* (T, columns), (T), (T) */
    void *linear, *attention;
    bf16 *d, *dnormed;                              /* (T, C): gradients of the residual stream, of a norm's output */
    bf16 *dactivated, *dgate_up, *dattended, *dqkv; /* (T, F), (T, 2 F), (T, H D), (T, (H + 2 Hkv) D) */
    bf16 *dlogits;                                  /* (T, columns) */
    float *dhidden_sum;                             /* (T, C) */
    int32_t *last_seen, *next;                      /* (V), (T) */
    float *tied;                                    /* (V, C), tied models: gradient of one sample before it is added */
};

struct model {
    struct model_config config;
    struct model_options options;
    const struct param_list *params; /* borrows */
    const bf16 *weights;             /* borrows; NULL before model_set_weights */
    size_t embed, final_norm, head;  /* offsets; head is embed if tied */
    int64_t columns;                 /* vocabulary entries whose logits are held at once */
    size_t attention_saved_bytes, attention_scratch_bytes;
    struct layer *layers;          /* owns */
    struct block *blocks;          /* owns; (B, L), or a single one with recompute */
    struct attention_stats *stats; /* owns; (L) */
    float *cosine, *sine;          /* (T, D/2) */
    bf16 *residual;                /* (B, L + 1, T, C): what enters each layer, and what leaves the last */
    bf16 *hidden;                  /* (B T, C): after the final norm, packed by the last call's length */
    float *final_inv_rms, *lse;    /* (B, T) */
    struct model_scratch scratch;
    int64_t batch, length; /* of the last forward */
    bool kept;             /* it can be followed by backward */
};

/* The residual stream of sample b as it enters `layer`; layer L: as it leaves the last one. */
static inline bf16 *model_residual(const struct model *m, int64_t b, int layer)
{
    return m->residual + (b * (m->config.layers + 1) + layer) * m->options.tokens * m->config.width;
}

static inline struct block *model_block(const struct model *m, int64_t b, int layer)
{
    return m->options.recompute == RECOMPUTE_BLOCK ? m->blocks : m->blocks + b * m->config.layers + layer;
}

/* One sample of `tokens` tokens. */
static inline struct attention_shape model_attention_shape(const struct model_config *c, int64_t tokens)
{
    return (struct attention_shape){.batch = 1,
                                    .tokens = tokens,
                                    .heads = c->heads,
                                    .kv_heads = c->kv_heads,
                                    .head_dim = c->head_dim,
                                    .causal = true,
                                    .softmax_scale = (float)(1.0 / __builtin_sqrt((double)c->head_dim))};
}
