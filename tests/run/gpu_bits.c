/* The program on a GPU: what must not change a bit, checkpoints, failures, and step times. */
#include "tests/run/program.h"

#include <stdio.h>
#include <string.h>

enum { UPDATES = 20 };

/* Runs share the choices of their products: with other algorithms they would have other bits. */
#define GPU "--device.kind=cuda --device.gemm_choices={}/gemm.json "

static const char plain[] = "--run.steps=20 --checkpoint.every=10 configs/arms/nvfp4_mxfp4.toml --linear.mlp=nvfp4 "
                            "--linear.attn=fp8 --optim.moments=bf16 --optim.stochastic_rounding=true";

static void test_what_changes_no_bit(void **state)
{
    static const char *const others[][2] = {{"again", ""},
                                            {"launched", "--device.graphs=false"},
                                            {"gate_up", "--device.recompute=gate_up"},
                                            {"block", "--device.recompute=block"},
                                            {"eager", "--device.graphs=false --device.recompute=block"}};
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, GPU "--run.out={}/straight %s", plain));
    assert_true(file_exists(p, "straight/gemm.json"));
    assert_true(file_exists(p, "straight/checkpoints/step_00000010/train_state/gemm.json"));
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        print_message("straight against %s\n", others[i][0]);
        EXITS(0, p, program_train(p, 1, GPU "--run.out={}/%s %s %s", others[i][0], plain, others[i][1]));
        assert_same_end(p, "straight", others[i][0], UPDATES);
    }
}

/* As if a run had been cut after update 10. Without --device.gemm_choices: the checkpoint brings its own. */
static void test_resumed_run_is_the_straight_run(void **state)
{
    struct program *p = *state;
    cut_run(p, "straight", "cut", 10, 12, 24);
    EXITS(0, p, program_train(p, 1, "--device.kind=cuda --run.out={}/cut %s", plain));
    program_expect(p, "update 11 of 20 is next");
    assert_same_end(p, "straight", "cut", UPDATES);
}

/* The kernels for heads of 128, with and without statistics in turn. */
static void test_what_changes_no_bit_in_heads_of_128(void **state)
{
    static const char wide[] = "--run.steps=20 --checkpoint.every=10 configs/arms/nvfp4_fp8.toml --model.width=256 "
                               "--model.head_dim=128 --data.seq_len=192 --log.attention_every=3 --eval.every=0 "
                               "--data.val= --data.micro_batch=2";
    static const char *const others[][2] = {
        {"wide_again", ""}, {"wide_launched", "--device.graphs=false"}, {"wide_block", "--device.recompute=block"}};
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, GPU "--run.out={}/wide %s", wide));
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        print_message("wide against %s\n", others[i][0]);
        EXITS(0, p, program_train(p, 1, GPU "--run.out={}/%s %s %s", others[i][0], wide, others[i][1]));
        assert_same_end(p, "wide", others[i][0], UPDATES);
    }
}

/* Byte for byte, at any size; `part`: the first 1 / part of the file. */
static void assert_same_bytes(struct program *p, const char *a, const char *b, const char *file, int part)
{
    EXITS(0, p,
          program_shell(p, "cd {} && cmp -n $(($(stat -c %%s %s/%s) / %d)) %s/%s %s/%s", a, file, part, a, file, b,
                        file));
}

/* Tensors of several pieces of the staging buffer. With a learning rate of 0 an update changes no weight: the initial
 * ones, and the FP32 masters (a third of the optimizer's file, before the moments), are the CPU's bits, also after a
 * way through the GPU and a checkpoint. */
static void test_initial_weights_are_the_cpus(void **state)
{
    static const char large[] = "--model.vocab=128256 --model.width=128 --data.batch=1 --eval.every=0 --data.val=";
    static const char optimizer[] = "train_state/optimizer.safetensors";
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--device.kind=cpu --run.out={}/w_cpu --run.steps=1 --optim.lr=0 %s", large));
    EXITS(0, p, program_train(p, 1, "--device.kind=cuda --run.out={}/w_cuda --run.steps=1 --optim.lr=0 %s", large));
    EXITS(0, p,
          program_train(p, 1,
                        "--device.kind=cuda --run.out={}/w_back --run.steps=2 --optim.lr=0 %s "
                        "--checkpoint.resume={}/w_cpu/checkpoints/step_00000001",
                        large));
    EXITS(0, p,
          program_shell(p,
                        "cd {} && ln -s w_cpu/checkpoints/step_00000001 c && ln -s w_cuda/checkpoints/step_00000001 g "
                        "&& ln -s w_back/checkpoints/step_00000002 b"));
    assert_same_bytes(p, "c", "g", optimizer, 3);
    assert_same_bytes(p, "c", "b", optimizer, 3);
    assert_same_bytes(p, "g", "b", "model.safetensors", 1);
    EXITS(0, p,
          program_shell(p, "cd {} && n=$(cmp -l c/model.safetensors g/model.safetensors | wc -l) && echo $n bytes of "
                           "weights differ && [ $n -le $(($(stat -c %%s c/model.safetensors) / 131072)) ]"));
    print_message("%s", p->output);
}

/* As the resume above, moments included, where tensors are large. */
static void test_large_tensors_resume(void **state)
{
    static const char run[] = "--run.steps=4 --checkpoint.every=2 --optim.moments=bf16 --model.vocab=128256 "
                              "--model.width=128 --data.batch=1 --eval.every=0 --data.val=";
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, GPU "--run.out={}/l_straight %s", run));
    EXITS(0, p,
          program_train(p, 1,
                        "--device.kind=cuda --run.out={}/l_cut --checkpoint.resume={}/l_straight/checkpoints/"
                        "step_00000002 %s",
                        run));
    EXITS(0, p,
          program_shell(p, "cd {} && ln -s l_straight/checkpoints/step_00000004 s && ln -s "
                           "l_cut/checkpoints/step_00000004 t"));
    assert_same_bytes(p, "s", "t", "model.safetensors", 1);
    assert_same_bytes(p, "s", "t", "train_state/optimizer.safetensors", 1);
}

/* ---- failures, and a run that has no data ---- */

static void test_numbers_that_are_not_finite(void **state)
{
    static const char *const kinds[][2] = {{"nan_grad", "1 gradients are not finite, first in tensor model.layers."},
                                           {"inf_grad", "1 gradients are not finite, first in tensor model.layers."},
                                           {"nan_weight", "weight model.layers."}};
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, GPU "--run.out={}/good --run.steps=5 --checkpoint.every=1 --checkpoint.keep=9"));
    for (int i = 0; i < 3; i++) {
        char checkpoint[128];
        EXITS(3, p,
              program_train(
                  p, 1, GPU "--run.out={}/%s --run.steps=5 --checkpoint.every=1 --debug.allow=1 --debug.fault=%s@3:0",
                  kinds[i][0], kinds[i][0]));
        program_expect(p, "update 3 stopped before it was applied");
        program_expect(p, kinds[i][1]);
        assert_int_equal(metrics_rows(p, kinds[i][0]), 3);
        snprintf(checkpoint, sizeof checkpoint, "%s/checkpoints/step_00000002/train_state/optimizer.safetensors",
                 kinds[i][0]);
        assert_same_file(p, checkpoint, "good/checkpoints/step_00000002/train_state/optimizer.safetensors");
    }
}

static void test_step_time_needs_no_data(void **state)
{
    struct program *p = *state;
    EXITS(0, p,
          program_train(
              p, 1,
              GPU "--run.out={}/timed --run.mode=step_time --run.steps=5 --data.train= --data.val= --eval.every=0"));
    print_message("%s", p->output);
    program_expect(p, "2 updates of 4 x 64 tokens on 1 ranks");
    program_expect(p, "MFU");
    assert_false(file_exists(p, "timed"));
    EXITS(0, p, program_train(p, 1, GPU "--dry-run"));
    program_expect(p, "fits");
    EXITS(0, p, program_call(p, "configs/gpt8b_step_time.toml --dry-run --data.batch=64 --data.micro_batch=64"));
    program_expect(p, "DOES NOT FIT");
    EXITS(2, p, program_call(p, "configs/gpt8b_step_time.toml --data.batch=64 --data.micro_batch=64"));
    program_expect(p, "see --dry-run; try data.micro_batch = 1");
}

/* An argument chooses tests by pattern: gpu_bits '*resume*'. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_changes_no_bit),
        cmocka_unit_test(test_resumed_run_is_the_straight_run),
        cmocka_unit_test(test_what_changes_no_bit_in_heads_of_128),
        cmocka_unit_test(test_initial_weights_are_the_cpus),
        cmocka_unit_test(test_large_tensors_resume),
        cmocka_unit_test(test_numbers_that_are_not_finite),
        cmocka_unit_test(test_step_time_needs_no_data),
    };
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
