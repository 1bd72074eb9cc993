/* train: run.mode = study: matched arms, one after the other. An arm file may set [attention] and [linear] only; all
 * else, initial weights and sample order included, is equal by construction. */
#pragma once

#include "train/run.h"

/* Runs every arm of study.arms for every seed, the reference first, in run.out/ARM/seed_N; arms that finished before
 * are skipped. Prints the differences of the configurations, a verdict line an arm, and a table. OK once every arm has
 * a verdict, diverged ones included. All ranks call it. */
MUST_CHECK enum status study_run(const struct config *config, struct comm *comm, const struct device *device,
                                 double deadline_s);

/* --dry-run of a study: checks every arm as study_run would and prints their differences. */
MUST_CHECK enum status study_print(const struct config *config, struct comm *comm, const struct device *device);
