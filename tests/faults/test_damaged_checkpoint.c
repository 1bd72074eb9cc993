/* A damaged newest checkpoint: the one before it is taken, the log says why, and the run ends as if nothing had been
 * there. Damage is done to a run of 4 updates that saved each of them. */
#include "tests/run/program.h"

#include <stdio.h>
#include <string.h>

static const char options[] = "--run.steps=4 --checkpoint.every=1 --checkpoint.keep=10 --eval.every=0";

static int setup(void **state)
{
    if (program_setup(state) != 0) {
        return 1;
    }
    EXITS(0, (struct program *)*state, program_train(*state, 1, "--run.out={}/good %s", options));
    return 0;
}

/* Copies the run and does `damage`, a shell command, within its newest checkpoint; updates from `next` on are made
 * again. */
static void check_damage(struct program *p, const char *damage, const char *says, int next)
{
    char words[64];
    EXITS(0, p,
          program_shell(p, "rm -rf {}/bad && cp -r {}/good {}/bad && cd {}/bad/checkpoints/step_00000004 && { %s; }",
                        damage));
    EXITS(0, p, program_train(p, 1, "--run.out={}/bad %s", options));
    program_expect(p, says);
    snprintf(words, sizeof words, "update %d of 4 is next", next);
    program_expect(p, words);
    assert_same_metrics(p, "good", "bad", "metrics.jsonl", 1);
    assert_same_metrics(p, "good", "bad", "layers.jsonl", 1);
    assert_same_file(p, "good/checkpoints/step_00000004/model.safetensors",
                     "bad/checkpoints/step_00000004/model.safetensors");
    assert_same_file(p, "good/checkpoints/step_00000004/train_state/optimizer.safetensors",
                     "bad/checkpoints/step_00000004/train_state/optimizer.safetensors");
    /* What was damaged has been replaced by what is whole. */
    EXITS(0, p, program_train(p, 1, "--run.out={}/bad %s", options));
    program_expect(p, "all 4 updates are made");
    assert_null(strstr(p->output, "skipped"));
}

/* XOR with 1 of the byte in the middle. */
static const char flip[] =
    "n=$(($(stat -c %s $f) / 2)); b=$(od -An -tu1 -j$n -N1 $f); printf \"\\\\$(printf %o $((b ^ 1)))\" "
    "| dd conv=notrunc bs=1 seek=$n of=$f status=none";

static void check_flip(struct program *p, const char *file, const char *says)
{
    char damage[512];
    snprintf(damage, sizeof damage, "f=%s; %s", file, flip);
    check_damage(p, damage, says, 4);
}

static void test_one_bit(void **state)
{
    struct program *p = *state;
    check_flip(p, "model.safetensors", "skipped: ");
    program_shell(p, "grep -c 'model.safetensors: damaged in extent 0' {}/bad/log.txt");
    check_flip(p, "train_state/optimizer.safetensors",
               "optimizer.safetensors: damaged in extent 0 (64 MiB from byte 0)");
    check_flip(p, "train_state/state.json", "step_00000004: skipped: ");
    check_flip(p, "config.json", "config.json: damaged in extent 0");
    check_flip(p, "tokenizer.json", "tokenizer.json: damaged in extent 0");
    check_flip(p, "manifest.json", "step_00000004: skipped: ");
}

static void test_a_file_cut_or_gone(void **state)
{
    struct program *p = *state;
    check_damage(p, "truncate -s -1 model.safetensors", "model.safetensors: expected 281328 bytes, found 281327", 4);
    check_damage(p, "truncate -s 0 train_state/optimizer.safetensors", "bytes, found 0", 4);
    check_damage(p, "rm train_state/state.json", "state.json: cannot open: No such file or directory", 4);
    check_damage(p, "rm -r train_state", "skipped: ", 4);
    check_damage(p, "truncate -s 100 manifest.json", "manifest.json:7:0: not valid JSON", 4);
}

static void test_no_manifest(void **state)
{
    struct program *p = *state;
    check_damage(p, "rm manifest.json", "manifest.json: missing: this checkpoint is not complete", 4);
    /* What a killed save leaves has another name: it is no checkpoint, and is removed without a word of alarm. */
    check_damage(p, "cd .. && mv step_00000004 .tmp_step_00000004 && rm .tmp_step_00000004/manifest.json",
                 "removing what an interrupted save left", 4);
    assert_false(file_exists(p, "bad/checkpoints/.tmp_step_00000004"));
}

static void test_two_are_damaged(void **state)
{
    struct program *p = *state;
    check_damage(p, "rm manifest.json ../step_00000003/model.safetensors", "step_00000003: skipped: ", 3);
    /* Foreign things in the folder are no checkpoints. */
    check_damage(p, "mkdir ../step_5 ../step_00000009x ../other && touch ../step_7 && rm manifest.json",
                 "step_00000004: skipped: ", 4);
}

/* The run begins again, and says so. */
static void test_all_are_damaged(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_shell(p, "rm -rf {}/bad && cp -r {}/good {}/bad && rm {}/bad/checkpoints/*/manifest.json"));
    EXITS(0, p, program_train(p, 1, "--run.out={}/bad %s", options));
    program_expect(p, "no checkpoint there can be resumed from: starting with update 1");
    assert_same_metrics(p, "good", "bad", "metrics.jsonl", 1);
    assert_same_file(p, "good/checkpoints/step_00000004/model.safetensors",
                     "bad/checkpoints/step_00000004/model.safetensors");
}

/* A checkpoint named by hand is not replaced by another one. */
static void test_a_damaged_one_by_name(void **state)
{
    struct program *p = *state;
    EXITS(0, p,
          program_shell(p, "rm -rf {}/bad && cp -r {}/good {}/bad && "
                           "truncate -s -1 {}/bad/checkpoints/step_00000004/model.safetensors"));
    EXITS(1, p,
          program_train(p, 1, "--run.out={}/named --checkpoint.resume={}/bad/checkpoints/step_00000004 --run.steps=6"));
    program_expect(p, "model.safetensors: expected 281328 bytes, found 281327");
    assert_false(file_exists(p, "named/checkpoints"));
}

/* Shards that are gone, cut or changed when a run goes on; put back, it goes on exactly. */
static void test_shards_at_a_resume(void **state)
{
    static const char *const faults[][2] = {
        {"mv {}/train.tok.zst {}/train.kept", "no token shard matches '"},
        {"head -c 3000 {}/train.kept > {}/train.tok.zst", "train.tok.zst"},
        {": > {}/train.tok.zst", "train.tok.zst"},
        {"cp {}/val.tok.zst {}/train.tok.zst", "checkpoint has training data"},
    };
    struct program *p = *state;
    EXITS(0, p, program_shell(p, "rm -rf {}/bad && cp -r {}/good {}/bad && rm -r {}/bad/checkpoints/step_00000004"));
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        EXITS(0, p, program_shell(p, "%s", faults[i][0]));
        EXITS(1, p, program_train(p, 1, "--run.out={}/bad %s", options));
        program_expect(p, faults[i][1]);
    }
    EXITS(0, p, program_shell(p, "mv {}/train.kept {}/train.tok.zst"));
    EXITS(0, p, program_train(p, 1, "--run.out={}/bad %s", options));
    assert_same_metrics(p, "good", "bad", "metrics.jsonl", 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_bit),
        cmocka_unit_test(test_a_file_cut_or_gone),
        cmocka_unit_test(test_no_manifest),
        cmocka_unit_test(test_two_are_damaged),
        cmocka_unit_test(test_all_are_damaged),
        cmocka_unit_test(test_a_damaged_one_by_name),
        cmocka_unit_test(test_shards_at_a_resume),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
