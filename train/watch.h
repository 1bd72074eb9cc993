/* train: the divergence watch. A verdict per update from loss, pre-clip gradient norm, non-finite counts and, in a
 * study, the reference arm's loss at the same update. healthy -> suspect -> diverged; diverged latches, suspect clears.
 * Windows count updates, never rows, since recorded series have gaps. Pure: knows no files, no clock.
 * The rule and the reasons for its numbers: docs/divergence.md. */
#pragma once

#include "core/json.h"

#include <stdint.h>

enum verdict { VERDICT_HEALTHY, VERDICT_SUSPECT, VERDICT_DIVERGED };
extern const char *const verdict_names[];

struct watch_config {
    int64_t window;            /* updates of history that the baselines are medians of; at most WATCH_WINDOW_MAX */
    double loss_rise_suspect;  /* nats above the best level: suspect */
    double loss_rise_diverged; /* nats above the best level: diverged, if confirmed */
    double norm_factor;        /* norm above this multiple of its median: a burst, suspect */
    int64_t confirm;           /* updates that a rise with a burst must last; without a burst: window */
    double partner_gap;        /* nats above the reference's loss for `confirm` updates: diverged */
};
enum { WATCH_WINDOW_MAX = 10000 };
struct watch_config watch_config_default(void);

struct watch; /* its size is fixed once opened */

/* Fails with ERR_CONFIG naming the key of [divergence], or ERR_NOMEM. */
MUST_CHECK enum status watch_open(struct watch **watch, const struct watch_config *config);
void watch_close(struct watch *watch);

struct watch_row {
    int64_t update; /* above that of the row before */
    double loss, grad_norm;
    int64_t non_finite;  /* of this update */
    double partner_loss; /* NaN if there is no partner or it has diverged */
};

enum verdict watch_update(struct watch *watch, const struct watch_row *row);
enum verdict watch_verdict(const struct watch *watch);
int64_t watch_onset(const struct watch *watch); /* update where the trouble that led to the verdict began; 0 = none */
const char *watch_reason(const struct watch *watch); /* one line with the numbers and without the names of
                                                       the verdicts; "" while healthy */

/* The whole state, for checkpoints: a watch restored from it gives the same verdicts. The caller owns the object; NULL
 * without memory. */
json_t *watch_save(const struct watch *watch);
/* Fails with ERR_DATA, leaving the watch as it was. */
MUST_CHECK enum status watch_restore(struct watch *watch, const json_t *state);
