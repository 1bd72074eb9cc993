/* model: what a model on the GPU holds. For model_*_cuda.c only.
 *
 * n = B T tokens are rows of every product. A layer keeps only what a product or attention made; outputs of norms and
 * of SwiGLU are made again in backward, one pass over memory each. Bytes kept per token and layer (8B: KiB):
 *
 *                                              none      gate_up   block
 *   residual stream entering the layer   2 C      8         8        8
 *   q, k, v                    2 (H + 2 Hkv) D   12        12
 *   attention's output                 2 H D      8         8
 *   residual stream in the middle        2 C      8         8
 *   gate, up                             4 F     56
 *   log sum of exponentials              4 H      0.1       0.1
 *   sum                                          92        36        8
 *
 * and attention's own state (variant->saved_bytes), with qk_norm 2 (H + Hkv) D + 4 (H + Hkv) more. `gate_up` pays one
 * product of 4 C F FLOPs a token more (8B: 15 % of all), `block` all of forward but the down projection and the head.
 */
#pragma once

#include "model/model_state.h"

struct cuda;
struct rope_largest;

enum {
    MODEL_HEAD_ROWS = 2048, /* rows whose logits exist at once (8B: 1.5 GiB in FP32 and BF16); part of the bits */
};

/* Kept from forward to backward; with recompute, (some) layers share one. */
struct kept {
    bf16 *qkv;            /* (n, (H + 2 Hkv) D); without qk_norm Q and K are rotated in place */
    bf16 *rotated;        /* (n, (H + Hkv) D): Q and K after qk_norm and RoPE; qkv itself without qk_norm */
    bf16 *attended;       /* (n, H D) */
    bf16 *middle;         /* (n, C): the residual stream between attention and feed-forward */
    bf16 *gate_up;        /* (n, 2 F) */
    float *q_inv, *k_inv; /* (n, H), (n, Hkv); qk_norm only */
    float *lse_log2;      /* (B, H, T) */
    float *head_amax;     /* (B, H + 2 Hkv): largest |x| of each head of Q, K and V; NULL if attention takes none */
    void *attention;      /* attention's own saved state */
};

struct model_cuda {
    int64_t rows;       /* the largest n */
    int64_t head_rows;  /* of logits at once */
    struct kept *kept;  /* owns the table; (L) */
    bf16 *residual;     /* (L + 1, n, C): what enters each layer, and what leaves the last */
    bf16 *hidden;       /* (n, C): after the final norm */
    bf16 *normed;       /* (n, C): output of the norm that ran last */
    float *inv_rms;     /* (n): its inverse RMS; the final norm's is kept from forward to backward */
    bf16 *branch;       /* (n, C): before it joins the residual stream; in backward the gradient of a norm's output; the
                           final norm's lies here from forward to backward */
    bf16 *d;            /* (n, C): gradient of the residual stream */
    void *tool;         /* scratch of the operator that runs */
    float *amax;        /* (2, L, PROJECTIONS): largest |x| and |dy| of each product; small formats only */
    float *weight_amax; /* (L, PROJECTIONS): found by the optimizer, see model_weight_amax */
    float *losses, *lse;              /* (n): of the head */
    int32_t *made_up;                 /* (2, n): tokens and targets of the warm-up */
    struct model_loss_row *loss_rows; /* (B) */

    /* These three share one memory: the feed-forward's half of a layer, attention's half, */
    bf16 *activated, *dgate_up, *dactivated; /* (n, F), (n, 2 F), (n, F) */
    bf16 *dattended, *dqkv;                  /* (n, H D), (n, (H + 2 Hkv) D) */
    /* and, with `tool`, the head. */
    float *logits; /* (head_rows, V) */
    bf16 *dlogits; /* (head_rows, V) */

    void *grads; /* of the last forward: backward must be asked for the same */
    bool accumulate;
    bool uncounted; /* no statistics */
};

/* One call: the shape, and where gradients go. */
struct pass {
    struct model *m;
    const struct model_batch *batch;
    int64_t n; /* rows of this call */
    bool keep; /* backward follows */
    void *grads;
    bool accumulate;
};

/* The residual stream that enters `layer`; layer L: that leaves the last one. */
static inline bf16 *model_residual_cuda(const struct model *m, int layer)
{
    return m->gpu->residual + layer * m->gpu->rows * m->config.width;
}

/* Where the amax of a projection's x, or dy, is kept; NULL for BF16, which has no scale. The kernel that writes the
 * operand finds it; x's is kept for backward. */
static inline float *model_amax_cuda(const struct model *m, int layer, enum projection p, bool of_dy)
{
    int64_t at = ((int64_t)of_dy * m->config.layers + layer) * PROJECTIONS + p;
    return m->layers[layer].linear[p].format == LINEAR_BF16 ? NULL : m->gpu->amax + at;
}

/* Where attention adds its statistics, or NULL. A recomputed forward adds to a dummy: the same kernels must run as the
 * first time. */
static inline struct attention_stats *model_stats_cuda(const struct model *m, int layer, bool again)
{
    return m->gpu->uncounted ? NULL : &m->stats[again ? m->config.layers : layer];
}

/* Operators of a layer, shared by forward and backward, which recomputes (`again`: without the statistics and amax that
 * forward has gathered). model_fwd_cuda.c */
struct norm {
    size_t gain;
    const bf16 *x, *branch; /* with a branch: sum = x + branch first */
    bf16 *sum, *y;
    float *amax; /* of y, or NULL */
};
void model_norm_cuda(const struct pass *w, const struct norm *norm);
void model_project_cuda(const struct pass *w, int layer, enum projection p, const bf16 *x, bf16 *y);
void model_rotate_cuda(const struct pass *w, bf16 *x, int64_t stride, bool inverse, const struct rope_largest *largest);
/* From normed (of the input) to branch; then from normed (of the middle) to gate_up. */
void model_attend_cuda(const struct pass *w, int layer, bool again);
void model_gate_up_cuda(const struct pass *w, int layer);

void model_backward_cuda(struct model *m, const struct model_backward *call);

/* out[b]: the sum in double and the number of valid targets of each sample of n = batch length rows; one fixed order.
 * model_loss_cuda.cu */
void model_loss_rows_cuda(const float *losses, const int32_t *targets, int64_t batch, int64_t length,
                          struct model_loss_row *out, const struct cuda *on);

/* Ranges around phases, layers and groups of operators: for a profiler (NVTX, which costs nothing without one), groups
 * also for options.trace. */
void model_range_open(const char *name);
void model_range_close(void);
void model_group_open(const struct model *m, const char *name);
void model_group_close(const struct model *m);
