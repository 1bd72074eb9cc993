/* train: step times. */
#include "train/step_time.h"

#include "train/run_folder.h"

#include <math.h>
#include <stdlib.h>

const char *const step_phase_names[STEP_PHASES] = {"data", "forward", "backward", "comm", "optim", "step"};

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

/* The first update pays for caches and untouched memory: it is no sample of the others. */
static enum status measure(struct trainer *t, double *values, struct step_times *times)
{
    int64_t steps = t->config->schedule.steps, first = steps > 1 ? 1 : 0, n = steps - first;
    for (int64_t i = 0; i < steps; i++) {
        struct step_result r;
        TRY(step_run(t, NAN, &r));
        double phases[STEP_PHASES] = {r.data_ms, r.forward_ms, r.backward_ms, r.comm_ms, r.optim_ms, r.step_ms};
        for (int p = 0; p < STEP_PHASES && i >= first; p++) {
            values[p * n + i - first] = phases[p];
        }
    }
    times->updates = n;
    for (int p = 0; p < STEP_PHASES; p++) {
        times->median[p] = step_time_quantile(values + p * n, n, 0.5);
        times->p10[p] = step_time_quantile(values + p * n, n, 0.1);
        times->p90[p] = step_time_quantile(values + p * n, n, 0.9);
    }
    times->tokens_per_s =
        (double)(t->config->data.batch * t->config->data.seq_len) / (1e-3 * times->median[PHASE_STEP]);
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
        trainer_close(t);
    }
    free(values);
    free(t);
    return status;
}

enum status step_time_run(const struct config *config, struct comm *comm, const struct device *device)
{
    struct step_times times;
    TRY(step_time_measure(config, comm, device, &times));
    if (comm->rank == 0) {
        printf("%lld updates of %lld x %lld tokens on %d ranks: %.0f tokens/s\n", (long long)times.updates,
               (long long)config->data.batch, (long long)config->data.seq_len, comm->size, times.tokens_per_s);
        printf("%-10s %12s %12s %12s %8s\n", "phase", "median ms", "p10", "p90", "share");
        for (int p = 0; p < STEP_PHASES; p++) {
            printf("%-10s %12.2f %12.2f %12.2f %7.1f%%\n", step_phase_names[p], times.median[p], times.p10[p],
                   times.p90[p], 100 * times.median[p] / times.median[PHASE_STEP]);
        }
    }
    return OK;
}
