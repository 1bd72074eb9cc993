#include "tests/model/fixture_cuda.h"

#if WITH_CUDA
#include "core/cuda.h"

#include "tests/gpu.h"

#include <math.h>

bool gpu_fixture_open(struct gpu_fixture *f, struct cuda *cuda, const struct model_config *config,
                      const struct model_options *options)
{
    memset(f, 0, sizeof *f);
    f->cuda = cuda;
    f->config = *config;
    f->options = *options;
    f->options.device = DEVICE_CUDA;
    f->options.cuda = cuda;
    struct attention_shape shape = {.batch = options->batch,
                                    .tokens = options->tokens,
                                    .heads = config->heads,
                                    .kv_heads = config->kv_heads,
                                    .head_dim = config->head_dim,
                                    .causal = true,
                                    .softmax_scale = 1 / sqrtf((float)config->head_dim)};
    if (!options->variant &&
        attention_choose(&shape, &options->attention, DEVICE_CUDA, "auto", &f->options.variant) != OK) {
        return false;
    }
    assert_int_equal(param_list_open(&f->params, config), OK);
    struct model *throw_away;
    arena_measure(&f->arena, "model");
    assert_int_equal(model_plan(&throw_away, &f->arena, config, &f->params, &f->options), OK);
    model_close(throw_away);
    size_t bytes = f->arena.used;
    assert_int_equal(f->arena.high_water, bytes);
    assert_int_equal(arena_open_on(&f->arena, "model", bytes, DEVICE_CUDA), OK);
    unsigned char *poison = malloc(bytes);
    memset(poison, 0xff, bytes); /* NaN: what is read before it is written shows */
    cuda_upload(cuda, f->arena.base, poison, bytes);
    free(poison);
    assert_int_equal(model_plan(&f->model, &f->arena, config, &f->params, &f->options), OK);
    assert_int_equal(f->arena.used, bytes);

    bf16 *weights = calloc(f->params.elements, sizeof *weights);
    fill_weights(&f->params, weights);
    f->weights = gpu_array(cuda, weights, f->params.elements * sizeof *weights);
    free(weights);
    f->grad_bytes = f->params.elements * dtype_bytes(options->grad_type);
    f->grads = gpu_array(cuda, NULL, f->grad_bytes);
    size_t tokens = (size_t)(options->batch * options->tokens) * sizeof(int32_t);
    f->tokens = gpu_array(cuda, NULL, tokens);
    f->targets = gpu_array(cuda, NULL, tokens);
    model_set_weights(f->model, f->weights);
    return true;
}

void gpu_fixture_close(struct gpu_fixture *f)
{
    model_close(f->model);
    arena_close(&f->arena);
    param_list_close(&f->params);
    cuda_free(f->weights);
    cuda_free(f->grads);
    cuda_free(f->tokens);
    cuda_free(f->targets);
}

struct model_batch gpu_fixture_batch(struct gpu_fixture *f, const struct model_batch *host, float loss_scale)
{
    size_t bytes = (size_t)(host->batch * host->length) * sizeof(int32_t);
    struct model_batch batch = *host;
    cuda_upload(f->cuda, f->tokens, host->tokens, bytes);
    cuda_upload(f->cuda, f->targets, host->targets, bytes);
    cuda_set_step(f->cuda,
                  &(struct cuda_step){.sample = host->sample, .update = host->update, .loss_scale = loss_scale});
    batch.tokens = f->tokens;
    batch.targets = f->targets;
    batch.sample = 0xbad; /* not looked at */
    batch.update = 0xbad;
    return batch;
}

void gpu_fixture_run(struct gpu_fixture *f, const struct model_batch *batch, bool accumulate)
{
    model_forward_cuda(f->model, batch, f->grads, accumulate);
    model_backward(f->model, &(struct model_backward){.batch = batch, .grads = f->grads, .accumulate = accumulate});
}

void *gpu_fixture_grads(const struct gpu_fixture *f)
{
    void *grads = malloc(f->grad_bytes);
    assert_non_null(grads);
    gpu_fetch(f->cuda, grads, f->grads, f->grad_bytes);
    return grads;
}

float *gpu_fixture_grads_f32(const struct gpu_fixture *f)
{
    void *grads = gpu_fixture_grads(f);
    if (f->options.grad_type == DTYPE_F32) {
        return grads;
    }
    float *wide = malloc(f->params.elements * sizeof *wide);
    for (size_t i = 0; i < f->params.elements; i++) {
        wide[i] = bf16_to_float(((const bf16 *)grads)[i]);
    }
    free(grads);
    return wide;
}

struct model_loss gpu_fixture_loss(const struct gpu_fixture *f)
{
    struct model_loss_row rows[16];
    struct model_loss sum = {0};
    assert_true(f->options.batch <= 16);
    cuda_download(f->cuda, rows, model_losses(f->model), (size_t)f->options.batch * sizeof *rows);
    assert_int_equal(cuda_sync(f->cuda, "losses"), OK);
    for (int64_t b = 0; b < f->options.batch; b++) {
        sum.loss_sum += rows[b].loss_sum;
        sum.valid += rows[b].valid;
    }
    return sum;
}
#endif
