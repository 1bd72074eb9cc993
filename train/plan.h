/* train: what a configuration amounts to, checked and told before anything is allocated. */
#pragma once

#include "core/device.h"
#include "dist/comm.h"
#include "train/config.h"

/* Legality over keys: batch arithmetic, shapes, formats, what the device can do. ERR_CONFIG and ERR_UNSUPPORTED name
 * the keys, their values and the nearest valid choice. Cuts a warm-up that is longer than the run, and says so. */
MUST_CHECK enum status plan_check(struct config *config, int ranks);

/* --dry-run: prints the plan to `out` (rank 0). What does not fit is said there; it is no error of a dry run. */
MUST_CHECK enum status plan_print(const struct config *config, struct comm *comm, const struct device *device,
                                  FILE *out);
