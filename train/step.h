/* train: one update. */
#pragma once

#include "train/trainer.h"

/* What a step observed. Sums over samples are taken in sample order: equal bits for any number of ranks. */
struct step_result {
    int64_t update;
    double loss;      /* mean over the valid targets of the update */
    double grad_norm; /* before clipping */
    double lr;
    int64_t valid;
    int64_t non_finite; /* gradients, losses and attention values that are NaN or infinite */
    uint64_t batch_hash;
    enum verdict verdict;
    double data_ms, forward_ms, backward_ms, comm_ms, optim_ms, step_ms; /* of this rank */
    const struct attention_stats *layer_stats; /* (layers), owned by the trainer, valid until the next step */
};

/* Makes update trainer->update + 1. partner_loss: the reference arm's loss at that update, NaN if there is none.
 *
 * The watch decides before anything is written: with a non-finite loss or norm, or a diverged verdict while
 * divergence.stop is set, weights, moments and trainer->update stay as they were and the step fails with ERR_DIVERGED,
 * naming step, tensor and rank; `result` is filled in that case too. All ranks return the same. */
MUST_CHECK enum status step_run(struct trainer *trainer, double partner_loss, struct step_result *result);

/* Seconds of a clock that never goes back. */
double step_clock_s(void);
