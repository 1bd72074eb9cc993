/* kill -9 at points that the seed picks, of runs that save every update, again and again until the run is done: every
 * resume finds a whole checkpoint, nothing is skipped, and the end is that of the run that nobody killed. */
#include "core/rng.h"
#include "tests/faults/background.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

enum { UPDATES = 40, QUICK_KILLS = 3, SOAK_KILLS = 60, RANK_KILLS = 12 };

static const char options[] = "--run.steps=40 --checkpoint.every=1 --checkpoint.keep=3 --dist.timeout_s=5";

static int setup(void **state)
{
    if (program_setup(state) != 0) {
        return 1;
    }
    EXITS(0, (struct program *)*state, program_train(*state, 1, "--run.out={}/whole %s", options));
    return 0;
}

static uint64_t seed(void)
{
    const char *text = getenv("SEED");
    return text != NULL ? strtoull(text, NULL, 10) : 1;
}

static void check_end(struct program *p, const char *run)
{
    char path[96];
    assert_same_metrics(p, "whole", run, "metrics.jsonl", 1);
    assert_same_metrics(p, "whole", run, "layers.jsonl", 1);
    snprintf(path, sizeof path, "%s/checkpoints/step_00000040/model.safetensors", run);
    assert_same_file(p, "whole/checkpoints/step_00000040/model.safetensors", path);
    snprintf(path, sizeof path, "%s/checkpoints/step_00000040/train_state/optimizer.safetensors", run);
    assert_same_file(p, "whole/checkpoints/step_00000040/train_state/optimizer.safetensors", path);
    /* No rubbish stays. */
    EXITS(0, p, program_shell(p, "! ls -d {}/%s/checkpoints/.tmp* 2> {}/none", run));
}

/* Some rows more than there were, then up to 20 ms: about an update and its save. */
static void wait_at_random(struct program *p, const char *run, uint64_t kill_number, int rows)
{
    uint64_t bits = rng_bits(seed(), 7, 0, kill_number);
    wait_for_rows(p, run, rows + 1 + (int)(bits % 3));
    nanosleep(&(struct timespec){.tv_nsec = (long)((bits >> 8) % 20000000)}, NULL);
}

/* Does the folder look as it does during a save or a rotation? Only what changed after the start counts: an earlier
 * kill may have left the same. */
static bool in_a_save(struct program *p, const char *run)
{
    return program_shell(p, "find {}/%s/checkpoints -maxdepth 1 -name '.tmp*' -newer {}/started | grep .", run) == 0;
}

static void test_kills_of_one_process(void **state)
{
    struct program *p = *state;
    int kills = is_soak() ? SOAK_KILLS : QUICK_KILLS, inside = 0, runs = 0;
    char arguments[128], run[32];
    for (int k = 0; k < kills; runs++) {
        snprintf(run, sizeof run, "killed_%d", runs);
        snprintf(arguments, sizeof arguments, "--run.out={}/%s %s", run, options);
        /* Each kill somewhat later in the run, until it is nearly done. */
        for (int rows = 0; k < kills && rows < UPDATES - 8; k++) {
            int status = 0;
            EXITS(0, p, program_shell(p, "touch {}/started"));
            pid_t pid = program_start(p, 1, arguments);
            wait_at_random(p, run, (uint64_t)k, rows);
            kill(pid, SIGKILL);
            assert_int_equal(waitpid(pid, &status, 0), pid);
            assert_true(WIFSIGNALED(status));
            inside += in_a_save(p, run);
            EXITS(0, p, program_shell(p, "cat {}/background.txt"));
            assert_null(strstr(p->output, "skipped"));
            assert_null(strstr(p->output, "error: "));
            EXITS(0, p, program_shell(p, "wc -l < {}/%s/metrics.jsonl", run));
            rows = (int)strtol(p->output, NULL, 10);
        }
        EXITS(0, p, program_train(p, 1, "%s", arguments));
        assert_null(strstr(p->output, "skipped"));
        program_expect(p, "of 40 is next");
        check_end(p, run);
    }
    print_message("kill -9: %d kills of %d runs, %d of them inside a save or rotation, all runs end as the whole one\n",
                  kills, runs, inside);
}

/* One of two ranks, whichever; mpirun then ends the other. */
static void test_kills_of_a_rank(void **state)
{
    struct program *p = *state;
    soak_only();
    needs_mpi();
    for (int k = 0; k < RANK_KILLS; k++) {
        char arguments[128], run[32];
        snprintf(run, sizeof run, "rank_%d", k);
        snprintf(arguments, sizeof arguments, "--run.out={}/%s %s", run, options);
        pid_t launcher = program_start(p, 2, arguments);
        wait_at_random(p, run, 1000 + (uint64_t)k, k);
        kill(rank_process(p, launcher, k % 2), SIGKILL);
        EXITS(128 + SIGKILL, p, wait_for_end(p, launcher, run, 60));
        EXITS(0, p, program_train(p, k % 3 == 0 ? 1 : 2, "%s", arguments));
        assert_null(strstr(p->output, "skipped"));
        check_end(p, run);
    }
    print_message("kill -9: %d kills of one rank of two, all runs end as the whole one\n", (int)RANK_KILLS);
}

/* SIGTERM at random points, also within a save: the save is finished, exit 4. */
static void test_stops_at_random_points(void **state)
{
    struct program *p = *state;
    char arguments[128];
    soak_only();
    snprintf(arguments, sizeof arguments, "--run.out={}/stops %s", options);
    int stops = 0;
    for (int rows = 0; rows < UPDATES - 8; stops++) {
        pid_t pid = program_start(p, 1, arguments);
        wait_at_random(p, "stops", 2000 + (uint64_t)stops, rows);
        kill(pid, SIGTERM);
        EXITS(4, p, wait_for_end(p, pid, "stops", 60));
        EXITS(0, p, program_shell(p, "! ls -d {}/stops/checkpoints/.tmp* 2> {}/none"));
        rows = metrics_rows(p, "stops");
    }
    EXITS(0, p, program_train(p, 1, "%s", arguments));
    check_end(p, "stops");
    print_message("SIGTERM: %d stops of one run, which ends as the whole one\n", stops);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kills_of_one_process),
        cmocka_unit_test(test_kills_of_a_rank),
        cmocka_unit_test(test_stops_at_random_points),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
