/* train: one training run from start or resume to its end. */
#pragma once

#include "train/metrics.h"

/* What a study asks of a run beside its configuration. All zero: a plain run. */
struct run_options {
    double deadline_s;          /* of core/clock.h: checkpoint and ERR_STOPPED from then on; 0 = none */
    const double *partner_loss; /* the reference's loss by update; NaN or beyond partner_count: no partner */
    int64_t partner_count;
    const char *start_from; /* checkpoint to begin with where the run has none of its own; NULL = initial weights */
    bool eval_pv_fp8;       /* at the end, evaluate once more with P and V in FP8 */
};

/* Trains in config->run.out until its last update. ERR_DIVERGED: stopped by the watch; ERR_STOPPED: by signal or
 * deadline, after a checkpoint. In both cases, and on success, verdict.json is written. All ranks call it. */
MUST_CHECK enum status run_train(const struct config *config, struct comm *comm, const struct device *device,
                                 const struct run_options *options);
