/* A rank that dies, hangs, or cannot begin ends all ranks, in time, with one line that says why; a signal to one rank
 * stops all with a checkpoint. What the run had saved goes on exactly. */
#include "tests/faults/background.h"

#include <signal.h>
#include <stdio.h>
#include <time.h>

/* A timeout that a slow save on a crowded machine does not reach. */
static const char endless[] = "--schedule.kind=constant --eval.every=0 --checkpoint.every=3 --dist.timeout_s=5";
/* Bounds a failure only: dist.timeout_s, a few steps of 5 s, and what a crowded machine needs. */
static const double limit_s = 120;

static pid_t start(struct program *p, int ranks, const char *run)
{
    char arguments[256];
    snprintf(arguments, sizeof arguments, "--run.out={}/%s %s --run.steps=100000", run, endless);
    pid_t launcher = program_start(p, ranks, arguments);
    wait_for_rows(p, run, 7);
    return launcher;
}

static void test_a_stopped_rank(void **state)
{
    struct program *p = *state;
    needs_mpi();
    pid_t launcher = start(p, 4, "stopped");
    assert_int_equal(kill(rank_process(p, launcher, 2), SIGSTOP), 0);
    EXITS(2, p, wait_for_end(p, launcher, "stopped", limit_s));
    program_expect(p, "heard nothing from rank 2 for ");
    expect_times(p, "error: ", 1);
    goes_on_exactly(p, "stopped", endless);
}

/* Rank 0 is who waits for all others, and who writes: its loss is another case. */
static void test_a_stopped_rank_0(void **state)
{
    struct program *p = *state;
    soak_only();
    needs_mpi();
    pid_t launcher = start(p, 4, "stopped_0");
    assert_int_equal(kill(rank_process(p, launcher, 0), SIGSTOP), 0);
    EXITS(2, p, wait_for_end(p, launcher, "stopped_0", limit_s));
    /* Two that wait for rank 0 itself, one of them a call ahead, may both speak before one has ended the other. */
    expect_blamed(p, 0);
    goes_on_exactly(p, "stopped_0", endless);
}

/* mpirun sees the death as soon as our timeout does, and says so; its exit status is that of the signal. */
static void check_killed(struct program *p, int rank, const char *run)
{
    char words[64];
    pid_t launcher = start(p, 2, run);
    assert_int_equal(kill(rank_process(p, launcher, rank), SIGKILL), 0);
    EXITS(128 + SIGKILL, p, wait_for_end(p, launcher, run, limit_s));
    snprintf(words, sizeof words, "mpirun noticed that process rank %d ", rank);
    expect_times(p, words, 1);
    program_expect(p, "exited on signal 9 (Killed)");
    goes_on_exactly(p, run, endless);
}

static void test_a_killed_rank(void **state)
{
    needs_mpi();
    check_killed(*state, 1, "killed");
    if (is_soak()) {
        check_killed(*state, 0, "killed_0");
    }
}

/* SIGTERM to any one rank: all agree, save and leave with 4. */
static void test_a_signal_to_one_rank(void **state)
{
    struct program *p = *state;
    needs_mpi();
    pid_t launcher = start(p, 2, "term");
    assert_int_equal(kill(rank_process(p, launcher, 1), SIGTERM), 0);
    EXITS(4, p, wait_for_end(p, launcher, "term", limit_s));
    expect_times(p, "asked by a signal", 1);
    expect_times(p, "error: ", 0);
    /* The checkpoint is of the last update made. */
    char saved[64];
    snprintf(saved, sizeof saved, "term/checkpoints/step_%08d/manifest.json", metrics_rows(p, "term"));
    assert_true(file_exists(p, saved));
    goes_on_exactly(p, "term", endless);
}

/* USR1 comes to all ranks by way of mpirun; schedulers may send it more than once. */
static void test_signals_to_mpirun(void **state)
{
    struct program *p = *state;
    soak_only();
    needs_mpi();
    pid_t launcher = start(p, 2, "usr1");
    assert_int_equal(kill(launcher, SIGUSR1), 0);
    assert_int_equal(kill(launcher, SIGUSR1), 0);
    EXITS(4, p, wait_for_end(p, launcher, "usr1", limit_s));
    expect_times(p, "asked by a signal", 1);
    assert_verdict(p, "usr1", "healthy", false);
    goes_on_exactly(p, "usr1", endless);
}

/* mpirun passes SIGTERM on and kills about a second later: whether the last save was made or not, what is there is
 * whole. */
static void test_a_signal_that_mpirun_does_not_wait_for(void **state)
{
    struct program *p = *state;
    soak_only();
    needs_mpi();
    pid_t launcher = start(p, 2, "mpirun_term");
    assert_int_equal(kill(launcher, SIGTERM), 0);
    assert_int_not_equal(wait_for_end(p, launcher, "mpirun_term", limit_s), 0);
    expect_times(p, "error: ", 0);
    goes_on_exactly(p, "mpirun_term", endless);
}

/* A pause shorter than dist.timeout_s, as of a machine that is moved, harms nothing. */
static void test_a_rank_that_pauses(void **state)
{
    struct program *p = *state;
    soak_only();
    needs_mpi();
    pid_t launcher = start(p, 2, "pause");
    for (int rank = 0; rank < 2; rank++) {
        pid_t pid = rank_process(p, launcher, rank);
        assert_int_equal(kill(pid, SIGSTOP), 0);
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        assert_int_equal(kill(pid, SIGCONT), 0);
        wait_for_rows(p, "pause", metrics_rows(p, "pause") + 5);
    }
    assert_int_equal(kill(launcher, SIGUSR1), 0);
    EXITS(4, p, wait_for_end(p, launcher, "pause", limit_s));
    expect_times(p, "error: ", 0);
    goes_on_exactly(p, "pause", endless);
}

/* A shard that one node does not have, at the start and at a resume: the cause is said by the rank that knows it. */
static void test_a_shard_missing_on_one_rank(void **state)
{
    static const char run[] = "--run.out={}/unlike --checkpoint.every=5";
    struct program *p = *state;
    char gone[128], other[128];
    needs_mpi();
    snprintf(gone, sizeof gone, "%s --data.train={}/gone.tok.zst", run);
    snprintf(other, sizeof other, "%s --data.train={}/val.tok.zst", run);
    EXITS(1, p, program_train_unequal(p, run, gone));
    program_expect(p, "[rank 1] error: no token shard matches '");
    expect_times(p, "error: ", 1);
    EXITS(0, p, program_train(p, 2, "%s", run));
    EXITS(0, p, program_shell(p, "rm -r {}/unlike/checkpoints/step_00000010"));
    EXITS(1, p, program_train_unequal(p, run, gone));
    program_expect(p, "[rank 1] error: no token shard matches '");
    expect_times(p, "error: ", 1);
    /* Other data under the right name. */
    EXITS(1, p, program_train_unequal(p, run, other));
    program_expect(p, "[rank 1] error: resume from ");
    program_expect(p, "checkpoint has training data");
    expect_times(p, "error: ", 1);
    EXITS(0, p, program_train_unequal(p, run, run));
    program_expect(p, "update 6 of 10 is next");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_stopped_rank),     cmocka_unit_test(test_a_stopped_rank_0),
        cmocka_unit_test(test_a_killed_rank),      cmocka_unit_test(test_a_signal_to_one_rank),
        cmocka_unit_test(test_signals_to_mpirun),  cmocka_unit_test(test_a_signal_that_mpirun_does_not_wait_for),
        cmocka_unit_test(test_a_rank_that_pauses), cmocka_unit_test(test_a_shard_missing_on_one_rank),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
