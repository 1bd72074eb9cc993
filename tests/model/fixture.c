#include "tests/model/fixture.h"

#include "core/rng.h"

#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

struct model_config small_config(void)
{
    return (struct model_config){.layers = 2,
                                 .width = 32,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 16,
                                 .ffn = 48,
                                 .vocab = 40,
                                 .context = 512,
                                 .rope = {.theta = 500},
                                 .norm_eps = 1e-5f,
                                 .init_std = 0.02f};
}

struct model_options small_options(int64_t batch, int64_t tokens)
{
    return (struct model_options){
        .attention = attention_recipe_bf16(), .batch = batch, .tokens = tokens, .logit_columns = 16, .seed = 5};
}

void fill_weights(const struct param_list *params, bf16 *weights)
{
    for (int i = 0; i < params->count; i++) {
        const struct param *p = &params->params[i];
        for (int64_t k = 0; k < p->rows * p->cols; k++) {
            float x = rng_normal(3, rng_stream(p->name), (uint64_t)k);
            weights[p->offset + (size_t)k] = bf16_from_float(p->kind == PARAM_NORM ? 1 + 0.3f * x : 0.25f * x);
        }
    }
}

void fixture_open(struct fixture *f, const struct model_config *config, const struct model_options *options)
{
    memset(f, 0, sizeof *f);
    f->config = *config;
    f->options = *options;
    struct attention_shape shape = {.batch = 1,
                                    .tokens = options->tokens,
                                    .heads = config->heads,
                                    .kv_heads = config->kv_heads,
                                    .head_dim = config->head_dim,
                                    .causal = true};
    assert_int_equal(attention_choose(&shape, &options->attention, DEVICE_CPU, "auto", &f->options.variant), OK);
    assert_int_equal(param_list_open(&f->params, config), OK);
    struct model *throw_away;
    arena_measure(&f->arena, "model");
    assert_int_equal(model_plan(&throw_away, &f->arena, config, &f->params, &f->options), OK);
    model_close(throw_away);
    size_t bytes = f->arena.used;
    assert_int_equal(arena_open(&f->arena, "model", bytes), OK);
    assert_int_equal(model_plan(&f->model, &f->arena, config, &f->params, &f->options), OK);
    assert_int_equal(f->arena.used, bytes);
    f->weights = calloc(f->params.elements, sizeof *f->weights);
    f->grads = malloc(f->params.elements * sizeof *f->grads);
    assert_true(f->weights && f->grads);
    memset(f->grads, 0xff, f->params.elements * sizeof *f->grads); /* NaN: what is not written shows */
    fill_weights(&f->params, f->weights);
    model_set_weights(f->model, f->weights);
}

void fixture_close(struct fixture *f)
{
    model_close(f->model);
    arena_close(&f->arena);
    param_list_close(&f->params);
    free(f->weights);
    free(f->grads);
}

struct model_loss fixture_run(struct fixture *f, const struct model_batch *batch, float loss_scale, bool accumulate)
{
    struct model_loss loss;
    model_forward(f->model, batch, true, &loss);
    model_backward(f->model,
                   &(struct model_backward){
                       .batch = batch, .loss_scale = loss_scale, .grads = f->grads, .accumulate = accumulate});
    return loss;
}

void fill_tokens(int32_t *tokens, int32_t *targets, int64_t n, int vocab, uint64_t stream)
{
    for (int64_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)(rng_bits(7, stream, 0, (uint64_t)i) % (uint32_t)vocab);
        targets[i] = i % 7 == 6 ? -1 : (int32_t)(rng_bits(7, stream, 1, (uint64_t)i) % (uint32_t)vocab);
    }
}

void assert_bits_equal(const float *a, const float *b, size_t n)
{
    assert_memory_equal(a, b, n * sizeof *a);
}
