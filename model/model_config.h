/* model: the shape of a Llama-3.1-style transformer, and the formats of its projections. */
#pragma once

#include "attention/recipe.h"
#include "core/status.h"

#include <stdint.h>

enum rope_scaling { ROPE_NONE, ROPE_LLAMA3 };

struct rope_config {
    float theta;
    enum rope_scaling scaling;
    float factor, low_freq_factor, high_freq_factor; /* llama3 scaling */
    int original_context;
};

struct model_config {
    int layers, width, heads, kv_heads, head_dim, ffn, vocab, context;
    struct rope_config rope;
    bool tied;    /* lm_head is embed_tokens */
    bool qk_norm; /* RMSNorm over each head of Q and K, before RoPE (one gain of D per layer each) */
    float norm_eps, init_std;
};

enum linear_format { LINEAR_BF16, LINEAR_FP8, LINEAR_NVFP4 };
extern const char *const rope_scaling_names[], *const linear_format_names[];

struct linear_recipe {
    enum linear_format attn, mlp, head; /* the head is BF16; other values are refused */
    int first_layers_bf16, last_layers_bf16;
};

enum recompute { RECOMPUTE_NONE, RECOMPUTE_BLOCK, RECOMPUTE_GATE_UP }; /* GATE_UP: CUDA only */
extern const char *const recompute_names[];

/* Shapes that cannot be: heads not a multiple of kv_heads, odd head_dim, sizes below 1, formats whose block does not
 * divide a width (16 for NVFP4). ERR_CONFIG names key, value and the nearest valid value. */
MUST_CHECK enum status model_config_check(const struct model_config *config, const struct linear_recipe *linear);

/* The formats that layer `layer` really uses: the recipe's, or BF16 among the first and last layers that stay so.
 * Plan, run and report all ask here. */
struct layer_formats {
    enum linear_format attn, mlp;
};
struct layer_formats model_layer_formats(const struct model_config *config, const struct linear_recipe *linear,
                                         int layer);
