/* tests/model: a small model with everything around it, ready to run. */
#pragma once

#include "model/model.h"

struct fixture {
    struct model_config config;
    struct model_options options;
    struct param_list params;
    struct arena arena;
    struct model *model;
    bf16 *weights;
    float *grads;
};

/* Two layers of width 32, heads 4 on 2 of 16, ffn 48, vocabulary 40. */
struct model_config small_config(void);

/* BF16 throughout, `batch` samples of up to `tokens` tokens. */
struct model_options small_options(int64_t batch, int64_t tokens);

/* Normal numbers large enough that no part of the model is linear, gains around 1. Gaps are left alone. */
void fill_weights(const struct param_list *params, bf16 *weights);

/* Plans, and sets weights to those. */
void fixture_open(struct fixture *f, const struct model_config *config, const struct model_options *options);
void fixture_close(struct fixture *f);

/* Forward and backward with loss_scale; returns the loss. */
struct model_loss fixture_run(struct fixture *f, const struct model_batch *batch, float loss_scale, bool accumulate);

/* Tokens and targets of a stream; every seventh target is ignored. */
void fill_tokens(int32_t *tokens, int32_t *targets, int64_t n, int vocab, uint64_t stream);

void assert_bits_equal(const float *a, const float *b, size_t n);
