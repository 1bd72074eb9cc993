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
    /* Of this rank. optim_ms: norm and AdamW. On CUDA nobody waits for AdamW: its time, and its share of step_ms, are
     * those of the update before (NaN in the first update of a process). */
    double data_ms, forward_ms, backward_ms, comm_ms, optim_ms, step_ms;
    double sm_mhz,
        watts;    /* of this rank's GPU while it worked; NaN where nobody asks or knows (run.mode = step_time) */
    bool counted; /* attention made statistics; else layer_stats are zeros */
    const struct attention_stats *layer_stats; /* (layers), owned by the trainer, valid until the next step */
};

/* Makes update trainer->update + 1. partner_loss: the reference arm's loss at that update, NaN if there is none.
 *
 * The watch decides before anything is written: with a non-finite loss or norm, or a diverged verdict while
 * divergence.stop is set, weights, moments and trainer->update stay as they were and the step fails with ERR_DIVERGED,
 * naming step, tensor and rank; `result` is filled in that case too. All ranks return the same. */
MUST_CHECK enum status step_run(struct trainer *trainer, double partner_loss, struct step_result *result);

/* Milliseconds since *since (of core/clock.h), which becomes now. */
double step_lap_ms(double *since);
