/* train: step times. */
#include "train/step_time.h"

#include "train/run_folder.h"

#include <math.h>
#include <stdlib.h>

const char *const step_phase_names[STEP_PHASES] = {"data",  "forward", "backward", "comm",
                                                   "optim", "step",    "sm_mhz",   "watts"};

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double step_time_quantile(double *values, int64_t n, double q)
{
    qsort(values, (size_t)n, sizeof *values, compare);
    return values[(int64_t)(q * (double)(n - 1) + 0.5)];
}

/* The first updates pay for caches, untouched memory, the choice of products and a cold GPU: they are no sample of the
 * others. */
static int64_t warm_ups(const struct trainer *t)
{
    int64_t steps = t->config->schedule.steps, want = t->device->kind == DEVICE_CPU ? 1 : 3;
    return steps > want ? want : steps - 1;
}

static void summarise(double *values, int64_t n, struct step_times *times)
{
    times->updates = n;
    for (int p = 0; p < STEP_PHASES; p++) {
        times->median[p] = step_time_quantile(values + p * n, n, 0.5);
        times->p10[p] = step_time_quantile(values + p * n, n, 0.1);
        times->p90[p] = step_time_quantile(values + p * n, n, 0.9);
    }
}

static enum status measure(struct trainer *t, double *values, struct step_times *times)
{
    const struct config *config = t->config;
    int64_t steps = config->schedule.steps, first = warm_ups(t), n = steps - first;
    for (int64_t i = 0; i < steps; i++) {
        struct step_result r;
        TRY(step_run(t, NAN, &r));
        double phases[STEP_PHASES] = {r.data_ms,  r.forward_ms, r.backward_ms, r.comm_ms,
                                      r.optim_ms, r.step_ms,    r.sm_mhz,      r.watts};
        for (int p = 0; p < STEP_PHASES && i >= first; p++) {
            values[p * n + i - first] = phases[p];
        }
    }
    /* A GPU may still be at the last update, which the times do not need (each has the optimizer's of the one before):
     * reading a weight waits for it, so that a failure in it is one of this run. */
    const bf16 *weight;
    size_t one = 1;
    TRY(t->engine->weights(t, 0, &one, &weight));
    summarise(values, n, times);
    double tokens = (double)(config->data.batch * config->data.seq_len);
    times->tokens_per_s = tokens / (1e-3 * times->median[PHASE_STEP]);
    times->flops_per_token = model_flops_per_token(&config->model, &t->params, config->data.seq_len);
    times->planned_gib = (double)t->arena.high_water / 0x1p30;
    times->used_gib = t->engine->memory_gib(t);
    struct attention_shape shape = trainer_attention_shape(config, t->device);
    attention_route_print(&shape, &config->attention, t->options.variant, times->attention, sizeof times->attention);
    return OK;
}

enum status step_time_measure(const struct config *config, struct comm *comm, const struct device *device,
                              struct step_times *times)
{
    struct trainer *t = calloc(1, sizeof *t);
    double *values = calloc((size_t)config->schedule.steps * STEP_PHASES, sizeof *values);
    enum status status = t == NULL || values == NULL ? status_fail(ERR_NOMEM, "no memory for step times") : OK;
    if (status == OK) {
        status = trainer_open(t, config, comm, device);
        ranks_quiet(comm, false);
        if (status == OK) {
            status = measure(t, values, times);
        }
        ranks_leave(comm, status);
        trainer_close(t);
    }
    free(values);
    free(t);
    return status;
}

/* Work by PaLM's count, which takes attention as if there were no causal mask; beside it what the mask leaves. */
static void print_rates(const struct config *config, const struct comm *comm, const struct device *device,
                        const struct step_times *times)
{
    const struct model_config *m = &config->model;
    double scores = 12.0 * m->layers * m->heads * m->head_dim * (double)config->data.seq_len;
    double rate = times->tokens_per_s * times->flops_per_token;
    double masked = times->tokens_per_s * (times->flops_per_token - 0.5 * scores);
    double peak = device->peak_flops * comm->size;
    printf(
        "model work %.2f GFLOP a token (6 (N - embedding) + 12 L H D T): %.1f TFLOP/s; %.1f with half of attention's "
        "(causal)\n",
        times->flops_per_token / 1e9, rate / 1e12, masked / 1e12);
    if (peak > 0) {
        printf("MFU %.1f %% (causal %.1f %%) of %.1f TFLOP/s: dense BF16 of %s by its datasheet, times %d\n",
               100 * rate / peak, 100 * masked / peak, peak / 1e12, device->name, comm->size);
    }
    printf("memory of a rank: %.2f GiB planned, %.2f GiB in use\n", times->planned_gib, times->used_gib);
    if (!isnan(times->median[PHASE_MHZ])) {
        printf("while working: SM clock %.0f MHz (p10 %.0f, p90 %.0f), power %.0f W (p10 %.0f, p90 %.0f)\n",
               times->median[PHASE_MHZ], times->p10[PHASE_MHZ], times->p90[PHASE_MHZ], times->median[PHASE_WATTS],
               times->p10[PHASE_WATTS], times->p90[PHASE_WATTS]);
    }
}

enum status step_time_run(const struct config *config, struct comm *comm, const struct device *device)
{
    struct step_times times;
    TRY(step_time_measure(config, comm, device, &times));
    if (comm->rank == 0) {
        char recipe[512];
        attention_recipe_print(&config->attention, recipe, sizeof recipe);
        printf("%lld updates of %lld x %lld tokens on %d ranks (%s, attention %s): %.0f tokens/s\n",
               (long long)times.updates, (long long)config->data.batch, (long long)config->data.seq_len, comm->size,
               device->name, times.attention, times.tokens_per_s);
        printf("%-10s %12s %12s %12s %8s\n", "phase", "median ms", "p10", "p90", "share");
        for (int p = 0; p <= PHASE_STEP; p++) {
            printf("%-10s %12.2f %12.2f %12.2f %7.1f%%\n", step_phase_names[p], times.median[p], times.p10[p],
                   times.p90[p], 100 * times.median[p] / times.median[PHASE_STEP]);
        }
        printf("attention %s; sums %s\n", recipe,
               config->run.deterministic == DETERMINISTIC_OFF ? "in any order" : "in a fixed order");
        printf("linear attn %s, mlp %s; %lld sequences at once, recompute %s; master %s, moments %s, gradients %s%s\n",
               linear_format_names[config->linear.attn], linear_format_names[config->linear.mlp],
               (long long)(device->kind == DEVICE_CPU ? 1 : config->data.micro_batch),
               recompute_names[config->recompute], config->optim.master_fp32 ? "fp32" : "none",
               config->optim.moments_bf16 ? "bf16" : "fp32", config->optim.grads_bf16 ? "bf16" : "fp32",
               config->optim.stochastic_rounding ? ", stochastic rounding" : "");
        print_rates(config, comm, device, &times);
    }
    return OK;
}
