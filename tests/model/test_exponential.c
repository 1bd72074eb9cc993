/* e^x against FP64 over its whole range, and at its ends. */
#include "model/exponential.h"

#include "tests/test.h"

static void test_two_units_in_the_last_place(void **state)
{
    (void)state;
    double worst = 0;
    for (int i = 0; i <= 4000000; i++) {
        float x = -104.0f + (float)i * (192.7f / 4000000.0f);
        double want = exp((double)x), unit = ldexp(1, ilogb(want) - 23);
        unit = unit > 0x1p-149 ? unit : 0x1p-149; /* subnormal results */
        double error = fabs((double)exponential(x) - want) / unit;
        worst = error > worst ? error : worst;
    }
    print_message("worst error: %.3f units\n", worst);
    assert_true(worst < 2);
}

static void test_ends(void **state)
{
    (void)state;
    assert_true(exponential(0) == 1 && exponential(-0.0f) == 1);
    assert_true(exponential(88.72f) < INFINITY && isinf(exponential(88.73f)));
    assert_true(isinf(exponential(1e30f)) && isinf(exponential(INFINITY)));
    assert_true(exponential(-104.0f) == 0x1p-149f || exponential(-104.0f) == 0);
    assert_true(exponential(-1e30f) == 0 && exponential(-INFINITY) == 0);
    assert_true(isnan(exponential(NAN)) && isnan(exponential(-NAN)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_units_in_the_last_place),
        cmocka_unit_test(test_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
