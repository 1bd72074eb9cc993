/* The model's contract at its edges: ignored targets, non-finite weights, the order of notifications, refusals. */
#include "model/linear.h"
#include "tests/model/check.h"
#include "tests/model/fixture.h"

#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 21 };

static void test_all_targets_ignored_gives_exactly_zero_gradients(void **state)
{
    (void)state;
    static const enum linear_format formats[] = {LINEAR_BF16, LINEAR_FP8, LINEAR_NVFP4};
    for (int i = 0; i < 3; i++) {
        struct fixture f;
        struct model_config c = small_config();
        struct model_options o = small_options(1, TOKENS);
        c.tied = i == 1;
        o.linear.attn = o.linear.mlp = formats[i];
        fixture_open(&f, &c, &o);
        int32_t tokens[TOKENS], targets[TOKENS];
        fill_tokens(tokens, targets, TOKENS, c.vocab, 1);
        for (int t = 0; t < TOKENS; t++) {
            targets[t] = -1;
        }
        struct model_batch batch = {.tokens = tokens, .targets = targets, .batch = 1, .length = TOKENS};
        struct model_loss loss = fixture_run(&f, &batch, 1, false);
        assert_true(loss.loss_sum == 0);
        assert_int_equal(loss.valid, 0);
        for (size_t k = 0; k < f.params.elements; k++) {
            assert_true(f.grads[k] == 0);
        }
        fixture_close(&f);
    }
}

/* An ignored target weighs nothing, but its token is still attended to: as if the row's loss were left out. */
static void test_an_ignored_target_leaves_only_its_own_term_out(void **state)
{
    (void)state;
    struct fixture f;
    struct model_config c = small_config();
    struct model_options o = small_options(1, TOKENS);
    fixture_open(&f, &c, &o);
    int32_t tokens[TOKENS], targets[TOKENS], alone[TOKENS];
    fill_tokens(tokens, targets, TOKENS, c.vocab, 1);
    double sum = 0;
    int64_t valid = 0;
    struct model_loss loss;
    for (int t = 0; t < TOKENS; t++) {
        for (int k = 0; k < TOKENS; k++) {
            alone[k] = k == t ? targets[t] : -1;
        }
        struct model_batch one = {.tokens = tokens, .targets = alone, .batch = 1, .length = TOKENS};
        model_forward(f.model, &one, false, &loss);
        sum += loss.loss_sum;
        valid += loss.valid;
    }
    struct model_batch batch = {.tokens = tokens, .targets = targets, .batch = 1, .length = TOKENS};
    model_forward(f.model, &batch, false, &loss);
    assert_true(loss.loss_sum == sum);
    assert_int_equal(loss.valid, valid);
    assert_int_equal(loss.valid, TOKENS - 3);
    fixture_close(&f);
}

/* One bad element of any tensor must show in the loss, in every linear format; where attention's small formats have no
 * code for it, in attention's count. */
static void check_bad_weights(enum linear_format format, bool small_attention)
{
    static const bf16 bad[] = {0x7fc0, 0xff80}; /* NaN, -Inf */
    for (int i = 0; i < 2; i++) {
        struct fixture f;
        struct model_config c = small_config();
        struct model_options o = small_options(1, TOKENS);
        c.qk_norm = i == 1;
        o.linear.attn = o.linear.mlp = format;
        if (small_attention) {
            o.attention.qk = QK_NVFP4;
            o.attention.pv = PV_FP8;
            attention_recipe_preset(&o.attention, BWD_REPRESENTED);
        }
        fixture_open(&f, &c, &o);
        int32_t tokens[TOKENS], targets[TOKENS];
        fill_tokens(tokens, targets, TOKENS, c.vocab, 1);
        struct model_batch batch = {.tokens = tokens, .targets = targets, .batch = 1, .length = TOKENS};
        for (int p = 0; p < f.params.count; p++) {
            const struct param *param = &f.params.params[p];
            size_t row = param->kind == PARAM_EMBED ? (size_t)tokens[2] : 0;
            bf16 *element = f.weights + param->offset + row * (size_t)param->cols + 3, old = *element;
            *element = bad[(p + i) % 2];
            struct model_loss loss;
            model_stats_reset(f.model);
            model_set_weights(f.model, f.weights);
            model_forward(f.model, &batch, false, &loss);
            bool counted = small_attention && param->layer >= 0 && model_stats(f.model)[param->layer].non_finite > 0;
            if (isfinite(loss.loss_sum) && !counted) {
                fail_msg("%s in %s: loss %g", param->name, linear_format_names[format], loss.loss_sum);
            }
            *element = old;
        }
        fixture_close(&f);
    }
}

static void test_a_nan_weight_is_never_swallowed(void **state)
{
    (void)state;
    for (int format = LINEAR_BF16; format <= LINEAR_NVFP4; format++) {
        check_bad_weights((enum linear_format)format, false);
        check_bad_weights((enum linear_format)format, true);
    }
}

struct seen {
    const struct fixture *f;
    int count, layers[8];
    float *copies[8];
};

static void on_layer(void *context, int layer)
{
    struct seen *s = context;
    assert_true(s->count < 8);
    size_t bytes = s->f->params.elements * sizeof(float);
    s->copies[s->count] = malloc(bytes);
    memcpy(s->copies[s->count], s->f->grads, bytes);
    s->layers[s->count++] = layer;
}

/* When a layer is announced, its gradients are final, for two samples too. */
static void test_layers_are_announced_when_they_are_final(void **state)
{
    (void)state;
    struct fixture f;
    struct model_config c = small_config();
    struct model_options o = small_options(2, TOKENS);
    fixture_open(&f, &c, &o);
    int32_t tokens[2 * TOKENS], targets[2 * TOKENS];
    fill_tokens(tokens, targets, 2 * TOKENS, c.vocab, 1);
    struct model_batch batch = {.tokens = tokens, .targets = targets, .batch = 2, .length = TOKENS};
    struct seen seen = {.f = &f};
    struct model_loss loss;
    model_forward(f.model, &batch, true, &loss);
    model_backward(f.model,
                   &(struct model_backward){
                       .batch = &batch, .loss_scale = 1, .grads = f.grads, .on_layer = on_layer, .context = &seen});
    assert_int_equal(seen.count, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(seen.layers[i], 2 - i);
        for (int p = 0; p < f.params.count; p++) {
            const struct param *param = &f.params.params[p];
            int owner = param->kind == PARAM_EMBED ? -1 : param->layer < 0 ? c.layers : param->layer;
            if (owner >= seen.layers[i]) {
                assert_bits_equal(seen.copies[i] + param->offset, f.grads + param->offset,
                                  (size_t)(param->rows * param->cols));
            }
        }
        free(seen.copies[i]);
    }
    fixture_close(&f);
}

/* Layers that stay in BF16 give the very bits of a BF16 model as far as they come first. */
static void test_a_layer_that_stays_bf16_really_does(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct linear_recipe r = {.attn = LINEAR_FP8, .mlp = LINEAR_NVFP4, .first_layers_bf16 = 1, .last_layers_bf16 = 1};
    c.layers = 5;
    for (int l = 0; l < 5; l++) {
        struct layer_formats f = model_layer_formats(&c, &r, l);
        assert_int_equal(f.attn, l == 0 || l == 4 ? LINEAR_BF16 : LINEAR_FP8);
        assert_int_equal(f.mlp, l == 0 || l == 4 ? LINEAR_BF16 : LINEAR_NVFP4);
    }
    c.layers = 2;
    double loss[3];
    for (int i = 0; i < 3; i++) { /* BF16; quantised but for both layers; quantised in the last */
        struct fixture f;
        struct model_options o = small_options(1, TOKENS);
        if (i > 0) {
            o.linear = (struct linear_recipe){
                .attn = LINEAR_FP8, .mlp = LINEAR_NVFP4, .first_layers_bf16 = 1, .last_layers_bf16 = i == 1};
        }
        fixture_open(&f, &c, &o);
        int32_t tokens[TOKENS], targets[TOKENS];
        fill_tokens(tokens, targets, TOKENS, c.vocab, 1);
        struct model_batch batch = {.tokens = tokens, .targets = targets, .batch = 1, .length = TOKENS};
        loss[i] = fixture_run(&f, &batch, 1, false).loss_sum;
        fixture_close(&f);
    }
    assert_true(loss[0] == loss[1]);
    assert_true(loss[0] != loss[2]);
}

/* Replaces a matrix of `rows` from the named parameter on by the values that its format represents. */
static void represent(struct fixture *f, enum linear_format format, const char *name, int64_t rows)
{
    const struct param *p = param_list_find(&f->params, name);
    size_t bytes = (size_t)(rows * p->cols) * sizeof(bf16);
    bf16 *values = malloc(bytes);
    linear_represent_weight_cpu(format, f->weights + p->offset, rows, p->cols, values);
    assert_memory_not_equal(f->weights + p->offset, values, bytes);
    memcpy(f->weights + p->offset, values, bytes);
    free(values);
}

/* A quantised model sees the represented weights only: weights that are representable already change nothing. */
static void test_quantised_layers_use_the_represented_weights(void **state)
{
    (void)state;
    for (int format = LINEAR_FP8; format <= LINEAR_NVFP4; format++) {
        struct fixture f;
        struct model_config c = small_config();
        struct model_options o = small_options(1, TOKENS);
        c.layers = 1;
        o.linear.attn = o.linear.mlp = (enum linear_format)format;
        fixture_open(&f, &c, &o);
        int32_t tokens[TOKENS], targets[TOKENS];
        fill_tokens(tokens, targets, TOKENS, c.vocab, 1);
        struct model_batch batch = {.tokens = tokens, .targets = targets, .batch = 1, .length = TOKENS};
        size_t bytes = f.params.elements * sizeof(float);
        float *before = malloc(bytes);
        double loss = fixture_run(&f, &batch, 1, false).loss_sum;
        memcpy(before, f.grads, bytes);
        represent(&f, o.linear.attn, "model.layers.0.self_attn.q_proj.weight", 64 + 32 + 32);
        represent(&f, o.linear.attn, "model.layers.0.self_attn.o_proj.weight", 32);
        represent(&f, o.linear.mlp, "model.layers.0.mlp.gate_proj.weight", 48 + 48);
        represent(&f, o.linear.mlp, "model.layers.0.mlp.down_proj.weight", 32);
        model_set_weights(f.model, f.weights);
        assert_true(fixture_run(&f, &batch, 1, false).loss_sum == loss);
        assert_memory_equal(before, f.grads, bytes);
        free(before);
        fixture_close(&f);
    }
}

static void test_plan_refuses_what_cannot_run(void **state)
{
    (void)state;
    struct model_config c = small_config();
    struct model_options o = small_options(1, 8);
    struct param_list params;
    struct arena arena;
    struct model *model;
    o.variant = attention_variants[0];
    assert_int_equal(param_list_open(&params, &c), OK);
    arena_measure(&arena, "model");
    o.tokens = c.context + 1;
    assert_int_equal(model_plan(&model, &arena, &c, &params, &o), ERR_CONFIG);
    assert_non_null(strstr(status_last_message(), "context"));
    model_close(model);
    o.tokens = 8;
    o.attention.sink_keys_fp8 = 7; /* not a multiple of 32 */
    assert_int_equal(model_plan(&model, &arena, &c, &params, &o), ERR_UNSUPPORTED);
    model_close(model);
    param_list_close(&params);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_targets_ignored_gives_exactly_zero_gradients),
        cmocka_unit_test(test_an_ignored_target_leaves_only_its_own_term_out),
        cmocka_unit_test(test_a_nan_weight_is_never_swallowed),
        cmocka_unit_test(test_layers_are_announced_when_they_are_final),
        cmocka_unit_test(test_a_layer_that_stays_bf16_really_does),
        cmocka_unit_test(test_quantised_layers_use_the_represented_weights),
        cmocka_unit_test(test_plan_refuses_what_cannot_run),
    };
    use_threads(1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
