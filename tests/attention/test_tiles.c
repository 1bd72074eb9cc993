/* What must not depend on tiles, and codes that the backward rebuilds (docs/numerics.md, sections 5 and 7). */
#include "attention/attention_cpu.h"
#include "tests/attention/cases.h"
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

/* 200 tokens: several tiles of every size below, and a short last block. */
static const struct attention_shape shape = {1, 200, 2, 1, 64, true, 0.125f};

static size_t code_count(void)
{
    return (size_t)(shape.heads * shape.tokens * shape.tokens);
}

static struct attention_cpu_probe probe_open(void)
{
    return (struct attention_cpu_probe){calloc(code_count(), 1), calloc(code_count(), sizeof(int16_t))};
}

static void probe_close(struct attention_cpu_probe *probe)
{
    free(probe->codes);
    free(probe->exponents);
}

static struct head_view view(bf16 *data, int64_t heads)
{
    return (struct head_view){data, shape.tokens * heads * shape.head_dim, heads * shape.head_dim, shape.head_dim};
}

static void forward_with(struct attention_case *c, const struct attention_cpu_options *options)
{
    void *scratch = malloc(attention_scratch_bytes_cpu_with(&shape, &c->recipe, options) + 64);
    struct attention_fwd call = {
        .shape = shape,
        .recipe = &c->recipe,
        .q = view(c->q, shape.heads),
        .k = view(c->k, shape.kv_heads),
        .v = view(c->v, shape.kv_heads),
        .out = view(c->out, shape.heads),
        .lse_log2 = c->lse_log2,
        .saved = c->saved,
        .scratch = scratch,
    };
    attention_fwd_cpu_with(&call, options);
    free(scratch);
}

static void backward_with(struct attention_case *c, const struct attention_cpu_options *options)
{
    void *scratch = malloc(attention_scratch_bytes_cpu_with(&shape, &c->recipe, options) + 64);
    struct attention_bwd call = {
        .shape = shape,
        .recipe = &c->recipe,
        .q = view(c->q, shape.heads),
        .k = view(c->k, shape.kv_heads),
        .v = view(c->v, shape.kv_heads),
        .out = view(c->out, shape.heads),
        .dout = view(c->dout, shape.heads),
        .dq = view(c->dq, shape.heads),
        .dk = view(c->dk, shape.kv_heads),
        .dv = view(c->dv, shape.kv_heads),
        .lse_log2 = c->lse_log2,
        .saved = c->saved,
        .scratch = scratch,
    };
    attention_bwd_cpu_with(&call, options);
    free(scratch);
}

/* Everything that the two calls wrote, compared bit for bit. */
static void assert_same_results(const struct attention_case *a, const struct attention_case *b)
{
    size_t queries = sizeof(bf16) * (size_t)case_queries(a);
    size_t keys = sizeof(bf16) * (size_t)case_keys(a);
    assert_memory_equal(a->lse_log2, b->lse_log2, sizeof(float) * (size_t)(shape.heads * shape.tokens));
    assert_memory_equal(a->out, b->out, queries);
    assert_memory_equal(a->dq, b->dq, queries);
    assert_memory_equal(a->dk, b->dk, keys);
    assert_memory_equal(a->dv, b->dv, keys);
}

static void check_tiles(const struct attention_recipe *recipe, enum input_kind kind)
{
    static const struct attention_cpu_options tilings[] = {
        {.query_rows = 32, .key_tile = 32},  {.query_rows = 64, .key_tile = 64}, {.query_rows = 96, .key_tile = 128},
        {.query_rows = 128, .key_tile = 32}, {.query_rows = 32, .key_tile = 0},  {.query_rows = 256, .key_tile = 256},
    };
    struct attention_case plain;
    struct attention_cpu_probe expected = probe_open();
    struct attention_cpu_options options = ATTENTION_CPU_DEFAULT;
    options.probe = &expected;
    case_open(&plain, &shape, recipe, kind, 9);
    forward_with(&plain, &options);
    options.probe = NULL;
    backward_with(&plain, &options);
    for (size_t i = 0; i < sizeof tilings / sizeof *tilings; i++) {
        struct attention_case tiled;
        struct attention_cpu_probe found = probe_open();
        options = tilings[i];
        options.probe = &found;
        case_open(&tiled, &shape, recipe, kind, 9);
        forward_with(&tiled, &options);
        options.probe = NULL;
        backward_with(&tiled, &options);
        assert_memory_equal(found.codes, expected.codes, code_count());
        assert_memory_equal(found.exponents, expected.exponents, code_count() * sizeof(int16_t));
        assert_same_results(&tiled, &plain);
        probe_close(&found);
        case_close(&tiled);
    }
    probe_close(&expected);
    case_close(&plain);
}

/* MXFP4 codes and block exponents carry no reference, so online anchors change nothing: section 5, step 2. */
static void test_mxfp4_does_not_depend_on_tiles(void **state)
{
    (void)state;
    for (int rule = MX_NEAREST; rule <= MX_OCP; rule++) {
        for (int kind = INPUT_GAUSS; kind <= INPUT_MIX; kind++) {
            struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
            recipe.mx_rule = rule;
            check_tiles(&recipe, kind);
        }
    }
}

/* With the row maximum known (two passes), query tiles change no bit of any route. */
static void test_query_rows_change_no_bit(void **state)
{
    (void)state;
    for (int pv = PV_BF16; pv <= PV_FP4_UE5M3; pv++) {
        struct attention_recipe recipe = recipe_of(pv, BWD_REPRESENTED);
        struct attention_case a;
        struct attention_case b;
        case_open(&a, &shape, &recipe, INPUT_PEAKY3, 9);
        case_open(&b, &shape, &recipe, INPUT_PEAKY3, 9);
        forward_with(&a, &(struct attention_cpu_options){.query_rows = 32});
        backward_with(&a, &(struct attention_cpu_options){.query_rows = 32});
        forward_with(&b, &(struct attention_cpu_options){.query_rows = 160});
        backward_with(&b, &(struct attention_cpu_options){.query_rows = 160});
        assert_same_results(&a, &b);
        case_close(&a);
        case_close(&b);
    }
}

/* FP8 and NVFP4 codes below the normal range of their grid may differ with the running anchor: at most 2^-14 of the row
 * maximum a key (section 5), so O moves by less than its BF16 rounding. */
static void test_online_anchor_moves_other_routes_little(void **state)
{
    (void)state;
    static const enum pv_format values[] = {PV_FP8, PV_NVFP4, PV_FP4_UE5M3};
    for (size_t v = 0; v < 3; v++) {
        struct attention_recipe recipe = recipe_of(values[v], BWD_REPRESENTED);
        struct attention_case a;
        struct attention_case b;
        case_open(&a, &shape, &recipe, INPUT_PEAKY3, 9);
        case_open(&b, &shape, &recipe, INPUT_PEAKY3, 9);
        forward_with(&a, &ATTENTION_CPU_DEFAULT);
        forward_with(&b, &(struct attention_cpu_options){.query_rows = 64, .key_tile = 32});
        double *expected = malloc(sizeof(double) * (size_t)case_queries(&a));
        for (int64_t i = 0; i < case_queries(&a); i++) {
            expected[i] = (double)bf16_to_float(a.out[i]);
        }
        double difference = rel_l2(b.out, expected, case_queries(&a));
        print_message("%s: online against two passes, O rel-L2 %.1e\n", pv_format_names[values[v]], difference);
        assert_true(difference < 1e-3);
        free(expected);
        case_close(&a);
        case_close(&b);
    }
}

/* Forward's codes, and those that the backward rebuilds relative to floor(LSE2). */
struct rebuilt {
    struct attention_cpu_probe forward, backward;
};

static struct rebuilt rebuild(const struct attention_recipe *recipe, enum input_kind kind)
{
    struct rebuilt r = {probe_open(), probe_open()};
    struct attention_case c;
    case_open(&c, &shape, recipe, kind, 10);
    struct attention_cpu_options options = ATTENTION_CPU_DEFAULT;
    options.probe = &r.forward;
    forward_with(&c, &options);
    options.probe = &r.backward;
    backward_with(&c, &options);
    case_close(&c);
    return r;
}

static void rebuilt_close(struct rebuilt *r)
{
    probe_close(&r->forward);
    probe_close(&r->backward);
}

static void test_rebuilt_mxfp4_codes_are_the_forwards(void **state)
{
    (void)state;
    for (int map = P_EXACT; map <= P_ACCURATE; map++) {
        for (int kind = INPUT_GAUSS; kind <= INPUT_MIX; kind++) {
            for (int anchor = ANCHOR_ROW; anchor <= ANCHOR_SAMPLED; anchor++) {
                struct attention_recipe recipe = recipe_of(PV_MXFP4, BWD_REPRESENTED);
                recipe.p_map = map;
                recipe.anchor = anchor;
                struct rebuilt r = rebuild(&recipe, kind);
                assert_memory_equal(r.backward.codes, r.forward.codes, code_count());
                rebuilt_close(&r);
            }
        }
    }
}

/* Blocks of 16 keys whose scale bytes are normal on both sides hold equal codes. (The smallest normal byte is left out:
 * a scale may have been rounded up to it from below, on the coarser grid.) */
static void test_rebuilt_nvfp4_codes_are_the_forwards_where_scales_are_normal(void **state)
{
    (void)state;
    enum { BLOCK = 16, BLOCKS = (200 + BLOCK - 1) / BLOCK, SMALLEST_NORMAL = 8 };
    for (int at = 0; at < 2 * INPUT_KINDS; at++) {
        struct attention_recipe recipe = recipe_of(at % 2 == 0 ? PV_NVFP4 : PV_FP4_UE5M3, BWD_REPRESENTED);
        struct rebuilt r = rebuild(&recipe, at / 2);
        int64_t compared = 0;
        int64_t blocks = 0;
        for (int64_t row = 0; row < shape.heads * shape.tokens; row++) {
            for (int64_t block = 0; block * BLOCK <= row % shape.tokens; block++) {
                int64_t e = row * BLOCKS + block;
                blocks++;
                if (r.forward.exponents[e] <= SMALLEST_NORMAL || r.backward.exponents[e] <= SMALLEST_NORMAL) {
                    continue;
                }
                compared++;
                int64_t first = row * shape.tokens + block * BLOCK;
                int64_t n = shape.tokens - block * BLOCK < BLOCK ? shape.tokens - block * BLOCK : BLOCK;
                assert_memory_equal(r.backward.codes + first, r.forward.codes + first, (size_t)n);
            }
        }
        print_message("%s %s: %d of %d blocks have normal scales\n", pv_format_names[recipe.pv], input_names[at / 2],
                      (int)compared, (int)blocks);
        assert_true(compared * 2 > blocks);
        rebuilt_close(&r);
    }
}

/* E4M3 codes of one row differ by one power of two, that of the two references, where both are normal
 * (again without the smallest normal code). */
static void test_rebuilt_fp8_codes_agree_where_normal(void **state)
{
    (void)state;
    enum { SMALLEST_NORMAL = 8, BINADE = 8 };
    struct attention_recipe recipe = recipe_of(PV_FP8, BWD_REPRESENTED);
    for (int kind = INPUT_GAUSS; kind <= INPUT_MIX; kind++) {
        struct rebuilt r = rebuild(&recipe, kind);
        int64_t compared = 0;
        for (int64_t row = 0; row < shape.heads * shape.tokens; row++) {
            bool known = false;
            int shift = 0;
            for (int64_t j = 0; j <= row % shape.tokens; j++) {
                int forward = r.forward.codes[row * shape.tokens + j];
                int backward = r.backward.codes[row * shape.tokens + j];
                if (forward <= SMALLEST_NORMAL || backward <= SMALLEST_NORMAL) {
                    continue;
                }
                shift = known ? shift : forward - backward;
                known = true;
                assert_int_equal(forward - backward, shift);
                assert_int_equal(shift % BINADE, 0);
                compared++;
            }
        }
        assert_true(compared > (int64_t)code_count() / 20);
        rebuilt_close(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mxfp4_does_not_depend_on_tiles),
        cmocka_unit_test(test_query_rows_change_no_bit),
        cmocka_unit_test(test_online_anchor_moves_other_routes_little),
        cmocka_unit_test(test_rebuilt_mxfp4_codes_are_the_forwards),
        cmocka_unit_test(test_rebuilt_nvfp4_codes_are_the_forwards_where_scales_are_normal),
        cmocka_unit_test(test_rebuilt_fp8_codes_agree_where_normal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
