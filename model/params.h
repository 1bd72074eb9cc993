/* model: the list of parameters. One flat array of elements holds them all; weights, master copies, gradients and
 * moments are such arrays with the same offsets. Names are Hugging Face's. */
#pragma once

#include "model/model_config.h"

#include <stddef.h>

enum param_kind { PARAM_EMBED, PARAM_NORM, PARAM_ATTN, PARAM_MLP, PARAM_HEAD };

struct param {
    char name[80];      /* model.layers.3.self_attn.q_proj.weight */
    int64_t rows, cols; /* (out, in) of a projection, (V, C) of an embedding; a norm gain is (1, C) */
    size_t offset;      /* first element in a flat array; a multiple of 64 but for k, v and up, which follow at once */
    enum param_kind kind;
    int layer;   /* -1 outside the layers */
    bool decays; /* weight decay applies: all but norm gains */
};

struct param_list {
    int count;
    struct param *params; /* owns */
    size_t elements;      /* length of a flat array, gaps included; gaps hold zeros */
    size_t parameters;    /* without gaps: what the model has */
};

/* In order: embedding, per layer (input_layernorm, q, k, v, [q_norm, k_norm], o, post_attention_layernorm, gate, up,
 * down), final norm, lm_head unless tied. q, k, v are adjacent without gap, so are gate and up: each group is one
 * matrix of (sum of rows, C). Fails with ERR_NOMEM. */
MUST_CHECK enum status param_list_open(struct param_list *list, const struct model_config *config);
void param_list_close(struct param_list *list);

/* NULL if the list has no such name. */
const struct param *param_list_find(const struct param_list *list, const char *name);

/* Initial values, FP32: normal(0, init_std), residual outputs (o_proj, down_proj) by init_std / sqrt(2 L), gains 1. A
 * value depends on seed, the parameter's name and the element's index only. Elements first .. first + n - 1 of one
 * parameter: */
void param_init(const struct param *param, const struct model_config *config, uint64_t seed, size_t first, size_t n,
                float *values);

/* All of them into a flat array, gaps zero. */
void param_list_init(const struct param_list *list, const struct model_config *config, uint64_t seed, float *values);
