/* The list of parameters: names, places, counts of Llama 3.1 8B, and initial values. */
#include "model/params.h"

#include "core/rng.h"
#include "model/model.h"

#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct model_config small(void)
{
    return (struct model_config){.layers = 3,
                                 .width = 24,
                                 .heads = 3,
                                 .kv_heads = 1,
                                 .head_dim = 10,
                                 .ffn = 31,
                                 .vocab = 500,
                                 .context = 8,
                                 .init_std = 0.02f};
}

static struct model_config llama_8b(void)
{
    return (struct model_config){.layers = 32,
                                 .width = 4096,
                                 .heads = 32,
                                 .kv_heads = 8,
                                 .head_dim = 128,
                                 .ffn = 14336,
                                 .vocab = 128256,
                                 .context = 131072};
}

static void test_llama_8b_has_its_parameters_and_flops(void **state)
{
    (void)state;
    struct model_config c = llama_8b();
    struct param_list list;
    assert_int_equal(param_list_open(&list, &c), OK);
    assert_int_equal(list.parameters, 8030261248);
    assert_int_equal(list.count, 3 + 9 * 32);
    double flops = model_flops_per_token(&c, &list, 4096);
    assert_true(flops == 6.0 * (8030261248.0 - 128256.0 * 4096.0) + 12.0 * 32 * 4096 * 4096);
    assert_true(fabs(flops / 1e9 - 51.47) < 0.005);
    /* A tied matrix is multiplied as the head does: the same work from fewer parameters. */
    param_list_close(&list);
    c.tied = true;
    assert_int_equal(param_list_open(&list, &c), OK);
    assert_int_equal(list.parameters, 8030261248 - 128256 * 4096);
    assert_true(model_flops_per_token(&c, &list, 4096) == flops);
    param_list_close(&list);
}

static void test_names_in_order(void **state)
{
    (void)state;
    static const char *const names[] = {
        "self_attn.q_proj", "self_attn.k_proj",         "self_attn.v_proj", "self_attn.q_norm", "self_attn.k_norm",
        "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};
    struct model_config c = small();
    struct param_list list;
    c.qk_norm = true;
    assert_int_equal(param_list_open(&list, &c), OK);
    assert_string_equal(list.params[0].name, "model.embed_tokens.weight");
    for (int layer = 0; layer < 3; layer++) {
        const struct param *p = list.params + 1 + 11 * layer;
        char name[80];
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", layer);
        assert_string_equal(p->name, name);
        for (int i = 0; i < 10; i++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, names[i]);
            assert_string_equal(p[1 + i].name, name);
            assert_int_equal(p[1 + i].layer, layer);
            assert_int_equal(p[1 + i].decays, p[1 + i].kind != PARAM_NORM);
        }
    }
    assert_string_equal(list.params[34].name, "model.norm.weight");
    assert_string_equal(list.params[35].name, "lm_head.weight");
    assert_int_equal(list.count, 36);
    assert_ptr_equal(param_list_find(&list, "lm_head.weight"), &list.params[35]);
    assert_null(param_list_find(&list, "output.weight"));
    param_list_close(&list);
    c.tied = true;
    assert_int_equal(param_list_open(&list, &c), OK);
    assert_null(param_list_find(&list, "lm_head.weight"));
    param_list_close(&list);
}

static void test_places_do_not_overlap_and_groups_touch(void **state)
{
    (void)state;
    struct model_config c = small();
    struct param_list list;
    assert_int_equal(param_list_open(&list, &c), OK);
    size_t end = 0, parameters = 0;
    for (int i = 0; i < list.count; i++) {
        const struct param *p = &list.params[i];
        bool joins = strstr(p->name, "k_proj") || strstr(p->name, "v_proj") || strstr(p->name, "up_proj");
        assert_true(joins ? p->offset == end : p->offset % 64 == 0 && p->offset >= end && p->offset < end + 64);
        end = p->offset + (size_t)(p->rows * p->cols);
        parameters += (size_t)(p->rows * p->cols);
    }
    assert_true(list.elements >= end && list.elements < end + 64 && list.elements % 64 == 0);
    assert_int_equal(list.parameters, parameters);
    param_list_close(&list);
}

static float *values_of(const struct model_config *c, uint64_t seed, struct param_list *list)
{
    assert_int_equal(param_list_open(list, c), OK);
    float *values = malloc(list->elements * sizeof *values);
    assert_non_null(values);
    memset(values, 0xff, list->elements * sizeof *values);
    param_list_init(list, c, seed, values);
    return values;
}

/* Another model that shares a name gives that tensor the same first elements: only seed, name and index count. */
static void test_initial_values_depend_on_seed_name_and_element(void **state)
{
    (void)state;
    struct model_config c = small(), other = small();
    struct param_list list, other_list;
    other.layers = 5;
    other.vocab = 300;
    other.ffn = 64;
    other.qk_norm = true;
    float *values = values_of(&c, 42, &list), *others = values_of(&other, 42, &other_list);
    static const char *const names[] = {"model.embed_tokens.weight", "model.layers.2.self_attn.v_proj.weight",
                                        "model.layers.1.mlp.gate_proj.weight", "lm_head.weight"};
    for (int i = 0; i < 4; i++) {
        const struct param *a = param_list_find(&list, names[i]), *b = param_list_find(&other_list, names[i]);
        int64_t n = a->rows * a->cols < b->rows * b->cols ? a->rows * a->cols : b->rows * b->cols;
        assert_memory_equal(values + a->offset, others + b->offset, (size_t)n * sizeof *values);
        char stream[96];
        snprintf(stream, sizeof stream, "init/%s", names[i]);
        assert_true(values[a->offset + 5] == 0.02f * rng_normal(42, rng_stream(stream), 5));
    }
    param_list_close(&other_list);
    float *seeded = values_of(&c, 43, &other_list);
    assert_true(seeded[0] != values[0] && seeded[1] != values[1]);
    free(values);
    free(others);
    free(seeded);
    param_list_close(&list);
    param_list_close(&other_list);
}

static void test_initial_spread(void **state)
{
    (void)state;
    struct model_config c = small();
    struct param_list list;
    float *values = values_of(&c, 1, &list);
    size_t end = 0;
    for (int i = 0; i < list.count; i++) {
        const struct param *p = &list.params[i];
        size_t n = (size_t)(p->rows * p->cols);
        for (; end < p->offset; end++) {
            assert_true(values[end] == 0);
        }
        double squares = 0;
        for (size_t k = 0; k < n; k++) {
            double x = (double)values[p->offset + k];
            assert_true(p->kind != PARAM_NORM || x == 1);
            squares += x * x;
        }
        bool residual = strstr(p->name, "o_proj") || strstr(p->name, "down_proj");
        double std = residual ? 0.02 / sqrt(6) : 0.02;
        /* The sample deviation of n numbers errs by 1 / sqrt(2 n); five times that. */
        if (p->kind != PARAM_NORM) {
            assert_true(fabs(sqrt(squares / (double)n) / std - 1) < 5 / sqrt(2.0 * (double)n));
        }
        end = p->offset + n;
    }
    free(values);
    param_list_close(&list);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama_8b_has_its_parameters_and_flops),
        cmocka_unit_test(test_names_in_order),
        cmocka_unit_test(test_places_do_not_overlap_and_groups_touch),
        cmocka_unit_test(test_initial_values_depend_on_seed_name_and_element),
        cmocka_unit_test(test_initial_spread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
