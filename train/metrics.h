/* train: what a run writes about itself: metrics.jsonl (one object an update), layers.jsonl (attention by layer),
 * console lines, verdict.json. Only rank 0 writes. A number that does not exist is null. */
#pragma once

#include "train/step.h"

struct metrics {
    FILE *rows, *layers; /* NULL on other ranks */
    double started_s;    /* clock when this process made its first update */
    int64_t first_update;
    bool warned; /* of flushed gradients */
};

/* Opens the files of run folder `out`. Rows of updates after `update` are dropped first: a resumed run writes them
 * again. Also drops a last line that a crash cut. */
MUST_CHECK enum status metrics_open(struct metrics *metrics, const char *out, int64_t update, int rank);
void metrics_close(struct metrics *metrics);

/* One row, if the update is a multiple of log.every, the last one, has an evaluation, or stops the run. val_loss is NaN
 * where none was made. */
MUST_CHECK enum status metrics_write(struct metrics *metrics, const struct trainer *trainer,
                                     const struct step_result *result, double val_loss, bool last);

/* How a run ended, or NaN and "" where there is nothing to say. */
struct metrics_end {
    bool finished; /* no update is left to make: done or diverged; a study skips such arms */
    int64_t step, onset;
    double loss, eval_loss, eval_loss_pv_fp8;
    const char *verdict, *reason, *last_healthy_checkpoint;
};
MUST_CHECK enum status metrics_write_verdict(const char *out, const struct trainer *trainer,
                                             const struct metrics_end *end);
