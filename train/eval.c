/* train: evaluation. */
#include "train/eval.h"

#include "core/log.h"
#include "train/run_folder.h"
#if WITH_CUDA
#include "core/cuda.h"
#endif

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Sample g of the evaluation is rank g mod size's; its numbers are zero elsewhere, so that sums over ranks are exact.
 */
static enum status eval_samples(struct trainer *t, struct model *model, int64_t samples, double *sums)
{
    loader_seek(t->val, (uint64_t)t->comm->rank, (uint64_t)t->comm->size, 1);
    for (int64_t g = t->comm->rank; g < samples; g += t->comm->size) {
        struct model_loss loss;
        TRY(loader_next(t->val, t->tokens, t->targets, NULL));
        TRY(t->engine->evaluate(t, model, &loss));
        sums[2 * g] = loss.loss_sum;
        sums[2 * g + 1] = (double)loss.valid;
    }
    return OK;
}

static enum status eval_model(struct trainer *t, struct model *model, double *loss)
{
    uint64_t windows = loader_windows(t->val);
    int64_t samples = t->config->eval_steps * t->config->data.batch;
    samples = (uint64_t)samples > windows ? (int64_t)windows : samples;
    double *sums = calloc((size_t)(2 * samples), sizeof *sums), loss_sum = 0, valid = 0;
    if (sums == NULL) {
        return status_fail(ERR_NOMEM, "no memory for the losses of %lld samples", (long long)samples);
    }
    /* A run that resumes behind its last update begins with an evaluation. */
    enum status status = t->engine->prepare(t);
    if (status == OK) {
        status = ranks_agree(t->comm, eval_samples(t, model, samples, sums));
    }
    if (status == OK) {
        status = comm_sum_f64(t->comm, sums, (int)(2 * samples));
    }
    for (int64_t g = 0; g < samples; g++) {
        loss_sum += sums[2 * g];
        valid += sums[2 * g + 1];
    }
    free(sums);
    *loss = valid > 0 ? loss_sum / valid : NAN;
    return status;
}

enum status eval_run(struct trainer *t, double *loss)
{
    *loss = NAN;
    return t->val == NULL ? OK : eval_model(t, t->model, loss);
}

/* Is there memory for a second model? The run itself never needs more than it planned; this evaluation does, and is
 * left out, with a line, where a GPU has no room. One answer for all ranks. */
static enum status has_room(struct trainer *t, size_t bytes, bool *room)
{
    int64_t missing = 0;
#if WITH_CUDA
    int64_t have;
    if (t->device->kind == DEVICE_CUDA) {
        TRY(cuda_memory_free(&have));
        missing = (int64_t)bytes > have;
    }
#endif
    TRY(comm_max_i64(t->comm, &missing, 1));
    *room = missing == 0;
    if (missing && t->comm->rank == 0) {
        log_info("no evaluation with pv = fp8: a second model of %.2f GiB does not fit the GPU beside this run",
                 (double)bytes / 0x1p30);
    }
    return OK;
}

/* A second model over the same weights, in memory of its own for as long as it lasts. */
static enum status eval_other(struct trainer *t, const struct model_options *options, double *loss)
{
    struct arena arena;
    struct model *model = NULL;
    bool room;
    arena_measure(&arena, "evaluation");
    enum status status = model_plan(&model, &arena, &t->config->model, &t->params, options);
    model_close(model);
    TRY(status);
    size_t bytes = arena.high_water;
    model = NULL;
    TRY(has_room(t, bytes, &room));
    if (!room) {
        return OK;
    }
    status = ranks_agree(t->comm, arena_open_on(&arena, "evaluation", bytes, t->device->kind));
    if (status == OK) {
        status = model_plan(&model, &arena, &t->config->model, &t->params, options);
    }
    if (status == OK) {
        model_set_weights(model, t->state.weights);
        status = eval_model(t, model, loss);
    }
    model_close(model);
    arena_close(&arena);
    return status;
}

enum status eval_run_pv_fp8(struct trainer *t, double *loss)
{
    struct model_options options = t->options;
    struct attention_recipe *recipe = &options.attention, plain = attention_recipe_bf16();
    *loss = NAN;
    if (t->val == NULL) {
        return OK;
    }
    /* Choices about FP4 probabilities fall away with them. */
    recipe->pv = PV_FP8;
    recipe->mx_rule = plain.mx_rule;
    recipe->p_map = plain.p_map;
    recipe->v_diag = plain.v_diag;
    recipe->sink_keys_fp8 = plain.sink_keys_fp8;
    attention_recipe_preset(recipe, BWD_REPRESENTED);
    struct attention_shape shape = trainer_attention_shape(t->config, t->device);
    shape.batch = options.batch = 1;
    options.recompute = RECOMPUTE_BLOCK; /* forward only: nothing is kept */
    const char *refusal = attention_recipe_refusal(recipe, t->config->model.head_dim);
    if (refusal != NULL) {
        log_info("no evaluation with pv = fp8: %s", refusal);
        return OK;
    }
    TRY(attention_choose(&shape, recipe, t->device->kind, "auto", &options.variant));
    return eval_other(t, &options, loss);
}
