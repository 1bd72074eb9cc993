/* The program as two ranks on two GPUs, started by mpirun: runs that repeat and resume bit for bit, and what a user
 * sees when a rank is lost. Skipped without MPI, or with one GPU. */
#include "core/device.h"
#include "tests/faults/background.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { UPDATES = 20 };

/* Runs share the choices of their products: with other algorithms they would have other bits. */
#define GPU "--device.kind=cuda --device.gemm_choices={}/gemm.json "

/* A timeout that timing products on one rank does not reach. */
static const char endless[] = "--device.kind=cuda --schedule.kind=constant --eval.every=0 --checkpoint.every=50 "
                              "--dist.timeout_s=5 --run.steps=1000000";
/* Bounds a failure only. */
static const double limit_s = 60;

static void needs_two_gpus(void)
{
    needs_mpi();
    if (!device_cuda_usable(1)) {
        print_message("one GPU: the test of two ranks is skipped\n");
        skip();
    }
}

/* ---- bits ---- */

static const char plain[] = "--run.steps=20 --checkpoint.every=10 configs/arms/nvfp4_mxfp4.toml --linear.mlp=nvfp4 "
                            "--linear.attn=fp8 --optim.moments=bf16 --optim.stochastic_rounding=true";

/* Every low-precision format, gradients summed in one bucket; the kernels for heads of 128, in several buckets. */
static void test_bits_of_two_runs(void **state)
{
    static const char *const runs[][2] = {
        {"plain", plain},
        {"wide", "--run.steps=20 --checkpoint.every=10 configs/arms/nvfp4_fp8.toml --model.width=256 "
                 "--model.head_dim=128 --data.seq_len=192 --log.attention_every=3 --eval.every=0 --data.val= "
                 "--data.micro_batch=2 --dist.bucket_mb=1"}};
    struct program *p = *state;
    needs_two_gpus();
    for (int i = 0; i < 2; i++) {
        char again[32];
        snprintf(again, sizeof again, "%s_again", runs[i][0]);
        EXITS(0, p, program_train(p, 2, GPU "--run.out={}/%s %s", runs[i][0], runs[i][1]));
        EXITS(0, p, program_train(p, 2, GPU "--run.out={}/%s %s", again, runs[i][1]));
        assert_same_end(p, runs[i][0], again, UPDATES);
        print_message("%s: loss %.7f to %.7f, twice\n", runs[i][0], metrics_value(p, again, 1, "loss"),
                      metrics_value(p, again, UPDATES, "loss"));
    }
}

/* As if the run above had been cut after update 10. Without --device.gemm_choices: the checkpoint brings its own. */
static void test_bits_of_a_resumed_run(void **state)
{
    struct program *p = *state;
    needs_two_gpus();
    cut_run(p, "plain", "cut", 10, 12, 24);
    EXITS(0, p, program_train(p, 2, "--device.kind=cuda --run.out={}/cut %s", plain));
    program_expect(p, "update 11 of 20 is next");
    assert_same_end(p, "plain", "cut", UPDATES);
}

/* ---- lost ranks ---- */

static pid_t start(struct program *p, const char *run, int rows, const char *options)
{
    char arguments[320];
    snprintf(arguments, sizeof arguments, "--run.out={}/%s %s %s", run, endless, options);
    pid_t launcher = program_start(p, 2, arguments);
    wait_for_rows(p, run, rows);
    return launcher;
}

static void stop_rank_1(struct program *p, const char *run, int rows, const char *options)
{
    pid_t launcher = start(p, run, rows, options);
    assert_int_equal(kill(rank_process(p, launcher, 1), SIGSTOP), 0);
    EXITS(2, p, wait_for_end(p, launcher, run, limit_s));
    program_expect(p, "dist.timeout_s");
    expect_times(p, "error: ", 1);
    print_message("%s: %.200s\n", run, strstr(p->output, "error: "));
}

/* Small updates: most often the ranks meet on the host when one is lost. NCCL would end only with both, so the rank
 * that is left must not wait for that. */
static void test_lost_rank_is_named(void **state)
{
    struct program *p = *state;
    needs_two_gpus();
    stop_rank_1(p, "stopped", 60, "");
    EXITS(4, p, program_train(p, 2, "--run.out={}/stopped %s --run.max_minutes=0.00001", endless));
    program_expect(p, "is next");
}

/* Updates of many launches, which the host makes as fast as the GPU takes them: most often the rank that is lost has
 * not come to its sum, so that the other's GPU has one before it that never ends. */
static void test_lost_rank_in_a_sum(void **state)
{
    struct program *p = *state;
    needs_two_gpus();
    stop_rank_1(p, "summing", 5, "--data.batch=128 --device.graphs=false");
}

static void test_lost_rank_that_is_killed(void **state)
{
    struct program *p = *state;
    needs_two_gpus();
    pid_t launcher = start(p, "killed", 60, "");
    assert_int_equal(kill(rank_process(p, launcher, 0), SIGKILL), 0);
    EXITS(128 + SIGKILL, p, wait_for_end(p, launcher, "killed", limit_s));
    program_expect(p, "exited on signal 9 (Killed)");
}

/* Both ranks are stopped for longer than the timeout, as with their whole machine: none blames the other. */
static void test_lost_time_of_a_whole_machine(void **state)
{
    struct program *p = *state;
    needs_two_gpus();
    pid_t launcher = start(p, "paused", 60, "");
    const pid_t ranks[2] = {rank_process(p, launcher, 0), rank_process(p, launcher, 1)};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kill(ranks[i], SIGSTOP), 0);
    }
    nanosleep(&(struct timespec){.tv_sec = 7}, NULL);
    int rows = metrics_rows(p, "paused");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kill(ranks[i], SIGCONT), 0);
    }
    wait_for_rows(p, "paused", rows + 20);
    assert_int_equal(kill(launcher, SIGUSR1), 0);
    EXITS(4, p, wait_for_end(p, launcher, "paused", limit_s));
    expect_times(p, "asked by a signal", 1);
    expect_times(p, "error: ", 0);
}

/* An argument chooses tests by pattern: gpu_two_ranks '*bits*'. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_of_two_runs),         cmocka_unit_test(test_bits_of_a_resumed_run),
        cmocka_unit_test(test_lost_rank_is_named),       cmocka_unit_test(test_lost_rank_in_a_sum),
        cmocka_unit_test(test_lost_rank_that_is_killed), cmocka_unit_test(test_lost_time_of_a_whole_machine),
    };
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
