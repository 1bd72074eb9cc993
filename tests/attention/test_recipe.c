/* Names, presets and legality of recipes; and that whatever is called legal runs. */
#include "tests/attention/cases.h"
#include "tests/attention/oracle.h"
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- names and presets ------------------------------------------------------------------------------------ */

static void check_names(const char *const *names, int count, const char *last)
{
    for (int i = 0; i < count; i++) {
        assert_non_null(names[i]);
    }
    assert_string_equal(names[count - 1], last);
    assert_null(names[count]);
}

static void test_every_enumerator_has_its_name(void **state)
{
    (void)state;
    check_names(qk_format_names, QK_NVFP4_E4M3 + 1, "nvfp4_e4m3");
    check_names(qk_scale_names, QK_SCALE_FOLDED + 1, "folded");
    check_names(pv_format_names, PV_FP4_UE5M3 + 1, "fp4_ue5m3");
    check_names(mx_family_names, MX_OCP + 1, "ocp");
    check_names(p_map_names, P_ACCURATE + 1, "accurate");
    check_names(p_anchor_names, ANCHOR_SAMPLED + 1, "sampled");
    check_names(v_diag_names, V_DIAG_FP8 + 1, "fp8");
    check_names(backward_preset_names, BWD_BF16 + 1, "bf16");
    check_names(bwd_p_names, BWD_P_BF16 + 1, "bf16");
    check_names(bwd_v_names, BWD_V_BF16 + 1, "bf16");
    check_names(bwd_stat_names, BWD_STAT_EXACT + 1, "exact");
    check_names(do_format_names, DO_BF16 + 1, "bf16");
    check_names(do_scale_names, DO_SCALE_FIXED + 1, "fixed");
    check_names(ds_scale_names, DS_SCALE_FIXED + 1, "fixed");
    check_names(qk_grad_names, QK_GRAD_LIFT + 1, "lift");
}

/* The table of docs/numerics.md section 7, in the words of a config. */
static void test_presets_are_those_of_the_numerics_law(void **state)
{
    (void)state;
    static const char *const table[][8] = {
        {"represented", "codes", "forward", "saved", "e4m3", "head", "bound", "original"},
        {"recentred", "fp8", "e4m3", "recentred", "e4m3", "head", "bound", "original"},
        {"exact_stat", "fp8", "e4m3", "exact", "e4m3", "head", "bound", "original"},
        {"saved_output", "fp8", "e4m3", "saved_raw", "e5m2", "head", "bound", "lift"},
        {"saved_output_fixed", "fp8", "e4m3", "saved_raw", "e5m2", "fixed", "fixed", "lift"},
        {"bf16", "bf16", "bf16", "saved", "bf16", "head", "bound", "original"},
    };
    for (int p = 0; p <= BWD_BF16; p++) {
        struct attention_recipe r = attention_recipe_bf16();
        attention_recipe_preset(&r, (enum backward_preset)p);
        assert_string_equal(backward_preset_names[r.backward], table[p][0]);
        assert_string_equal(bwd_p_names[r.bwd_p], table[p][1]);
        assert_string_equal(bwd_v_names[r.bwd_v], table[p][2]);
        assert_string_equal(bwd_stat_names[r.bwd_stat], table[p][3]);
        assert_string_equal(do_format_names[r.do_format], table[p][4]);
        assert_string_equal(do_scale_names[r.do_scale], table[p][5]);
        assert_string_equal(ds_scale_names[r.ds_scale], table[p][6]);
        assert_string_equal(qk_grad_names[r.qk_grad], table[p][7]);
    }
}

static void test_the_printed_line_names_every_choice(void **state)
{
    (void)state;
    struct attention_recipe r = attention_recipe_bf16();
    r.qk = QK_NVFP4;
    r.qk_scale = QK_SCALE_MSE;
    r.pv = PV_MXFP4;
    r.mx_rule = MX_OCP;
    r.sink_keys_fp8 = 64;
    attention_recipe_preset(&r, BWD_RECENTRED);
    char text[512];
    attention_recipe_print(&r, text, sizeof text);
    assert_non_null(strstr(text, "qk=nvfp4/mse"));
    assert_non_null(strstr(text, "pv=mxfp4/ocp"));
    assert_non_null(strstr(text, "sink_keys_fp8=64"));
    assert_non_null(strstr(text, "backward=recentred"));
    assert_null(strstr(text, "debug_leak"));
    r.debug_leak = 0.05f;
    attention_recipe_print(&r, text, sizeof text);
    assert_non_null(strstr(text, " debug_leak=0.05"));
    char tiny[8];
    attention_recipe_print(&r, tiny, sizeof tiny); /* cut, not overrun */
    assert_int_equal(strlen(tiny), sizeof tiny - 1);
}

/* ---- legality --------------------------------------------------------------------------------------------- */

struct refusal {
    struct attention_recipe recipe;
    int head_dim;
    const char *keys[2]; /* that the message must name */
};

static void test_each_refusal_names_its_keys(void **state)
{
    (void)state;
    struct attention_recipe plain = attention_recipe_bf16();
    struct attention_recipe fp8 = recipe_of(PV_FP8, BWD_REPRESENTED);
    struct attention_recipe mx = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    struct refusal list[14];
    int n = 0;
#define REFUSED(from, dim, change, ...)                                                                                \
    list[n] = (struct refusal){.recipe = from, .head_dim = dim, .keys = {__VA_ARGS__}};                                \
    list[n++].recipe.change
    REFUSED(plain, 64, qk_scale = QK_SCALE_MSE, "qk=", "qk_scale");
    REFUSED(mx, 64, qk_scale = QK_SCALE_FOLDED, "qk_scale=folded", "head_dim");
    struct attention_recipe affine = mx;
    affine.p_map = P_AFFINE;
    REFUSED(affine, 64, affine_a = 0, "p_map=affine", "affine_a");
    REFUSED(affine, 64, affine_a = -1.5f, "p_map=affine", "affine_a");
    REFUSED(fp8, 64, p_map = P_THRESHOLD, "p_map", "pv=");
    REFUSED(fp8, 64, anchor = ANCHOR_ZERO, "anchor", "pv=");
    REFUSED(fp8, 64, v_diag = V_DIAG_FP8, "v_diag", "pv=");
    REFUSED(plain, 64, sink_keys_fp8 = 32, "sink_keys_fp8", "pv=");
    REFUSED(mx, 64, sink_keys_fp8 = 33, "sink_keys_fp8", "32");
    REFUSED(mx, 64, sink_keys_fp8 = -32, "sink_keys_fp8", "negative");
    REFUSED(plain, 64, do_scale = DO_SCALE_FIXED, "do_format", "do_scale");
    REFUSED(plain, 64, ds_scale = DS_SCALE_FIXED, "backward", "ds_scale");
    REFUSED(mx, 64, sink_keys_fp8 = 32, "sink_keys_fp8", "anchor");
    list[n - 1].recipe.anchor = ANCHOR_SAMPLED;
#undef REFUSED
    for (int i = 0; i < n; i++) {
        assert_int_equal(attention_recipe_check(&list[i].recipe, list[i].head_dim), ERR_UNSUPPORTED);
        for (int k = 0; k < 2; k++) {
            assert_non_null(strstr(status_last_message(), list[i].keys[k]));
        }
    }
}

static void test_impossible_shapes_and_names_are_refused(void **state)
{
    (void)state;
    struct attention_recipe r = recipe_of(PV_FP8, BWD_REPRESENTED);
    const struct attention_variant *v = NULL;
    struct attention_shape good = {.batch = 1, .tokens = 8, .heads = 6, .kv_heads = 2, .head_dim = 64};
    assert_int_equal(attention_choose(&good, &r, DEVICE_CPU, "auto", &v), OK);
    assert_string_equal(v->name, "cpu");
    struct attention_shape heads = good;
    heads.kv_heads = 4;
    assert_int_equal(attention_choose(&heads, &r, DEVICE_CPU, "auto", &v), ERR_UNSUPPORTED);
    assert_non_null(strstr(status_last_message(), "kv_heads=4"));
    struct attention_shape dim = good;
    dim.head_dim = 80 + 8;
    assert_int_equal(attention_choose(&dim, &r, DEVICE_CPU, "cpu", &v), ERR_UNSUPPORTED);
    assert_non_null(strstr(status_last_message(), "head_dim=88"));
    assert_non_null(strstr(status_last_message(), "multiple of 16"));
    assert_int_equal(attention_choose(&good, &r, DEVICE_CPU, "warp9", &v), ERR_UNSUPPORTED);
    assert_non_null(strstr(status_last_message(), "warp9"));
}

/* ---- what is legal runs ----------------------------------------------------------------------------------- */

enum { T = 40 };

/* Inputs shared by all recipes, and exact attention on them. */
struct sweep {
    struct attention_case c;
    double *out, *dq, *dk, *dv;
    int64_t run;
};

static void open_sweep(struct sweep *s, int64_t head_dim)
{
    struct attention_shape shape = {.batch = 1,
                                    .tokens = T,
                                    .heads = 2,
                                    .kv_heads = 1,
                                    .head_dim = head_dim,
                                    .causal = true,
                                    .softmax_scale = 1 / sqrtf((float)head_dim)};
    struct attention_recipe plain = attention_recipe_bf16();
    case_open(&s->c, &shape, &plain, INPUT_GAUSS, 7);
    s->out = calloc((size_t)case_queries(&s->c), sizeof(double));
    s->dq = calloc((size_t)case_queries(&s->c), sizeof(double));
    s->dk = calloc((size_t)case_keys(&s->c), sizeof(double));
    s->dv = calloc((size_t)case_keys(&s->c), sizeof(double));
    struct oracle_problem p = {shape, &plain, s->c.q, s->c.k, s->c.v, s->c.dout};
    oracle_exact(&p, s->out, s->dq, s->dk, s->dv);
    s->run = 0;
}

static void close_sweep(struct sweep *s)
{
    case_close(&s->c);
    free(s->out);
    free(s->dq);
    free(s->dk);
    free(s->dv);
}

/* Runs one recipe if it is legal. The bounds are loose: they catch a lost factor or operand, not a wrong rounding. */
static void run_recipe(struct sweep *s, const struct attention_recipe *recipe, double fwd_bound, double bwd_bound)
{
    const struct attention_variant *v = s->c.variant;
    if (v->refuses(&s->c.shape, recipe) != NULL) {
        return;
    }
    assert_int_equal(attention_recipe_check(recipe, (int)s->c.shape.head_dim), OK);
    free(s->c.saved);
    free(s->c.scratch);
    s->c.saved = malloc(v->saved_bytes(&s->c.shape, recipe) + 1);
    s->c.scratch = malloc(v->scratch_bytes(&s->c.shape, recipe) + 1);
    s->c.recipe = *recipe;
    s->c.stats = (struct attention_stats){0};
    case_forward(&s->c);
    case_backward(&s->c);
    double error[4] = {rel_l2(s->c.out, s->out, case_queries(&s->c)), rel_l2(s->c.dq, s->dq, case_queries(&s->c)),
                       rel_l2(s->c.dk, s->dk, case_keys(&s->c)), rel_l2(s->c.dv, s->dv, case_keys(&s->c))};
    bool good = error[0] <= fwd_bound && error[1] <= bwd_bound && error[2] <= bwd_bound && error[3] <= bwd_bound &&
                s->c.stats.non_finite == 0;
    if (!good) {
        char text[512];
        attention_recipe_print(recipe, text, sizeof text);
        print_message("%s: out %.3f dq %.3f dk %.3f dv %.3f non-finite %.0f\n", text, error[0], error[1], error[2],
                      error[3], s->c.stats.non_finite);
    }
    assert_true(good);
    s->run++;
}

/* Steps r through all values of an array of small counters; false after the last. */
static bool next(int *digits, const int *limits, int n)
{
    for (int i = 0; i < n; i++) {
        if (++digits[i] < limits[i]) {
            return true;
        }
        digits[i] = 0;
    }
    return false;
}

static void test_every_legal_forward_runs(void **state)
{
    (void)state;
    struct sweep s;
    open_sweep(&s, 128);
    static const int limits[] = {3, 3, 5, 2, 5, 3, 2, 2};
    int d[8] = {0};
    do {
        struct attention_recipe r = attention_recipe_bf16();
        attention_recipe_preset(&r, BWD_REPRESENTED);
        r.qk = (enum qk_format)d[0];
        r.qk_scale = (enum qk_scale)d[1];
        r.pv = (enum pv_format)d[2];
        r.mx_rule = (enum mx_family)d[3];
        r.p_map = (enum p_map)d[4];
        r.anchor = (enum p_anchor)d[5];
        r.v_diag = (enum v_diag)d[6];
        r.sink_keys_fp8 = 32 * d[7];
        r.k_center = (d[0] + d[2] + d[4]) % 2; /* meets every value of the others, not every pair */
        r.dk_center = d[1] != 0;
        run_recipe(&s, &r, r.anchor == ANCHOR_SAMPLED ? 0.75 : 0.5, 0.75);
    } while (next(d, limits, 8));
    /* qk and scale 7; pv bf16 and fp8: 1 each; nvfp4 and ue5m3: diag 2, sinks 2; mxfp4: rule 2, map 5,
     * diag 2, and either an anchor of 3 or sinks (mx_rule is ignored elsewhere, hence twice). */
    assert_int_equal(s.run, 7 * (2 * (1 + 1 + 4 + 4) + 2 * 5 * 2 * (3 + 1)));
    close_sweep(&s);
}

static void test_every_legal_backward_runs(void **state)
{
    (void)state;
    struct sweep s;
    open_sweep(&s, 32);
    static const int limits[] = {3, 3, 4, 3, 2, 2, 2, 2, 2};
    static const enum pv_format formats[] = {PV_MXFP4, PV_FP8};
    int d[9] = {0};
    do {
        struct attention_recipe r = recipe_of(formats[d[7]], d[8] ? BWD_BF16 : BWD_REPRESENTED);
        r.bwd_p = (enum bwd_p)d[0];
        r.bwd_v = (enum bwd_v)d[1];
        r.bwd_stat = (enum bwd_stat)d[2];
        r.do_format = (enum do_format)d[3];
        r.do_scale = (enum do_scale)d[4];
        r.ds_scale = (enum ds_scale)d[5];
        r.qk_grad = (enum qk_grad)d[6];
        run_recipe(&s, &r, 0.5, 1.0);
    } while (next(d, limits, 9));
    /* Of 6 (dO format, scale) pairs 5 are legal; ds_scale fixed is not with the bf16 preset. */
    assert_int_equal(s.run, 3 * 3 * 4 * 5 * 2 * 2 * (2 + 1));
    close_sweep(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_enumerator_has_its_name),
        cmocka_unit_test(test_presets_are_those_of_the_numerics_law),
        cmocka_unit_test(test_the_printed_line_names_every_choice),
        cmocka_unit_test(test_each_refusal_names_its_keys),
        cmocka_unit_test(test_impossible_shapes_and_names_are_refused),
        cmocka_unit_test(test_every_legal_forward_runs),
        cmocka_unit_test(test_every_legal_backward_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
