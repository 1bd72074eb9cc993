/* run.deterministic = any: losses, norms, statistics, weights and moments are the same bits over 1, 2 and 4 ranks, with
 * and without recomputation. A batch of 12 leaves the tree of gradients uneven at every number of ranks. */
#include "dist/comm.h"
#include "tests/faults/background.h"

#include <stdio.h>

static const char *const same_files[] = {"checkpoints/step_00000004/model.safetensors",
                                         "checkpoints/step_00000004/train_state/optimizer.safetensors"};

static void check_layouts(struct program *p, const char *name, const char *options)
{
    char first[64], run[64], a[160], b[160];
    snprintf(first, sizeof first, "%s_1_none", name);
    EXITS(0, p, program_train(p, 1, "--run.out={}/%s --run.steps=4 %s", first, options));
    for (int ranks = 1; ranks <= (comm_has_mpi() ? 4 : 1); ranks *= 2) {
        static const char *const recompute[] = {"none", "block"};
        /* The first is there already; both answers on two ranks are enough for every day. */
        for (int k = ranks == 1 || (ranks == 4 && !is_soak()); k < 2; k++) {
            snprintf(run, sizeof run, "%s_%d_%s", name, ranks, recompute[k]);
            EXITS(0, p,
                  program_train(p, ranks, "--run.out={}/%s --run.steps=4 --device.recompute=%s %s", run, recompute[k],
                                options));
            assert_same_metrics(p, first, run, "metrics.jsonl", 1);
            assert_same_metrics(p, first, run, "layers.jsonl", 1);
            assert_int_equal(metrics_rows(p, run), 4);
            for (size_t f = 0; f < sizeof same_files / sizeof same_files[0]; f++) {
                snprintf(a, sizeof a, "%s/%s", first, same_files[f]);
                snprintf(b, sizeof b, "%s/%s", run, same_files[f]);
                assert_same_file(p, a, b);
            }
        }
    }
}

static void test_plain(void **state)
{
    soak_only();
    check_layouts(*state, "plain", "--data.batch=12");
}

/* Every source of random numbers and every narrow format at once. */
static void test_low_precision(void **state)
{
    check_layouts(*state, "low",
                  "configs/arms/nvfp4_mxfp4.toml --linear.mlp=nvfp4 --linear.attn=nvfp4 --optim.master=none "
                  "--optim.moments=bf16 --optim.stochastic_rounding=true --data.batch=12");
}

static void test_saved_output(void **state)
{
    soak_only();
    check_layouts(*state, "saved",
                  "configs/arms/nvfp4_fp8_saved.toml --linear.mlp=fp8 --linear.attn=fp8 --optim.grads=bf16 "
                  "--model.tied=true --data.batch=4");
}

/* The comparison can fail: other bits are seen. */
static void test_another_format_is_another_run(void **state)
{
    struct program *p = *state;
    EXITS(0, p,
          program_train(p, 1,
                        "--run.out={}/other --run.steps=4 configs/arms/nvfp4_mxfp4.toml --linear.mlp=nvfp4 "
                        "--linear.attn=nvfp4 --optim.master=none --optim.moments=bf16 --data.batch=12"));
    EXITS(1, p, program_shell(p, "cmp {}/low_1_none/%s {}/other/%s", same_files[0], same_files[0]));
}

/* One sample a rank, on far more ranks than there are cores. */
static void test_64_ranks(void **state)
{
    struct program *p = *state;
    soak_only();
    needs_mpi();
    EXITS(0, p, program_train(p, 1, "--run.out={}/ranks_1 --run.steps=2 --data.batch=64 --eval.every=0"));
    EXITS(0, p, program_train(p, 64, "--run.out={}/ranks_64 --run.steps=2 --data.batch=64 --eval.every=0"));
    assert_same_metrics(p, "ranks_1", "ranks_64", "metrics.jsonl", 1);
    assert_same_metrics(p, "ranks_1", "ranks_64", "layers.jsonl", 1);
    assert_same_file(p, "ranks_1/checkpoints/step_00000002/model.safetensors",
                     "ranks_64/checkpoints/step_00000002/model.safetensors");
    assert_same_file(p, "ranks_1/checkpoints/step_00000002/train_state/optimizer.safetensors",
                     "ranks_64/checkpoints/step_00000002/train_state/optimizer.safetensors");
}

/* There is one micro-batch: sums are by sample. Others are refused, with the way out, and not taken for something else.
 */
static void test_micro_batch(void **state)
{
    struct program *p = *state;
    for (int micro = 2; micro <= 4; micro *= 2) {
        char words[64];
        EXITS(1, p, program_train(p, 1, "--run.out={}/micro --data.micro_batch=%d", micro));
        snprintf(words, sizeof words, "data.micro_batch = %d", micro);
        program_expect(p, words);
        assert_false(file_exists(p, "micro"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),        cmocka_unit_test(test_low_precision),
        cmocka_unit_test(test_saved_output), cmocka_unit_test(test_another_format_is_another_run),
        cmocka_unit_test(test_64_ranks),     cmocka_unit_test(test_micro_batch),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
