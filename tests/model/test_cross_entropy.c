/* Head and cross entropy against FP64; gradients against the closed form and central differences of the FP64 form. */
#include "model/cross_entropy.h"

#include "tests/model/check.h"

#include "tests/test.h"

#include <math.h>
#include <string.h>

enum { ROWS = 9, C = 24, V = 53 };

struct form {
    double hidden[ROWS * C], weight[V * C];
    const int32_t *targets;
};

static void logits_of(const struct form *f, int r, double *logits)
{
    for (int v = 0; v < V; v++) {
        logits[v] = 0;
        for (int c = 0; c < C; c++) {
            logits[v] += f->hidden[r * C + c] * f->weight[v * C + c];
        }
    }
}

static double lse_of(const double *logits)
{
    double max = logits[0], sum = 0;
    for (int v = 0; v < V; v++) {
        max = logits[v] > max ? logits[v] : max;
    }
    for (int v = 0; v < V; v++) {
        sum += exp(logits[v] - max);
    }
    return max + log(sum);
}

static double loss_of(const void *context)
{
    const struct form *f = context;
    double logits[V], loss = 0;
    for (int r = 0; r < ROWS; r++) {
        logits_of(f, r, logits);
        loss += f->targets[r] < 0 ? 0 : lse_of(logits) - logits[f->targets[r]];
    }
    return loss;
}

static const int32_t some_targets[ROWS] = {0, 52, -1, 7, 7, 15, 16, -1, 31};

struct buffers {
    bf16 hidden[ROWS * C], weight[V * C], dhidden[ROWS * C], dlogits[ROWS * V];
    float lse[ROWS], logits[ROWS * V], sum[ROWS], target_logit[ROWS], dweight[V * C], dhidden_sum[ROWS * C];
};

static struct cross_entropy shape_of(struct buffers *b, const int32_t *targets, int columns)
{
    return (struct cross_entropy){.rows = ROWS,
                                  .width = C,
                                  .vocab = V,
                                  .columns = columns,
                                  .hidden = b->hidden,
                                  .weight = b->weight,
                                  .targets = targets,
                                  .lse = b->lse,
                                  .logits = b->logits};
}

static double run(struct buffers *b, const int32_t *targets, int columns, float scale, bool accumulate, int64_t *valid)
{
    struct cross_entropy shape = shape_of(b, targets, columns);
    double loss = cross_entropy_fwd_cpu(
        &(struct cross_entropy_fwd){.shape = shape, .sum = b->sum, .target_logit = b->target_logit}, valid);
    cross_entropy_bwd_cpu(&(struct cross_entropy_bwd){.shape = shape,
                                                      .loss_scale = scale,
                                                      .dhidden = b->dhidden,
                                                      .dweight = b->dweight,
                                                      .accumulate = accumulate,
                                                      .dlogits = b->dlogits,
                                                      .dhidden_sum = b->dhidden_sum});
    return loss;
}

static void fill(struct buffers *b, struct form *f, const int32_t *targets, float scale)
{
    memset(b, 0xff, sizeof *b);
    fill_bf16(b->hidden, ROWS * C, 1, scale);
    fill_bf16(b->weight, V * C, 2, 0.5f);
    bf16_to_double(b->hidden, f->hidden, ROWS * C);
    bf16_to_double(b->weight, f->weight, V * C);
    f->targets = targets;
}

static void test_loss_and_gradients_for_every_cut_of_the_vocabulary(void **state)
{
    (void)state;
    static const int columns[] = {1, 16, 32, V};
    static struct buffers b;
    static struct form f;
    double dhidden[ROWS * C], dweight[V * C];
    fill(&b, &f, some_targets, 1);
    double want = loss_of(&f);
    for (int i = 0; i < ROWS * C; i++) {
        dhidden[i] = 0.25 * central_difference(loss_of, &f, &f.hidden[i], 1e-4);
    }
    for (int i = 0; i < V * C; i++) {
        dweight[i] = 0.25 * central_difference(loss_of, &f, &f.weight[i], 1e-4);
    }
    for (int k = 0; k < 4; k++) {
        int64_t valid;
        double loss = run(&b, some_targets, columns[k], 0.25f, false, &valid);
        assert_int_equal(valid, ROWS - 2);
        assert_true(fabs(loss - want) <= 1e-6 * want);
        /* Each dlogit is rounded to BF16 once: .0016 relative on average, in sums of many less; then dhidden once. */
        assert_true(rel_l2_bf16(b.dhidden, dhidden, ROWS * C) < 0.004);
        assert_true(rel_l2_f32(b.dweight, dweight, V * C) < 0.003);
        for (int r = 0; r < ROWS; r++) {
            for (int c = 0; c < C; c++) {
                assert_true(some_targets[r] >= 0 || b.dhidden[r * C + c] == 0);
            }
        }
    }
}

static void test_accumulation_adds_the_same_numbers(void **state)
{
    (void)state;
    static struct buffers b;
    static struct form f;
    float once[V * C];
    int64_t valid;
    fill(&b, &f, some_targets, 1);
    run(&b, some_targets, 16, 1, false, &valid);
    memcpy(once, b.dweight, sizeof once);
    run(&b, some_targets, 16, 1, true, &valid);
    for (int i = 0; i < V * C; i++) {
        assert_true(b.dweight[i] == once[i] + once[i]);
    }
}

static void test_all_ignored_is_zero(void **state)
{
    (void)state;
    static struct buffers b;
    static struct form f;
    int32_t targets[ROWS];
    int64_t valid;
    memset(targets, 0xff, sizeof targets);
    fill(&b, &f, targets, 1);
    assert_true(run(&b, targets, 16, 1, false, &valid) == 0);
    assert_int_equal(valid, 0);
    for (int i = 0; i < V * C; i++) {
        assert_true(b.dweight[i] == 0);
    }
}

/* Logits of some hundreds: exp of them overflows FP32 and must never be taken. */
static void test_large_logits(void **state)
{
    (void)state;
    static struct buffers b;
    static struct form f;
    int64_t valid;
    fill(&b, &f, some_targets, 150);
    double want = loss_of(&f), loss = run(&b, some_targets, 16, 1, false, &valid);
    assert_true(want > 1000);
    assert_true(fabs(loss - want) <= 1e-5 * want);
    for (int i = 0; i < ROWS * C; i++) {
        assert_true(isfinite(bf16_to_float(b.dhidden[i])));
    }
}

static void test_nan_and_infinity_reach_the_loss(void **state)
{
    (void)state;
    static struct buffers b;
    static struct form f;
    int64_t valid;
    static const bf16 bad[] = {0x7fc0, 0x7f80, 0xff80};
    for (int k = 0; k < 3; k++) {
        fill(&b, &f, some_targets, 1);
        b.weight[40 * C] = bad[k]; /* an entry that no target names, beyond the first cut */
        assert_false(isfinite(run(&b, some_targets, 16, 1, false, &valid)));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loss_and_gradients_for_every_cut_of_the_vocabulary),
        cmocka_unit_test(test_accumulation_adds_the_same_numbers),
        cmocka_unit_test(test_all_ignored_is_zero),
        cmocka_unit_test(test_large_logits),
        cmocka_unit_test(test_nan_and_infinity_reach_the_loss),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
