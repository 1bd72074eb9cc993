/* Backward of the CPU variant against the FP64 restatement: presets, single switches, lifts, and true gradients. */
#include "tests/attention/cases.h"
#include "tests/attention/oracle.h"
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct attention_shape gqa = {1, 100, 4, 2, 64, true, 0.125f};
static const struct attention_shape wide = {1, 72, 1, 1, 128, true, 0.0884f};
static const struct attention_shape full = {1, 48, 2, 1, 64, false, 0.125f};

static struct oracle_problem problem_of(const struct attention_case *c)
{
    return (struct oracle_problem){c->shape, &c->recipe, c->q, c->k, c->v, c->dout};
}

struct gradients {
    double *dq, *dk, *dv;
};

static struct gradients gradients_open(const struct attention_case *c)
{
    return (struct gradients){
        malloc(sizeof(double) * (size_t)case_queries(c)),
        malloc(sizeof(double) * (size_t)case_keys(c)),
        malloc(sizeof(double) * (size_t)case_keys(c)),
    };
}

static void gradients_close(struct gradients *g)
{
    free(g->dq);
    free(g->dk);
    free(g->dv);
}

static void round_all(double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = oracle_round(ORACLE_BF16, x[i]);
    }
}

/* Relative L2 of dQ, dK, dV against the oracle's, rounded once: what is left are flips of codes and of BF16. */
static void check_gradients(const struct attention_case *c, const struct oracle_bwd *b, double bound)
{
    round_all(b->dq, case_queries(c));
    round_all(b->dk, case_keys(c));
    round_all(b->dv, case_keys(c));
    double dq = rel_l2(c->dq, b->dq, case_queries(c));
    double dk = rel_l2(c->dk, b->dk, case_keys(c));
    double dv = rel_l2(c->dv, b->dv, case_keys(c));
    char text[512];
    attention_recipe_print(&c->recipe, text, sizeof text);
    print_message("%s: dq %.1e dk %.1e dv %.1e\n", text, dq, dk, dv);
    assert_true(dq <= bound);
    assert_true(dk <= bound);
    assert_true(dv <= bound);
}

static void check_statistics(const struct attention_case *c, const struct oracle_leak *leak)
{
    const struct attention_stats *s = &c->stats;
    assert_true(fabs(s->ds_abs / leak->ds_abs - 1) < 2e-3);
    assert_true(fabs(s->ds_stored_abs / leak->ds_stored_abs - 1) < 2e-3);
    assert_true(fabs(s->r_r / leak->r_r - 1) < 2e-3);
    assert_true(fabs(s->leak_abs - leak->leak_abs) <= 0.02 * leak->leak_abs + 1e-6 * leak->ds_abs);
    assert_true(fabs(s->leak_stored_abs - leak->leak_stored_abs) <= 0.02 * leak->leak_stored_abs);
    assert_true(fabs(s->ds_saturated - leak->ds_saturated) <= 1);
    assert_true(fabs(s->ds_count - leak->ds_count) <= 1e-3 * leak->ds_count);
    assert_true(fabs(s->ds_flushed - leak->ds_flushed) <= 1e-2 * leak->ds_flushed + 2);
}

static void check_recipe(const struct attention_shape *shape, const struct attention_recipe *recipe,
                         enum input_kind kind)
{
    struct attention_case c;
    struct oracle_bwd b;
    case_open(&c, shape, recipe, kind, 2);
    case_forward(&c);
    case_backward(&c);
    struct oracle_problem p = problem_of(&c);
    oracle_backward(&p, c.out, c.lse_log2, &b);
    check_gradients(&c, &b, 2e-3);
    check_statistics(&c, &b.leak);
    oracle_backward_free(&b);
    case_close(&c);
}

static void test_every_preset_on_every_value_format(void **state)
{
    (void)state;
    for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
        for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
            struct attention_recipe recipe = recipe_of(pv, preset);
            if (attention_recipe_refusal(&recipe, 64) != NULL) {
                continue;
            }
            check_recipe(&gqa, &recipe, INPUT_GAUSS);
            check_recipe(&wide, &recipe, INPUT_PEAKY3);
            check_recipe(&full, &recipe, INPUT_OUTLIER);
            check_recipe(&gqa, &recipe, INPUT_SINK);
        }
    }
}

static void test_a_planted_leak(void **state)
{
    (void)state;
    for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, preset);
        recipe.debug_leak = preset % 2 == 0 ? 0.1f : -0.1f;
        check_recipe(&gqa, &recipe, INPUT_GAUSS);
    }
}

static void test_forward_options_reach_the_backward(void **state)
{
    (void)state;
    for (int pv = PV_FP8; pv <= PV_FP4_UE5M3; pv++) {
        for (int option = 0; option < 8; option++) {
            struct attention_recipe recipe = recipe_of(pv, BWD_REPRESENTED);
            recipe.v_diag = option == 1 || option == 4 ? V_DIAG_FP8 : V_DIAG_BLOCKED;
            recipe.sink_keys_fp8 = option == 2 || option == 4 ? 32 : 0;
            recipe.k_center = option == 3;
            recipe.dk_center = option == 5;
            recipe.mx_rule = option == 6 && pv == PV_MXFP4 ? MX_OCP : MX_NEAREST;
            recipe.qk = option == 7 ? QK_NVFP4_E4M3 : QK_NVFP4;
            if (attention_recipe_refusal(&recipe, 64) == NULL) {
                check_recipe(&gqa, &recipe, INPUT_GAUSS);
            }
        }
    }
}

static void test_every_probability_map_reaches_the_backward(void **state)
{
    (void)state;
    for (int map = P_EXACT; map <= P_ACCURATE; map++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
        recipe.p_map = map;
        if (attention_recipe_refusal(&recipe, 64) == NULL) {
            check_recipe(&gqa, &recipe, INPUT_GAUSS);
        }
    }
}

/* --- Switches: one alone, from `represented` --- */

struct switch_row {
    const char *name;
    size_t offset; /* in struct attention_recipe; every switch is an enum */
    int first, last;
};

static const struct switch_row switches[] = {
    {"bwd_p", offsetof(struct attention_recipe, bwd_p), BWD_P_CODES, BWD_P_BF16},
    {"bwd_v", offsetof(struct attention_recipe, bwd_v), BWD_V_FORWARD, BWD_V_BF16},
    {"bwd_stat", offsetof(struct attention_recipe, bwd_stat), BWD_STAT_SAVED_RAW, BWD_STAT_EXACT},
    {"do_format", offsetof(struct attention_recipe, do_format), DO_E4M3, DO_BF16},
    {"do_scale", offsetof(struct attention_recipe, do_scale), DO_SCALE_HEAD, DO_SCALE_FIXED},
    {"ds_scale", offsetof(struct attention_recipe, ds_scale), DS_SCALE_BOUND, DS_SCALE_FIXED},
    {"qk_grad", offsetof(struct attention_recipe, qk_grad), QK_GRAD_ORIGINAL, QK_GRAD_LIFT},
};

static bool same_gradients(const struct attention_case *a, const struct attention_case *b)
{
    return memcmp(a->dq, b->dq, sizeof(bf16) * (size_t)case_queries(a)) == 0 &&
           memcmp(a->dk, b->dk, sizeof(bf16) * (size_t)case_keys(a)) == 0 &&
           memcmp(a->dv, b->dv, sizeof(bf16) * (size_t)case_keys(a)) == 0;
}

static void check_switch(enum pv_format pv, const struct switch_row *row, int value)
{
    struct attention_recipe base = recipe_of(pv, BWD_REPRESENTED);
    struct attention_recipe changed = base;
    int before;
    memcpy(&before, (char *)&changed + row->offset, sizeof before);
    memcpy((char *)&changed + row->offset, &value, sizeof value);
    if (value == before || attention_recipe_refusal(&changed, 64) != NULL) {
        return;
    }
    struct attention_case a;
    struct attention_case b;
    case_open(&a, &gqa, &base, INPUT_GAUSS, 2);
    case_open(&b, &gqa, &changed, INPUT_GAUSS, 2);
    case_forward(&a);
    case_backward(&a);
    case_forward(&b);
    case_backward(&b);
    print_message("%s = %d: ", row->name, value);
    bool same_v = pv == PV_FP8 && strcmp(row->name, "bwd_v") == 0 && value == BWD_V_E4M3;
    assert_int_equal(same_gradients(&a, &b), same_v);
    case_close(&a);
    case_close(&b);
    check_recipe(&gqa, &changed, INPUT_GAUSS);
}

static void test_every_switch_alone(void **state)
{
    (void)state;
    for (int pv = PV_FP8; pv <= PV_FP4_UE5M3; pv++) {
        for (size_t i = 0; i < sizeof switches / sizeof *switches; i++) {
            for (int value = switches[i].first; value <= switches[i].last; value++) {
                check_switch(pv, &switches[i], value);
            }
        }
    }
}

/* --- Lifts: a forgotten power of two shows in dV of dO = 1, which is the column sums of P --- */

/* The mean over features of dV_j; all are equal but for roundings. */
static double column_of(const struct attention_case *c, int64_t j)
{
    double sum = 0;
    for (int64_t e = 0; e < c->shape.head_dim; e++) {
        sum += (double)bf16_to_float(c->dv[j * c->shape.head_dim + e]);
    }
    return sum / (double)c->shape.head_dim;
}

/* Column sums of the forward's represented P (rebuilt: within the rounding of dO, 2^-4 an element), or only their
 * total, which is the number of rows if the rows of P sum to 1 (P from another statistic: within 15 %). */
static void check_column_sums(enum pv_format pv, enum backward_preset preset)
{
    struct attention_recipe recipe = recipe_of(pv, preset);
    struct attention_case c;
    struct oracle_fwd f;
    case_open(&c, &wide, &recipe, INPUT_GAUSS, 4);
    for (int64_t i = 0; i < case_queries(&c); i++) {
        c.dout[i] = bf16_from_float(1);
    }
    case_forward(&c);
    case_backward(&c);
    struct oracle_problem p = problem_of(&c);
    oracle_forward(&p, &f);
    double *column = calloc((size_t)wide.tokens, sizeof *column);
    for (int64_t i = 0; i < wide.tokens; i++) {
        const double *value = f.value + i * wide.tokens;
        double total = 0;
        for (int64_t j = 0; j <= i; j++) {
            total += value[j];
        }
        for (int64_t j = 0; j <= i; j++) {
            column[j] += value[j] / total;
        }
    }
    double all = 0;
    for (int64_t j = 0; j < wide.tokens; j++) {
        all += column_of(&c, j);
        if (preset == BWD_REPRESENTED || preset == BWD_BF16) {
            assert_true(fabs(column_of(&c, j) - column[j]) <= 0.07 * column[j] + 1e-6);
        }
    }
    print_message("pv %s, %s: sum of columns / rows %.4f\n", pv_format_names[pv], backward_preset_names[preset],
                  all / (double)wide.tokens);
    assert_true(fabs(all / (double)wide.tokens - 1) < 0.15);
    free(column);
    oracle_forward_free(&f);
    case_close(&c);
}

static void test_dv_of_ones_is_the_column_sums_of_p(void **state)
{
    (void)state;
    for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
        for (int preset = BWD_REPRESENTED; preset <= BWD_SAVED_OUTPUT; preset++) {
            check_column_sums(pv, preset);
        }
    }
    check_column_sums(PV_BF16, BWD_BF16);
}

static void test_zero_dout_gives_exact_zeros(void **state)
{
    (void)state;
    for (int preset = BWD_REPRESENTED; preset <= BWD_BF16; preset++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, preset);
        struct attention_case c;
        case_open(&c, &gqa, &recipe, INPUT_GAUSS, 5);
        memset(c.dout, 0, sizeof(bf16) * (size_t)case_queries(&c));
        case_forward(&c);
        case_backward(&c);
        for (int64_t i = 0; i < case_queries(&c); i++) {
            assert_int_equal(c.dq[i] & 0x7fff, 0);
        }
        for (int64_t i = 0; i < case_keys(&c); i++) {
            assert_int_equal(c.dk[i] & 0x7fff, 0);
            assert_int_equal(c.dv[i] & 0x7fff, 0);
        }
        case_close(&c);
    }
}

/* --- True gradients --- */

/* <O, dO> of exact attention. */
static double exact_loss(const struct oracle_problem *p, double *out, int64_t n)
{
    double sum = 0;
    oracle_exact(p, out, NULL, NULL, NULL);
    for (int64_t i = 0; i < n; i++) {
        sum += out[i] * (double)bf16_to_float(p->dout[i]);
    }
    return sum;
}

/* Moves x one BF16 code up and down, where both steps are equal (not at a power of two). */
static void check_derivative(const struct oracle_problem *p, bf16 *x, double expected, double *out, int64_t n)
{
    if ((*x & 0x7f) == 0 || (*x & 0x7f) == 0x7f || (*x & 0x7fff) < 0x3e00) {
        return;
    }
    *x = (bf16)(*x + 1);
    double above = exact_loss(p, out, n);
    double x_above = (double)bf16_to_float(*x);
    *x = (bf16)(*x - 2);
    double below = exact_loss(p, out, n);
    double x_below = (double)bf16_to_float(*x);
    *x = (bf16)(*x + 1);
    double slope = (above - below) / (x_above - x_below);
    assert_true(fabs(slope - expected) <= 1e-3 * fabs(expected) + 2e-7);
}

static void test_exact_gradients_are_central_differences(void **state)
{
    (void)state;
    const struct attention_shape shape = {1, 20, 2, 1, 64, true, 0.125f};
    struct attention_recipe recipe = attention_recipe_bf16();
    struct attention_case c;
    case_open(&c, &shape, &recipe, INPUT_GAUSS, 6);
    struct gradients g = gradients_open(&c);
    double *out = malloc(sizeof(double) * (size_t)case_queries(&c));
    struct oracle_problem p = problem_of(&c);
    oracle_exact(&p, out, g.dq, g.dk, g.dv);
    for (int64_t i = 0; i < case_queries(&c); i += 37) {
        check_derivative(&p, &c.q[i], g.dq[i], out, case_queries(&c));
    }
    for (int64_t i = 0; i < case_keys(&c); i += 37) {
        check_derivative(&p, &c.k[i], g.dk[i], out, case_queries(&c));
        check_derivative(&p, &c.v[i], g.dv[i], out, case_queries(&c));
    }
    free(out);
    gradients_close(&g);
    case_close(&c);
}

/* Section 10: the BF16 route is within .002 to .004 of the exact gradients. */
static void test_bf16_route_gives_the_exact_gradients(void **state)
{
    (void)state;
    const struct attention_shape *shapes[] = {&gqa, &wide, &full};
    struct attention_recipe recipe = attention_recipe_bf16();
    for (size_t i = 0; i < 3; i++) {
        struct attention_case c;
        case_open(&c, shapes[i], &recipe, INPUT_GAUSS, 7);
        struct gradients g = gradients_open(&c);
        double *out = malloc(sizeof(double) * (size_t)case_queries(&c));
        case_forward(&c);
        case_backward(&c);
        struct oracle_problem p = problem_of(&c);
        oracle_exact(&p, out, g.dq, g.dk, g.dv);
        assert_true(rel_l2(c.out, out, case_queries(&c)) < 4e-3);
        assert_true(rel_l2(c.dq, g.dq, case_queries(&c)) < 4e-3);
        assert_true(rel_l2(c.dk, g.dk, case_keys(&c)) < 4e-3);
        assert_true(rel_l2(c.dv, g.dv, case_keys(&c)) < 4e-3);
        free(out);
        gradients_close(&g);
        case_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact_gradients_are_central_differences),
        cmocka_unit_test(test_bf16_route_gives_the_exact_gradients),
        cmocka_unit_test(test_every_preset_on_every_value_format),
        cmocka_unit_test(test_a_planted_leak),
        cmocka_unit_test(test_forward_options_reach_the_backward),
        cmocka_unit_test(test_every_probability_map_reaches_the_backward),
        cmocka_unit_test(test_every_switch_alone),
        cmocka_unit_test(test_dv_of_ones_is_the_column_sums_of_p),
        cmocka_unit_test(test_zero_dout_gives_exact_zeros),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
