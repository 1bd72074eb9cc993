/* train: the loop around the step. */
#include "train/run.h"

#include "core/clock.h"
#include "core/log.h"
#include "train/eval.h"
#include "train/run_folder.h"
#include "train/signals.h"
#include "train/snapshot.h"
#include "train/step_time.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = CONFIG_PATH + 64, STEP_TIMES_MAX = 1 << 14 };

struct run {
    const struct config *config;
    const struct run_options *options;
    struct run_folder folder;
    struct trainer trainer;
    struct metrics metrics;
    double val_loss; /* of the newest evaluation */
    int64_t val_update;
    double *step_ms; /* owns; of the updates of this process, the newest STEP_TIMES_MAX of them */
    int64_t updates;
};

static enum status open_log(const struct config *config, const struct comm *comm)
{
    char path[PATH_BYTES];
    if (comm->rank != 0) {
        return OK;
    }
    snprintf(path, sizeof path, "%s/log.txt", config->run.out);
    return log_open_file(path);
}

/* The configuration as used, so that a run folder explains itself. Written once the run is sure to begin: a refused
 * resume leaves that of the run which the folder holds. */
static enum status dump_config(const struct config *config, const struct comm *comm)
{
    char path[PATH_BYTES];
    if (comm->rank != 0) {
        return OK;
    }
    snprintf(path, sizeof path, "%s/config.toml", config->run.out);
    return config_dump(config, path);
}

/* What runs otherwise on a GPU than on the CPU. */
static void report_gpu(const struct trainer *t)
{
    const struct linear_recipe *linear = &t->config->linear;
    bool nvfp4 = linear->attn == LINEAR_NVFP4 || linear->mlp == LINEAR_NVFP4;
    bool scaled = linear->attn != LINEAR_BF16 || linear->mlp != LINEAR_BF16;
    long long at_once = (long long)t->config->data.micro_batch;
    log_info("GPU %d: %lld sequences at once, %s, sums %s", t->device->ordinal, at_once,
             t->config->graphs ? "as graphs" : "without graphs",
             t->options.unordered ? "in any order (run.deterministic = off)" : "in a fixed order");
    if (t->config->attention_every == 1) {
        log_info(
            "statistics of attention in every update (log.attention_every = 1): where there are faster kernels they "
            "would run without");
    }
    if (nvfp4) {
        log_info("linear nvfp4: emulated: exact values, multiplied in BF16");
    }
    if (scaled && at_once > 1) {
        log_info("linear: scales of activations and gradients span the %lld sequences of a micro-batch", at_once);
    }
}

/* What a reader of the log must know about every later number: size, place, formats, data, rules. */
static void report_start(const struct trainer *t)
{
    char recipe[512];
    attention_recipe_print(&t->config->attention, recipe, sizeof recipe);
    log_info("run %s: %zu parameters, %.2f GiB a rank, %d ranks, %d threads each, on %s%s", t->config->run.name,
             t->params.parameters, (double)t->arena.high_water / 0x1p30, t->comm->size, t->device->threads,
             t->device->name, strcmp(t->config->device, "auto") == 0 ? " (device.kind = auto)" : "");
    if (t->device->kind == DEVICE_CUDA) {
        report_gpu(t);
    }
    char route[256];
    struct attention_shape shape = trainer_attention_shape(t->config, t->device);
    attention_route_print(&shape, &t->config->attention, t->options.variant, route, sizeof route);
    bool plain = t->config->attention.qk == QK_BF16 && t->config->attention.pv == PV_BF16;
    bool cpu = t->device->kind == DEVICE_CPU;
    log_info("attention %s%s: %s", route,
             plain ? ""
             : cpu ? " (low-precision formats emulated)"
                   : " (NVFP4 and MXFP4 emulated by wider formats)",
             recipe);
    model_report_formats(&t->config->model, &t->options);
    log_info(
        "data: %llu windows of %lld tokens; weight decay on matrices and embeddings, not on norm gains; clipping %s",
        (unsigned long long)loader_windows(t->train), (long long)t->config->data.seq_len,
        t->config->optim.clip > 0 ? "by the global norm" : "off");
}

/* Lock before anything is read or written; data and memory before the checkpoint, which is checked against both;
 * config.toml and the rows change last, once it is known where the run goes on. */
static enum status start(struct run *run, struct comm *comm, const struct device *device)
{
    struct trainer *t = &run->trainer;
    bool resumed;
    TRY(run_folder_open(&run->folder, run->config->run.out, comm));
    TRY(ranks_agree(comm, open_log(run->config, comm)));
    TRY(trainer_open(t, run->config, comm, device));
    TRY(snapshot_resume(t, run->config->run.out, &resumed));
    if (!resumed && run->options->start_from != NULL) {
        /* What arms and seeds of a study may differ in. */
        TRY(snapshot_load(t, run->options->start_from, "attention.* linear.* run.seed"));
    }
    report_start(t);
    TRY(ranks_agree(comm, dump_config(run->config, comm)));
    TRY(ranks_agree(comm, metrics_open(&run->metrics, run->config->run.out, t->update, comm->rank)));
    ranks_quiet(comm, false);
    return OK;
}

/* Past the reference's last row there is no partner. */
static double partner_loss(const struct run_options *options, int64_t update)
{
    return update < options->partner_count ? options->partner_loss[update] : NAN;
}

/* At most once for the same weights: the last update and the conclusion both ask. */
static enum status evaluate(struct run *run)
{
    struct trainer *t = &run->trainer;
    if (run->val_update != t->update) {
        TRY(eval_run(t, &run->val_loss));
        run->val_update = t->update;
    }
    return OK;
}

/* Has anybody been asked to stop, or is the time over? One answer for all ranks. */
static enum status stop_agreed(struct run *run, bool *stop)
{
    double deadline = run->options->deadline_s;
    int64_t wanted = signals_stop_wanted() ? 2 : deadline > 0 && clock_s() >= deadline ? 1 : 0;
    TRY(comm_max_i64(run->trainer.comm, &wanted, 1));
    *stop = wanted != 0;
    if (*stop) {
        log_info("stopping after update %lld: %s", (long long)run->trainer.update,
                 wanted == 2 ? "asked by a signal" : "run.max_minutes is over");
    }
    return OK;
}

/* Updates until the last one, a verdict or a wish to stop. */
static enum status loop(struct run *run)
{
    struct trainer *t = &run->trainer;
    const struct config *config = run->config;
    while (t->update < config->schedule.steps) {
        struct step_result result;
        enum status status = step_run(t, partner_loss(run->options, t->update + 1), &result);
        if (status == ERR_DIVERGED) {
            /* The update that was refused is the row that one looks for. */
            TRY(metrics_write(&run->metrics, t, &result, NAN, true));
            return status;
        }
        TRY(status);
        run->step_ms[run->updates++ % STEP_TIMES_MAX] = result.step_ms;
        bool last = t->update == config->schedule.steps, stop = false;
        bool eval = last || (config->eval_every > 0 && t->update % config->eval_every == 0);
        if (eval) {
            TRY(evaluate(run));
        }
        TRY(metrics_write(&run->metrics, t, &result, eval ? run->val_loss : NAN, last));
        if (!last) {
            TRY(stop_agreed(run, &stop));
        }
        if (last || stop || (config->checkpoint.every > 0 && t->update % config->checkpoint.every == 0)) {
            TRY(snapshot_save(t, config->run.out));
        }
        if (stop) {
            return ERR_STOPPED;
        }
    }
    return OK;
}

/* The first update pays for caches and fresh memory, so a mean would lie; evaluations and checkpoints are in no step.
 */
static void report_times(const struct run *run)
{
    int64_t n = run->updates < STEP_TIMES_MAX ? run->updates : STEP_TIMES_MAX;
    const struct config_data *data = &run->config->data;
    if (n == 0) {
        return;
    }
    double median = step_time_quantile(run->step_ms, n, 0.5), p10 = step_time_quantile(run->step_ms, n, 0.1),
           p90 = step_time_quantile(run->step_ms, n, 0.9);
    log_info("step time: median %.1f ms (p10 %.1f, p90 %.1f; %lld updates), %.0f tokens/s", median, p10, p90,
             (long long)n, 1e3 * (double)(data->batch * data->seq_len) / median);
}

/* verdict.json, whatever the end was. A stopped run will go on, so it is not evaluated: under a signal minutes count.
 */
static enum status conclude(struct run *run, enum status ended)
{
    struct trainer *t = &run->trainer;
    char healthy[PATH_BYTES] = "";
    double pv_fp8 = NAN;
    if (ended != ERR_STOPPED) {
        TRY(evaluate(run));
    }
    if (ended != ERR_STOPPED && run->options->eval_pv_fp8) {
        TRY(eval_run_pv_fp8(t, &pv_fp8));
    }
    bool diverged = ended == ERR_DIVERGED || watch_verdict(t->watch) == VERDICT_DIVERGED;
    const char *reason = watch_reason(t->watch);
    if (t->comm->rank == 0) {
        /* What was saved after the trouble began must not be what a later run resumes from. */
        int64_t onset = diverged ? watch_onset(t->watch) : 0;
        TRY(snapshot_last_healthy(run->config->run.out, onset, healthy, sizeof healthy));
    }
    struct metrics_end end = {.finished = ended != ERR_STOPPED,
                              .step = t->update,
                              .onset = watch_onset(t->watch),
                              .loss = t->last_loss,
                              .eval_loss = ended == ERR_STOPPED ? NAN : run->val_loss,
                              .eval_loss_pv_fp8 = pv_fp8,
                              .verdict = verdict_names[diverged ? VERDICT_DIVERGED : watch_verdict(t->watch)],
                              .reason = reason,
                              .last_healthy_checkpoint = healthy};
    TRY(ranks_agree(t->comm, metrics_write_verdict(run->config->run.out, t, &end)));
    report_times(run);
    log_info("verdict of %s: %s after update %lld%s%s", run->config->run.name, end.verdict, (long long)t->update,
             reason[0] != '\0' ? ": " : "", reason);
    return ended;
}

enum status run_train(const struct config *config, struct comm *comm, const struct device *device,
                      const struct run_options *options)
{
    struct run *run = calloc(1, sizeof *run);
    double *step_ms = calloc(STEP_TIMES_MAX, sizeof *step_ms);
    if (run == NULL || step_ms == NULL) {
        free(run);
        free(step_ms);
        return status_fail(ERR_NOMEM, "no memory for a run");
    }
    run->step_ms = step_ms;
    run->config = config;
    run->options = options;
    run->folder.lock = -1;
    run->val_loss = NAN;
    run->val_update = -1;
    enum status status = start(run, comm, device);
    if (status == OK) {
        status = loop(run);
        if (status == OK || status == ERR_DIVERGED || status == ERR_STOPPED) {
            status = conclude(run, status);
        }
    }
    ranks_leave(comm, status);
    metrics_close(&run->metrics);
    trainer_close(&run->trainer);
    log_close_file();
    run_folder_close(&run->folder);
    free(run->step_ms);
    free(run);
    return status;
}
