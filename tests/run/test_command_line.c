/* The program from outside: what it prints, what it refuses, and with which exit status. Nothing here trains. */
#include "tests/run/program.h"

#include <string.h>

static void test_options_that_only_print(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_call(p, "--help"));
    program_expect(p, "Exit status: 0 done; 1 wrong use");
    EXITS(0, p, program_call(p, "--version"));
    program_expect(p, "train_gpt8b ");
    EXITS(0, p, program_call(p, "--keys"));
    program_expect(p, "attention.pv  (bf16 | fp8 | mxfp4 | nvfp4 | fp4_ue5m3; bf16)");
    program_expect(p, "study.arms");
    EXITS(0, p, program_call(p, "--keys=markdown"));
    program_expect(p, "## [attention]");
}

static void test_wrong_use(void **state)
{
    struct program *p = *state;
    EXITS(1, p, program_call(p, "%s", ""));
    program_expect(p, "no configuration file");
    EXITS(1, p, program_call(p, "--frobnicate"));
    program_expect(p, "--frobnicate: no such option");
    EXITS(1, p, program_call(p, "{}/missing.toml"));
    program_expect(p, "missing.toml");
    EXITS(1, p, program_call(p, "{}"));
    program_expect(p, "is it a folder?");
    EXITS(1, p, program_train(p, 1, "--optim.rl=1"));
    program_expect(p, "unknown key optim.rl; the nearest is optim.lr");
    EXITS(1, p, program_train(p, 1, "--dry-run --optim.lr"));
    program_expect(p, "expected --section.key=value");
}

/* Every illegal combination is found before anything is allocated, also by --dry-run. */
static void test_illegal_combinations(void **state)
{
    static const char *const cases[][2] = {
        {"--run.deterministic=layout", "run.deterministic"},
        {"--data.micro_batch=2", "data.micro_batch = 2"},
        {"--data.seq_len=128 --model.context=64", "data.seq_len = 128 is longer than model.context = 64"},
        {"--model.kv_heads=3", "kv_heads"},
        {"--model.head_dim=63", "head_dim"},
        {"--device.kind=cuda", "cuda"},
        {"--data.val= --eval.every=1", "data.val names no shards"},
        {"--attention.variant=sm100", "sm100"},
        {"--attention.sink_keys_fp8=7 --attention.pv=mxfp4 --attention.qk=nvfp4", "sink_keys_fp8"},
        {"--linear.head=fp8", "head"},
        {"--run.steps=0", "one of the two"},
        {"--dist.zero=1", "sharding is not built"},
    };
    struct program *p = *state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXITS(1, p, program_train(p, 1, "--dry-run %s", cases[i][0]));
        program_expect(p, cases[i][1]);
    }
}

static void test_bad_data(void **state)
{
    struct program *p = *state;
    EXITS(1, p, program_train(p, 1, "--run.out={}/bad --data.train={}/none.tok.zst"));
    program_expect(p, "none.tok.zst");
    program_shell(p, "head -c 2000 {}/train.tok.zst > {}/cut.tok.zst");
    EXITS(1, p, program_train(p, 1, "--run.out={}/bad --data.train={}/cut.tok.zst"));
    program_expect(p, "cut.tok.zst");
    /* The shards declare more tokens than the model has. */
    EXITS(1, p, program_train(p, 1, "--run.out={}/bad --model.vocab=256"));
    program_expect(p, "train.tok.zst");
    EXITS(1, p, program_train(p, 1, "--run.out={}/bad --data.seq_len=2000000 --device.recompute=block"));
    /* A machine that refuses is another matter. */
    EXITS(2, p, program_train(p, 1, "--run.out=/proc/gpt8b"));
    program_expect(p, "/proc/gpt8b");
}

static void test_dry_run_tells_the_plan_and_writes_nothing(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--dry-run --run.out={}/dry --schedule.warmup=50"));
    program_expect(p, "schedule.warmup = 50 does not fit into 10 updates: cut to 9");
    program_expect(p, "parameters");
    program_expect(p, "gradient tree");
    program_expect(p, "fits");
    program_expect(p, "attention    cpu: qk=bf16");
    assert_false(file_exists(p, "dry"));
}

static void test_shipped_configurations(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_call(p, "configs/gpt8b.toml --dry-run"));
    program_expect(p, "8030261248");
    program_expect(p, "51.47 GFLOP");
    program_expect(p, "23842 of 1024 sequences x 4096 tokens");
    program_expect(p, "DOES NOT FIT");
    EXITS(0, p, program_call(p, "configs/demo.toml --dry-run"));
    EXITS(0, p, program_call(p, "configs/tiny_cpu.toml --dry-run"));
    program_expect(p, "data.train   1 shards");
    static const char *const arms[] = {"bf16", "nvfp4_fp8", "nvfp4_fp8_saved", "nvfp4_mxfp4", "nvfp4_mxfp4_saved"};
    for (size_t i = 0; i < sizeof arms / sizeof arms[0]; i++) {
        EXITS(0, p, program_call(p, "configs/tiny_cpu.toml configs/arms/%s.toml --dry-run", arms[i]));
    }
    EXITS(0, p, program_call(p, "configs/tiny_cpu.toml --run.steps=3 --run.out={}/tiny"));
    assert_verdict(p, "tiny", "healthy", true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options_that_only_print),
        cmocka_unit_test(test_wrong_use),
        cmocka_unit_test(test_illegal_combinations),
        cmocka_unit_test(test_bad_data),
        cmocka_unit_test(test_dry_run_tells_the_plan_and_writes_nothing),
        cmocka_unit_test(test_shipped_configurations),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
