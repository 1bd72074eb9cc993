/* Forward of the CPU variant against the FP64 restatement, on every kind of recipe. */
#include "tests/attention/cases.h"
#include "tests/attention/oracle.h"
#include "tests/test.h"

#include <math.h>
#include <string.h>

static const struct attention_shape shapes[] = {
    {.batch = 1, .tokens = 100, .heads = 4, .kv_heads = 2, .head_dim = 64, .causal = true, .softmax_scale = 0.125f},
    {.batch = 1, .tokens = 160, .heads = 1, .kv_heads = 1, .head_dim = 128, .causal = true, .softmax_scale = 0.0884f},
    {.batch = 1, .tokens = 48, .heads = 2, .kv_heads = 1, .head_dim = 128, .causal = false, .softmax_scale = 0.0884f},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* What the comparison of one recipe saw. A row is touched if it differs by more than FP32 sums and the BF16 rounding
 * explain: then a code of it flipped, because FP32 and FP64 scores fell on two sides of a boundary. */
struct seen {
    int64_t rows, touched;
    double lse_worst; /* among rows that are not touched */
};

/* The relative step of P's format: what one flipped code may change of the greatest value of a row. */
static double step_of(const struct attention_recipe *recipe)
{
    return recipe->pv == PV_BF16 ? 0x1p-7 : recipe->pv == PV_FP8 ? 0x1p-3 : 0.5;
}

static double amax_of_v(const struct attention_case *c)
{
    double m = 0;
    for (int64_t j = 0; j < case_keys(c); j++) {
        m = fmax(m, (double)fabsf(bf16_to_float(c->v[j])));
    }
    return m;
}

static void check_row(const struct attention_case *c, const struct oracle_fwd *f, double v_max, int64_t head, int64_t i,
                      struct seen *seen)
{
    const struct attention_shape *s = &c->shape;
    int64_t row = head * s->tokens + i;
    double total = 0;
    double greatest = 0;
    for (int64_t j = 0; j < s->tokens; j++) {
        total += f->value[row * s->tokens + j];
        greatest = fmax(greatest, f->value[row * s->tokens + j]);
    }
    double flip = step_of(&c->recipe) * greatest / total; /* of the row's mass, by one flipped code */
    double lse_error = fabs((double)c->lse_log2[row] - f->lse2[row]);
    bool touched = lse_error > 1e-5;
    assert_true(lse_error <= 1e-5 + 2 * flip);
    for (int64_t e = 0; e < s->head_dim; e++) {
        int64_t at = (i * s->heads + head) * s->head_dim + e;
        double error = fabs((double)bf16_to_float(c->out[at]) - f->out[at]);
        double tight = 1.01 * 0x1p-8 * fabs(f->out[at]) + 1e-6 * v_max;
        touched = touched || error > tight;
        if (!(error <= tight + 2 * flip * v_max)) {
            fail_msg("head %d row %d feature %d: %g, oracle %g, bound %g", (int)head, (int)i, (int)e,
                     (double)bf16_to_float(c->out[at]), f->out[at], tight + 2 * flip * v_max);
        }
    }
    seen->rows++;
    seen->touched += touched;
    seen->lse_worst = touched ? seen->lse_worst : fmax(seen->lse_worst, lse_error);
}

/* Every shape, on two of the inputs; at most 2 % of the rows may be touched (1e-4 of the codes, at most 160 codes a
 * row). */
static void check_recipe(const struct attention_recipe *recipe)
{
    char text[512];
    struct seen seen = {0, 0, 0};
    attention_recipe_print(recipe, text, sizeof text);
    for (int at = 0; at < 2 * N_SHAPES; at++) {
        const struct attention_shape *shape = &shapes[at % N_SHAPES];
        if (attention_recipe_refusal(recipe, (int)shape->head_dim) != NULL) {
            continue;
        }
        struct attention_case c;
        struct oracle_fwd f;
        case_open(&c, shape, recipe, at % INPUT_MIX, 1);
        case_forward(&c);
        struct oracle_problem p = {c.shape, &c.recipe, c.q, c.k, c.v, c.dout};
        oracle_forward(&p, &f);
        double v_max = amax_of_v(&c);
        for (int64_t row = 0; row < shape->heads * shape->tokens; row++) {
            check_row(&c, &f, v_max, row / shape->tokens, row % shape->tokens, &seen);
        }
        assert_true(fabs(c.stats.logit_max / f.logit_max - 1) < 1e-5);
        assert_true(c.stats.p_rows == (double)(shape->heads * shape->tokens));
        assert_true(fabs(c.stats.p_lost_mass - f.lost_mass) <= 1e-2 * f.lost_mass + 1e-3);
        assert_true(c.stats.non_finite == 0);
        oracle_forward_free(&f);
        case_close(&c);
    }
    print_message("%s: %d of %d rows touched, lse within %.1e\n", text, (int)seen.touched, (int)seen.rows,
                  seen.lse_worst);
    assert_true(seen.rows > 0);
    assert_true(seen.touched * 50 <= seen.rows);
}

static void test_every_score_format(void **state)
{
    (void)state;
    static const struct {
        enum qk_format qk;
        enum qk_scale scale;
    } scores[] = {
        {QK_BF16, QK_SCALE_AMAX},    {QK_NVFP4, QK_SCALE_AMAX},      {QK_NVFP4, QK_SCALE_MSE},
        {QK_NVFP4, QK_SCALE_FOLDED}, {QK_NVFP4_E4M3, QK_SCALE_AMAX}, {QK_NVFP4_E4M3, QK_SCALE_MSE},
    };
    static const enum pv_format values[] = {PV_BF16, PV_FP8, PV_MXFP4};
    for (size_t i = 0; i < sizeof scores / sizeof *scores; i++) {
        for (size_t j = 0; j < sizeof values / sizeof *values; j++) {
            bool plain = scores[i].qk == QK_BF16 && values[j] == PV_BF16;
            struct attention_recipe recipe = recipe_of(values[j], plain ? BWD_BF16 : BWD_REPRESENTED);
            recipe.qk = scores[i].qk;
            recipe.qk_scale = scores[i].scale;
            check_recipe(&recipe);
        }
    }
}

static void test_every_probability_map(void **state)
{
    (void)state;
    static const enum p_map maps[] = {P_EXACT, P_THRESHOLD, P_CODE_SPACE, P_AFFINE, P_ACCURATE};
    for (int rule = MX_NEAREST; rule <= MX_OCP; rule++) {
        for (size_t i = 0; i < sizeof maps / sizeof *maps; i++) {
            struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
            recipe.mx_rule = rule;
            recipe.p_map = maps[i];
            check_recipe(&recipe);
        }
    }
    struct attention_recipe wan = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    wan.p_map = P_AFFINE;
    wan.affine_a = 1.60f;
    wan.affine_b = 0.95f;
    check_recipe(&wan);
}

static void test_every_value_format_with_its_options(void **state)
{
    (void)state;
    for (int pv = PV_FP8; pv <= PV_FP4_UE5M3; pv++) {
        for (int option = 0; option < 8; option++) {
            struct attention_recipe recipe = recipe_of(pv, BWD_REPRESENTED);
            recipe.v_diag = option == 1 || option == 4 ? V_DIAG_FP8 : V_DIAG_BLOCKED;
            recipe.sink_keys_fp8 = option == 2 || option == 4 ? 32 : 0;
            recipe.k_center = option == 3;
            recipe.anchor = option == 5 ? ANCHOR_ZERO : option >= 6 ? ANCHOR_SAMPLED : ANCHOR_ROW;
            recipe.mx_rule = option == 7 ? MX_OCP : MX_NEAREST;
            if (attention_recipe_refusal(&recipe, 128) == NULL) {
                check_recipe(&recipe);
            }
        }
    }
}

/* The batch is only a stride: each sequence gives the bits that it gives alone. */
static void test_bits_do_not_depend_on_the_batch(void **state)
{
    (void)state;
    struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    struct attention_shape two = shapes[0];
    two.batch = 2;
    struct attention_case both;
    struct attention_case one;
    case_open(&both, &two, &recipe, INPUT_GAUSS, 3);
    case_open(&one, &shapes[0], &recipe, INPUT_GAUSS, 3);
    case_forward(&both);
    case_backward(&both);
    for (int64_t b = 0; b < 2; b++) {
        size_t queries = sizeof(bf16) * (size_t)case_queries(&one);
        size_t keys = sizeof(bf16) * (size_t)case_keys(&one);
        memcpy(one.q, both.q + b * case_queries(&one), queries);
        memcpy(one.dout, both.dout + b * case_queries(&one), queries);
        memcpy(one.k, both.k + b * case_keys(&one), keys);
        memcpy(one.v, both.v + b * case_keys(&one), keys);
        case_forward(&one);
        case_backward(&one);
        assert_memory_equal(one.out, both.out + b * case_queries(&one), queries);
        assert_memory_equal(one.dq, both.dq + b * case_queries(&one), queries);
        assert_memory_equal(one.dk, both.dk + b * case_keys(&one), keys);
        assert_memory_equal(one.dv, both.dv + b * case_keys(&one), keys);
    }
    case_close(&both);
    case_close(&one);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_score_format),
        cmocka_unit_test(test_every_probability_map),
        cmocka_unit_test(test_every_value_format_with_its_options),
        cmocka_unit_test(test_bits_do_not_depend_on_the_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
