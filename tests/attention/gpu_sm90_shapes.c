/* The Hopper passes against the CPU reference in every shape: each length from 1 to 200, all ratios of heads, batches,
 * views of every kind. Inputs and routes: gpu_sm90_inputs.c. */
#include "tests/attention/gpu_sm90_check.h"

enum { ROUTES = 5 };

/* One recipe for each kernel. */
static struct attention_recipe route(int i)
{
    static const struct route rows[ROUTES] = {{QK_BF16, PV_BF16, BWD_BF16},
                                              {QK_NVFP4, PV_FP8, BWD_REPRESENTED},
                                              {QK_NVFP4, PV_MXFP4, BWD_REPRESENTED},
                                              {QK_NVFP4_E4M3, PV_FP8, BWD_SAVED_OUTPUT},
                                              {QK_NVFP4_E4M3, PV_MXFP4, BWD_REPRESENTED}};
    struct attention_recipe recipe = recipe_of_route(rows[i]);
    recipe.mx_rule = i == 4 ? MX_OCP : MX_NEAREST;
    return recipe;
}

/* Plain BF16 and one quantised route at each length, both masks in turn; all routes and masks around edges of tiles. */
static int lengths(struct gpu *gpu, enum pass passes)
{
    struct seen seen[ROUTES] = {{0}};
    int bad = 0;
    for (int64_t T = 1; T <= 200 && bad < 12; T++) {
        const bool edge = T < 3 || T % 64 < 2 || T % 64 == 63;
        for (int i = 0; i < 2 * ROUTES; i++) {
            const bool causal = i < ROUTES;
            const int r = i % ROUTES;
            if ((!edge && (causal != (T / 4 % 2 == 0) || (r != 0 && r != 1 + T % 4))) || gpu_leaves_out(17)) {
                continue;
            }
            const struct attention_recipe recipe = route(r);
            const struct attention_shape s = shape_of(1, T, 2, 1, causal);
            bad += check(gpu, &s, &recipe, INPUT_GAUSS, (enum layout)(T % LAYOUTS), passes, &seen[r]);
        }
    }
    for (int r = 0; r < ROUTES; r++) {
        char what[32];
        snprintf(what, sizeof what, "lengths, route %d", r);
        seen_print(what, &seen[r]);
    }
    return bad;
}

static void forward_lengths(void **state)
{
    assert_int_equal(lengths(*state, FORWARD), 0);
}

static void backward_lengths(void **state)
{
    assert_int_equal(lengths(*state, BACKWARD), 0);
}

/* Every ratio of heads that a model has, and some that none has; batches; views apart, fused, spread. */
static int heads(struct gpu *gpu, enum pass passes)
{
    static const int64_t cases[][4] = {
        /* batch, tokens, heads, kv heads */
        {1, 256, 1, 1}, {2, 384, 4, 4},  {3, 257, 4, 2}, {1, 311, 4, 1},  {2, 129, 8, 1},
        {2, 300, 6, 2}, {1, 320, 3, 3},  {3, 150, 5, 1}, {1, 200, 32, 8}, {2, 140, 7, 1},
        {5, 66, 2, 1},  {1, 190, 16, 2}, {1, 450, 4, 2}, {2, 97, 12, 3},
    };
    struct seen seen = {0};
    int bad = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int r = 0; r < ROUTES; r++) {
            const struct attention_recipe recipe = route(r);
            const struct attention_shape s =
                shape_of(cases[i][0], cases[i][1], cases[i][2], cases[i][3], (i + (size_t)r) % 3 != 0);
            if (!gpu_leaves_out(13)) {
                bad += check(gpu, &s, &recipe, INPUT_GAUSS, (enum layout)((i + (size_t)r) % LAYOUTS), passes, &seen);
            }
        }
    }
    seen_print("heads", &seen);
    return bad;
}

static void forward_heads(void **state)
{
    assert_int_equal(heads(*state, FORWARD), 0);
}

static void backward_heads(void **state)
{
    assert_int_equal(heads(*state, BACKWARD), 0);
}

/* So many queries of a group that all sums of dK and dV go through memory, some twice (attention_bwd_sm90_fp8). */
static void backward_sums(void **state)
{
    const struct attention_shape s =
        shape_of(1, 200, 12, 1, true); /* 48 tiles of queries for the first block of keys */
    struct seen seen = {0};
    int bad = 0;
    for (int r = 1; r < ROUTES; r++) {
        const struct attention_recipe recipe = route(r);
        if (!gpu_leaves_out(1)) {
            bad += check(*state, &s, &recipe, INPUT_GAUSS, APART, BACKWARD, &seen);
        }
    }
    seen_print("sums through memory", &seen);
    assert_int_equal(bad, 0);
}

/* K and dK less their means, around tiles and the rows that a block adds up at a time. */
static void backward_centred(void **state)
{
    static const int64_t tokens[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 193};
    struct seen seen = {0};
    int bad = 0;
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        for (int keys = 1; keys < 4; keys++) {
            for (int r = 0; r < ROUTES; r++) {
                struct attention_recipe recipe = route(r);
                const struct attention_shape s = shape_of(1 + tokens[i] % 3 % 2, tokens[i], 4, 1 << (i + (size_t)r) % 3,
                                                          (i + (size_t)keys) % 2 == 0);
                recipe.k_center = keys != 1;
                recipe.dk_center = keys != 2;
                if (!gpu_leaves_out(17)) {
                    bad += check(*state, &s, &recipe, INPUT_SINK, (enum layout)((i + (size_t)r) % LAYOUTS), BACKWARD,
                                 &seen);
                }
            }
        }
    }
    seen_print("less their means", &seen);
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(forward_lengths), cmocka_unit_test(backward_lengths),
                                       cmocka_unit_test(forward_heads),   cmocka_unit_test(backward_heads),
                                       cmocka_unit_test(backward_sums),   cmocka_unit_test(backward_centred)};
    gpu_arguments(argc, argv);
    return cmocka_run_group_tests(tests, gpu_open_state, gpu_close_state);
}
