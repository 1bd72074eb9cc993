/* The probability producers against FP64: thresholds of the exact codes, the other maps, and the range of block
 * exponents. Scores enter through p_row_publish, as in the forward. */
#include "attention/attention_cpu.h"
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const float thresholds[7] = {-0x1.fffffep+0f, -0x1.a8ff96p-2f, 0x1.49a786p-2f, 0x1.9d5dap-1f,
                                    0x1.5269e2p+0f,  0x1.ceaedp+0f,   0x1.2934f2p+1f};

static struct attention_recipe mx_recipe(enum mx_family rule, enum p_map map)
{
    struct attention_recipe r = attention_recipe_bf16();
    r.pv = PV_MXFP4;
    r.mx_rule = rule;
    r.p_map = map;
    return r;
}

/* Codes of up to 31 values x under the OCP rule with exponent 0: a first key at 2.9 sets it, so that x = t. */
static void codes_of(const struct attention_recipe *recipe, const float *x, int n, uint8_t *codes)
{
    float t[32];
    uint8_t all[32];
    t[0] = 2.9f;
    for (int j = 1; j < 32; j++) {
        t[j] = j <= n ? x[j - 1] : ATTENTION_MASKED;
    }
    struct p_row row = {.t = t, .visible = n + 1, .n = n + 1, .anchor = 3, .reference = 3, .codes = all};
    p_row_publish(recipe, &row);
    memcpy(codes, all + 1, (size_t)n);
    for (int j = 0; j < n; j++) { /* and the tile holds the values of these codes */
        static const float values[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
        assert_true(t[j + 1] == values[codes[j]] / 8);
    }
}

/* Nearest of the eight values to 2^x, ties to the even code. The long double has 40 bits more than x. */
static int nearest_code(long double x)
{
    static const long double midpoints[] = {.25L, .75L, 1.25L, 1.75L, 2.5L, 3.5L, 5.0L};
    long double p = exp2l(x);
    int code = 0;
    while (code < 7 && (p > midpoints[code] || (p == midpoints[code] && code % 2 == 1))) {
        code++;
    }
    return code;
}

static void check_exact(const struct attention_recipe *recipe, const float *x, int n)
{
    uint8_t codes[31];
    codes_of(recipe, x, n, codes);
    for (int j = 0; j < n; j++) {
        assert_int_equal(codes[j], nearest_code((long double)x[j]));
    }
}

static void test_exact_and_threshold_round_the_power_around_each_boundary(void **state)
{
    (void)state;
    struct attention_recipe exact = mx_recipe(MX_OCP, P_EXACT);
    struct attention_recipe threshold = mx_recipe(MX_OCP, P_THRESHOLD);
    for (int b = 0; b < 7; b++) {
        float x = thresholds[b];
        for (int i = 0; i < 310; i++) {
            x = nextafterf(x, -INFINITY);
        }
        for (int i = 0; i < 20; i++) {
            float list[31];
            for (int j = 0; j < 31; j++) {
                list[j] = x;
                x = nextafterf(x, INFINITY);
            }
            check_exact(&exact, list, 31);
            check_exact(&threshold, list, 31);
        }
    }
}

static void test_exact_codes_on_a_dense_sweep(void **state)
{
    (void)state;
    struct attention_recipe exact = mx_recipe(MX_OCP, P_EXACT);
    float list[31];
    int n = 0;
    for (uint32_t i = 0; i < 400000; i++) {
        list[n++] = -30.0f + 32.89f * (float)i / 400000.0f;
        if (n == 31) {
            check_exact(&exact, list, n);
            n = 0;
        }
    }
    check_exact(&exact, (float[]){0.0f, -0.0f, 1.0f, -1.0f, 0x1p-26f, -0x1p-26f, -1e20f}, 7);
}

/* docs/numerics.md section 5: the affine map agrees with exact codes on 41 % of them, code space on 99.5 %. */
static void test_how_often_other_maps_agree_with_exact_codes(void **state)
{
    (void)state;
    struct attention_recipe affine = mx_recipe(MX_OCP, P_AFFINE);
    struct attention_recipe space = mx_recipe(MX_OCP, P_CODE_SPACE);
    int count = 0;
    int affine_equal = 0;
    int space_equal = 0;
    float list[31];
    uint8_t a[31];
    uint8_t s[31];
    for (int i = 0; i < 31 * 4000; i++) {
        list[i % 31] = -2.5f + 5.0f * (float)i / (31 * 4000.0f);
        if (i % 31 == 30) {
            codes_of(&affine, list, 31, a);
            codes_of(&space, list, 31, s);
            for (int j = 0; j < 31; j++) {
                int exact = nearest_code((long double)list[j]);
                affine_equal += a[j] == exact;
                space_equal += s[j] == exact;
                assert_true(abs(s[j] - exact) <= 1);
                count++;
            }
        }
    }
    assert_true(affine_equal < count * 0.6);
    assert_true(space_equal > count * 0.985);
}

static void test_accurate_rounds_its_anchor_pairs_exactly(void **state)
{
    (void)state;
    struct attention_recipe accurate = mx_recipe(MX_OCP, P_ACCURATE);
    float t[128];
    uint8_t codes[128];
    const float y = -1.0f; /* 2^-1 is code 1; 1.65 y + .8 < 0 is code 0 */
    for (int j = 0; j < 128; j++) {
        t[j] = j % 32 == 31 ? 2.9f : y;
    }
    struct p_row row = {.t = t, .visible = 128, .n = 128, .anchor = 3, .reference = 3, .codes = codes};
    p_row_publish(&accurate, &row);
    for (int j = 0; j < 128; j++) {
        int pair = j % 32 / 2;
        int s = j / 32 % 4;
        bool anchor = pair == s || pair == s + 8 || pair == 4 || pair == 12;
        if (j % 32 != 31) {
            assert_int_equal(codes[j], anchor ? 1 : 0);
        }
    }
}

/* ---- block exponents -------------------------------------------------------------------------------------- */

static struct p_row publish_constant(const struct attention_recipe *recipe, float *t, float score, float anchor)
{
    for (int j = 0; j < 32; j++) {
        t[j] = score;
    }
    struct p_row row = {.t = t, .visible = 32, .n = 32, .anchor = anchor, .reference = anchor};
    p_row_publish(recipe, &row);
    return row;
}

static void test_blocks_below_the_range_vanish_and_above_it_show(void **state)
{
    (void)state;
    float t[32];
    struct attention_recipe r = mx_recipe(MX_NEAREST, P_EXACT);
    r.anchor = ANCHOR_ZERO;
    /* Value 2^-126 q / 6 is kept, with alpha (sum q / 6) and not (alpha / 6) sum q, which would flush. */
    struct p_row row = publish_constant(&r, t, -126.0f, anchor_of(&r, -126.0f));
    assert_true(row.sum / attention_unit(&r) == 32 * 0x1p-126f);
    row = publish_constant(&r, t, -127.0f, 0);
    assert_true(row.sum == 0);
    row = publish_constant(&r, t, 118.0f, 0);
    assert_true(isfinite(row.sum));
    row = publish_constant(&r, t, 128.5f, 0); /* no E8M0 byte: "it overflows above t = 128" */
    assert_true(isnan(row.sum));
}

/* Section 6: with M = 110, L = 16 what lies below the sampled maximum is coded against the floor. */
static void test_the_sampled_reference_floors_small_blocks(void **state)
{
    (void)state;
    float t[32];
    struct attention_recipe r = mx_recipe(MX_NEAREST, P_EXACT);
    r.anchor = ANCHOR_SAMPLED;
    float anchor = anchor_of(&r, 5.0f);
    assert_true(anchor == 115.0f);
    struct p_row row = publish_constant(&r, t, 5.0f, anchor);
    assert_true(row.sum / attention_unit(&r) == 32 * 0x1p-110f);
    row = publish_constant(&r, t, 3.0f, anchor); /* 1/4 of the floor: x = log2 6 - 2, code 3 = 1.5: still right */
    assert_true(row.sum / attention_unit(&r) == 32 * 0x1p-112f);
    row = publish_constant(&r, t, 0.0f, anchor); /* 1/32: 6/32 rounds to zero */
    assert_true(row.sum == 0);
}

/* A block's codes do not know the anchor, so that backward, which has another reference, finds the same. */
static void test_mxfp4_codes_do_not_depend_on_the_reference(void **state)
{
    (void)state;
    for (int rule = MX_NEAREST; rule <= MX_OCP; rule++) {
        struct attention_recipe r = mx_recipe((enum mx_family)rule, P_EXACT);
        float t[2][64];
        uint8_t codes[2][64];
        for (int j = 0; j < 64; j++) {
            t[0][j] = t[1][j] = 3.0f * sinf((float)j) - 7.25f;
        }
        struct p_row a = {.t = t[0], .visible = 50, .n = 50, .anchor = -4, .reference = -4, .codes = codes[0]};
        struct p_row b = {.t = t[1], .visible = 50, .n = 50, .anchor = -4, .reference = 1, .codes = codes[1]};
        for (int j = 50; j < 64; j++) {
            t[0][j] = t[1][j] = ATTENTION_MASKED;
        }
        b.rebuilt = true;
        p_row_publish(&r, &a);
        p_row_publish(&r, &b);
        assert_memory_equal(codes[0], codes[1], 50);
        for (int j = 0; j < 64; j++) {
            assert_true(t[0][j] == 32 * t[1][j]);
        }
    }
}

static void test_power_of_two_is_accurate_and_shifts_exactly(void **state)
{
    (void)state;
    for (int i = -200000; i < 200000; i++) {
        float x = (float)i / 4096.0f;
        float y;
        float shifted;
        exp2_row(&x, 1, 0, &y);
        exp2_row(&x, 1, -3, &shifted);
        double exact = exp2((double)x);
        assert_true(fabs((double)y / exact - 1) <= 0x1.4p-24);
        assert_true(y == 8 * shifted);
    }
    float edges[] = {0.0f, 1.0f, -126.0f, -200.0f, 200.0f, ATTENTION_MASKED};
    float out[6];
    exp2_row(edges, 6, 0, out);
    assert_true(out[0] == 1 && out[1] == 2 && out[2] == 0x1p-126f && out[3] == 0 && isinf(out[4]) && out[5] == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact_and_threshold_round_the_power_around_each_boundary),
        cmocka_unit_test(test_exact_codes_on_a_dense_sweep),
        cmocka_unit_test(test_how_often_other_maps_agree_with_exact_codes),
        cmocka_unit_test(test_accurate_rounds_its_anchor_pairs_exactly),
        cmocka_unit_test(test_blocks_below_the_range_vanish_and_above_it_show),
        cmocka_unit_test(test_the_sampled_reference_floors_small_blocks),
        cmocka_unit_test(test_mxfp4_codes_do_not_depend_on_the_reference),
        cmocka_unit_test(test_power_of_two_is_accurate_and_shifts_exactly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
