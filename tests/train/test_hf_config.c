/* config.json: the fields of the published Llama 3.1 8B file, which `transformers` reads. */
#include "tests/test.h"
#include "train/hf_config.h"

static void assert_integer(const json_t *root, const char *key, long long value)
{
    assert_true(json_is_integer(json_object_get(root, key)));
    assert_int_equal(json_integer_value(json_object_get(root, key)), value);
}

static void test_llama_3_1_8b(void **state)
{
    (void)state;
    struct model_config c = {.layers = 32,
                             .width = 4096,
                             .heads = 32,
                             .kv_heads = 8,
                             .head_dim = 128,
                             .ffn = 14336,
                             .vocab = 128256,
                             .context = 131072,
                             .rope = {500000, ROPE_LLAMA3, 8, 1, 4, 8192},
                             .norm_eps = 1e-5F,
                             .init_std = 0.02F};
    json_t *root = hf_config(&c);
    assert_string_equal(json_string_value(json_array_get(json_object_get(root, "architectures"), 0)),
                        "LlamaForCausalLM");
    assert_string_equal(json_string_value(json_object_get(root, "model_type")), "llama");
    assert_integer(root, "hidden_size", 4096);
    assert_integer(root, "intermediate_size", 14336);
    assert_integer(root, "num_hidden_layers", 32);
    assert_integer(root, "num_attention_heads", 32);
    assert_integer(root, "num_key_value_heads", 8);
    assert_integer(root, "vocab_size", 128256);
    assert_integer(root, "max_position_embeddings", 131072);
    assert_integer(root, "bos_token_id", 128000);
    /* Exactly these decimals, not their FP32 neighbours. */
    assert_true(json_number_value(json_object_get(root, "rms_norm_eps")) == 1e-5);
    assert_true(json_number_value(json_object_get(root, "initializer_range")) == 0.02);
    assert_true(json_number_value(json_object_get(root, "rope_theta")) == 500000);
    const json_t *scaling = json_object_get(root, "rope_scaling");
    assert_string_equal(json_string_value(json_object_get(scaling, "rope_type")), "llama3");
    assert_true(json_number_value(json_object_get(scaling, "factor")) == 8);
    assert_true(json_number_value(json_object_get(scaling, "low_freq_factor")) == 1);
    assert_true(json_number_value(json_object_get(scaling, "high_freq_factor")) == 4);
    assert_integer(scaling, "original_max_position_embeddings", 8192);
    assert_true(json_is_false(json_object_get(root, "tie_word_embeddings")));
    json_decref(root);
}

static void test_other_shapes(void **state)
{
    (void)state;
    struct model_config c = {.layers = 1, .vocab = 320, .tied = true, .qk_norm = true, .norm_eps = 1e-6F};
    json_t *root = hf_config(&c);
    assert_string_equal(json_string_value(json_object_get(root, "model_type")), "qwen3");
    assert_true(json_is_null(json_object_get(root, "rope_scaling")));
    assert_true(json_is_true(json_object_get(root, "tie_word_embeddings")));
    assert_integer(root, "eos_token_id", 257);
    json_decref(root);
    c.vocab = 1000;
    root = hf_config(&c);
    assert_null(json_object_get(root, "eos_token_id"));
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_llama_3_1_8b), cmocka_unit_test(test_other_shapes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
