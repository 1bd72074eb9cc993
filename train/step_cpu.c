/* train: the step on the CPU. Samples run one at a time, each a leaf of the gradient tree (run.deterministic = any). */
#include "train/step.h"

#include "core/clock.h"

#include <math.h>
#include <string.h>
#include <sys/resource.h>

static enum status open_cpu(struct trainer *t)
{
    (void)t;
    return OK;
}

static enum status carve_cpu(struct trainer *t, struct arena *arena, struct arena *host)
{
    const struct config *config = t->config;
    size_t n = t->params.elements, moment = adamw_moment_bytes(&config->optim);
    size_t row = (size_t)t->local * (size_t)config->data.seq_len * sizeof(int32_t);
    t->state.weights = arena_take(arena, "weights", n * sizeof(bf16));
    t->state.master = config->optim.master_fp32 ? arena_take(arena, "master", n * sizeof(float)) : NULL;
    t->state.m = arena_take(arena, "moments", n * moment);
    t->state.v = arena_take(arena, "moments", n * moment);
    TRY(grad_tree_plan(&t->tree, arena, t->comm, n, t->local, config->optim.grads_bf16));
    t->tokens = arena_take(host, "batch", row);
    t->targets = arena_take(host, "batch", row);
    return OK;
}

static void release_cpu(struct trainer *t)
{
    grad_tree_close(&t->tree);
}

static void close_cpu(struct trainer *t)
{
    (void)t;
}

/* FP32 values, into the first node of the gradient tree for want of a master. */
static enum status initialise_cpu(struct trainer *t)
{
    size_t n = t->params.elements, moment = adamw_moment_bytes(&t->config->optim);
    float *values = t->state.master != NULL ? t->state.master : grad_tree_leaf(&t->tree);
    param_list_init(&t->params, &t->config->model, (uint64_t)t->config->run.seed, values);
    for (size_t i = 0; i < n; i++) {
        t->state.weights[i] = bf16_from_float(values[i]);
    }
    memset(t->state.m, 0, n * moment);
    memset(t->state.v, 0, n * moment);
    return OK;
}

/* By exponent bits, without branches: this runs over every gradient of every sample, to name the rank and sample of a
 * NaN that the sum over samples would hide. */
static bool all_finite(const float *x, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bad |= (bits & 0x7f800000U) == 0x7f800000U;
    }
    return bad == 0;
}

static bool sample_is_finite(const struct trainer *t, double loss, const float *leaf)
{
    bool finite = isfinite(loss);
    for (int i = 0; i < t->params.count && finite; i++) {
        finite = all_finite(leaf + t->segments[i].offset, t->segments[i].elements);
    }
    return finite;
}

/* Forward and backward of sample k of this rank, a leaf of the gradient tree. */
static void run_sample(struct trainer *t, struct step_result *r, int64_t k, int64_t *bad_sample)
{
    int64_t T = t->config->data.seq_len, layers = t->config->model.layers, g = t->comm->rank * t->local + k;
    struct model_batch batch = {.tokens = t->tokens + k * T,
                                .targets = t->targets + k * T,
                                .batch = 1,
                                .length = T,
                                .sample = (uint64_t)(t->samples + g),
                                .update = (uint32_t)r->update};
    struct model_loss loss;
    float *leaf = grad_tree_leaf(&t->tree);
    double clock = clock_s();
    model_stats_reset(t->model);
    model_forward(t->model, &batch, true, &loss);
    r->forward_ms += step_lap_ms(&clock);
    model_backward(t->model, &(struct model_backward){
                                 .batch = &batch, .loss_scale = (float)(1.0 / (double)r->valid), .grads = leaf});
    size_t element;
    float value;
    if (k == 0 && fault_in_gradient(t, r->update, &element, &value)) {
        leaf[element] = value;
    }
    t->sample_loss[g] = loss.loss_sum;
    memcpy(t->sample_stats + g * layers, model_stats(t->model), (size_t)layers * sizeof *t->sample_stats);
    if (!sample_is_finite(t, loss.loss_sum, leaf) && g < *bad_sample) {
        *bad_sample = g;
    }
    grad_tree_push(&t->tree);
    r->backward_ms += step_lap_ms(&clock);
}

static enum status gradients_cpu(struct trainer *t, struct step_result *r, struct step_gradients *g)
{
    g->bad_sample = INT64_MAX;
    r->counted = true;
    for (int64_t k = 0; k < t->local; k++) {
        run_sample(t, r, k, &g->bad_sample);
    }
    double clock = clock_s();
    TRY(grad_tree_sum(&t->tree, &t->grads));
    r->comm_ms += step_lap_ms(&clock);
    g->norm = gradnorm_of(t->grads, t->segments, t->params.count);
    r->optim_ms += step_lap_ms(&clock);
    return OK;
}

static enum status apply_cpu(struct trainer *t, struct step_result *r, float clip_scale)
{
    double clock = clock_s();
    adamw_step(&t->config->optim, &t->state, t->segments, t->params.count, t->grads, clip_scale, (float)r->lr,
               (uint32_t)r->update);
    trainer_weights_changed(t);
    r->optim_ms += step_lap_ms(&clock);
    return OK;
}

static enum status evaluate_cpu(struct trainer *t, struct model *model, struct model_loss *loss)
{
    struct model_batch batch = {.tokens = t->tokens,
                                .targets = t->targets,
                                .batch = 1,
                                .length = t->config->data.seq_len,
                                .update = (uint32_t)t->update};
    model_forward(model, &batch, false, loss);
    return OK;
}

static enum status weights_cpu(struct trainer *t, size_t first, size_t *n, const bf16 **values)
{
    (void)n;
    *values = t->state.weights + first;
    return OK;
}

static void spoil_weight_cpu(struct trainer *t, size_t element)
{
    t->state.weights[element] = bf16_from_float(NAN);
    trainer_weights_changed(t);
}

static void expose_cpu(struct trainer *t, enum state_array array, int param, struct checkpoint_tensor *tensor)
{
    void *const arrays[] = {[STATE_WEIGHTS] = t->state.weights,
                            [STATE_MASTER] = t->state.master,
                            [STATE_M] = t->state.m,
                            [STATE_V] = t->state.v};
    tensor->data = (char *)arrays[array] + t->segments[param].offset * dtype_bytes(tensor->dtype);
}

/* Products on the CPU have one order of sums: there is nothing to choose, nothing to read. */
static enum status prepare_cpu(struct trainer *t)
{
    (void)t;
    return OK;
}

static enum status recall_cpu(struct trainer *t, const char *path)
{
    (void)t;
    (void)path;
    return OK;
}

/* ru_maxrss is in KiB. */
static double memory_gib_cpu(const struct trainer *t)
{
    struct rusage usage;
    (void)t;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss / 0x1p20;
}

const struct engine engine_cpu = {.open = open_cpu,
                                  .carve = carve_cpu,
                                  .release = release_cpu,
                                  .close = close_cpu,
                                  .initialise = initialise_cpu,
                                  .gradients = gradients_cpu,
                                  .apply = apply_cpu,
                                  .prepare = prepare_cpu,
                                  .evaluate = evaluate_cpu,
                                  .weights = weights_cpu,
                                  .spoil_weight = spoil_weight_cpu,
                                  .expose = expose_cpu,
                                  .recall = recall_cpu,
                                  .memory_gib = memory_gib_cpu};
