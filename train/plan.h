/* train: what a configuration amounts to, checked and told before anything is allocated. */
#pragma once

#include "core/device.h"
#include "dist/comm.h"
#include "train/config.h"

/* Legality over keys: batch arithmetic, shapes, formats, what the device can do. ERR_CONFIG and ERR_UNSUPPORTED name
 * the keys, their values and the nearest valid choice. Cuts a warm-up that is longer than the run, and says so. */
MUST_CHECK enum status plan_check(struct config *config, int ranks, const struct device *device);

/* " device.recompute = block, optim.moments = bf16, ... a smaller model": what makes a run smaller, as far as it is not
 * set so already. */
enum { PLAN_ADVICE = 256 };
void plan_advice(const struct config *config, const struct device *device, char *text, size_t bytes);

/* Bytes of a GPU that a run leaves alone: kernels are loaded when they first run, and the runtime and the libraries
 * take memory of their own. */
#define DEVICE_RESERVE (INT64_C(1) << 29)

/* --dry-run: prints the plan to `out` (rank 0). What does not fit is said there; it is no error of a dry run. */
MUST_CHECK enum status plan_print(const struct config *config, struct comm *comm, const struct device *device,
                                  FILE *out);
