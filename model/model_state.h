/* model: what a planned model holds. For the files model_*.c only; everybody else knows model.h. */
#pragma once

#include "model/linear.h"
#include "model/model.h"

enum projection { PROJECTION_QKV, PROJECTION_O, PROJECTION_GATE_UP, PROJECTION_DOWN, PROJECTIONS };

/* Places are offsets into a flat array of parameters. */
struct layer {
    size_t input_norm, q_norm, k_norm, mlp_norm, matrix[PROJECTIONS];
    struct linear linear[PROJECTIONS];
    void *represented[PROJECTIONS]; /* weights in their format; NULL for BF16, which is the weight itself */
};

/* CPU: what backward reads of one layer and one sample. */
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

/* CPU, undefined between calls. */
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

/* Where a model runs. model_plan.c does what both have in common. */
struct model_backend {
    /* What this device cannot do with a legal configuration. */
    enum status (*check)(const struct model_config *config, const struct model_options *options);
    /* Takes memory; on the real pass (arena->base) fills tables. */
    enum status (*take)(struct model *m, struct arena *arena);
    void (*release)(struct model *m); /* what `take` allocated on the host; of any half-built state */
    void (*represent)(struct model *m, struct layer *layer, enum projection p, const bf16 *weight); /* not for BF16 */
    void (*backward)(struct model *m, const struct model_backward *call);
    void (*logits)(struct model *m, int64_t first_row, int64_t rows, float *logits);
    void (*stats_reset)(struct model *m);
};
extern const struct model_backend model_backend_cpu, model_backend_cuda;
void model_backward_cpu(struct model *m, const struct model_backward *call);
void model_logits_cpu(struct model *m, int64_t first_row, int64_t rows, float *logits);

struct model_cuda;

struct model {
    const struct model_backend *backend;
    struct model_config config;
    struct model_options options;
    const struct param_list *params; /* borrows */
    const bf16 *weights;             /* borrows; NULL before model_set_weights */
    size_t embed, final_norm, head;  /* offsets; head is embed if tied */
    size_t attention_saved_bytes, attention_scratch_bytes;
    struct layer *layers;          /* owns */
    struct attention_stats *stats; /* (L); CPU: owns; CUDA: (L + 1), the last is for what is not counted */
    float *cosine, *sine;          /* (T, D/2) */
    int64_t batch, length;         /* of the last forward */
    bool kept;                     /* it can be followed by backward */

    struct model_cuda *gpu; /* owns; CUDA only. The rest: CPU only */

    int64_t columns;            /* vocabulary entries whose logits are held at once */
    struct block *blocks;       /* owns; (B, L), or a single one with recompute */
    bf16 *residual;             /* (B, L + 1, T, C): what enters each layer, and what leaves the last */
    bf16 *hidden;               /* (B T, C): after the final norm, packed by the last call's length */
    float *final_inv_rms, *lse; /* (B, T) */
    struct model_scratch scratch;
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

static inline struct attention_shape model_attention_shape(const struct model_config *c, int64_t batch, int64_t tokens)
{
    return (struct attention_shape){.batch = batch,
                                    .tokens = tokens,
                                    .heads = c->heads,
                                    .kv_heads = c->kv_heads,
                                    .head_dim = c->head_dim,
                                    .causal = true,
                                    .softmax_scale = (float)(1.0 / __builtin_sqrt((double)c->head_dim))};
}

/* The attention of the largest call: of the whole batch on CUDA, of a sample on the CPU, which loops. */
static inline struct attention_shape model_largest_attention(const struct model_config *c,
                                                             const struct model_options *o)
{
    return model_attention_shape(c, o->device == DEVICE_CUDA ? o->batch : 1, o->tokens);
}

/* Widths of Q and of K or V. */
static inline int64_t model_q_width(const struct model_config *c)
{
    return (int64_t)c->heads * c->head_dim;
}

static inline int64_t model_kv_width(const struct model_config *c)
{
    return (int64_t)c->kv_heads * c->head_dim;
}

/* Where Q, K and V of a layer lie. Q and K are neighbours in `rotated`; V stays in qkv. */
struct heads {
    int64_t q, kv;                 /* widths of Q and of K */
    int64_t qkv_stride, qk_stride; /* of a token, in qkv and in rotated */
};

static inline struct heads model_heads(const struct model_config *c)
{
    int64_t q = model_q_width(c), kv = model_kv_width(c);
    return (struct heads){q, kv, q + 2 * kv, c->qk_norm ? q + kv : q + 2 * kv};
}

static inline struct head_view model_head_view(bf16 *data, int64_t tokens, int64_t stride, int64_t head_dim)
{
    return (struct head_view){
        .data = data, .batch_stride = tokens * stride, .token_stride = stride, .head_stride = head_dim};
}

/* The elements between parameters, and behind the last: calls `zero` for each gap that is not empty. */
static inline void model_each_gap(const struct param_list *params, void (*zero)(void *context, size_t at, size_t n),
                                  void *context)
{
    size_t end = 0;
    for (int i = 0; i < params->count; i++) {
        const struct param *p = &params->params[i];
        if (p->offset > end) {
            zero(context, end, p->offset - end);
        }
        end = p->offset + (size_t)(p->rows * p->cols);
    }
    if (params->elements > end) {
        zero(context, end, params->elements - end);
    }
}
