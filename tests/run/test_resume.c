/* Stopping and going on: a resumed run is the straight run, and nothing is resumed that does not fit. */
#include "tests/run/program.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

static const char state_file[] = "checkpoints/step_00000010/train_state/optimizer.safetensors";

/* Gives run `b` the checkpoint that run `a` made at update 5, as if it had been cut there; its metrics go on to 7. */
static void cut_at_5(struct program *p, const char *a, const char *b)
{
    cut_run(p, a, b, 5, 7, 15);
    EXITS(0, p, program_shell(p, "printf '{\"step\": 8, \"lo' >> {}/%s/metrics.jsonl", b));
}

static void check_resume(struct program *p, const char *name, int ranks, const char *options)
{
    char straight[64], resumed[64], left[160], right[160];
    snprintf(straight, sizeof straight, "%s_straight", name);
    snprintf(resumed, sizeof resumed, "%s_resumed", name);
    EXITS(0, p, program_train(p, 1, "--run.out={}/%s --checkpoint.every=5 %s", straight, options));
    cut_at_5(p, straight, resumed);
    EXITS(0, p, program_train(p, ranks, "--run.out={}/%s --checkpoint.every=5 %s", resumed, options));
    program_expect(p, "update 6 of 10 is next");
    assert_same_metrics(p, straight, resumed, "metrics.jsonl", 1);
    assert_same_metrics(p, straight, resumed, "layers.jsonl", 1);
    snprintf(left, sizeof left, "%s/checkpoints/step_00000010/model.safetensors", straight);
    snprintf(right, sizeof right, "%s/checkpoints/step_00000010/model.safetensors", resumed);
    assert_same_file(p, left, right);
    snprintf(left, sizeof left, "%s/%s", straight, state_file);
    snprintf(right, sizeof right, "%s/%s", resumed, state_file);
    assert_same_file(p, left, right);
    /* The rest of the state, the path of the run aside. */
    EXITS(0, p,
          program_shell(p,
                        "for r in %s %s; do grep -v run.out {}/$r/checkpoints/step_00000010/train_state/"
                        "state.json > {}/$r/state; done; cmp {}/%s/state {}/%s/state",
                        straight, resumed, straight, resumed));
}

static void test_resumed_run_is_the_straight_run(void **state)
{
    check_resume(*state, "bf16", 1, "");
    check_resume(*state, "mx", 1,
                 "configs/arms/nvfp4_mxfp4.toml --linear.mlp=nvfp4 --linear.attn=fp8 --optim.master=none "
                 "--optim.moments=bf16 --optim.stochastic_rounding=true --data.prefetch=0");
}

static void test_resume_on_another_number_of_ranks(void **state)
{
    struct program *p = *state;
    if (program_call(p, "--version") != 0 || strstr(p->output, "MPI yes") == NULL) {
        skip();
    }
    check_resume(p, "ranks", 2, "configs/arms/nvfp4_fp8.toml");
}

static void test_a_finished_run_stays_finished(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/bf16_straight --checkpoint.every=5"));
    program_expect(p, "all 10 updates are made");
    assert_int_equal(metrics_rows(p, "bf16_straight"), 10);
}

static void test_what_does_not_fit_is_refused(void **state)
{
    struct program *p = *state;
    EXITS(1, p, program_train(p, 1, "--run.out={}/bf16_straight --attention.qk=nvfp4 --attention.pv=fp8"));
    program_expect(p, "attention.qk: checkpoint has \"bf16\", config has \"nvfp4\"");
    EXITS(1, p, program_train(p, 1, "--run.out={}/bf16_straight --model.layers=3"));
    program_expect(p, "model.layers: checkpoint has 2, config has 3");
    EXITS(1, p, program_train(p, 1, "--run.out={}/bf16_straight --data.train={}/val.tok.zst"));
    program_expect(p, "checkpoint has training data");
    EXITS(1, p, program_train(p, 1, "--run.out={}/bf16_straight --checkpoint.resume=never"));
    program_expect(p, "checkpoint.resume = never");
    EXITS(1, p, program_train(p, 1, "--run.out={}/bf16_straight --checkpoint.resume={}/nowhere"));
    /* A notice, not silence; and an explicit wish. */
    EXITS(0, p,
          program_train(p, 1,
                        "--run.out={}/changed --checkpoint.resume={}/bf16_straight/checkpoints/step_00000005 "
                        "--optim.lr=1e-3 --attention.qk=nvfp4 --attention.pv=fp8 "
                        "'--checkpoint.may_change=attention.*'"));
    program_expect(p, "optim.lr: checkpoint has 0.005, config has 0.001: applied");
    program_expect(p, "attention.qk: checkpoint has \"bf16\", config has \"nvfp4\": applied");
}

static void test_a_damaged_checkpoint_is_passed_over(void **state)
{
    struct program *p = *state;
    EXITS(0, p,
          program_shell(p, "cp -r {}/bf16_straight {}/damaged && printf X | dd conv=notrunc bs=1 seek=4000 "
                           "of={}/damaged/checkpoints/step_00000010/model.safetensors"));
    EXITS(0, p, program_train(p, 1, "--run.out={}/damaged --checkpoint.every=5"));
    program_expect(p, "step_00000010");
    program_expect(p, "update 6 of 10 is next");
}

static void test_a_locked_folder_is_refused(void **state)
{
    struct program *p = *state;
    EXITS(1, p,
          program_shell(p, "flock {}/bf16_straight/lock ${BUILD_DIR:-build/release}/train_gpt8b {}/base.toml "
                           "--run.out={}/bf16_straight"));
    program_expect(p, "in use by another run");
}

static void stop_by(struct program *p, int ranks, int number, const char *name)
{
    char arguments[256];
    snprintf(arguments, sizeof arguments, "--run.out={}/%s --run.steps=100000 --schedule.kind=constant --eval.every=0",
             name);
    pid_t pid = program_start(p, ranks, arguments);
    assert_int_equal(program_stop(p, pid, name, number), 4);
    assert_verdict(p, name, "healthy", false);
    /* The checkpoint is of the last update made: the same command goes on after it. */
    int rows = metrics_rows(p, name);
    char words[64];
    EXITS(4, p, program_train(p, 1, "%s --run.max_minutes=0.00001", arguments));
    snprintf(words, sizeof words, "update %d of 100000 is next", rows + 1);
    program_expect(p, words);
    program_expect(p, "run.max_minutes is over");
    assert_int_equal(metrics_rows(p, name), rows + 1);
}

static void test_signals_stop_with_a_checkpoint(void **state)
{
    stop_by(*state, 1, SIGTERM, "term");
    stop_by(*state, 1, SIGUSR1, "usr1");
}

/* mpirun passes SIGUSR1 on to the ranks, which agree. */
static void test_a_signal_to_mpirun_stops_all_ranks(void **state)
{
    struct program *p = *state;
    if (program_call(p, "--version") != 0 || strstr(p->output, "MPI yes") == NULL) {
        skip();
    }
    stop_by(p, 2, SIGUSR1, "mpirun");
}

/* kill -9 leaves what the last checkpoint holds; the same command ends as if nothing had happened. */
static void test_a_killed_run_goes_on(void **state)
{
    static const char options[] = "--run.steps=60 --checkpoint.every=2 --checkpoint.keep=2";
    struct program *p = *state;
    char arguments[256];
    EXITS(0, p, program_train(p, 1, "--run.out={}/whole %s", options));
    snprintf(arguments, sizeof arguments, "--run.out={}/killed %s", options);
    pid_t pid = program_start(p, 1, arguments);
    assert_int_equal(program_stop(p, pid, "killed", SIGKILL), -1);
    EXITS(0, p, program_train(p, 1, "%s", arguments));
    assert_same_metrics(p, "whole", "killed", "metrics.jsonl", 1);
    assert_same_file(p, "whole/checkpoints/step_00000060/model.safetensors",
                     "killed/checkpoints/step_00000060/model.safetensors");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resumed_run_is_the_straight_run),
        cmocka_unit_test(test_resume_on_another_number_of_ranks),
        cmocka_unit_test(test_a_finished_run_stays_finished),
        cmocka_unit_test(test_what_does_not_fit_is_refused),
        cmocka_unit_test(test_a_damaged_checkpoint_is_passed_over),
        cmocka_unit_test(test_a_locked_folder_is_refused),
        cmocka_unit_test(test_signals_stop_with_a_checkpoint),
        cmocka_unit_test(test_a_signal_to_mpirun_stops_all_ranks),
        cmocka_unit_test(test_a_killed_run_goes_on),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
