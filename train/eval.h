/* train: evaluation: the mean loss over the first windows of data.val, in order. */
#pragma once

#include "train/trainer.h"

/* eval.steps batches of data.batch sequences (or what data.val holds, if less), spread over the ranks; equal bits for
 * any number of them. NaN without data.val. */
MUST_CHECK enum status eval_run(struct trainer *trainer, double *loss);

/* The same weights with attention's P and V in FP8, all else as trained: how much of a loss is owed to what FP4 blocks
 * of V let earlier rows see of later keys. NaN, and a line in the log, where the recipe has no such neighbour. */
MUST_CHECK enum status eval_run_pv_fp8(struct trainer *trainer, double *loss);
