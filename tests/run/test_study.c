/* A study of two tiny arms from end to end, and what counts as its success. */
#include "core/file.h"
#include "tests/run/program.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

static void write_arm(const struct program *p, const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", p->folder, name);
    assert_int_equal(file_write_atomic(path, text, strlen(text)), OK);
}

static const char study[] = "--run.mode=study '--study.arms={}/arm_*.toml' --study.reference=arm_plain "
                            "--study.seeds=[1,2] --log.stdout=true";

static int write_arms(void **state)
{
    struct program *p = *state;
    write_arm(p, "arm_plain.toml", "[attention]\nqk = \"bf16\"\npv = \"bf16\"\n");
    write_arm(p, "arm_low.toml", "[attention]\nqk = \"nvfp4\"\npv = \"mxfp4\"\n");
    return 0;
}

static void test_matched_arms(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/study %s", study));
    program_expect(p, "attention.pv: \"bf16\" -> \"mxfp4\"");
    program_expect(p, "attention.backward: \"bf16\" -> \"represented\"");
    assert_null(strstr(p->output, "optim.lr:"));
    /* The reference runs first, though its name is not the first. */
    char *plain = strstr(p->output, "run arm_plain/seed_1"), *low = strstr(p->output, "run arm_low/seed_1");
    assert_true(plain != NULL && low != NULL && plain < low);
    assert_verdict(p, "study/arm_plain/seed_1", "healthy", true);
    assert_verdict(p, "study/arm_low/seed_2", "healthy", true);
    /* Same samples in the same order, nearly the same first loss; other seeds read other samples. */
    assert_true(metrics_value(p, "study/arm_plain/seed_1", 1, "loss") !=
                metrics_value(p, "study/arm_low/seed_1", 1, "loss"));
    EXITS(0, p,
          program_shell(p, "for a in arm_plain arm_low; do grep -o 'batch_hash\": \"[0-9a-f]*' "
                           "{}/study/$a/seed_1/metrics.jsonl > {}/$a.hashes; done; "
                           "cmp {}/arm_plain.hashes {}/arm_low.hashes"));
    EXITS(0, p, program_shell(p, "grep -q 'eval_loss_pv_fp8\": [0-9]' {}/study/arm_low/seed_1/verdict.json"));
}

static void test_an_arm_is_the_run_that_it_would_be_alone(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "{}/arm_low.toml --run.out={}/alone --run.seed=2"));
    assert_same_metrics(p, "alone", "study/arm_low/seed_2", "metrics.jsonl", 1);
    assert_same_file(p, "alone/checkpoints/step_00000010/model.safetensors",
                     "study/arm_low/seed_2/checkpoints/step_00000010/model.safetensors");
}

static void test_finished_arms_are_skipped(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_shell(p, "rm -r {}/study/arm_low/seed_2"));
    EXITS(0, p, program_train(p, 1, "--run.out={}/study %s", study));
    program_expect(p, "arm_plain/seed_2: finished before, skipped");
    program_expect(p, "arm_low/seed_1: finished before, skipped");
    program_expect(p, "run arm_low/seed_2");
    assert_same_metrics(p, "alone", "study/arm_low/seed_2", "metrics.jsonl", 1);
    /* Under another configuration they are not the same arms. */
    EXITS(1, p, program_train(p, 1, "--run.out={}/study %s --data.batch=2", study));
    program_expect(p, "data.batch: checkpoint has 4, config has 2");
}

static void test_from_a_checkpoint(void **state)
{
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/trunk --checkpoint.every=5"));
    EXITS(0, p,
          program_train(p, 1,
                        "--run.out={}/branches --run.mode=study '--study.arms={}/arm_*.toml' "
                        "--study.reference=arm_plain --study.from={}/trunk/checkpoints/step_00000005"));
    assert_int_equal(metrics_rows(p, "branches/arm_low/seed_1"), 5);
    /* The reference goes on exactly as the trunk did. */
    assert_same_metrics(p, "trunk", "branches/arm_plain/seed_1", "metrics.jsonl", 6);
}

/* A learning rate that no arm survives: every arm still gets its verdict, and the study is done. */
static void test_diverged_arms_are_verdicts_too(void **state)
{
    struct program *p = *state;
    EXITS(0, p,
          program_train(p, 1,
                        "--run.out={}/wild --run.mode=study '--study.arms={}/arm_*.toml' "
                        "--study.reference=arm_plain --optim.lr=100 --run.steps=200"));
    program_expect(p, "judged without a partner");
    assert_verdict(p, "wild/arm_plain/seed_1", "diverged", true);
    assert_verdict(p, "wild/arm_low/seed_1", "diverged", true);
}

/* Two updates behind the reference by next to nothing are enough here; the reference itself has no partner. Resumed,
 * the arm finds the reference's losses in its folder. */
static void test_partner_rule(void **state)
{
    static const char options[] = "--run.mode=study '--study.arms={}/arm_*.toml' --study.reference=arm_plain "
                                  "--run.steps=40 --divergence.partner_gap=1e-9 --divergence.confirm=1";
    struct program *p = *state;
    EXITS(0, p, program_train(p, 1, "--run.out={}/partner %s", options));
    program_expect(p, "nats from the reference");
    assert_verdict(p, "partner/arm_plain/seed_1", "healthy", true);
    assert_verdict(p, "partner/arm_low/seed_1", "diverged", true);
    EXITS(0, p, program_shell(p, "cp -r {}/partner {}/partner_2 && rm -r {}/partner_2/arm_low"));
    EXITS(0, p, program_train(p, 1, "--run.out={}/partner_2 %s", options));
    assert_verdict(p, "partner_2/arm_low/seed_1", "diverged", true);
    assert_same_metrics(p, "partner/arm_low/seed_1", "partner_2/arm_low/seed_1", "metrics.jsonl", 1);
}

/* A signal stops the study in the middle of an arm; the same command skips, resumes and ends as if there had been none.
 */
static void test_a_stopped_study_goes_on(void **state)
{
    static const char options[] = "--run.mode=study '--study.arms={}/arm_*.toml' --study.reference=arm_plain "
                                  "--run.steps=150 --eval.every=0";
    struct program *p = *state;
    char arguments[256];
    EXITS(0, p, program_train(p, 1, "--run.out={}/unbroken %s", options));
    snprintf(arguments, sizeof arguments, "--run.out={}/broken %s", options);
    pid_t pid = program_start(p, 1, arguments);
    assert_int_equal(program_stop(p, pid, "broken/arm_low/seed_1", SIGTERM), 4);
    assert_verdict(p, "broken/arm_low/seed_1", "healthy", false);
    EXITS(0, p, program_train(p, 1, "%s", arguments));
    program_expect(p, "arm_plain/seed_1: finished before, skipped");
    assert_same_metrics(p, "unbroken/arm_low/seed_1", "broken/arm_low/seed_1", "metrics.jsonl", 1);
    assert_same_file(p, "unbroken/arm_low/seed_1/checkpoints/step_00000150/model.safetensors",
                     "broken/arm_low/seed_1/checkpoints/step_00000150/model.safetensors");
}

static void test_wrong_studies(void **state)
{
    struct program *p = *state;
    EXITS(1, p, program_train(p, 1, "--run.out={}/w --run.mode=study"));
    program_expect(p, "names 0 arms");
    EXITS(1, p, program_train(p, 1, "--run.out={}/w --run.mode=study '--study.arms={}/none_*.toml'"));
    program_expect(p, "no file matches");
    EXITS(1, p,
          program_train(p, 1,
                        "--run.out={}/w --run.mode=study '--study.arms={}/arm_*.toml' "
                        "--study.reference=arm_plane"));
    program_expect(p, "the nearest is arm_plain");
    write_arm(p, "bad.toml", "[optim]\nlr = 1.0\n");
    EXITS(1, p,
          program_train(p, 1,
                        "--run.out={}/w --run.mode=study '--study.arms={}/arm_*.toml {}/bad.toml' "
                        "--study.reference=arm_plain"));
    program_expect(p, "bad.toml:2: optim.lr: an arm may set [attention] and [linear] only");
    /* --dry-run finds it too, and an arm whose keys do not fit together. */
    EXITS(1, p,
          program_train(p, 1,
                        "--dry-run --run.mode=study '--study.arms={}/arm_*.toml {}/bad.toml' "
                        "--study.reference=arm_plain"));
    write_arm(p, "bad.toml", "[attention]\nqk = \"bf16\"\npv = \"mxfp4\"\nsink_keys_fp8 = 33\n");
    EXITS(1, p,
          program_train(p, 1,
                        "--dry-run --run.mode=study '--study.arms={}/arm_*.toml {}/bad.toml' "
                        "--study.reference=arm_plain"));
    program_expect(p, "sink_keys_fp8");
    EXITS(0, p,
          program_train(p, 1,
                        "--dry-run --run.mode=study '--study.arms={}/arm_*.toml' "
                        "--study.reference=arm_plain"));
    program_expect(p, "attention.pv: \"bf16\" -> \"mxfp4\"");
    assert_false(file_exists(p, "w/arm_plain"));
}

static int setup(void **state)
{
    return program_setup(state) != 0 || write_arms(state) != 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matched_arms),
        cmocka_unit_test(test_an_arm_is_the_run_that_it_would_be_alone),
        cmocka_unit_test(test_finished_arms_are_skipped),
        cmocka_unit_test(test_from_a_checkpoint),
        cmocka_unit_test(test_diverged_arms_are_verdicts_too),
        cmocka_unit_test(test_partner_rule),
        cmocka_unit_test(test_a_stopped_study_goes_on),
        cmocka_unit_test(test_wrong_studies),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
