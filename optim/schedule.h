/* optim: the learning rate as a function of the update, exact at both ends. */
#pragma once

#include "core/status.h"

#include <stddef.h>

enum schedule_kind { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT };
extern const char *const schedule_kind_names[]; /* by enum, then NULL */

struct schedule {
    enum schedule_kind kind;
    int64_t warmup, steps; /* updates; 0 <= warmup < steps unless steps = 1 */
    float final_fraction;  /* of the peak, at the last update; SCHEDULE_CONSTANT has no use for it */
    float decay_fraction;  /* wsd: the last part of the run that decays */
};

/* Factor of the peak at `update` = 1 .. steps.
 *   update u of the warm-up   u / warmup: never 0, the peak exactly at u = max(warmup, 1)
 *   after it, with p from 0 at the peak to 1 at the last update and f = final_fraction
 *     cosine    f + (1 - f) (1 + cos(pi p)) / 2
 *     linear    1 - (1 - f) p
 *     wsd       1, then linear over the last round(decay_fraction steps) updates
 *     constant  1
 *   the last update           final_fraction exactly (a run of one update is all last update); constant: 1
 * The same bits on every machine. */
double schedule_factor(const struct schedule *s, int64_t update);
