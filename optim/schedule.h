/* optim: the learning rate as a function of the update, exact at both ends. */
#pragma once

#include "core/status.h"

enum schedule_kind { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT };
extern const char *const schedule_kind_names[];

struct schedule {
    enum schedule_kind kind;
    int64_t warmup, steps; /* updates; warmup < steps unless steps = 1 */
    float final_fraction;  /* of the peak, at the last update */
    float decay_fraction;  /* wsd: the last part of the run that decays */
};

/* Factor of the peak at `update` = 1 .. steps. Update u of the warm-up has u / warmup (never 0, the peak exactly at
 * u = warmup); the last update has final_fraction exactly. */
double schedule_factor(const struct schedule *s, int64_t update);
