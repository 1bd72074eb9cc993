/* dist: how long a rank that looks for others again and again has waited for them. Knows no ranks and no library.
 *
 * Time counts from the first look. A gap between two looks counts at most half a second: a process that was itself
 * stopped, with its whole machine perhaps, must not blame others for the time when it wakes up.
 *
 *     struct patience patience = patience_begin(limit_s, clock_s());
 *     while (!look()) {
 *         if (!patience_lasts(&patience, clock_s())) {
 *             return too_late;
 *         }
 *         patience_rest(&patience);
 *     } */
#pragma once

#include <stdbool.h>

struct patience {
    double limit_s, waited_s;
    double last_s; /* the last look, by the clock */
};

struct patience patience_begin(double limit_s, double now_s);

/* After a look in vain, by a clock that never goes back: false once more than the limit has been waited. Asked after
 * the look and before the rest, so that whoever was stopped while resting looks once more before giving up. */
bool patience_lasts(struct patience *patience, double now_s);

/* Until the next look: gives the processor away at first, since a rank in step answers within microseconds, and sleeps
 * for moments later. */
void patience_rest(const struct patience *patience);
