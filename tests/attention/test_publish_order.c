/* The order of the blocks that publish operands of the Hopper backward: each piece of work once, and none before what
 * it waits for. On the CPU: the lengths that matter are too long to run. */
#include "attention/attention_bwd_sm90_order.h"

#include "tests/test.h"

#include <stdbool.h>

/* Blocks of the kernel: 32 tokens measured, 64 queries of a head or 128 keys published. */
static struct publish_order order_of(int units, int group, int tokens)
{
    return publish_order_of(units, (tokens + 31) / 32, group * ((tokens + 63) / 64) + (tokens + 127) / 128);
}

static void check(int units, int group, int tokens)
{
    const struct publish_order o = order_of(units, group, tokens);
    int measured = 0, published = 0, unit = 0;
    for (int number = 0; number < publish_blocks(&o); number++) {
        const struct publish_place place = publish_place_of(&o, number);
        bool good = place.measures < 0 || place.publishes < 0;
        if (place.measures >= 0) { /* unit by unit, without a gap */
            good = good && place.measures == measured++;
        }
        if (place.publishes >= 0) { /* the next of its unit, all of which is measured */
            good = good && place.unit == unit && place.publishes == published++ && measured >= (unit + 1) * o.each;
            unit += published == o.others;
            published %= o.others;
        }
        if (!good) {
            fail_msg("%d units, group %d, %d tokens: block %d of %d: unit %d measures %d publishes %d", units, group,
                     tokens, number, publish_blocks(&o), place.unit, place.measures, place.publishes);
        }
    }
    assert_int_equal(measured, units * o.each);
    assert_int_equal(unit, units);
    assert_int_equal(published, 0);
}

static void test_each_block_once_and_none_too_early(void **state)
{
    static const int groups[] = {1, 2, 3, 4, 5, 8, 16, 64, 128};
    static const int lengths[] = {1, 31, 32, 33, 64, 65, 129, 777, 4096, 6400, 6432, 32768};
    (void)state;
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            check(1, groups[g], lengths[i]);
            check(3, groups[g], lengths[i]);
            check(32, groups[g], lengths[i] > 4096 ? 100 : lengths[i]);
        }
    }
}

/* Here each * (each + others) leaves 31 bits, and at the last 32. */
static void test_long_sequences(void **state)
{
    (void)state;
    check(1, 64, 262144);
    check(2, 8, 700001);
    check(1, 1, 1200000);
    check(1, 4, 8388480);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_block_once_and_none_too_early),
                                       cmocka_unit_test(test_long_sequences)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
