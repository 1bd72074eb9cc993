/* The step against its definition: the gradient of the mean loss over all tokens of the update, clipped by its norm,
 * and AdamW's first update in FP64. Only the model itself is shared. */
#include "core/log.h"
#include "data/shard.h"
#include "data/tokenizer.h"
#include "tests/test.h"
#include "train/plan.h"
#include "train/step.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BATCH = 3, TOKENS = 32 };

struct fixture {
    char folder[64];
    struct config config;
    struct comm comm;
    struct device device;
    struct trainer trainer;
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct shard_writer *writer;
    char path[128];
    int32_t tokens[1000];
    *state = f;
    log_set_level((enum log_level)(LOG_ERROR + 1));
    snprintf(f->folder, sizeof f->folder, "/tmp/gpt8b_step_XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    snprintf(path, sizeof path, "%s/a.tok.zst", f->folder);
    for (int i = 0; i < 1000; i++) {
        tokens[i] = (i * i + 7 * i) % 97;
    }
    assert_int_equal(shard_writer_open(&writer, path, BYTE_VOCAB), OK);
    assert_int_equal(shard_writer_add(writer, tokens, 1000), OK);
    assert_int_equal(shard_writer_finish(writer), OK);
    assert_int_equal(comm_open(&f->comm, NULL, NULL, 60), OK);
    assert_int_equal(device_open(&f->device, "cpu", 0), OK);
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    char path[128];
    snprintf(path, sizeof path, "%s/a.tok.zst", f->folder);
    unlink(path);
    rmdir(f->folder);
    comm_close(&f->comm);
    free(f);
    return 0;
}

static void open_trainer(struct fixture *f, const char *clip)
{
    char train[128], clipping[64];
    char *keys[] = {"run.steps=4",       "model.layers=1",    "model.width=32",  "model.heads=2", "model.kv_heads=1",
                    "model.head_dim=16", "model.ffn=64",      "model.vocab=320", "optim.lr=1e-2", "data.batch=3",
                    "data.seq_len=32",   "schedule.warmup=2", "data.prefetch=0", train,           clipping};
    snprintf(train, sizeof train, "data.train=%s/a.tok.zst", f->folder);
    snprintf(clipping, sizeof clipping, "optim.clip=%s", clip);
    config_init(&f->config);
    assert_int_equal(config_add_overrides(&f->config, keys, sizeof keys / sizeof keys[0]), OK);
    assert_int_equal(config_finish(&f->config), OK);
    assert_int_equal(plan_check(&f->config, 1, &f->device), OK);
    assert_int_equal(trainer_open(&f->trainer, &f->config, &f->comm, &f->device), OK);
}

/* Loss and gradient of the update's three sequences in one call of another model, divided by all its targets. */
static double whole_batch(struct fixture *f, float *grads)
{
    struct trainer *t = &f->trainer;
    struct model_options options = t->options;
    struct model *model = NULL;
    struct arena arena;
    int32_t window[TOKENS + 1], tokens[BATCH * TOKENS], targets[BATCH * TOKENS];
    options.batch = BATCH;
    for (int g = 0; g < BATCH; g++) {
        assert_int_equal(loader_sample(t->train, (uint64_t)g, window), OK);
        memcpy(tokens + g * TOKENS, window, TOKENS * sizeof *window);
        memcpy(targets + g * TOKENS, window + 1, TOKENS * sizeof *window);
    }
    arena_measure(&arena, "test");
    assert_int_equal(model_plan(&model, &arena, &f->config.model, &t->params, &options), OK);
    model_close(model);
    assert_int_equal(arena_open(&arena, "test", arena.high_water), OK);
    assert_int_equal(model_plan(&model, &arena, &f->config.model, &t->params, &options), OK);
    model_set_weights(model, t->state.weights);
    struct model_batch batch = {.tokens = tokens, .targets = targets, .batch = BATCH, .length = TOKENS, .update = 1};
    struct model_loss loss;
    model_forward(model, &batch, true, &loss);
    model_backward(model,
                   &(struct model_backward){.batch = &batch, .loss_scale = 1.0F / (BATCH * TOKENS), .grads = grads});
    model_close(model);
    arena_close(&arena);
    assert_int_equal(loss.valid, BATCH * TOKENS);
    return loss.loss_sum / (BATCH * TOKENS);
}

static double norm_of(const struct trainer *t, const float *grads)
{
    double sum = 0;
    for (int i = 0; i < t->params.count; i++) {
        for (size_t e = 0; e < t->segments[i].elements; e++) {
            double g = (double)grads[t->segments[i].offset + e];
            sum += g * g;
        }
    }
    return sqrt(sum);
}

/* First update: m / (1 - b1) = g and v / (1 - b2) = g^2, hence w - lr (g / (|g| + eps) + decay w). */
static void check_update(const struct fixture *f, const float *before, const float *grads, double factor, double lr)
{
    const struct trainer *t = &f->trainer;
    for (int i = 0; i < t->params.count; i++) {
        const struct param *p = &t->params.params[i];
        double decay = p->kind == PARAM_NORM ? 0 : 0.1;
        for (size_t e = p->offset; e < p->offset + t->segments[i].elements; e++) {
            double g = factor * (double)grads[e], w = (double)before[e];
            double expected = w - lr * (g / (fabs(g) + 1e-8) + decay * w);
            double found = (double)t->state.master[e];
            /* Where |g| is near eps, FP32 gradients of another order of sums differ visibly. */
            double tolerance = 2e-3 * lr + lr * fmin(1, 1e-9 / (fabs(g) + 1e-12));
            if (fabs(found - expected) > tolerance) {
                fail_msg("%s: element %zu: expected %.9g, found %.9g, gradient %g", p->name, e - p->offset, expected,
                         found, g);
            }
            assert_true(t->state.weights[e] == bf16_from_float(t->state.master[e]));
        }
    }
}

static void check_first_step(struct fixture *f, const char *clip, double clip_value)
{
    open_trainer(f, clip);
    struct trainer *t = &f->trainer;
    float *before = malloc(t->params.elements * sizeof *before), *grads = calloc(t->params.elements, sizeof *grads);
    struct step_result r;
    memcpy(before, t->state.master, t->params.elements * sizeof *before);
    double loss = whole_batch(f, grads), norm = norm_of(t, grads);
    assert_int_equal(step_run(t, NAN, &r), OK);
    assert_true(fabs(r.loss - loss) < 1e-6);
    assert_true(fabs(r.grad_norm - norm) < 1e-5 * norm);
    assert_true(r.lr == 0.5 * (double)1e-2F); /* first of two updates of warm-up */
    assert_int_equal(r.valid, BATCH * TOKENS);
    assert_int_equal(r.update, 1);
    assert_int_equal(t->samples, BATCH);
    check_update(f, before, grads, clip_value > 0 && norm > clip_value ? clip_value / norm : 1, r.lr);
    free(before);
    free(grads);
    trainer_close(t);
}

static void test_first_step_is_its_definition(void **state)
{
    check_first_step(*state, "0", 0);
}

/* A clip far below the norm, so small that eps counts: a wrong factor would show. */
static void test_clipping_scales_the_whole_gradient(void **state)
{
    check_first_step(*state, "1e-6", 1e-6);
}

static void test_a_diverged_verdict_writes_nothing(void **state)
{
    struct fixture *f = *state;
    struct step_result r;
    open_trainer(f, "1");
    struct trainer *t = &f->trainer;
    assert_int_equal(step_run(t, NAN, &r), OK);
    size_t n = t->params.elements * sizeof(float);
    float *master = malloc(n), *m = malloc(n);
    memcpy(master, t->state.master, n);
    memcpy(m, t->state.m, n);
    /* The model computes with the BF16 weights: an Inf there makes loss and gradients NaN. */
    t->state.weights[t->params.params[0].offset + 5] = 0x7f80;
    trainer_weights_changed(t);
    assert_int_equal(step_run(t, NAN, &r), ERR_DIVERGED);
    assert_non_null(strstr(status_last_message(), "model.embed_tokens.weight"));
    assert_int_equal(r.verdict, VERDICT_DIVERGED);
    assert_int_equal(r.update, 2);
    assert_int_equal(t->update, 1);
    assert_int_equal(t->samples, BATCH);
    assert_memory_equal(master, t->state.master, n);
    assert_memory_equal(m, t->state.m, n);
    free(master);
    free(m);
    trainer_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_step_is_its_definition),
        cmocka_unit_test(test_clipping_scales_the_whole_gradient),
        cmocka_unit_test(test_a_diverged_verdict_writes_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
