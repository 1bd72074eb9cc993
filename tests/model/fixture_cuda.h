/* tests/model: the twin on the GPU of a model of fixture.h: the same weights, batches and options. */
#pragma once

#include "tests/model/fixture.h"

struct cuda;

struct gpu_fixture {
    struct cuda *cuda; /* borrows */
    struct model_config config;
    struct model_options options;
    struct param_list params;
    struct arena arena;
    struct model *model;
    void *weights, *grads;     /* device; flat, grads in options.grad_type, poisoned at first */
    int32_t *tokens, *targets; /* device; (B, T) of the largest call */
    size_t grad_bytes;
};

/* options: device and cuda are set here; variant NULL: the first of the GPU's that does not refuse. Weights are those
 * of fixture_open. False: no variant of the GPU runs this recipe. */
bool gpu_fixture_open(struct gpu_fixture *f, struct cuda *cuda, const struct model_config *config,
                      const struct model_options *options);
void gpu_fixture_close(struct gpu_fixture *f);

/* Batch of host tokens -> batch of device tokens, copied; and the step's numbers. */
struct model_batch gpu_fixture_batch(struct gpu_fixture *f, const struct model_batch *host, float loss_scale);

/* Forward and backward of a device batch, enqueued. */
void gpu_fixture_run(struct gpu_fixture *f, const struct model_batch *batch, bool accumulate);

/* Gradients as they are, to be freed; checks the guard behind them. And as FP32. */
void *gpu_fixture_grads(const struct gpu_fixture *f);
float *gpu_fixture_grads_f32(const struct gpu_fixture *f);

/* The sum over samples. */
struct model_loss gpu_fixture_loss(const struct gpu_fixture *f);
