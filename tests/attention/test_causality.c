/* Which routes let a query see later tokens (docs/numerics.md, section 13), found by changing those tokens. */
#include "tests/attention/cases.h"
#include "tests/test.h"

#include <math.h>

/* 80 tokens: blocks of 16 and 32, the last one of 32 short. */
static const struct attention_shape shape = {1, 80, 2, 1, 64, true, 0.125f};

enum { CHANGED = 37 }; /* tokens from here on are replaced: in the middle of a block of 16 and of 32 */

/* Replaces q, k and v of all tokens from CHANGED on by those of another draw, times `factor`. */
static void change_future(struct attention_case *c, float factor)
{
    struct attention_case other;
    case_open(&other, &c->shape, &c->recipe, INPUT_GAUSS, 99);
    int64_t kv_row = c->shape.kv_heads * c->shape.head_dim;
    int64_t q_row = c->shape.heads * c->shape.head_dim;
    for (int64_t i = CHANGED * kv_row; i < case_keys(c); i++) {
        c->k[i] = bf16_from_float(bf16_to_float(other.k[i]) * factor);
        c->v[i] = bf16_from_float(bf16_to_float(other.v[i]) * factor);
    }
    for (int64_t i = CHANGED * q_row; i < case_queries(c); i++) {
        c->q[i] = bf16_from_float(bf16_to_float(other.q[i]) * factor);
    }
    case_close(&other);
}

/* The number of elements of O before CHANGED that the change moved, and by how much (relative L2). */
struct movement {
    int64_t elements;
    double rel_l2;
};

static struct movement future_moves_past(const struct attention_recipe *recipe, float factor)
{
    struct attention_case a;
    struct attention_case b;
    case_open(&a, &shape, recipe, INPUT_GAUSS, 8);
    case_open(&b, &shape, recipe, INPUT_GAUSS, 8);
    change_future(&b, factor);
    case_forward(&a);
    case_forward(&b);
    struct movement m = {0, 0};
    double error = 0;
    double size = 0;
    for (int64_t i = 0; i < CHANGED * shape.heads * shape.head_dim; i++) {
        double x = (double)bf16_to_float(a.out[i]);
        double y = (double)bf16_to_float(b.out[i]);
        m.elements += a.out[i] != b.out[i];
        error += (x - y) * (x - y);
        size += x * x;
    }
    m.rel_l2 = sqrt(error / size);
    for (int64_t head = 0; head < shape.heads; head++) {
        for (int64_t i = 0; i < CHANGED; i++) {
            m.elements += a.lse_log2[head * shape.tokens + i] != b.lse_log2[head * shape.tokens + i];
        }
    }
    case_close(&a);
    case_close(&b);
    return m;
}

static bool has_v_blocks(enum pv_format pv)
{
    return pv == PV_MXFP4 || pv == PV_NVFP4 || pv == PV_FP4_UE5M3;
}

static void check_route(const struct attention_recipe *recipe)
{
    if (attention_recipe_refusal(recipe, (int)shape.head_dim) != NULL) {
        return;
    }
    char text[512];
    attention_recipe_print(recipe, text, sizeof text);
    struct movement quiet = future_moves_past(recipe, 1);
    bool leaks = (has_v_blocks(recipe->pv) && recipe->v_diag == V_DIAG_BLOCKED) || recipe->k_center;
    print_message("%s: %d moved, rel-L2 %.2g\n", text, (int)quiet.elements, quiet.rel_l2);
    assert_int_equal(quiet.elements > 0, leaks);
}

static void test_only_v_blocks_and_k_center_look_ahead(void **state)
{
    (void)state;
    for (int qk = QK_BF16; qk <= QK_NVFP4_E4M3; qk++) {
        for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
            for (int option = 0; option < 8; option++) {
                struct attention_recipe recipe = recipe_of(pv, BWD_REPRESENTED);
                recipe.qk = qk;
                recipe.v_diag = option & 1 ? V_DIAG_FP8 : V_DIAG_BLOCKED;
                recipe.sink_keys_fp8 = option & 2 ? 32 : 0;
                recipe.k_center = (option & 4) != 0;
                check_route(&recipe);
            }
        }
    }
}

static void test_no_producer_anchor_or_score_scale_looks_ahead(void **state)
{
    (void)state;
    struct attention_recipe base = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    base.v_diag = V_DIAG_FP8;
    for (int map = P_EXACT; map <= P_ACCURATE; map++) {
        for (int anchor = ANCHOR_ROW; anchor <= ANCHOR_SAMPLED; anchor++) {
            for (int rule = MX_NEAREST; rule <= MX_OCP; rule++) {
                struct attention_recipe recipe = base;
                recipe.p_map = map;
                recipe.anchor = anchor;
                recipe.mx_rule = rule;
                check_route(&recipe);
            }
        }
    }
    struct attention_recipe mse = base;
    mse.qk_scale = QK_SCALE_MSE;
    check_route(&mse);
}

/* G, and the multipliers of qk = nvfp4_e4m3 and of E4M3 V (4, less if a value exceeds 112), come from the greatest
 * magnitude of a whole head: tokens to come included. Being powers of two they change nothing while scales and values
 * stay normal; a later token some 2^15 louder pushes earlier ones among the subnormals, and then past rows move. */
static void test_head_scales_look_ahead_only_beyond_their_range(void **state)
{
    (void)state;
    static const enum pv_format values[] = {PV_BF16, PV_FP8, PV_MXFP4};
    for (int qk = QK_BF16; qk <= QK_NVFP4_E4M3; qk++) {
        for (size_t i = 0; i < 3; i++) {
            struct attention_recipe recipe = recipe_of(values[i], BWD_REPRESENTED);
            recipe.qk = qk;
            recipe.v_diag = values[i] == PV_MXFP4 ? V_DIAG_FP8 : V_DIAG_BLOCKED;
            struct movement loud = future_moves_past(&recipe, 16);
            struct movement deafening = future_moves_past(&recipe, 0x1p18f);
            print_message("qk %s pv %s: 16 times louder: %d moved, 2^18: %d, rel-L2 %.2g\n", qk_format_names[qk],
                          pv_format_names[values[i]], (int)loud.elements, (int)deafening.elements, deafening.rel_l2);
            assert_int_equal(loud.elements, 0);
            assert_int_equal(deafening.elements > 0, qk != QK_BF16 || values[i] != PV_BF16);
        }
    }
}

/* The other direction: with nothing changed but the past, the future must move (the test can see at all). */
static void test_the_past_moves_the_future(void **state)
{
    (void)state;
    struct attention_recipe recipe = recipe_of(PV_FP8, BWD_REPRESENTED);
    struct attention_case a;
    struct attention_case b;
    case_open(&a, &shape, &recipe, INPUT_GAUSS, 8);
    case_open(&b, &shape, &recipe, INPUT_GAUSS, 8);
    b.v[3] = (bf16)(b.v[3] ^ 0x8000u);
    case_forward(&a);
    case_forward(&b);
    int64_t q_row = shape.heads * shape.head_dim;
    for (int64_t i = 0; i < shape.tokens; i++) {
        assert_true(a.out[i * q_row + 3] != b.out[i * q_row + 3]);
    }
    case_close(&a);
    case_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_only_v_blocks_and_k_center_look_ahead),
        cmocka_unit_test(test_no_producer_anchor_or_score_scale_looks_ahead),
        cmocka_unit_test(test_head_scales_look_ahead_only_beyond_their_range),
        cmocka_unit_test(test_the_past_moves_the_future),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
