/* Bytes that the GPU plan of the 8B model takes. Measuring needs no GPU. */
#include "model/model.h"

#include "tests/test.h"

#include <string.h>

static struct model_config config_8b(void)
{
    return (struct model_config){.layers = 32,
                                 .width = 4096,
                                 .heads = 32,
                                 .kv_heads = 8,
                                 .head_dim = 128,
                                 .ffn = 14336,
                                 .vocab = 128256,
                                 .context = 131072,
                                 .rope = {.theta = 500000},
                                 .norm_eps = 1e-5f,
                                 .init_std = 0.02f};
}

#if WITH_CUDA
static size_t attention_no_bytes(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    (void)shape;
    (void)recipe;
    return 0;
}

static const char *attention_no_refusal(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    (void)shape;
    (void)recipe;
    return NULL;
}

/* The model's own bytes: attention keeps and needs nothing. */
static const struct attention_variant nothing = {.name = "nothing",
                                                 .device = DEVICE_CUDA,
                                                 .refuses = attention_no_refusal,
                                                 .saved_bytes = attention_no_bytes,
                                                 .scratch_bytes = attention_no_bytes};

static size_t model_bytes(enum recompute recompute, int64_t tokens)
{
    struct model_config c = config_8b();
    struct model_options o = {.variant = &nothing,
                              .attention = attention_recipe_bf16(),
                              .recompute = recompute,
                              .device = DEVICE_CUDA,
                              .grad_type = DTYPE_BF16,
                              .batch = 1,
                              .tokens = tokens};
    struct param_list params;
    struct arena arena;
    struct model *model;
    assert_int_equal(param_list_open(&params, &c), OK);
    arena_measure(&arena, "model");
    assert_int_equal(model_plan(&model, &arena, &c, &params, &o), OK);
    assert_int_equal(arena.used, arena.high_water);
    model_close(model);
    param_list_close(&params);
    return arena.used;
}

/* KiB a token and layer, as model/model_cuda.h says. What all layers share comes once: outputs of norms, a gradient of
 * the stream, its last row (40 KiB), small arrays, and with recomputation one layer's activations. */
static void test_bytes_a_token_and_layer(void **state)
{
    (void)state;
    static const struct {
        enum recompute recompute;
        double kib, shared_kib;
    } table[] = {{RECOMPUTE_NONE, 92.125, 48}, {RECOMPUTE_GATE_UP, 36.125, 48 + 56}, {RECOMPUTE_BLOCK, 8, 48 + 84.125}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        enum { SHORT = 4096, LONG = 8192 };
        /* At both lengths the head's scratch is larger than a layer's, which shares its memory. */
        double more = (double)(model_bytes(table[i].recompute, LONG) - model_bytes(table[i].recompute, SHORT));
        double kib = more / (LONG - SHORT) / 1024, least = 32 * table[i].kib;
        if (kib < least || kib > least + table[i].shared_kib) {
            fail_msg("recompute %s: %.2f KiB a token, expected %.2f to %.2f", recompute_names[table[i].recompute], kib,
                     least, least + table[i].shared_kib);
        }
    }
}

/* Beside 74.8 GiB of weights, gradients, split master and BF16 moments, in the 139 GiB of an H200. */
static void test_8b_fits_one_card(void **state)
{
    (void)state;
    const double left = 139 - 74.8;
    assert_true((double)model_bytes(RECOMPUTE_NONE, 4096) / 0x1p30 < 14);
    assert_true((double)model_bytes(RECOMPUTE_NONE, 16384) / 0x1p30 < left);
    assert_true((double)model_bytes(RECOMPUTE_GATE_UP, 16384) / 0x1p30 < 22);
    assert_true((double)model_bytes(RECOMPUTE_BLOCK, 65536) / 0x1p30 < left);
}
#else
static void test_a_build_without_cuda_refuses(void **state)
{
    (void)state;
    struct model_config c = config_8b();
    struct model_options o = {.device = DEVICE_CUDA, .batch = 1, .tokens = 16};
    struct param_list params = {0};
    struct arena arena;
    struct model *model;
    arena_measure(&arena, "model");
    assert_int_equal(model_plan(&model, &arena, &c, &params, &o), ERR_UNSUPPORTED);
    assert_non_null(strstr(status_last_message(), "CUDA=1"));
    model_close(model);
}
#endif

/* What only the GPU does, by name. */
static void test_the_cpu_refuses_gate_up(void **state)
{
    (void)state;
    struct model_config c = config_8b();
    struct model_options o = {
        .attention = attention_recipe_bf16(), .recompute = RECOMPUTE_GATE_UP, .batch = 1, .tokens = 16};
    struct attention_shape shape = {
        .batch = 1, .tokens = 16, .heads = c.heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim, .causal = true};
    struct param_list params = {0};
    struct arena arena;
    struct model *model;
    assert_int_equal(attention_choose(&shape, &o.attention, DEVICE_CPU, "auto", &o.variant), OK);
    arena_measure(&arena, "model");
    assert_int_equal(model_plan(&model, &arena, &c, &params, &o), ERR_UNSUPPORTED);
    assert_non_null(strstr(status_last_message(), "recompute = gate_up"));
    model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#if WITH_CUDA
        cmocka_unit_test(test_bytes_a_token_and_layer),
        cmocka_unit_test(test_8b_fits_one_card),
#else
        cmocka_unit_test(test_a_build_without_cuda_refuses),
#endif
        cmocka_unit_test(test_the_cpu_refuses_gate_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
