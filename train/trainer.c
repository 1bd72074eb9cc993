/* train: planning, allocation and initial state of a run. */
#include "train/trainer.h"

#include "train/plan.h"
#include "train/run_folder.h"
#if WITH_CUDA
#include "core/cuda.h"
#endif

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* On the CPU samples run one at a time: their gradients are the leaves of the tree (run.deterministic = any). */
static int64_t samples_at_once(const struct config *config, const struct device *device)
{
    return device->kind == DEVICE_CPU ? 1 : config->data.micro_batch;
}

struct attention_shape trainer_attention_shape(const struct config *config, const struct device *device)
{
    const struct model_config *m = &config->model;
    return (struct attention_shape){.batch = samples_at_once(config, device),
                                    .tokens = config->data.seq_len,
                                    .heads = m->heads,
                                    .kv_heads = m->kv_heads,
                                    .head_dim = m->head_dim,
                                    .causal = true,
                                    .softmax_scale = 1.0F / sqrtf((float)m->head_dim)};
}

static const struct engine *engine_of(const struct device *device)
{
#if WITH_CUDA
    return device->kind == DEVICE_CUDA ? &engine_cuda : &engine_cpu;
#else
    ASSERT(device->kind == DEVICE_CPU);
    return &engine_cpu;
#endif
}

/* What follows from the configuration alone: parameters, their segments for the optimizer, the attention variant. */
static enum status describe(struct trainer *t, const struct config *config, struct comm *comm,
                            const struct device *device)
{
    memset(t, 0, sizeof *t);
    t->config = config;
    t->comm = comm;
    t->device = device;
    t->engine = engine_of(device);
    t->local = config->data.batch / comm->size;
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
    bool narrow = device->kind == DEVICE_CUDA && config->optim.grads_bf16;
    t->options = (struct model_options){.linear = config->linear,
                                        .attention = config->attention,
                                        .recompute = config->recompute,
                                        .device = device->kind,
                                        .unordered = config->run.deterministic == DETERMINISTIC_OFF,
                                        .grad_type = narrow ? DTYPE_BF16 : DTYPE_F32,
                                        .batch = samples_at_once(config, device),
                                        .tokens = config->data.seq_len,
                                        .seed = (uint64_t)config->run.seed};
    struct attention_shape shape = trainer_attention_shape(config, device);
    return attention_choose(&shape, &config->attention, device->kind, config->attention_variant, &t->options.variant);
}

/* The same calls for measuring and for real: what is planned is what is taken. */
static enum status carve(struct trainer *t, struct arena *arena, struct arena *host)
{
    size_t batch = (size_t)t->config->data.batch, layers = (size_t)t->config->model.layers;
    if (t->device->kind == DEVICE_CPU) {
        host = arena;
    }
    TRY(t->engine->carve(t, arena, host));
    t->sample_loss = arena_take(host, "statistics", batch * sizeof *t->sample_loss);
    t->sample_stats = arena_take(host, "statistics", batch * layers * sizeof *t->sample_stats);
    return model_plan(&t->model, arena, &t->config->model, &t->params, &t->options);
}

static void release_plan(struct trainer *t)
{
    model_close(t->model);
    t->model = NULL;
    if (t->engine != NULL) {
        t->engine->release(t);
    }
}

static enum status measure(struct trainer *t, struct arena *arena, struct arena *host)
{
    arena_measure(arena, t->device->kind == DEVICE_CPU ? "run" : "GPU");
    arena_measure(host, "host");
    enum status status = carve(t, arena, host);
    release_plan(t);
    return status;
}

enum status trainer_measure(const struct config *config, struct comm *comm, const struct device *device,
                            struct arena *arena, struct arena *host)
{
    struct trainer t;
    enum status status = describe(&t, config, comm, device);
    if (status == OK) {
        status = measure(&t, arena, host);
    }
    trainer_close(&t);
    return status;
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
    if (data->train[0] != '\0') { /* step_time can do without */
        TRY(loader_open(&t->train, &train));
    }
    if (data->val[0] == '\0') {
        return OK;
    }
    struct loader_config val = train;
    val.pattern = data->val;
    val.shuffle = false;
    return loader_open(&t->val, &val);
}

/* Measures, compares with what the device has, allocates once. */
static enum status open_memory(struct trainer *t)
{
    struct arena measured, host;
    int64_t have = t->device->memory_bytes;
    TRY(measure(t, &measured, &host));
#if WITH_CUDA
    if (t->device->kind == DEVICE_CUDA) {
        TRY(cuda_memory_free(&have));
        have -= DEVICE_RESERVE;
    }
#endif
    if ((int64_t)measured.high_water > have) {
        char advice[PLAN_ADVICE];
        plan_advice(t->config, t->device, advice, sizeof advice);
        return status_fail(ERR_NOMEM, "this run needs %.2f GiB a rank, %s has %.2f GiB: see --dry-run; try%s",
                           (double)measured.high_water / 0x1p30, t->device->name, (double)have / 0x1p30, advice);
    }
    TRY(arena_open_on(&t->arena, measured.name, measured.high_water, t->device->kind));
    return host.high_water > 0 ? arena_open(&t->host, "host", host.high_water) : OK;
}

enum status trainer_open(struct trainer *t, const struct config *config, struct comm *comm, const struct device *device)
{
    enum status status = describe(t, config, comm, device);
    if (status == OK) {
        status = open_data(t);
    }
    if (status == OK) {
        status = t->engine->open(t);
    }
    TRY(ranks_agree(comm, status));
    /* Planning the gradient tree is a collective: all ranks must get that far, or none. */
    TRY(ranks_agree(comm, open_memory(t)));
    TRY(ranks_agree(comm, carve(t, &t->arena, &t->host)));
    TRY(ranks_agree(comm, t->engine->initialise(t)));
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
    if (t->engine != NULL) {
        t->engine->close(t);
    }
    arena_close(&t->arena);
    arena_close(&t->host);
    param_list_close(&t->params);
    free(t->segments);
    memset(t, 0, sizeof *t);
}

/* Rank r takes the r-th contiguous part of every update's samples. */
void trainer_seek(struct trainer *t)
{
    if (t->train != NULL) {
        loader_seek(t->train, (uint64_t)(t->samples + t->comm->rank * t->local), (uint64_t)t->config->data.batch,
                    t->local);
    }
}

void trainer_weights_changed(struct trainer *t)
{
    model_set_weights(t->model, t->state.weights);
}
