/* patience: what counts as waiting, by a clock of the test. Times are sums of powers of two, so they add exactly. */
#include "dist/patience.h"
#include "tests/test.h"

/* Looks every `step_s` from the time of the last look. Returns how many looks patience lasted, at most `looks`. */
static int looks_that_last(struct patience *p, double step_s, int looks)
{
    double start_s = p->last_s;
    for (int i = 1; i <= looks; i++) {
        if (!patience_lasts(p, start_s + i * step_s)) {
            return i - 1;
        }
    }
    return looks;
}

/* To the limit and no look further, whatever the clock showed at the beginning. */
static void test_a_wait_ends_after_its_limit(void **state)
{
    (void)state;
    const double starts_s[] = {0, 3, 1 << 20};
    for (int i = 0; i < 3; i++) {
        struct patience p = patience_begin(2, starts_s[i]);
        assert_int_equal(looks_that_last(&p, 0.25, 100), 8);
        assert_true(p.waited_s == 2.25);
    }
}

/* Time counts, not looks: a million within a limit, and none after it. */
static void test_many_looks_cost_nothing(void **state)
{
    (void)state;
    struct patience p = patience_begin(2, 64);
    assert_int_equal(looks_that_last(&p, 0x1p-20, 1 << 20), 1 << 20);
    assert_true(p.waited_s == 1);
    assert_int_equal(looks_that_last(&p, 0, 1000), 1000);
    assert_int_equal(looks_that_last(&p, 0x1p-3, 100), 8);
}

/* Whoever was stopped for an hour has as much left to wait as before, but for half a second. */
static void test_a_stopped_process_blames_nobody(void **state)
{
    (void)state;
    struct patience p = patience_begin(2, 16);
    assert_int_equal(looks_that_last(&p, 0.25, 2), 2);
    assert_int_equal(looks_that_last(&p, 3600, 1), 1);
    assert_true(p.waited_s == 1);
    assert_int_equal(looks_that_last(&p, 0.25, 100), 4);
}

/* Stopped at once, before the first look in vain. */
static void test_a_stop_before_the_first_look(void **state)
{
    (void)state;
    struct patience p = patience_begin(2, 16);
    assert_int_equal(looks_that_last(&p, 3600, 1), 1);
    assert_true(p.waited_s == 0.5);
}

/* A process that gets to look only now and then still gives up: the others may really be gone. */
static void test_one_stop_after_the_other_ends(void **state)
{
    (void)state;
    struct patience p = patience_begin(2, 16);
    assert_int_equal(looks_that_last(&p, 60, 100), 4);
}

static void test_gaps_below_half_a_second_count_whole(void **state)
{
    (void)state;
    struct patience p = patience_begin(2, 16);
    assert_int_equal(looks_that_last(&p, 0.4375, 100), 4);
    assert_true(p.waited_s == 5 * 0.4375);
    p = patience_begin(2, 16);
    assert_int_equal(looks_that_last(&p, 0.5625, 100), 4);
    assert_true(p.waited_s == 2.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_wait_ends_after_its_limit),
        cmocka_unit_test(test_many_looks_cost_nothing),
        cmocka_unit_test(test_a_stopped_process_blames_nobody),
        cmocka_unit_test(test_a_stop_before_the_first_look),
        cmocka_unit_test(test_one_stop_after_the_other_ends),
        cmocka_unit_test(test_gaps_below_half_a_second_count_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
