/* The statistics of a call against what they are defined to be, computed apart or known beforehand. */
#include "attention/attention_cpu.h"
#include "tests/attention/cases.h"
#include "tests/attention/oracle.h"
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct attention_shape shape = {
    .batch = 1, .tokens = 150, .heads = 2, .kv_heads = 1, .head_dim = 64, .causal = true, .softmax_scale = 0.125f};

static double score(const struct attention_case *c, int64_t h, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t d = 0; d < shape.head_dim; d++) {
        sum += (double)bf16_to_float(c->q[(i * shape.heads + h) * shape.head_dim + d]) *
               (double)bf16_to_float(c->k[j * shape.head_dim + d]);
    }
    return 0.125 * sum;
}

static struct head_view view(bf16 *data, int64_t heads)
{
    return (struct head_view){data, shape.tokens * heads * shape.head_dim, heads * shape.head_dim, shape.head_dim};
}

/* Exact scores (qk = bf16), and the codes that the forward made of them. */
static void test_largest_logit_and_lost_mass(void **state)
{
    (void)state;
    static const enum pv_format formats[] = {PV_FP8, PV_MXFP4, PV_NVFP4, PV_FP4_UE5M3};
    for (int f = 0; f < 4; f++) {
        struct attention_recipe recipe = recipe_of(formats[f], BWD_REPRESENTED);
        recipe.qk = QK_BF16;
        struct attention_case c;
        case_open(&c, &shape, &recipe, INPUT_PEAKY3, 3);
        uint8_t *codes = calloc((size_t)(shape.heads * shape.tokens * shape.tokens), 1);
        struct attention_cpu_probe probe = {.codes = codes};
        struct attention_cpu_options options = ATTENTION_CPU_DEFAULT;
        options.probe = &probe;
        options.key_tile = 64; /* the sums move with the anchor */
        attention_fwd_cpu_with(&(struct attention_fwd){.shape = shape,
                                                       .recipe = &recipe,
                                                       .q = view(c.q, 2),
                                                       .k = view(c.k, 1),
                                                       .v = view(c.v, 1),
                                                       .out = view(c.out, 2),
                                                       .lse_log2 = c.lse_log2,
                                                       .saved = c.saved,
                                                       .scratch = c.scratch,
                                                       .stats = &c.stats},
                               &options);
        double lost = 0;
        double largest = 0;
        for (int64_t row = 0; row < shape.heads * shape.tokens; row++) {
            double total = 0;
            double missing = 0;
            for (int64_t j = 0; j <= row % shape.tokens; j++) {
                double s = score(&c, row / shape.tokens, row % shape.tokens, j);
                largest = fmax(largest, fabs(s));
                total += exp(s);
                missing += codes[row * shape.tokens + j] == 0 ? exp(s) : 0;
            }
            lost += missing / total;
        }
        assert_true(c.stats.p_rows == (double)(shape.heads * shape.tokens));
        assert_true(fabs(c.stats.logit_max - largest) <= 1e-5 * largest);
        assert_true(lost > 0 && fabs(c.stats.p_lost_mass - lost) <= 1e-4 * lost);
        free(codes);
        case_close(&c);
    }
}

static void scale(bf16 *x, int64_t n, float factor)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = bf16_from_float(factor * bf16_to_float(x[i]));
    }
}

static struct attention_stats run(const struct attention_recipe *recipe, float dout_factor)
{
    struct attention_case c;
    case_open(&c, &shape, recipe, INPUT_GAUSS, 4);
    memset(c.dout, 0, 64 * sizeof(bf16)); /* zeros are not counted as flushed */
    scale(c.dout, case_queries(&c), dout_factor);
    case_forward(&c);
    case_backward(&c);
    struct attention_stats stats = c.stats;
    case_close(&c);
    return stats;
}

/* dO about normal with deviation 2^-14, which has lost runs: with a fixed lift of 4 E4M3 flushes nearly all of it and
 * E5M2 a tenth; with a lift per head almost nothing is lost. */
static void test_flushed_dout(void **state)
{
    (void)state;
    struct attention_recipe r = recipe_of(PV_FP8, BWD_RECENTRED);
    double elements = (double)(shape.tokens * shape.heads * shape.head_dim - 64);
    const float to_small = 0x1p-4f; /* the case draws with deviation 2^-10 */
    r.do_scale = DO_SCALE_FIXED;
    struct attention_stats e4m3 = run(&r, to_small);
    assert_true(e4m3.do_count == elements);
    assert_true(e4m3.do_flushed > 0.95 * elements);
    r.do_format = DO_E5M2;
    struct attention_stats e5m2 = run(&r, to_small);
    assert_true(e5m2.do_flushed > 0.01 * elements && e5m2.do_flushed < 0.2 * elements);
    r.do_format = DO_E4M3;
    r.do_scale = DO_SCALE_HEAD;
    struct attention_stats head = run(&r, to_small);
    assert_true(head.do_count == elements && head.do_flushed < 0.001 * elements);
}

/* The fixed dS lift saturates for large dO and flushes for small; the bound does neither, whatever the size of dO. */
static void test_flushed_and_saturated_ds(void **state)
{
    (void)state;
    struct attention_recipe r = recipe_of(PV_FP8, BWD_RECENTRED);
    double visible = (double)(shape.heads * shape.tokens * (shape.tokens + 1) / 2);
    struct attention_stats plain = run(&r, 1.0f);
    assert_true(plain.ds_count > 0.98 * visible && plain.ds_count <= visible);
    assert_true(plain.ds_saturated == 0 && plain.ds_flushed < 0.2 * visible);
    struct attention_stats large = run(&r, 0x1p20f);
    assert_true(large.ds_saturated == 0 && large.ds_flushed == plain.ds_flushed);
    r.ds_scale = DS_SCALE_FIXED;
    large = run(&r, 0x1p20f);
    assert_true(large.ds_saturated > 0.1 * visible);
    struct attention_stats small = run(&r, 0x1p-8f);
    assert_true(small.ds_saturated == 0 && small.ds_flushed > 0.95 * small.ds_count);
    struct attention_recipe bf16_route = attention_recipe_bf16();
    struct attention_stats none = run(&bf16_route, 0x1p20f);
    assert_true(none.ds_saturated == 0 && none.ds_flushed == 0 && none.do_flushed == 0);
}

/* b = sum rho r / sum r^2, the biased part of the row leak (section 7), with a sink and dO along O, where it is large;
 * and as the FP64 restatement finds it. */
static double slope(enum pv_format pv, enum backward_preset preset)
{
    struct attention_recipe r = recipe_of(pv, preset);
    struct attention_case c;
    case_open(&c, &shape, &r, INPUT_SINK, 5);
    case_forward(&c);
    memcpy(c.dout, c.out, (size_t)case_queries(&c) * sizeof(bf16));
    scale(c.dout, case_queries(&c), 0x1p-10f);
    case_backward(&c);
    struct oracle_problem p = {shape, &r, c.q, c.k, c.v, c.dout};
    struct oracle_bwd o;
    oracle_backward(&p, c.out, c.lse_log2, &o);
    double b = c.stats.leak_r / c.stats.r_r;
    assert_true(fabs(c.stats.r_r - o.leak.r_r) <= 1e-4 * o.leak.r_r);
    assert_true(fabs(b - o.leak.leak_r / o.leak.r_r) <= 1e-5 + 1e-3 * fabs(b));
    oracle_backward_free(&o);
    case_close(&c);
    return b;
}

static void test_slope_of_the_leak_with_a_sink(void **state)
{
    (void)state;
    assert_true(fabs(slope(PV_MXFP4, BWD_REPRESENTED)) < 5e-4);
    assert_true(fabs(slope(PV_NVFP4, BWD_REPRESENTED)) < 5e-4);
    assert_true(fabs(slope(PV_FP8, BWD_REPRESENTED)) < 5e-4);
    assert_true(fabs(slope(PV_MXFP4, BWD_RECENTRED)) < 1e-6);
    assert_true(fabs(slope(PV_MXFP4, BWD_SAVED_OUTPUT)) > 0.05);
    assert_true(fabs(slope(PV_FP8, BWD_SAVED_OUTPUT)) < 0.02);
}

static void test_stats_add(void **state)
{
    (void)state;
    struct attention_stats sum = {.logit_max = 3, .leak_abs = 1, .r_r = 2, .non_finite = 1, .p_lost_mass = 0.5};
    struct attention_stats one = {.logit_max = 2, .leak_abs = 4, .r_r = 5, .non_finite = 2, .p_lost_mass = 0.25};
    attention_stats_add(&sum, &one);
    assert_true(sum.logit_max == 3 && sum.leak_abs == 5 && sum.r_r == 7 && sum.non_finite == 3);
    assert_true(sum.p_lost_mass == 0.75);
    one.logit_max = 9;
    attention_stats_add(&sum, &one);
    assert_true(sum.logit_max == 9);
    one.logit_max = NAN; /* is not lost in a maximum */
    attention_stats_add(&sum, &one);
    one.logit_max = 1;
    attention_stats_add(&sum, &one);
    assert_true(isnan(sum.logit_max));
    /* Every field is a double and is added: none may be forgotten when one is added to the struct. */
    enum { FIELDS = sizeof(struct attention_stats) / sizeof(double) };
    double ones[FIELDS];
    double total[FIELDS] = {0};
    for (int i = 0; i < FIELDS; i++) {
        ones[i] = 1;
    }
    struct attention_stats a;
    struct attention_stats b;
    memcpy(&a, ones, sizeof a);
    memcpy(&b, total, sizeof b);
    attention_stats_add(&b, &a);
    assert_memory_equal(&a, &b, sizeof a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_largest_logit_and_lost_mass),
        cmocka_unit_test(test_flushed_dout),
        cmocka_unit_test(test_flushed_and_saturated_ds),
        cmocka_unit_test(test_slope_of_the_leak_with_a_sink),
        cmocka_unit_test(test_stats_add),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
