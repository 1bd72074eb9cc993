/* The row leak (docs/numerics.md, section 7): bounds that separate the backwards from each other, at T 384. */
#include "tests/attention/cases.h"
#include "tests/test.h"

#include <math.h>

static const struct attention_shape shape = {1, 384, 2, 1, 128, true, 0.08838835f};

struct leak {
    double before, stored, slope;
};

static struct leak leak_of(const struct attention_recipe *recipe, enum input_kind kind)
{
    struct attention_case c;
    case_open(&c, &shape, recipe, kind, 11);
    case_forward(&c);
    case_backward(&c);
    struct leak leak = {
        c.stats.leak_abs / c.stats.ds_abs,
        c.stats.leak_stored_abs / c.stats.ds_stored_abs,
        c.stats.leak_r / c.stats.r_r,
    };
    case_close(&c);
    print_message("%-8s %-9s %-18s lambda %.1e, stored %.1e, b %.1e\n", input_names[kind], pv_format_names[recipe->pv],
                  backward_preset_names[recipe->backward], leak.before, leak.stored, leak.slope);
    return leak;
}

/* Preset by preset: between low and high on every format and on plain and sink inputs. */
static void check_preset(enum backward_preset preset, enum pv_format first, double low, double high)
{
    static const enum input_kind kinds[] = {INPUT_GAUSS, INPUT_SINK};
    for (int pv = first; pv <= PV_FP4_UE5M3; pv++) {
        for (int kind = 0; kind < 2; kind++) {
            struct attention_recipe recipe = recipe_of(pv, preset);
            double lambda = leak_of(&recipe, kinds[kind]).before;
            assert_true(lambda >= low);
            assert_true(lambda <= high);
        }
    }
}

static void test_represented_leaks_only_the_rounding_of_o(void **state)
{
    (void)state;
    check_preset(BWD_REPRESENTED, PV_BF16, 0, 1e-3);
}

static void test_recentred_does_not_leak(void **state)
{
    (void)state;
    check_preset(BWD_RECENTRED, PV_BF16, 0, 1e-6);
}

static void test_exact_stat_leaks_only_the_rounding_of_o(void **state)
{
    (void)state;
    check_preset(BWD_EXACT_STAT, PV_BF16, 0, 1e-3);
}

static void test_saved_output_leaks_through_fp4(void **state)
{
    (void)state;
    check_preset(BWD_SAVED_OUTPUT, PV_MXFP4, 1e-2, 0.5);
}

static void test_saved_output_leaks_less_through_fp8(void **state)
{
    (void)state;
    for (int kind = INPUT_GAUSS; kind <= INPUT_SINK; kind += INPUT_SINK - INPUT_GAUSS) {
        struct attention_recipe recipe = recipe_of(PV_FP8, BWD_SAVED_OUTPUT);
        double lambda = leak_of(&recipe, kind).before;
        assert_true(lambda > 1.5e-3);
        assert_true(lambda < 0.1);
    }
}

static void test_bf16_is_the_yardstick(void **state)
{
    (void)state;
    struct attention_recipe recipe = attention_recipe_bf16();
    assert_true(leak_of(&recipe, INPUT_GAUSS).before < 1e-3);
    assert_true(leak_of(&recipe, INPUT_SINK).before < 1e-3);
}

/* E4M3 dS hides all of this: after storing every mode leaks 3e-3 or more. */
static void test_storing_ds_hides_the_difference(void **state)
{
    (void)state;
    for (int preset = BWD_REPRESENTED; preset <= BWD_EXACT_STAT; preset++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, preset);
        double stored = leak_of(&recipe, INPUT_GAUSS).stored;
        assert_true(stored > 1e-3);
        assert_true(stored < 2e-2);
    }
}

/* r from the raw dO under an otherwise represented backward: 12 to 17 times the leak. */
static void test_r_must_use_the_decoded_dout(void **state)
{
    (void)state;
    struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    double consistent = leak_of(&recipe, INPUT_GAUSS).before;
    recipe.bwd_stat = BWD_STAT_SAVED_RAW;
    assert_true(leak_of(&recipe, INPUT_GAUSS).before > 6 * consistent);
}

/* The planted leak: of the size asked for, of one sign, in every route; and nothing at all with 0. */
static void test_a_planted_leak_has_its_size_and_sign(void **state)
{
    (void)state;
    static const double sizes[] = {0.03, -0.03, 0.2};
    for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            struct attention_recipe recipe = recipe_of(pv, BWD_RECENTRED);
            recipe.debug_leak = (float)sizes[i];
            double lambda = leak_of(&recipe, INPUT_GAUSS).before;
            /* The leak adds to sum |dS| too, to second order. */
            assert_true(fabs(lambda / fabs(sizes[i]) - 1) < 0.1);
        }
    }
}

/* sum_j dS_ij k_j is what dQ is made of: with all keys equal only the row sum is left, so dQ shows the sign. */
static void test_a_planted_leak_shows_in_dq_with_its_sign(void **state)
{
    (void)state;
    for (int sign = -1; sign <= 1; sign++) {
        struct attention_recipe recipe = attention_recipe_bf16();
        struct attention_case c;
        recipe.bwd_stat = BWD_STAT_RECENTRED;
        recipe.debug_leak = 0.1f * (float)sign;
        case_open(&c, &shape, &recipe, INPUT_GAUSS, 11);
        for (int64_t i = 0; i < case_keys(&c); i++) {
            c.k[i] = 0x3f80; /* 1 */
        }
        case_forward(&c);
        case_backward(&c);
        int64_t wrong = 0;
        for (int64_t i = shape.heads * shape.head_dim; i < case_queries(&c); i++) { /* row 0 has dS = 0 */
            float dq = bf16_to_float(c.dq[i]);
            wrong += sign == 0 ? fabsf(dq) > 1e-2f : dq * (float)sign <= 0;
        }
        assert_int_equal(wrong, 0);
        case_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_represented_leaks_only_the_rounding_of_o),
        cmocka_unit_test(test_recentred_does_not_leak),
        cmocka_unit_test(test_exact_stat_leaks_only_the_rounding_of_o),
        cmocka_unit_test(test_saved_output_leaks_through_fp4),
        cmocka_unit_test(test_saved_output_leaks_less_through_fp8),
        cmocka_unit_test(test_bf16_is_the_yardstick),
        cmocka_unit_test(test_storing_ds_hides_the_difference),
        cmocka_unit_test(test_r_must_use_the_decoded_dout),
        cmocka_unit_test(test_a_planted_leak_has_its_size_and_sign),
        cmocka_unit_test(test_a_planted_leak_shows_in_dq_with_its_sign),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
