/* Schedules against the formulas of optim/schedule.h in FP64, and exactly at their ends. */
#include "tests/test.h"

#include "optim/schedule.h"

#include <math.h>

static double cosine_fp64(const struct schedule *s, int64_t update)
{
    int64_t peak = s->warmup > 1 ? s->warmup : 1;
    if (update <= peak) {
        return (double)update / (double)peak;
    }
    double p = (double)(update - peak) / (double)(s->steps - peak), f = (double)s->final_fraction;
    return f + (1.0 - f) * 0.5 * (1.0 + cos(M_PI * p));
}

static int64_t updates_at_peak(const struct schedule *s)
{
    int64_t n = 0;
    for (int64_t u = 1; u <= s->steps; u++) {
        double factor = schedule_factor(s, u);
        assert_true(factor > 0.0 && factor <= 1.0);
        n += factor == 1.0;
    }
    return n;
}

static void test_ten_updates_with_warmup_of_four(void **state)
{
    (void)state;
    struct schedule s = {.kind = SCHEDULE_LINEAR, .warmup = 4, .steps = 10, .final_fraction = 0.25f};
    const double linear[] = {0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25};
    for (int64_t u = 1; u <= 10; u++) {
        assert_true(schedule_factor(&s, u) == linear[u - 1]);
    }
    s.kind = SCHEDULE_COSINE;
    for (int64_t u = 1; u <= 10; u++) {
        assert_true(fabs(schedule_factor(&s, u) - cosine_fp64(&s, u)) < 2e-7);
    }
    s.kind = SCHEDULE_WSD;
    s.decay_fraction = 0.3f;
    const double wsd[] = {0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25};
    for (int64_t u = 1; u <= 10; u++) {
        assert_true(schedule_factor(&s, u) == wsd[u - 1]);
    }
    s.kind = SCHEDULE_CONSTANT;
    for (int64_t u = 1; u <= 10; u++) {
        assert_true(schedule_factor(&s, u) == (u < 4 ? linear[u - 1] : 1.0));
    }
}

static void test_ends_are_exact_for_every_warmup(void **state)
{
    (void)state;
    const int64_t steps[] = {2, 3, 10, 1000, 23842};
    for (int kind = SCHEDULE_COSINE; kind <= SCHEDULE_WSD; kind++) {
        for (int i = 0; i < 5; i++) {
            const int64_t warmups[] = {0, 1, steps[i] / 2, steps[i] - 1};
            for (int w = 0; w < 4; w++) {
                struct schedule s = {.kind = (enum schedule_kind)kind,
                                     .warmup = warmups[w],
                                     .steps = steps[i],
                                     .final_fraction = 0.01f,
                                     .decay_fraction = 0.2f};
                assert_true(schedule_factor(&s, s.steps) == (double)0.01f);
                assert_true(schedule_factor(&s, s.warmup > 1 ? s.warmup : 1) == 1.0);
                assert_true(kind == SCHEDULE_WSD || updates_at_peak(&s) == 1);
            }
        }
    }
}

static void test_one_update_is_the_last_update(void **state)
{
    (void)state;
    for (int kind = SCHEDULE_COSINE; kind <= SCHEDULE_CONSTANT; kind++) {
        struct schedule s = {.kind = (enum schedule_kind)kind, .steps = 1, .final_fraction = 0.5f};
        double expected = kind == SCHEDULE_CONSTANT ? 1.0 : 0.5;
        assert_true(schedule_factor(&s, 1) == expected);
        s.warmup = 1;
        assert_true(schedule_factor(&s, 1) == expected);
    }
}

static void test_cosine_of_a_long_run_follows_fp64_and_never_rises(void **state)
{
    (void)state;
    const struct schedule s = {.kind = SCHEDULE_COSINE, .warmup = 2000, .steps = 23842, .final_fraction = 0.01f};
    for (int64_t u = 1; u < s.steps; u++) {
        assert_true(fabs(schedule_factor(&s, u) - cosine_fp64(&s, u)) < 2e-7);
        assert_true(u < s.warmup || schedule_factor(&s, u + 1) < schedule_factor(&s, u));
    }
}

static void test_every_kind_has_a_name(void **state)
{
    (void)state;
    assert_string_equal(schedule_kind_names[SCHEDULE_COSINE], "cosine");
    assert_string_equal(schedule_kind_names[SCHEDULE_LINEAR], "linear");
    assert_string_equal(schedule_kind_names[SCHEDULE_WSD], "wsd");
    assert_string_equal(schedule_kind_names[SCHEDULE_CONSTANT], "constant");
    assert_null(schedule_kind_names[SCHEDULE_CONSTANT + 1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ten_updates_with_warmup_of_four),
        cmocka_unit_test(test_ends_are_exact_for_every_warmup),
        cmocka_unit_test(test_one_update_is_the_last_update),
        cmocka_unit_test(test_cosine_of_a_long_run_follows_fp64_and_never_rises),
        cmocka_unit_test(test_every_kind_has_a_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
