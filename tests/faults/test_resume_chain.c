/* Resume upon resume, over other numbers of ranks and depths of prefetch, in the middle of a shard and over an epoch
 * change that falls into an update: the rows, batches and weights of the run that never stopped. */
#include "dist/comm.h"
#include "tests/faults/background.h"

#include <stdio.h>
#include <string.h>

enum { UPDATES = 24, LEGS = 3 };

/* Three shards of 10, 21 and 6 windows: an epoch of 37 windows ends inside an update of 4. */
static int setup(void **state)
{
    if (program_setup(state) != 0) {
        return 1;
    }
    struct program *p = *state;
    EXITS(0, p,
          program_shell(
              p, "for s in 'a 640' 'b 1344' 'c 384'; do set -- $s; "
                 "awk -v n=$2 -v s=$1 'BEGIN { srand(length(s) + n); for (i = 0; i < n; i++) "
                 "printf \"%%s\", substr(\"the cat sat\", 1 + int(11 * rand()), 1) }' > {}/$1.txt; "
                 "${BUILD_DIR:-build/release}/prepare_data --tokenizer bytes --out {}/$1 {}/$1.txt || exit 1; done"));
    return 0;
}

struct leg {
    int from, ranks, prefetch; /* goes on after update `from` */
};

static int train(struct program *p, const char *run, const struct leg *leg, const char *options)
{
    return program_train(p, comm_has_mpi() ? leg->ranks : 1,
                         "--run.out={}/%s --run.steps=%d '--data.train={}/[abc]/*.tok.zst' --data.prefetch=%d "
                         "--checkpoint.every=1 --checkpoint.keep=100 %s",
                         run, UPDATES, leg->prefetch, options);
}

/* What a run leaves that is killed right after saving update `step`: rows and a torn line beyond it. */
static void cut_after(struct program *p, const char *run, int step)
{
    EXITS(0, p,
          program_shell(
              p,
              "for c in {}/%s/checkpoints/step_*; do [ ${c##*_} -le %08d ] || rm -r $c; done; "
              "for f in 'metrics 1' 'layers 2'; do set -- $f; head -n $(($2 * %d + 1)) {}/%s/$1.jsonl > {}/rows && "
              "printf '{\"step\": 99, \"lo' >> {}/rows && mv {}/rows {}/%s/$1.jsonl; done",
              run, step, step + 1, run, run));
}

static void check_chain(struct program *p, const char *name, const struct leg legs[LEGS], const char *options)
{
    char straight[64], resumed[64], words[64], a[160], b[160];
    snprintf(straight, sizeof straight, "%s_straight", name);
    snprintf(resumed, sizeof resumed, "%s_resumed", name);
    EXITS(0, p, train(p, straight, &(struct leg){0, 1, 1}, options));
    assert_int_equal(metrics_rows(p, straight), UPDATES);
    for (int step = 1; step <= UPDATES; step++) {
        assert_true(metrics_value(p, straight, step, "step") == step);
    }
    EXITS(0, p, program_shell(p, "cp -r {}/%s {}/%s", straight, resumed));
    for (int i = 0; i < LEGS; i++) {
        cut_after(p, resumed, legs[i].from);
        EXITS(0, p, train(p, resumed, &legs[i], options));
        snprintf(words, sizeof words, "update %d of %d is next", legs[i].from + 1, UPDATES);
        program_expect(p, words);
        assert_same_metrics(p, straight, resumed, "metrics.jsonl", 1);
        assert_same_metrics(p, straight, resumed, "layers.jsonl", 1);
        for (int step = legs[i].from + 1; step <= UPDATES; step++) {
            static const char *const files[] = {"model.safetensors", "train_state/optimizer.safetensors"};
            for (int f = 0; f < 2; f++) {
                snprintf(a, sizeof a, "%s/checkpoints/step_%08d/%s", straight, step, files[f]);
                snprintf(b, sizeof b, "%s/checkpoints/step_%08d/%s", resumed, step, files[f]);
                assert_same_file(p, a, b);
            }
        }
    }
}

/* Update 10 crosses into epoch 2, update 19 into epoch 3. */
static void test_more_and_more_ranks(void **state)
{
    static const struct leg legs[LEGS] = {{5, 1, 0}, {9, 2, 2}, {13, 4, 0}};
    soak_only();
    check_chain(*state, "more", legs, "");
}

static void test_fewer_ranks_and_low_precision(void **state)
{
    static const struct leg legs[LEGS] = {{4, 4, 2}, {10, 2, 0}, {19, 1, 2}};
    check_chain(*state, "fewer", legs,
                "configs/arms/nvfp4_mxfp4.toml --linear.mlp=nvfp4 --optim.master=none --optim.moments=bf16 "
                "--optim.stochastic_rounding=true");
}

/* The shards are three, the epochs are not multiples of the batch, and no epoch repeats the order of another: else the
 * two tests above would prove less than they say. */
static void test_the_data_is_as_meant(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_shell(p, "grep 'data: 3[0-9] windows of 64 tokens' {}/fewer_straight/log.txt"));
    EXITS(0, p, program_shell(p, "ls {}/[abc]/train*.tok.zst | wc -l | grep -qx 3"));
    EXITS(0, p,
          program_shell(p,
                        "grep -o 'batch_hash\": \"[0-9a-f]*' {}/fewer_straight/metrics.jsonl | sort -u | wc -l | "
                        "grep -qx %d",
                        UPDATES));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_more_and_more_ranks),
        cmocka_unit_test(test_fewer_ranks_and_low_precision),
        cmocka_unit_test(test_the_data_is_as_meant),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
