/* A run that breaks: stopped before the damage is written, named, and told by the exit status. */
#include "checkpoint/checkpoint.h"
#include "tests/run/program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum status alone(void *context, enum status mine, enum status *worst)
{
    (void)context;
    *worst = mine;
    return OK;
}

/* Describes the tensors of a safetensors file, with memory for their data. */
static struct checkpoint_tensor *read_list(const char *path, struct safetensors *file)
{
    assert_int_equal(safetensors_read_header(file, path), OK);
    struct checkpoint_tensor *list = calloc((size_t)file->count, sizeof *list);
    for (int i = 0; i < file->count; i++) {
        const struct safetensors_entry *e = &file->entries[i];
        list[i] =
            (struct checkpoint_tensor){.name = e->name, .dtype = e->dtype, .rank = e->rank, .data = malloc(e->bytes)};
        memcpy(list[i].shape, e->shape, sizeof list[i].shape);
    }
    return list;
}

static void free_list(struct checkpoint_tensor *list, struct safetensors *file)
{
    for (int i = 0; i < file->count; i++) {
        free(list[i].data);
    }
    free(list);
    safetensors_close(file);
}

/* Copies checkpoint `from` into `folder` with one weight made NaN, hashes and all: a checkpoint in perfect order that
 * holds a broken weight. */
static void poison(const struct program *p, const char *from, const char *to, const char *tensor)
{
    char source[160], folder[160], path[256];
    struct safetensors model, state;
    struct checkpoint_content content = {0};
    struct checkpoint_group group = {.rank = 0, .size = 1, .agree = alone};
    snprintf(source, sizeof source, "%s/%s", p->folder, from);
    snprintf(folder, sizeof folder, "%s/%s", p->folder, to);
    snprintf(path, sizeof path, "%s/model.safetensors", source);
    struct checkpoint_tensor *weights = read_list(path, &model);
    snprintf(path, sizeof path, "%s/train_state/optimizer.safetensors", source);
    struct checkpoint_tensor *optimizer = read_list(path, &state);
    content.model = weights;
    content.n_model = model.count;
    content.state = optimizer;
    content.n_state = state.count;
    assert_int_equal(checkpoint_load(source, &content), OK);
    bool found = false;
    for (int i = 0; i < model.count; i++) {
        if (strcmp(weights[i].name, tensor) == 0) {
            ((bf16 *)weights[i].data)[3] = 0x7fc0;
            found = true;
        }
    }
    assert_true(found);
    snprintf(path, sizeof path, "%s/config.json", source);
    assert_int_equal(json_read_file(path, &content.config), OK);
    assert_int_equal(checkpoint_read_train(source, &content.train), OK);
    assert_int_equal(checkpoint_save(folder, 5, &group, &content), OK);
    json_decref(content.config);
    json_decref(content.train);
    free_list(weights, &model);
    free_list(optimizer, &state);
}

static void check_nan_stop(struct program *p, int ranks, const char *out, const char *options)
{
    EXITS(3, p,
          program_train(p, ranks, "--run.out={}/%s --checkpoint.resume={}/poisoned/step_00000005 %s", out, options));
    program_expect(p, "update 6 stopped before it was applied");
    program_expect(p, "weight model.layers.1.mlp.down_proj.weight is not finite");
    assert_verdict(p, out, "diverged", true);
    assert_false(file_exists(p, "poisoned/step_00000006"));
    assert_int_equal(metrics_rows(p, out), 1);
}

static void test_nan_weight_stops_before_the_update(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/good --checkpoint.every=5"));
    poison(p, "good/checkpoints/step_00000005", "poisoned", "model.layers.1.mlp.down_proj.weight");
    check_nan_stop(p, 1, "nan_1", "");
    check_nan_stop(p, 1, "nan_fp4",
                   "configs/arms/nvfp4_mxfp4.toml --linear.mlp=nvfp4 '--checkpoint.may_change=attention.* "
                   "linear.*'");
    if (program_call(p, "--version") == 0 && strstr(p->output, "MPI yes") != NULL) {
        check_nan_stop(p, 2, "nan_2", "");
    }
}

/* Healthy checkpoints stay, and the verdict names the newest of them. */
static void test_divergence_stops_and_keeps_what_was_healthy(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/wild --optim.lr=1e-3 --run.steps=40 --checkpoint.every=10"));
    EXITS(3, p,
          program_train(p, 1,
                        "--run.out={}/wild --optim.lr=100 --run.steps=400 --checkpoint.every=10 "
                        "--schedule.kind=constant"));
    program_expect(p, "verdict of run: diverged");
    assert_verdict(p, "wild", "diverged", true);
    assert_true(file_exists(p, "wild/checkpoints/step_00000040"));
    EXITS(0, p, program_shell(p, "grep last_healthy_checkpoint {}/wild/verdict.json"));
    program_expect(p, "step_00000040");
    /* With divergence.stop = false it goes on, as long as numbers are finite, and stays diverged. */
    EXITS(0, p,
          program_train(p, 1,
                        "--run.out={}/on --optim.lr=0.3 --run.steps=120 --schedule.kind=constant "
                        "--divergence.stop=false --divergence.loss_rise_suspect=0.01 "
                        "--divergence.loss_rise_diverged=0.02 --divergence.confirm=1 --divergence.window=5"));
    assert_verdict(p, "on", "diverged", true);
    assert_int_equal(metrics_rows(p, "on"), 120);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nan_weight_stops_before_the_update),
        cmocka_unit_test(test_divergence_stops_and_keeps_what_was_healthy),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
