/* train: planted faults (debug.fault), by which tests and operators see how a run fails. Without one all is a no-op. */
#pragma once

#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct trainer;

enum fault_kind { FAULT_NONE, FAULT_NAN_GRAD, FAULT_INF_GRAD, FAULT_NAN_WEIGHT, FAULT_EXIT, FAULT_HANG, FAULT_KILL };

/* One process strikes whenever it makes this update: also again after a resume, until the key is taken away. */
struct fault {
    enum fault_kind kind;
    int64_t update;
    int rank;
};

/* "KIND@UPDATE:RANK"; "" is none. ERR_CONFIG says what is wrong, also with a rank that does not exist. */
MUST_CHECK enum status fault_parse(struct fault *fault, const char *text, int ranks);

/* Before the first sample of an update: exit (status 1), hang, kill; one weight becomes NaN. May not return. */
void fault_before_update(struct trainer *trainer, int64_t update);

/* After the backward of this rank's first sample: is one element of the gradient to become NaN or Inf? */
bool fault_in_gradient(const struct trainer *trainer, int64_t update, size_t *element, float *value);
