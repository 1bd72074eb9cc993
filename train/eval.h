/* train: evaluation: the mean loss over the first windows of data.val, in order. */
#pragma once

#include "train/trainer.h"

/* eval.steps batches of data.batch sequences (or what data.val holds, if less), spread over the ranks; equal bits for
 * any number of them. NaN without data.val. */
MUST_CHECK enum status eval_run(struct trainer *trainer, double *loss);

/* The same weights with attention's P and V in FP8, all else as trained: shows how much of a loss comes from FP4 blocks
 * of V that let earlier rows see later keys. NaN, and a line in the log, where the recipe has no FP8 counterpart. */
MUST_CHECK enum status eval_run_pv_fp8(struct trainer *trainer, double *loss);
