/* The whole model against an FP64 restatement of it with the same BF16 weights: loss, logits, and every gradient
 * against central differences of the restatement's loss.
 *
 * Tolerance: a rounding to BF16 errs by 2^-8 / sqrt(3) / 1.4 = .0016 of a value on average, and a gradient passes about
 * ten of them a layer in forward and ten in backward: sqrt(40) * .0016 = .010 relative L2 for two layers if errors only
 * added up; gates, softmax and the norms' projections enlarge them. Measured: .007 to .04. The limit is .05, and .03
 * for what cannot be rounding: the length of the part of the gradient that lies along the true one. Leaving out one
 * term of any backward moves a tensor by more than .1. */
#include "core/rng.h"
#include "tests/model/check.h"
#include "tests/model/fixture.h"
#include "tests/model/oracle.h"

#include "tests/test.h"

#include <math.h>

#include <stdlib.h>

enum { TOKENS = 13, SAMPLED = 80 };

struct run {
    const struct fixture *f;
    const int32_t *tokens, *targets;
    double *w;
};

static double loss_of(const void *context)
{
    const struct run *r = context;
    return oracle_loss(&r->f->config, &r->f->params, r->w, r->tokens, r->targets, TOKENS, NULL);
}

/* Up to SAMPLED elements spread over the tensor, as one vector: relative L2 error, and the part along the truth,
 * less 1.
 */
static double sampled_error(const struct run *r, const struct param *p, double scale, double *along)
{
    int64_t n = p->rows * p->cols, count = n < SAMPLED ? n : SAMPLED;
    double error = 0, norm = 0, product = 0;
    for (int64_t k = 0; k < count; k++) {
        size_t at = p->offset + (size_t)(k * n / count + (count < n ? k % (n / count) : 0));
        double want = scale * central_difference(loss_of, r, &r->w[at], 1e-4);
        double e = (double)r->f->grads[at] - want;
        error += e * e;
        norm += want * want;
        product += want * (double)r->f->grads[at];
    }
    *along = product / norm - 1;
    return sqrt(error / norm);
}

/* The derivative along a random direction of the whole tensor: no element escapes. Relative to the gradient's length,
 * which a random direction of normal numbers sees on average. */
static double direction_error(const struct run *r, const struct param *p, double scale)
{
    int64_t n = p->rows * p->cols;
    const double h = 1e-5;
    double got = 0, squares = 0, above, below;
    for (int64_t k = 0; k < n; k++) {
        double u = (double)rng_normal(17, 4, (uint64_t)k), g = (double)r->f->grads[p->offset + (size_t)k];
        got += u * g;
        squares += g * g;
        r->w[p->offset + (size_t)k] += h * u;
    }
    above = loss_of(r);
    for (int64_t k = 0; k < n; k++) {
        r->w[p->offset + (size_t)k] -= 2 * h * (double)rng_normal(17, 4, (uint64_t)k);
    }
    below = loss_of(r);
    for (int64_t k = 0; k < n; k++) {
        r->w[p->offset + (size_t)k] = (double)bf16_to_float(r->f->weights[p->offset + (size_t)k]);
    }
    return fabs(got - scale * (above - below) / (2 * h)) / sqrt(squares);
}

static void check_model(const struct model_config *config)
{
    struct fixture f;
    struct model_options options = small_options(1, TOKENS + 3); /* planned for more than is used */
    int32_t tokens[TOKENS], targets[TOKENS];
    fixture_open(&f, config, &options);
    fill_tokens(tokens, targets, TOKENS, config->vocab, 1);
    struct model_batch batch = {.tokens = tokens, .targets = targets, .batch = 1, .length = TOKENS};
    const float scale = 0.125f;
    struct model_loss loss = fixture_run(&f, &batch, scale, false);
    struct run r = {&f, tokens, targets, malloc(f.params.elements * sizeof(double))};
    assert_non_null(r.w);
    bf16_to_double(f.weights, r.w, (int64_t)f.params.elements);

    double logits[TOKENS * 64];
    float got[TOKENS * 64];
    double want = oracle_loss(config, &f.params, r.w, tokens, targets, TOKENS, logits);
    assert_int_equal(loss.valid, TOKENS - 1);
    /* Logits are off by about .006 of their length (roundings of the forward alone); losses of rows average that. */
    assert_true(fabs(loss.loss_sum - want) / want < 0.01);
    model_logits(f.model, 0, TOKENS, got);
    assert_true(rel_l2_f32(got, logits, (int64_t)TOKENS * config->vocab) < 0.02);

    for (int i = 0; i < f.params.count; i++) {
        const struct param *p = &f.params.params[i];
        double along, sampled = sampled_error(&r, p, (double)scale, &along);
        double directed = direction_error(&r, p, (double)scale);
        /* The error along a random direction is a normal number times the relative L2 error. */
        if (!(sampled < 0.05 && fabs(along) < 0.03 && directed < 3 * 0.05)) {
            fail_msg("%s: relative L2 %.4f, length %+.4f, in a direction %.4f", p->name, sampled, along, directed);
        }
    }
    free(r.w);
    fixture_close(&f);
}

static void test_gradients_with_grouped_heads(void **state)
{
    (void)state;
    struct model_config c = small_config();
    check_model(&c);
}

static void test_gradients_with_one_kv_head_and_odd_sizes(void **state)
{
    (void)state;
    struct model_config c = small_config();
    c.kv_heads = 1;
    c.heads = 3;
    c.ffn = 37;
    c.width = 26;
    c.vocab = 41;
    check_model(&c);
}

static void test_gradients_of_a_tied_head(void **state)
{
    (void)state;
    struct model_config c = small_config();
    c.tied = true;
    check_model(&c);
}

static void test_gradients_with_qk_norm(void **state)
{
    (void)state;
    struct model_config c = small_config();
    c.qk_norm = true;
    check_model(&c);
}

static void test_gradients_with_llama3_rope(void **state)
{
    (void)state;
    struct model_config c = small_config();
    /* Within 16 original tokens: some pairs are kept, some mixed, some stretched. */
    c.rope = (struct rope_config){.theta = 500,
                                  .scaling = ROPE_LLAMA3,
                                  .factor = 8,
                                  .low_freq_factor = 1,
                                  .high_freq_factor = 4,
                                  .original_context = 64};
    c.kv_heads = 4;
    check_model(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients_with_grouped_heads),
        cmocka_unit_test(test_gradients_with_one_kv_head_and_odd_sizes),
        cmocka_unit_test(test_gradients_of_a_tied_head),
        cmocka_unit_test(test_gradients_with_qk_norm),
        cmocka_unit_test(test_gradients_with_llama3_rope),
    };
    use_threads(1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
