/* The Hopper passes against the CPU reference in every route that they run, on random, peaky, sink, outlier and mixed
 * inputs. Shapes: gpu_sm90_shapes.c. */
#include "tests/attention/gpu_sm90_check.h"

enum { RECIPES_MAX = 64 };

/* ---- forward ----------------------------------------------------------------------------------------------- */

/* Every kernel and every parameter of one. Legal or not: the caller asks. */
static int forward_routes(struct attention_recipe *recipes)
{
    int n = 0;
    recipes[n++] = attention_recipe_bf16();
    for (enum qk_format qk = QK_BF16; qk <= QK_NVFP4_E4M3; qk++) {
        struct attention_recipe r = recipe_of(PV_FP8, BWD_REPRESENTED);
        r.qk = qk;
        r.qk_scale = QK_SCALE_AMAX;
        recipes[n++] = r;
        r.pv = PV_MXFP4;
        for (enum mx_family rule = MX_NEAREST; rule <= MX_OCP; rule++) {
            for (enum p_map map = P_EXACT; map <= P_AFFINE; map++) {
                r.mx_rule = rule;
                r.p_map = map;
                recipes[n++] = r;
            }
        }
    }
    recipes[n] = recipe_of(PV_FP8, BWD_REPRESENTED);
    recipes[n++].qk_scale = QK_SCALE_MSE;
    static const struct route centred[] = {{QK_BF16, PV_BF16, BWD_BF16},
                                           {QK_NVFP4, PV_MXFP4, BWD_REPRESENTED},
                                           {QK_NVFP4_E4M3, PV_FP8, BWD_REPRESENTED},
                                           {QK_NVFP4_E4M3, PV_MXFP4, BWD_REPRESENTED}};
    for (int i = 0; i < 4; i++) {
        recipes[n] = recipe_of_route(centred[i]);
        recipes[n].qk_scale = i == 3 ? QK_SCALE_MSE : QK_SCALE_AMAX;
        recipes[n++].k_center = true;
    }
    return n;
}

static void forward_inputs(void **state)
{
    struct attention_recipe recipes[RECIPES_MAX];
    const int n = forward_routes(recipes);
    int bad = 0;
    for (int i = 0; i < n; i++) {
        struct seen seen = {0};
        char text[512];
        for (int kind = 0; kind < INPUT_KINDS; kind++) {
            const struct attention_shape s =
                shape_of(1 + kind % 2, (*gpu_small() ? 100 : 220) + 37 * kind, 4, 2, (i + kind) % 3 != 0);
            assert_null(attention_fwd_refuses_sm90(&s, &recipes[i]));
            if (!gpu_leaves_out(7)) {
                bad += check(*state, &s, &recipes[i], (enum input_kind)kind, (enum layout)((i + kind) % LAYOUTS),
                             FORWARD, &seen);
            }
        }
        attention_recipe_print(&recipes[i], text, sizeof text);
        text[60] = 0;
        seen_print(text, &seen);
        /* E4M3 scores touch rows as often as the tensor core rounds a score over a boundary. */
        bad += recipes[i].qk != QK_NVFP4_E4M3 && seen.touched > seen.rows / 50;
    }
    assert_int_equal(bad, 0);
}

/* ---- backward ---------------------------------------------------------------------------------------------- */

static int backward_routes(struct attention_recipe *recipes)
{
    static const enum backward_preset presets[] = {BWD_REPRESENTED, BWD_SAVED_OUTPUT, BWD_SAVED_OUTPUT_FIXED};
    int n = 0;
    recipes[n++] = attention_recipe_bf16();
    for (enum qk_format qk = QK_NVFP4; qk <= QK_NVFP4_E4M3; qk++) {
        for (int i = 0; i < 9; i++) {
            struct attention_recipe r = recipe_of(i / 3 == 0 ? PV_FP8 : PV_MXFP4, presets[i % 3]);
            r.qk = qk;
            r.mx_rule = i / 3 == 2 ? MX_OCP : MX_NEAREST;
            recipes[n++] = r;
        }
    }
    /* One switch each, as configs may set them. */
    recipes[n] = recipe_of(PV_FP8, BWD_REPRESENTED);
    recipes[n++].do_format = DO_E5M2;
    recipes[n] = recipe_of(PV_FP8, BWD_SAVED_OUTPUT);
    recipes[n++].do_format = DO_E4M3;
    recipes[n] = recipe_of(PV_FP8, BWD_SAVED_OUTPUT);
    recipes[n++].bwd_stat = BWD_STAT_SAVED;
    recipes[n] = recipe_of(PV_MXFP4, BWD_REPRESENTED);
    recipes[n++].bwd_v = BWD_V_E4M3;
    recipes[n] = recipe_of(PV_FP8, BWD_REPRESENTED);
    recipes[n++].qk_grad = QK_GRAD_LIFT;
    recipes[n] = recipe_of(PV_MXFP4, BWD_SAVED_OUTPUT);
    recipes[n++].p_map = P_THRESHOLD;
    recipes[n] = recipe_of(PV_MXFP4, BWD_SAVED_OUTPUT);
    recipes[n++].p_map = P_AFFINE;
    recipes[n] = recipe_of(PV_MXFP4, BWD_SAVED_OUTPUT_FIXED);
    recipes[n++].p_map = P_CODE_SPACE;
    /* K, or dK, or both less their means. */
    static const struct route centred[] = {{QK_BF16, PV_BF16, BWD_BF16},
                                           {QK_NVFP4, PV_FP8, BWD_REPRESENTED},
                                           {QK_NVFP4, PV_MXFP4, BWD_SAVED_OUTPUT},
                                           {QK_NVFP4_E4M3, PV_FP8, BWD_REPRESENTED}};
    for (int i = 0; i < 3 * 4; i++) {
        recipes[n] = recipe_of_route(centred[i / 3]);
        recipes[n].k_center = i % 3 != 1;
        recipes[n++].dk_center = i % 3 != 0;
    }
    recipes[n] = recipe_of(PV_FP8, BWD_REPRESENTED);
    recipes[n].qk_grad = QK_GRAD_LIFT;
    recipes[n++].k_center = true;
    return n;
}

static void backward_inputs(void **state)
{
    struct attention_recipe recipes[RECIPES_MAX];
    const int n = backward_routes(recipes);
    int bad = 0;
    for (int i = 0; i < n; i++) {
        struct seen seen = {0};
        char text[512];
        if (attention_recipe_refusal(&recipes[i], D) != NULL) {
            attention_recipe_print(&recipes[i], text, sizeof text);
            print_message("not legal: %s: %s\n", text, attention_recipe_refusal(&recipes[i], D));
            bad++;
            continue;
        }
        for (int kind = 0; kind < INPUT_KINDS; kind++) {
            const struct attention_shape s =
                shape_of(1 + kind % 2, (*gpu_small() ? 200 : 300) - 29 * kind, 4, 2, kind != INPUT_PEAKY3);
            const char *why = attention_bwd_refuses_sm90(&s, &recipes[i]);
            if (why != NULL) {
                print_message("recipe %d is refused: %s\n", i, why);
                bad++;
            } else if (!gpu_leaves_out(7)) {
                bad += check(*state, &s, &recipes[i], (enum input_kind)kind, (enum layout)((i + kind) % LAYOUTS),
                             BACKWARD, &seen);
            }
        }
        attention_recipe_print(&recipes[i], text, sizeof text);
        print_message("%s: ", backward_preset_names[recipes[i].backward]);
        text[60] = 0;
        seen_print(text, &seen);
    }
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(forward_inputs), cmocka_unit_test(backward_inputs)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
