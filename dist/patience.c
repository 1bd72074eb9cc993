#include "dist/patience.h"

#include "core/status.h"

#include <sched.h>
#include <time.h>

static const double gap_max_s = 0.5;
/* How long we look without sleeping. In time, not in looks: on a crowded machine each of them gives the processor away
 * for milliseconds. */
static const double spin_s = 2e-3;
enum { NAP_NS = 50000 };

struct patience patience_begin(double limit_s, double now_s)
{
    return (struct patience){.limit_s = limit_s, .last_s = now_s};
}

bool patience_lasts(struct patience *patience, double now_s)
{
    double gap_s = now_s - patience->last_s;
    ASSERT(gap_s >= 0);
    patience->waited_s += gap_s < gap_max_s ? gap_s : gap_max_s;
    patience->last_s = now_s;
    return patience->waited_s <= patience->limit_s;
}

void patience_rest(const struct patience *patience)
{
    if (patience->waited_s < spin_s) {
        sched_yield();
    } else {
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
}
