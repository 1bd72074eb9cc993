/* train: planning, allocation and initial state of a run. */
#include "train/trainer.h"

#include "train/run_folder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct attention_shape trainer_attention_shape(const struct config *config)
{
    const struct model_config *m = &config->model;
    return (struct attention_shape){.batch = 1,
                                    .tokens = config->data.seq_len,
                                    .heads = m->heads,
                                    .kv_heads = m->kv_heads,
                                    .head_dim = m->head_dim,
                                    .causal = true,
                                    .softmax_scale = 1.0F / sqrtf((float)m->head_dim)};
}

/* What follows from the configuration alone: parameters, their segments for the optimizer, the attention variant. */
static enum status describe(struct trainer *t, const struct config *config, struct comm *comm)
{
    memset(t, 0, sizeof *t);
    t->config = config;
    t->comm = comm;
    t->last_loss = NAN;
    TRY(fault_parse(&t->fault, config->debug_fault, comm->size));
    TRY(param_list_open(&t->params, &config->model));
    t->segments = calloc((size_t)t->params.count, sizeof *t->segments);
    if (t->segments == NULL) {
        return status_fail(ERR_NOMEM, "no memory for a list of %d parameters", t->params.count);
    }
    for (int i = 0; i < t->params.count; i++) {
        const struct param *p = &t->params.params[i];
        t->segments[i] = (struct adamw_segment){
            .name = p->name, .offset = p->offset, .elements = (size_t)(p->rows * p->cols), .decays = p->decays};
    }
    /* run.deterministic = any: samples run one at a time, and their gradients are the leaves of the tree. */
    t->options = (struct model_options){.linear = config->linear,
                                        .attention = config->attention,
                                        .recompute = config->recompute,
                                        .batch = 1,
                                        .tokens = config->data.seq_len,
                                        .seed = (uint64_t)config->run.seed};
    struct attention_shape shape = trainer_attention_shape(config);
    return attention_choose(&shape, &config->attention, DEVICE_CPU, config->attention_variant, &t->options.variant);
}

/* The same calls for measuring and for real: what is planned is what is taken. */
static enum status carve(struct trainer *t, struct arena *arena)
{
    const struct config *config = t->config;
    size_t n = t->params.elements, moment = adamw_moment_bytes(&config->optim);
    size_t local = (size_t)(config->data.batch / t->comm->size), batch = (size_t)config->data.batch;
    size_t row = (size_t)config->data.seq_len * sizeof(int32_t);
    t->state.weights = arena_take(arena, "weights", n * sizeof(bf16));
    t->state.master = config->optim.master_fp32 ? arena_take(arena, "master", n * sizeof(float)) : NULL;
    t->state.m = arena_take(arena, "moments", n * moment);
    t->state.v = arena_take(arena, "moments", n * moment);
    TRY(grad_tree_plan(&t->tree, arena, t->comm, n, (int64_t)local, config->optim.grads_bf16));
    t->tokens = arena_take(arena, "batch", local * row);
    t->targets = arena_take(arena, "batch", local * row);
    t->sample_loss = arena_take(arena, "statistics", batch * sizeof *t->sample_loss);
    t->sample_stats = arena_take(arena, "statistics", batch * (size_t)config->model.layers * sizeof *t->sample_stats);
    return model_plan(&t->model, arena, &config->model, &t->params, &t->options);
}

static void release_plan(struct trainer *t)
{
    model_close(t->model);
    t->model = NULL;
    grad_tree_close(&t->tree);
}

enum status trainer_measure(const struct config *config, struct comm *comm, struct arena *arena)
{
    struct trainer t;
    arena_measure(arena, "run");
    enum status status = describe(&t, config, comm);
    if (status == OK) {
        status = carve(&t, arena);
    }
    trainer_close(&t);
    return status;
}

/* Initial weights: FP32 values, into the first node of the gradient tree for want of a master. */
static void initialise(struct trainer *t)
{
    size_t n = t->params.elements, moment = adamw_moment_bytes(&t->config->optim);
    float *values = t->state.master != NULL ? t->state.master : grad_tree_leaf(&t->tree);
    memset(values, 0, n * sizeof *values);
    param_list_init(&t->params, &t->config->model, (uint64_t)t->config->run.seed, values);
    for (size_t i = 0; i < n; i++) {
        t->state.weights[i] = bf16_from_float(values[i]);
    }
    memset(t->state.m, 0, n * moment);
    memset(t->state.v, 0, n * moment);
}

/* Validation reads in order, so that every evaluation of a run sees the same text. */
static enum status open_data(struct trainer *t)
{
    const struct config_data *data = &t->config->data;
    struct loader_config train = {.pattern = data->train,
                                  .seq_len = data->seq_len,
                                  .vocab = (uint32_t)t->config->model.vocab,
                                  .seed = (uint64_t)t->config->run.seed,
                                  .shuffle = true,
                                  .prefetch = data->prefetch};
    TRY(loader_open(&t->train, &train));
    if (data->val[0] == '\0') {
        return OK;
    }
    struct loader_config val = train;
    val.pattern = data->val;
    val.shuffle = false;
    return loader_open(&t->val, &val);
}

/* Measures, compares with what the machine has, allocates once. */
static enum status open_memory(struct trainer *t)
{
    struct arena measured;
    arena_measure(&measured, "run");
    enum status status = carve(t, &measured);
    release_plan(t);
    TRY(status);
    if ((int64_t)measured.high_water > t->device->memory_bytes) {
        return status_fail(
            ERR_NOMEM,
            "this run needs %.2f GiB a rank, %s has %.2f GiB: see --dry-run; try device.recompute = "
            "block, optim.moments = bf16, optim.master = none, a shorter data.seq_len or a smaller model",
            (double)measured.high_water / 0x1p30, t->device->name, (double)t->device->memory_bytes / 0x1p30);
    }
    return arena_open(&t->arena, "run", measured.high_water);
}

enum status trainer_open(struct trainer *t, const struct config *config, struct comm *comm, const struct device *device)
{
    enum status status = describe(t, config, comm);
    t->device = device;
    if (status == OK) {
        status = open_data(t);
    }
    TRY(ranks_agree(comm, status));
    /* Planning the gradient tree is a collective: all ranks must get that far, or none. */
    TRY(ranks_agree(comm, open_memory(t)));
    TRY(ranks_agree(comm, carve(t, &t->arena)));
    initialise(t);
    TRY(watch_open(&t->watch, &config->watch));
    trainer_weights_changed(t);
    trainer_seek(t);
    return OK;
}

void trainer_close(struct trainer *t)
{
    loader_close(t->train);
    loader_close(t->val);
    watch_close(t->watch);
    release_plan(t);
    arena_close(&t->arena);
    param_list_close(&t->params);
    free(t->segments);
    memset(t, 0, sizeof *t);
}

/* Rank r takes the r-th contiguous part of every update's samples. */
void trainer_seek(struct trainer *t)
{
    int64_t local = t->config->data.batch / t->comm->size;
    loader_seek(t->train, (uint64_t)(t->samples + t->comm->rank * local), (uint64_t)t->config->data.batch, local);
}

void trainer_weights_changed(struct trainer *t)
{
    model_set_weights(t->model, t->state.weights);
}
