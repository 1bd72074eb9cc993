/* What a device cannot do is refused with the keys, their values and the nearest that would do; no GPU is needed. */
#include "core/log.h"
#include "tests/test.h"
#include "train/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct device cpu = {.kind = DEVICE_CPU, .name = "CPU"};
static const struct device gpu = {.kind = DEVICE_CUDA, .name = "GPU"};

/* plan_check of a small configuration with up to two more keys. */
static enum status check(const struct device *device, int ranks, const char *one, const char *two)
{
    static const char *const base[] = {"run.steps=4",      "model.layers=1", "model.width=64", "model.heads=1",
                                       "model.kv_heads=1", "model.ffn=64",   "model.vocab=64", "model.head_dim=64",
                                       "optim.lr=1e-3",    "data.train=a",   "data.batch=12",  "data.seq_len=32"};
    enum { BASE = sizeof base / sizeof base[0] };
    struct config *config = malloc(sizeof *config);
    char *keys[BASE + 2];
    int n = 0;
    assert_non_null(config);
    for (; n < BASE; n++) {
        keys[n] = (char *)(uintptr_t)base[n];
    }
    const char *more[] = {one, two};
    for (int i = 0; i < 2; i++) {
        if (more[i] != NULL) {
            keys[n++] = (char *)(uintptr_t)more[i];
        }
    }
    config_init(config);
    assert_int_equal(config_add_overrides(config, keys, n), OK);
    assert_int_equal(config_finish(config), OK);
    enum status status = plan_check(config, ranks, device);
    free(config);
    return status;
}

static void expect_refusal(enum status found, enum status expected, const char *words)
{
    assert_int_equal(found, expected);
    if (strstr(status_last_message(), words) == NULL) {
        fail_msg("expected \"%s\" in: %s", words, status_last_message());
    }
}

static void test_determinism_of_each_device(void **state)
{
    (void)state;
    static const char *const modes[] = {"run.deterministic=off", "run.deterministic=layout"};
    assert_int_equal(check(&cpu, 1, NULL, NULL), OK);
    assert_int_equal(check(&gpu, 1, NULL, NULL), OK);
    assert_int_equal(check(&cpu, 1, "run.deterministic=any", NULL), OK);
    expect_refusal(check(&gpu, 1, "run.deterministic=any", NULL), ERR_UNSUPPORTED, "device.kind = cpu");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(check(&gpu, 1, modes[i], NULL), OK);
        expect_refusal(check(&cpu, 1, modes[i], NULL), ERR_UNSUPPORTED, "which no CPU code does");
    }
}

/* 12 sequences: 12 a rank, or 4 on each of 3. */
static void test_micro_batches(void **state)
{
    (void)state;
    static const char *const fine[] = {"data.micro_batch=1", "data.micro_batch=3", "data.micro_batch=12"};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(check(&gpu, 1, fine[i], NULL), OK);
    }
    assert_int_equal(check(&gpu, 3, "data.micro_batch=2", NULL), OK);
    expect_refusal(check(&gpu, 1, "data.micro_batch=5", NULL), ERR_CONFIG, "nearest valid values are 4 and 6");
    expect_refusal(check(&gpu, 3, "data.micro_batch=3", NULL), ERR_CONFIG, "nearest valid values are 2 and 4");
    expect_refusal(check(&gpu, 1, "data.micro_batch=20", NULL), ERR_CONFIG, "nearest valid values are 12 and 12");
    expect_refusal(check(&cpu, 1, "data.micro_batch=2", NULL), ERR_UNSUPPORTED, "remove the key or set 1");
}

static void test_ranks(void **state)
{
    (void)state;
    assert_int_equal(check(&gpu, 3, NULL, NULL), OK); /* no power of two is needed */
    expect_refusal(check(&cpu, 3, NULL, NULL), ERR_CONFIG, "start 2 or 4");
    expect_refusal(check(&gpu, 5, NULL, NULL), ERR_CONFIG, "nearest valid values are 10 and 15");
}

static void test_recomputation(void **state)
{
    (void)state;
    assert_int_equal(check(&gpu, 1, "device.recompute=gate_up", NULL), OK);
    assert_int_equal(check(&cpu, 1, "device.recompute=block", NULL), OK);
    expect_refusal(check(&cpu, 1, "device.recompute=gate_up", NULL), ERR_UNSUPPORTED, "on CUDA only");
}

static void test_advice_names_what_is_left_to_change(void **state)
{
    (void)state;
    struct config *config = malloc(sizeof *config);
    char text[PLAN_ADVICE];
    assert_non_null(config);
    config_init(config);
    config->data.micro_batch = 4;
    plan_advice(config, &gpu, text, sizeof text);
    assert_string_equal(text, " data.micro_batch = 1, device.recompute = gate_up or block, optim.moments = bf16, "
                              "optim.grads = bf16, optim.master = none, a smaller model or a shorter data.seq_len");
    config->data.micro_batch = 1;
    config->recompute = RECOMPUTE_GATE_UP;
    config->optim.moments_bf16 = config->optim.grads_bf16 = true;
    plan_advice(config, &gpu, text, sizeof text);
    assert_string_equal(text, " device.recompute = block, optim.master = none, a smaller model or a shorter "
                              "data.seq_len");
    config->recompute = RECOMPUTE_BLOCK;
    config->optim.master_fp32 = false;
    plan_advice(config, &cpu, text, sizeof text);
    assert_string_equal(text, " a smaller model or a shorter data.seq_len");
    free(config);
}

static int quiet(void **state)
{
    (void)state;
    log_set_level((enum log_level)(LOG_ERROR + 1));
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_determinism_of_each_device),
        cmocka_unit_test(test_micro_batches),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_recomputation),
        cmocka_unit_test(test_advice_names_what_is_left_to_change),
    };
    return cmocka_run_group_tests(tests, quiet, NULL);
}
