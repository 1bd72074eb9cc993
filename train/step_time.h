/* train: run.mode = step_time: how long an update takes, by phase. */
#pragma once

#include "train/step.h"

/* Milliseconds, then clock and power of the GPU. */
enum step_phase {
    PHASE_DATA,
    PHASE_FORWARD,
    PHASE_BACKWARD,
    PHASE_COMM,
    PHASE_OPTIM,
    PHASE_STEP,
    PHASE_MHZ,
    PHASE_WATTS,
    STEP_PHASES
};
extern const char *const step_phase_names[STEP_PHASES];

/* Milliseconds on this rank over the measured updates. */
struct step_times {
    int64_t updates;
    double median[STEP_PHASES], p10[STEP_PHASES], p90[STEP_PHASES];
    double tokens_per_s; /* of all ranks, from the median step */
    double flops_per_token, planned_gib, used_gib;
    char attention[256]; /* attention_route_print */
};

/* The q-quantile of n values by nearest rank; sorts them. */
double step_time_quantile(double *values, int64_t n, double q);

/* Makes run.steps updates from initial weights, writing nothing; the first is left out (on a GPU: the first three)
 * unless there are no more. No checkpoint or evaluation falls into a step. Without data.train tokens are random. */
MUST_CHECK enum status step_time_measure(const struct config *config, struct comm *comm, const struct device *device,
                                         struct step_times *times);

/* As above, and prints the table. */
MUST_CHECK enum status step_time_run(const struct config *config, struct comm *comm, const struct device *device);
