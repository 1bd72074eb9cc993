/* Direct-P in the Hopper backward: gradients where MXFP4 codes are rebuilt by p_map = affine and code_space, against
 * the CPU reference and the variant `cuda`. The codes themselves: gpu_sm90_codes.c; dS: gpu_sm90_ds.c. */
#include "tests/attention/gpu_sm90_check.h"

enum { RECIPES = 10 };

/* Map and rule, then qk; behind them the paper's other constants. */
static struct attention_recipe map_recipe(int i)
{
    struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    recipe.p_map = i % 2 == 0 ? P_AFFINE : P_CODE_SPACE;
    recipe.mx_rule = i / 2 % 2 == 0 ? MX_NEAREST : MX_OCP;
    recipe.qk = i / 4 % 2 == 0 ? QK_NVFP4 : QK_NVFP4_E4M3;
    if (i >= 8) {
        recipe.p_map = P_AFFINE;
        recipe.affine_a = i == 8 ? 1.60f : 1.65f;
        recipe.affine_b = i == 8 ? 0.95f : 0.80f;
    }
    return recipe;
}

static void print_seen(const char *what, const struct attention_recipe *r, const struct seen *seen)
{
    char text[96];
    snprintf(text, sizeof text, "%s, %s %s %s", what, qk_format_names[r->qk], mx_family_names[r->mx_rule],
             p_map_names[r->p_map]);
    seen_print(text, seen);
}

/* ---- beside the CPU ---------------------------------------------------------------------------------------- */

static void inputs(void **state)
{
    int bad = 0;
    for (int i = 0; i < RECIPES; i++) {
        const struct attention_recipe recipe = map_recipe(i);
        struct seen seen = {0};
        for (int kind = 0; kind < INPUT_KINDS; kind++) {
            const struct attention_shape s = shape_of(1 + kind % 2, 330 - 31 * kind, 4, 2, (i + kind) % 4 != 0);
            if (!gpu_leaves_out(7)) {
                bad += check(*state, &s, &recipe, (enum input_kind)kind, (enum layout)((i + kind) % LAYOUTS), BACKWARD,
                             &seen);
            }
        }
        print_seen("inputs", &recipe, &seen);
    }
    assert_int_equal(bad, 0);
}

/* A block of 32 keys lies in two warps, a tile has 64 queries, a unit of work 128 keys: lengths around all of them. */
static void lengths(void **state)
{
    struct seen seen = {0};
    int bad = 0;
    for (int64_t T = 1; T <= 290 && bad < 12; T += T % 32 < 2 || T % 32 == 31 ? 1 : 10) {
        for (int i = 0; i < 4; i++) {
            const struct attention_recipe recipe = map_recipe((i + 4 * (int)(T & 1)) % 8);
            const struct attention_shape s = shape_of(1, T, 2, 1, (T / 2 + i / 2) % 2 == 0);
            if (!gpu_leaves_out(13)) {
                bad += check(*state, &s, &recipe, INPUT_GAUSS, (enum layout)(T % LAYOUTS), BACKWARD, &seen);
            }
        }
    }
    seen_print("lengths", &seen);
    assert_int_equal(bad, 0);
}

/* Scores that lie far apart (FP16 windows and 16-bit sums must not wrap), none at all (every code a largest one), and
 * rows that saw nothing. */
static void far_scores(void **state)
{
    static const struct {
        const char *name;
        float q, k, factor;
    } cases[] = {{"scores to +-600", 12, 12, 4},
                 {"scores to +-6000", 36, 40, 4},
                 {"scores zero", 0, 1, 1},
                 {"lost rows", 1, 1, 1}};
    struct seen seen = {0};
    int bad = 0;
    for (int i = 0; i < 4 * 4; i++) {
        const struct attention_recipe recipe = map_recipe(i % 4);
        const struct attention_shape s = shape_of(1, 200, 4, 2, i % 3 != 0);
        struct attention_case c;
        if (gpu_leaves_out(5)) {
            continue;
        }
        case_open(&c, &s, &recipe, INPUT_GAUSS, 31);
        case_multiply(c.q, case_queries(&c), cases[i / 4].q);
        case_multiply(c.k, case_keys(&c), cases[i / 4].k);
        case_forward(&c);
        for (int64_t row = 0; i / 4 == 3 && row < s.heads * s.tokens; row++) {
            if (row % 7 == 0 || (row % s.tokens >= 64 && row % s.tokens < 128)) {
                c.lse_log2[row] = -INFINITY;
                memset(c.out + (row % s.tokens * s.heads + row / s.tokens) * D, 0, D * sizeof(bf16));
            }
        }
        case_backward(&c);
        seen.factor = cases[i / 4].factor;
        bad += check_backward(*state, &c, cases[i / 4].name, APART, &seen);
        case_close(&c);
    }
    seen_print("far scores", &seen);
    assert_int_equal(bad, 0);
}

static int64_t not_finite(const struct gpu_case *g, enum tensor t)
{
    int64_t n = 0;
    for (size_t i = 0; i < tensor_bytes(g, t) / sizeof(bf16); i++) {
        n += !isfinite(bf16_to_float(g->got[t][i]));
    }
    return n;
}

/* A NaN of an input shows in what training sees, although the code of a NaN is a zero. */
static void broken_inputs(void **state)
{
    int bad = 0;
    for (int i = 0; i < 4 * 3; i++) {
        const struct attention_recipe recipe = map_recipe(i % 4);
        const struct attention_shape s = shape_of(1, 200, 4, 2, true);
        struct attention_case c;
        struct gpu_case g;
        if (gpu_leaves_out(5)) {
            continue;
        }
        case_open(&c, &s, &recipe, INPUT_GAUSS, 41);
        bf16 *inputs[] = {c.q, c.k, c.dout};
        inputs[i / 4][70 * 2 * D + 5] = bf16_from_float(NAN);
        gpu_case_open(&g, *state, &c, APART, BOTH);
        bad += gpu_case_run(&g);
        for (int t = OUT; t < TENSORS; t++) {
            const bool expected = t != OUT || i / 4 != 2; /* O does not depend on dO */
            if (t != DOUT && (not_finite(&g, (enum tensor)t) > 0) != expected) {
                print_message("broken input %d, recipe %d: tensor %d has %lld that are not finite\n", i / 4, i % 4, t,
                              (long long)not_finite(&g, (enum tensor)t));
                bad++;
            }
        }
        gpu_case_close(&g);
        case_close(&c);
    }
    assert_int_equal(bad, 0);
}

/* ---- beside the variant cuda ------------------------------------------------------------------------------- */

/* Both passes of either: the forward's codes and the backward's are those of one device. A row where the two forwards
 * have another code has another gradient (gpu_sm90_check.h); E4M3 scores more of them. */
static void both_passes(void **state)
{
    int bad = 0;
    for (int i = 0; i < RECIPES; i++) {
        struct attention_case c;
        struct gpu_case g, cuda;
        struct seen seen = {.cases = 1};
        char what[256];
        const struct attention_recipe recipe = map_recipe(i);
        const struct attention_shape s = shape_of(2, 425, 4, 2, true);
        if (gpu_leaves_out(3)) {
            continue;
        }
        case_open(&c, &s, &recipe, (enum input_kind)(i % INPUT_KINDS), 77);
        gpu_case_open_as(&cuda, *state, &c, &attention_variant_cuda, APART, BOTH);
        bad += gpu_case_run(&cuda);
        memcpy(c.dq, cuda.got[OUT_DQ], tensor_bytes(&cuda, OUT_DQ));
        memcpy(c.dk, cuda.got[OUT_DK], tensor_bytes(&cuda, OUT_DK));
        memcpy(c.dv, cuda.got[OUT_DV], tensor_bytes(&cuda, OUT_DV));
        gpu_case_open(&g, *state, &c, APART, BOTH);
        bad += gpu_case_run(&g);
        describe(&g, input_names[i % INPUT_KINDS], what, sizeof what);
        bad += compare_backward(&g, what, &seen);
        print_seen("beside cuda", &recipe, &seen);
        gpu_case_close(&g);
        gpu_case_close(&cuda);
        case_close(&c);
    }
    assert_int_equal(bad, 0);
}

/* ---- anchors ----------------------------------------------------------------------------------------------- */

/* Where P is exp2(t - LSE2), the forward's anchor is in LSE2 and O and nowhere else. */
static void anchors(void **state)
{
    struct seen seen = {0};
    int bad = 0;
    for (int i = 0; i < 4 * INPUT_KINDS; i++) {
        struct attention_recipe recipe = recipe_of(PV_MXFP4, i % 2 == 0 ? BWD_SAVED_OUTPUT : BWD_SAVED_OUTPUT_FIXED);
        const struct attention_shape s = shape_of(1, 290, 4, 2, i % 3 != 0);
        recipe.anchor = i / 2 % 2 == 0 ? ANCHOR_ZERO : ANCHOR_SAMPLED;
        assert_null(attention_bwd_refuses_sm90(&s, &recipe));
        if (!gpu_leaves_out(5)) {
            bad += check(*state, &s, &recipe, (enum input_kind)(i / 4), APART, BACKWARD, &seen);
        }
    }
    seen_print("anchors", &seen);
    assert_int_equal(bad, 0);
}

/* ---- what is accepted -------------------------------------------------------------------------------------- */

static void expect(const char *why, const char *words)
{
    if (words == NULL ? why != NULL : why == NULL || strstr(why, words) == NULL) {
        fail_msg("expected %s in: %s", words == NULL ? "nothing" : words, why == NULL ? "nothing" : why);
    }
}

static void accepted(void **state)
{
    const struct attention_shape s = shape_of(1, 256, 4, 2, true);
    struct attention_recipe recipe;
    (void)state;
    for (int i = 0; i < RECIPES; i++) {
        recipe = map_recipe(i);
        expect(attention_fwd_refuses_sm90(&s, &recipe), NULL);
        expect(attention_bwd_refuses_sm90(&s, &recipe), NULL);
    }
    recipe = map_recipe(0);
    recipe.affine_b = 0.4f; /* the largest code of a block might be 3 */
    expect(attention_fwd_refuses_sm90(&s, &recipe), "affine_a");
    recipe.affine_b = 2.4f; /* might be beyond 7 */
    expect(attention_fwd_refuses_sm90(&s, &recipe), "affine_a");
    recipe.p_map = P_ACCURATE;
    expect(attention_bwd_refuses_sm90(&s, &recipe), "p_map");
    recipe = map_recipe(0);
    recipe.anchor = ANCHOR_SAMPLED;
    expect(attention_bwd_refuses_sm90(&s, &recipe), "anchor");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(inputs),      cmocka_unit_test(lengths),
                                       cmocka_unit_test(far_scores),  cmocka_unit_test(broken_inputs),
                                       cmocka_unit_test(both_passes), cmocka_unit_test(anchors),
                                       cmocka_unit_test(accepted)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
