/* train: the divergence watch. A verdict per update from loss, pre-clip gradient norm, non-finite counts and, in a
 * study, the reference arm's loss at the same update. healthy -> suspect -> diverged; diverged latches. Windows count
 * updates, never rows, since recorded series have gaps. Pure: knows no files, no clock. */
#pragma once

#include "core/json.h"

#include <stdint.h>

enum verdict { VERDICT_HEALTHY, VERDICT_SUSPECT, VERDICT_DIVERGED };
extern const char *const verdict_names[];

struct watch_config {
    int64_t window;            /* updates of history that baselines use */
    double loss_rise_suspect;  /* loss above the baseline by this many nats: suspect */
    double loss_rise_diverged; /* and sustained, or with a norm burst: diverged */
    double norm_factor;        /* norm above this multiple of the baseline norm is a burst */
    int64_t confirm;           /* updates a rise must last */
    double partner_gap;        /* nats above the reference's loss, sustained: diverged */
};
struct watch_config watch_config_default(void);

struct watch; /* opaque; fixed size, copied whole */

MUST_CHECK enum status watch_open(struct watch **watch, const struct watch_config *config);
void watch_close(struct watch *watch);

struct watch_row {
    int64_t update;
    double loss, grad_norm;
    int64_t non_finite;  /* of this update */
    double partner_loss; /* NaN if there is no partner or it has diverged */
};

enum verdict watch_update(struct watch *watch, const struct watch_row *row);
enum verdict watch_verdict(const struct watch *watch);
int64_t watch_onset(const struct watch *watch); /* update where the trouble that led to the verdict began; 0 = none */
const char *watch_reason(const struct watch *watch); /* one line with the numbers; "" while healthy */

/* The whole state, for checkpoints: a watch restored from it gives the same verdicts. */
json_t *watch_save(const struct watch *watch);
MUST_CHECK enum status watch_restore(struct watch *watch, const json_t *state);
