/* Planted faults (debug.fault): the run ends, says why, and nothing broken is written. On two ranks where there is MPI,
 * with the fault on the second: the first must hear of it. */
#include "tests/run/program.h"

#include <stdio.h>
#include <string.h>

static bool has_mpi(struct program *p)
{
    return program_call(p, "--version") == 0 && strstr(p->output, "MPI yes") != NULL;
}

static void test_refused_unless_allowed(void **state)
{
    static const char *const cases[][2] = {
        {"--debug.fault=nan_grad@3:0", "debug.fault is set: it breaks a run on purpose; set debug.allow = 1"},
        {"--attention.debug_leak=0.01", "attention.debug_leak is set"},
        {"--debug.allow=1 --debug.fault=nan_grad@3:1", "no rank 1 among 1"},
        {"--debug.allow=1 --debug.fault=nan_grad@0:0", "expected KIND@UPDATE:RANK"},
        {"--debug.allow=1 --debug.fault=nan_grad@3:0x", "expected KIND@UPDATE:RANK"},
        {"--debug.allow=1 --debug.fault=nan_grad", "expected KIND@UPDATE:RANK"},
        {"--debug.allow=1 --debug.fault=nan_grab@3:0", "nan_grab is none of nan_grad, inf_grad"},
    };
    struct program *p = *state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EXITS(1, p, program_train(p, 1, "--dry-run %s", cases[i][0]));
        program_expect(p, cases[i][1]);
    }
}

/* The update is refused, and the newest checkpoint is the one before, byte for byte as without the fault. */
static void check_number(struct program *p, int ranks, const char *kind, const char *words)
{
    char out[64], where[64], checkpoint[128];
    snprintf(out, sizeof out, "%s_%d", kind, ranks);
    snprintf(where, sizeof where, "first in sample %d of the update, rank %d", ranks == 2 ? 2 : 0, ranks - 1);
    EXITS(3, p,
          program_train(p, ranks, "--run.out={}/%s --checkpoint.every=1 --debug.allow=1 --debug.fault=%s@3:%d", out,
                        kind, ranks - 1));
    program_expect(p, "update 3 stopped before it was applied");
    program_expect(p, words);
    program_expect(p, where);
    assert_verdict(p, out, "diverged", true);
    assert_int_equal(metrics_rows(p, out), 3);
    snprintf(checkpoint, sizeof checkpoint, "%s/checkpoints/step_00000003", out);
    assert_false(file_exists(p, checkpoint));
    snprintf(checkpoint, sizeof checkpoint, "%s/checkpoints/step_00000002/model.safetensors", out);
    assert_same_file(p, checkpoint, "good/checkpoints/step_00000002/model.safetensors");
    snprintf(checkpoint, sizeof checkpoint, "%s/checkpoints/step_00000002/train_state/optimizer.safetensors", out);
    assert_same_file(p, checkpoint, "good/checkpoints/step_00000002/train_state/optimizer.safetensors");
}

static void test_numbers_that_are_not_finite(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/good --checkpoint.every=1 --checkpoint.keep=20"));
    for (int ranks = 1; ranks <= 1 + has_mpi(p); ranks++) {
        check_number(p, ranks, "nan_grad", "1 gradients are not finite, first in tensor model.layers.");
        check_number(p, ranks, "inf_grad", "1 gradients are not finite, first in tensor model.layers.");
        check_number(p, ranks, "nan_weight", ranks == 1 ? "weight model.layers." : "gradients are not finite");
    }
}

/* The other rank does not wait forever. */
static void test_a_lost_rank_ends_the_run(void **state)
{
    static const char *const kinds[] = {"exit", "kill", "hang"};
    /* Of what ends, the launcher speaks: we must not be first, however long it takes on a crowded machine. */
    static const char *const timeouts[] = {"60", "60", "4"};
    struct program *p = *state;
    if (!has_mpi(p)) {
        skip();
    }
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        int status = program_train(p, 2,
                                   "--run.out={}/%s --checkpoint.every=1 --dist.timeout_s=%s --debug.allow=1 "
                                   "--debug.fault=%s@3:1",
                                   kinds[i], timeouts[i], kinds[i]);
        assert_int_not_equal(status, 0);
        program_expect(p, "planted in update 3, rank 1");
        char newest[128];
        snprintf(newest, sizeof newest, "%s/checkpoints/step_00000002", kinds[i]);
        assert_true(file_exists(p, newest));
        snprintf(newest, sizeof newest, "%s/checkpoints/step_00000003", kinds[i]);
        assert_false(file_exists(p, newest));
        /* One cause: the launcher's where the process ended, ours where it only is silent. */
        const char *cause = strstr(p->output, "error: ");
        assert_true(cause == NULL || strstr(cause + 1, "error: ") == NULL);
        if (strcmp(kinds[i], "hang") == 0) {
            program_expect(p, "rank 0 heard nothing from rank 1 for 4.0 s");
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused_unless_allowed),
        cmocka_unit_test(test_numbers_that_are_not_finite),
        cmocka_unit_test(test_a_lost_rank_ends_the_run),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
