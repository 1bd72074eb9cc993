/* attention: the schedule of blocks of the FP8 backward's publishing on Hopper, for its kernel and its test.
 *
 * A kv head has `each` measuring blocks and `others` publishing ones, which wait until their head is measured.
 * Measuring runs one head and PUBLISH_AHEAD blocks ahead, so that few publishers wait, and is then interleaved evenly
 * with publishing, so that what was measured is still in the L2 cache when it is published. Blocks wait for lower
 * numbers only: no deadlock. */
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define ORDER_FN static inline __host__ __device__
#else
#define ORDER_FN static inline
#endif

enum { PUBLISH_AHEAD = 200 }; /* fewer, and publishers wait; more, and the L2 cache loses */

struct publish_order {
    int units, each, others, ahead; /* units: (batch, kv head) */
    uint32_t share;                 /* of `each` in each + others, in 2^-32, rounded up */
};

/* What block `number` does. measures: it is this measuring block, counted over all units; publishes: it is this
 * publishing block of `unit`, counted from the end; -1: it is none. Both -1: nothing is left to measure. */
struct publish_place {
    int unit, measures, publishes;
};

/* units (each + others) and units each below 2^30. */
ORDER_FN struct publish_order publish_order_of(int units, int each, int others)
{
    struct publish_order o = {units, each, others, each + PUBLISH_AHEAD, 0};
    const uint64_t all = (uint64_t)each + (uint64_t)others;
    o.ahead = o.ahead < units * each ? o.ahead : units * each;
    o.share = (uint32_t)((((uint64_t)each << 32) + all - 1) / all);
    return o;
}

ORDER_FN int publish_blocks(const struct publish_order *o)
{
    return o->ahead + o->units * (o->each + o->others);
}

/* Blocks that measure among the first n of a unit: 0 or 1 more than among n - 1, and `each` of all. */
ORDER_FN int publish_share(const struct publish_order *o, int n)
{
    return (int)((uint64_t)(uint32_t)n * o->share >> 32);
}

ORDER_FN struct publish_place publish_place_of(const struct publish_order *o, int number)
{
    const int all = o->each + o->others, index = number - o->ahead;
    const int unit = index / all, rest = index - unit * all, share = publish_share(o, rest);
    struct publish_place place = {unit, -1, -1};
    if (index < 0) {
        place.measures = number;
    } else if (publish_share(o, rest + 1) == share) {
        place.publishes = rest - share;
    } else if (o->ahead + unit * o->each + share < o->units * o->each) {
        place.measures = o->ahead + unit * o->each + share;
    }
    return place;
}
