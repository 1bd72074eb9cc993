/* What must not change a bit: recomputation, threads, which samples share a call, how gradients are accumulated. */
#include "tests/model/check.h"
#include "tests/model/fixture.h"

#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 37, SAMPLES = 2 }; /* two whole NVFP4 blocks of tokens and a short one */

struct data {
    int32_t tokens[SAMPLES * TOKENS], targets[SAMPLES * TOKENS];
};

static struct data data_make(int vocab)
{
    struct data d;
    fill_tokens(d.tokens, d.targets, SAMPLES * TOKENS, vocab, 2);
    return d;
}

static struct model_batch batch_of(const struct data *d, int64_t first, int64_t count)
{
    return (struct model_batch){.tokens = d->tokens + first * TOKENS,
                                .targets = d->targets + first * TOKENS,
                                .batch = count,
                                .length = TOKENS,
                                .sample = 100 + (uint64_t)first,
                                .update = 3};
}

static struct attention_recipe attention_of(enum linear_format format)
{
    struct attention_recipe recipe = attention_recipe_bf16();
    if (format != LINEAR_BF16) {
        recipe.qk = QK_NVFP4;
        recipe.pv = format == LINEAR_FP8 ? PV_FP8 : PV_MXFP4;
        recipe.mx_rule = MX_OCP;
        attention_recipe_preset(&recipe, format == LINEAR_FP8 ? BWD_REPRESENTED : BWD_EXACT_STAT);
    }
    return recipe;
}

/* One model for each linear format, with an attention that suits it, tied and with qk_norm in turn. */
static void open_format(struct fixture *f, enum linear_format format, enum recompute recompute, int64_t batch)
{
    struct model_config c = small_config();
    struct model_options o = small_options(batch, TOKENS);
    c.tied = format == LINEAR_FP8;
    c.qk_norm = format == LINEAR_NVFP4;
    o.linear.attn = o.linear.mlp = format;
    o.attention = attention_of(format);
    o.recompute = recompute;
    fixture_open(f, &c, &o);
}

static const enum linear_format formats[] = {LINEAR_BF16, LINEAR_FP8, LINEAR_NVFP4};
enum { FORMATS = sizeof formats / sizeof *formats };

/* Runs both samples in one call; the caller frees the gradient. */
static float *gradient_of_batch(enum linear_format format, enum recompute recompute, int threads,
                                struct model_loss *loss)
{
    use_threads(threads);
    struct fixture f;
    open_format(&f, format, recompute, SAMPLES);
    struct data d = data_make(f.config.vocab);
    struct model_batch batch = batch_of(&d, 0, SAMPLES);
    *loss = fixture_run(&f, &batch, 0.01f, false);
    float *grads = f.grads;
    f.grads = NULL;
    fixture_close(&f);
    use_threads(1);
    return grads;
}

static size_t elements_of(enum linear_format format)
{
    struct fixture f;
    open_format(&f, format, RECOMPUTE_NONE, 1);
    size_t n = f.params.elements;
    fixture_close(&f);
    return n;
}

static void test_recomputation_and_threads_change_no_bit(void **state)
{
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        struct model_loss plain_loss, other_loss;
        float *plain = gradient_of_batch(formats[i], RECOMPUTE_NONE, 1, &plain_loss);
        float *recomputed = gradient_of_batch(formats[i], RECOMPUTE_BLOCK, 1, &other_loss);
        assert_bits_equal(plain, recomputed, elements_of(formats[i]));
        assert_true(plain_loss.loss_sum == other_loss.loss_sum);
        float *threaded = gradient_of_batch(formats[i], RECOMPUTE_NONE, 2, &other_loss);
        assert_bits_equal(plain, threaded, elements_of(formats[i]));
        assert_true(plain_loss.loss_sum == other_loss.loss_sum);
        assert_true(isfinite(plain_loss.loss_sum));
        free(plain);
        free(recomputed);
        free(threaded);
    }
}

/* A batch, calls that accumulate, and gradients of single calls added outside: one result. */
static void test_a_batch_is_the_sum_of_its_samples(void **state)
{
    (void)state;
    for (int i = 0; i < FORMATS; i++) {
        struct model_loss whole, first, second;
        float *batch_grads = gradient_of_batch(formats[i], RECOMPUTE_NONE, 1, &whole);
        struct fixture f;
        open_format(&f, formats[i], RECOMPUTE_NONE, 1);
        size_t n = f.params.elements;
        struct data d = data_make(f.config.vocab);
        struct model_batch one = batch_of(&d, 0, 1), two = batch_of(&d, 1, 1);
        first = fixture_run(&f, &one, 0.01f, false);
        float *sum = malloc(n * sizeof *sum);
        memcpy(sum, f.grads, n * sizeof *sum);
        second = fixture_run(&f, &two, 0.01f, true);
        assert_bits_equal(batch_grads, f.grads, n);
        assert_true(whole.loss_sum == first.loss_sum + second.loss_sum);
        assert_int_equal(whole.valid, first.valid + second.valid);
        fixture_run(&f, &two, 0.01f, false);
        for (size_t k = 0; k < n; k++) {
            sum[k] += f.grads[k];
        }
        assert_bits_equal(batch_grads, sum, n);
        free(sum);
        free(batch_grads);
        fixture_close(&f);
    }
}

/* The random numbers of NVFP4 are keyed by update and sample; nothing else changes between these calls. */
static void test_stochastic_rounding_follows_sample_and_update(void **state)
{
    (void)state;
    struct fixture f;
    open_format(&f, LINEAR_NVFP4, RECOMPUTE_NONE, 1);
    struct data d = data_make(f.config.vocab);
    size_t bytes = f.params.elements * sizeof(float);
    float *first = malloc(bytes);
    struct model_batch batch = batch_of(&d, 0, 1);
    struct model_loss loss = fixture_run(&f, &batch, 0.01f, false);
    memcpy(first, f.grads, bytes);
    fixture_run(&f, &batch, 0.01f, false);
    assert_memory_equal(first, f.grads, bytes);
    batch.update++;
    assert_true(fixture_run(&f, &batch, 0.01f, false).loss_sum == loss.loss_sum);
    assert_memory_not_equal(first, f.grads, bytes);
    batch.update--;
    batch.sample++;
    fixture_run(&f, &batch, 0.01f, false);
    assert_memory_not_equal(first, f.grads, bytes);
    free(first);
    fixture_close(&f);
}

static void test_logits_do_not_depend_on_the_rows_asked_for(void **state)
{
    (void)state;
    struct fixture f;
    open_format(&f, LINEAR_BF16, RECOMPUTE_NONE, SAMPLES);
    struct data d = data_make(f.config.vocab);
    struct model_batch batch = batch_of(&d, 0, SAMPLES);
    struct model_loss loss;
    model_forward(f.model, &batch, false, &loss);
    int64_t vocab = f.config.vocab;
    float *all = malloc(sizeof *all * (size_t)(SAMPLES * TOKENS * vocab)), *some = malloc(sizeof *some * 3 * 40);
    model_logits(f.model, 0, SAMPLES * TOKENS, all);
    model_logits(f.model, TOKENS - 1, 3, some);
    assert_bits_equal(all + (TOKENS - 1) * vocab, some, (size_t)(3 * vocab));
    free(all);
    free(some);
    fixture_close(&f);
}

static void test_statistics_do_not_count_recomputation(void **state)
{
    (void)state;
    struct attention_stats seen[2];
    for (int i = 0; i < 2; i++) {
        struct fixture f;
        open_format(&f, LINEAR_BF16, i ? RECOMPUTE_BLOCK : RECOMPUTE_NONE, 1);
        struct data d = data_make(f.config.vocab);
        struct model_batch batch = batch_of(&d, 0, 1);
        fixture_run(&f, &batch, 1, false);
        model_stats_reset(f.model);
        fixture_run(&f, &batch, 1, false);
        seen[i] = model_stats(f.model)[1];
        fixture_close(&f);
    }
    assert_memory_equal(&seen[0], &seen[1], sizeof *seen);
    assert_true(seen[0].logit_max > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_recomputation_and_threads_change_no_bit),
        cmocka_unit_test(test_a_batch_is_the_sum_of_its_samples),
        cmocka_unit_test(test_stochastic_rounding_follows_sample_and_update),
        cmocka_unit_test(test_logits_do_not_depend_on_the_rows_asked_for),
        cmocka_unit_test(test_statistics_do_not_count_recomputation),
    };
    use_threads(1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
