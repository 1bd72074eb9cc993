/* Refusals of shapes and formats: each names its key and a value that would do. */
#include "model/model_config.h"

#include "tests/test.h"

#include <math.h>
#include <string.h>

static struct model_config good(void)
{
    return (struct model_config){.layers = 4,
                                 .width = 64,
                                 .heads = 6,
                                 .kv_heads = 2,
                                 .head_dim = 32,
                                 .ffn = 96,
                                 .vocab = 100,
                                 .context = 128,
                                 .rope = {.theta = 10000},
                                 .norm_eps = 1e-5f,
                                 .init_std = 0.02f};
}

static void refuses(const struct model_config *c, const struct linear_recipe *r, const char *key, const char *remedy)
{
    assert_int_equal(model_config_check(c, r), ERR_CONFIG);
    if (!strstr(status_last_message(), key) || !strstr(status_last_message(), remedy)) {
        fail_msg("\"%s\" and \"%s\" expected in: %s", key, remedy, status_last_message());
    }
}

static void test_good_shapes_pass(void **state)
{
    (void)state;
    struct model_config c = good();
    struct linear_recipe r = {LINEAR_NVFP4, LINEAR_FP8, LINEAR_BF16, 1, 3};
    assert_int_equal(model_config_check(&c, &r), OK);
    c.rope = (struct rope_config){500000, ROPE_LLAMA3, 8, 1, 4, 8192};
    assert_int_equal(model_config_check(&c, &r), OK);
}

static void test_shapes_that_cannot_be(void **state)
{
    (void)state;
    struct linear_recipe r = {0};
    struct model_config c = good();
    c.ffn = 0;
    refuses(&c, &r, "model.ffn = 0", "at least 1");
    c = good();
    c.kv_heads = 4;
    refuses(&c, &r, "model.kv_heads = 4", "nearest kv_heads is 3");
    c = good();
    c.kv_heads = 12;
    refuses(&c, &r, "model.kv_heads = 12", "nearest kv_heads is 6");
    c = good();
    c.head_dim = 31;
    refuses(&c, &r, "model.head_dim = 31", "32");
    c = good();
    c.rope.theta = NAN;
    refuses(&c, &r, "model.rope_theta", "above 1");
    c = good();
    c.rope = (struct rope_config){500000, ROPE_LLAMA3, 8, 4, 4, 8192};
    refuses(&c, &r, "rope_scaling = llama3", "0 < low < high");
    c.rope.scaling = (enum rope_scaling)7;
    refuses(&c, &r, "rope_scaling", "known: none, llama3");
    c = good();
    c.norm_eps = 0;
    refuses(&c, &r, "model.norm_eps = 0", "above 0");
    c = good();
    c.init_std = -1;
    refuses(&c, &r, "model.init_std = -1", "not negative");
}

static void test_formats_that_cannot_be(void **state)
{
    (void)state;
    struct model_config c = good();
    struct linear_recipe r = {.head = LINEAR_FP8};
    refuses(&c, &r, "linear.head = fp8", "bf16");
    r = (struct linear_recipe){.first_layers_bf16 = 3, .last_layers_bf16 = 2};
    refuses(&c, &r, "first_layers_bf16 = 3", "model.layers = 4");
    r = (struct linear_recipe){.mlp = LINEAR_NVFP4};
    c.ffn = 1000;
    refuses(&c, &r, "model.ffn = 1000", "nearest 1008");
    c.ffn = 97;
    refuses(&c, &r, "model.ffn = 97", "nearest 96");
    c = good();
    c.head_dim = 20;
    r = (struct linear_recipe){.attn = LINEAR_NVFP4};
    refuses(&c, &r, "model.heads x head_dim = 120", "linear.attn = nvfp4");
    r = (struct linear_recipe){.attn = LINEAR_FP8}; /* one scale for all: any size will do */
    assert_int_equal(model_config_check(&c, &r), OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_shapes_pass),
        cmocka_unit_test(test_shapes_that_cannot_be),
        cmocka_unit_test(test_formats_that_cannot_be),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
