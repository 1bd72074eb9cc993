/* Equal bits: from run to run, over ranks, with and without recomputation, over threads. */
#include "dist/comm.h"
#include "tests/run/program.h"

#include <stdio.h>
#include <string.h>

static const char weights[] = "checkpoints/step_00000010/model.safetensors";

static void assert_same_run(const struct program *p, const char *a, const char *b)
{
    char left[128], right[128];
    assert_same_metrics(p, a, b, "metrics.jsonl", 1);
    assert_same_metrics(p, a, b, "layers.jsonl", 1);
    snprintf(left, sizeof left, "%s/%s", a, weights);
    snprintf(right, sizeof right, "%s/%s", b, weights);
    assert_same_file(p, left, right);
    snprintf(left, sizeof left, "%s/checkpoints/step_00000010/train_state/optimizer.safetensors", a);
    snprintf(right, sizeof right, "%s/checkpoints/step_00000010/train_state/optimizer.safetensors", b);
    assert_same_file(p, left, right);
}

static void test_two_runs_are_equal_and_learn(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/a"));
    EXITS(0, p, program_train(p, 1, "--run.out={}/b"));
    assert_same_run(p, "a", "b");
    assert_int_equal(metrics_rows(p, "a"), 10);
    assert_verdict(p, "a", "healthy", true);
    double first = metrics_value(p, "a", 1, "loss"), last = metrics_value(p, "a", 10, "loss");
    assert_true(first > 5.5 && first < 6.0); /* ln 320 = 5.77 */
    assert_true(last < first - 0.5);
    /* Another seed is another run. */
    EXITS(0, p, program_train(p, 1, "--run.out={}/c --run.seed=2 --run.steps=1"));
    assert_true(metrics_value(p, "c", 1, "loss") != first);
}

static void test_schedule_is_wired(void **state)
{
    struct program *p = *state;
    /* lr 5e-3, warm-up 2, last update at a tenth, in FP32. */
    assert_true(metrics_value(p, "a", 1, "lr") == 0.5 * (double)5e-3F);
    assert_true(metrics_value(p, "a", 2, "lr") == (double)5e-3F);
    assert_true(metrics_value(p, "a", 10, "lr") == (double)5e-3F * (double)0.1F);
    assert_true(metrics_value(p, "a", 10, "tokens") == 10 * 4 * 64);
}

static void test_recomputation_changes_no_bit(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "configs/arms/nvfp4_mxfp4.toml --run.out={}/keep"));
    EXITS(0, p, program_train(p, 1, "configs/arms/nvfp4_mxfp4.toml --run.out={}/again --device.recompute=block"));
    assert_same_run(p, "keep", "again");
}

static void test_threads_change_no_bit(void **state)
{
    struct program *p = *state;
    EXITS(0, p,
          program_shell(p, "OMP_NUM_THREADS=3 ${BUILD_DIR:-build/release}/train_gpt8b {}/base.toml "
                           "configs/arms/nvfp4_mxfp4.toml --run.out={}/threads"));
    assert_same_run(p, "keep", "threads");
}

/* Linear recipes with stochastic rounding and narrow optimizer state: random numbers must not depend on ranks either.
 * The single rank accumulates what two ranks share. */
static void test_two_ranks_equal_one(void **state)
{
    static const char options[] = "configs/arms/nvfp4_mxfp4_saved.toml --linear.mlp=nvfp4 --linear.attn=nvfp4 "
                                  "--optim.master=none --optim.moments=bf16 --optim.stochastic_rounding=true "
                                  "--optim.grads=bf16 --data.batch=6";
    struct program *p = *state;
    if (!comm_has_mpi()) {
        skip();
    }
    EXITS(0, p, program_train(p, 1, "--run.out={}/one %s", options));
    EXITS(0, p, program_train(p, 2, "--run.out={}/two %s", options));
    assert_same_run(p, "one", "two");
    EXITS(0, p, program_train(p, 2, "--run.out={}/plain"));
    assert_same_run(p, "a", "plain");
}

static void test_ranks_that_do_not_fit(void **state)
{
    struct program *p = *state;
    if (!comm_has_mpi()) {
        skip();
    }
    EXITS(1, p, program_train(p, 3, "--run.out={}/three"));
    program_expect(p, "start 2 or 4");
    EXITS(1, p, program_train(p, 2, "--run.out={}/odd --data.batch=5"));
    program_expect(p, "nearest valid values are 4 and 6");
    /* The cause is said once. */
    char *first = strstr(p->output, "nearest valid values");
    assert_null(strstr(first + 1, "nearest valid values"));
}

static void test_step_time_prints_phases_and_writes_nothing(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/timed --run.mode=step_time --run.steps=3"));
    program_expect(p, "2 updates of 4 x 64 tokens on 1 ranks");
    program_expect(p, "backward");
    assert_false(file_exists(p, "timed"));
}

/* One rank's trouble ends both, and its cause is said once, by its own rank. */
static void test_a_rank_that_cannot_start(void **state)
{
    struct program *p = *state;
    if (!comm_has_mpi()) {
        skip();
    }
    EXITS(1, p, program_train_unequal(p, "--run.out={}/u", "--run.out={}/u --data.train={}/none.tok.zst"));
    program_expect(p, "[rank 1] error: ");
    program_expect(p, "none.tok.zst");
    assert_null(strstr(strstr(p->output, "error: ") + 1, "error: "));
    EXITS(1, p, program_train_unequal(p, "--run.out={}/u", "--run.out={}/v"));
    program_expect(p, "run.out must be one folder that all ranks share");
    EXITS(1, p, program_train_unequal(p, "--run.out={}/u", "--run.out={}/u --optim.lr=1e-3"));
    program_expect(p, "different configurations");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_runs_are_equal_and_learn),
        cmocka_unit_test(test_schedule_is_wired),
        cmocka_unit_test(test_recomputation_changes_no_bit),
        cmocka_unit_test(test_threads_change_no_bit),
        cmocka_unit_test(test_two_ranks_equal_one),
        cmocka_unit_test(test_ranks_that_do_not_fit),
        cmocka_unit_test(test_a_rank_that_cannot_start),
        cmocka_unit_test(test_step_time_prints_phases_and_writes_nothing),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
