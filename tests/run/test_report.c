/* The program report on runs that the test writes: what the page says, and what is refused. Looks are for a person. */
#include "tests/run/program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void write_text(const struct program *p, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", p->folder, name);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    fputs(text, out);
    assert_int_equal(fclose(out), 0);
}

static int report(struct program *p, const char *arguments)
{
    const char *build = getenv("BUILD_DIR");
    return program_shell(p, "%s/report %s", build != NULL ? build : "build/release", arguments);
}

/* A study of two arms: losses 3, 2 and 3, 2.5, so the gap at the end is +0.5; the second one diverged. */
static void write_study(struct program *p)
{
    assert_int_equal(program_shell(p, "rm -rf {}/study && mkdir -p {}/study/bf16/seed_1 {}/study/arm_a/seed_1"), 0);
    write_text(p, "study/bf16/seed_1/metrics.jsonl",
               "{\"step\": 1, \"loss\": 3.0, \"grad_norm\": 1.5, \"row_leak\": 1e-3, \"tokens_per_s\": 100}\n"
               "{\"step\": 2, \"loss\": 2.0, \"grad_norm\": 1.0, \"row_leak\": 1e-3, \"tokens_per_s\": 300}\n");
    write_text(p, "study/bf16/seed_1/verdict.json", "{\"verdict\": \"healthy\", \"reason\": \"\", \"onset\": 0}");
    write_text(p, "study/arm_a/seed_1/metrics.jsonl",
               "{\"step\": 1, \"loss\": 3.0, \"grad_norm\": 1.5, \"row_leak\": 0.1, \"tokens_per_s\": 100}\n"
               "{\"step\": 2, \"loss\": 2.5, \"grad_norm\": null, \"row_leak\": 0.1, \"tokens_per_s\": 100}\n");
    write_text(p, "study/arm_a/seed_1/verdict.json",
               "{\"verdict\": \"diverged\", \"reason\": \"loss <3> & more\", \"onset\": 2, \"eval_loss\": 2.75}");
}

static void expect_in_page(struct program *p, const char *words)
{
    assert_int_equal(program_shell(p, "cat {}/study/report.html"), 0);
    program_expect(p, words);
}

static void test_a_study_becomes_one_page(void **state)
{
    struct program *p = *state;
    write_study(p);
    EXITS(0, p, report(p, "{}/study"));
    program_expect(p, "report.html: 2 runs");
    expect_in_page(p, "bf16/seed_1 (reference)");
    expect_in_page(p, "<td class=\"diverged\">diverged</td><td>2</td><td>2</td><td>2.5000</td><td>+0.5000</td>"
                      "<td>2.7500</td><td>&ndash;</td><td>1.00e-01</td>");
    expect_in_page(p, "loss &lt;3&gt; &amp; more");
    expect_in_page(p, "src=\"data:image/svg+xml;base64,");
    expect_in_page(p, "Signed row leak (slope on r): no run has this number.");
    /* Self-contained: the only addresses are the data themselves. */
    EXITS(1, p, program_shell(p, "grep -E 'src=\"http|href=' {}/study/report.html"));
}

static void test_the_pictures_hold_the_curves(void **state)
{
    struct program *p = *state;
    write_study(p);
    EXITS(0, p, report(p, "{}/study"));
    EXITS(0, p, program_shell(p, "grep -o 'base64,[^\"]*' {}/study/report.html | head -n 1 | cut -c 8- | base64 -d"));
    program_expect(p, "</svg>");
    program_expect(p, "arm_a/seed_1");
}

static void test_the_reference_can_be_named(void **state)
{
    struct program *p = *state;
    write_study(p);
    EXITS(0, p, report(p, "--reference arm_a {}/study"));
    expect_in_page(p, "arm_a/seed_1 (reference)");
    EXITS(1, p, report(p, "--reference nobody {}/study"));
    program_expect(p, "--reference nobody names none of the 2 runs");
}

static void test_bad_input_is_named(void **state)
{
    struct program *p = *state;
    write_study(p);
    EXITS(1, p, report(p, ""));
    program_expect(p, "name at least one run or study folder");
    EXITS(1, p, report(p, "{}"));
    program_expect(p, "expected metrics.jsonl or ARM/seed_N/metrics.jsonl inside, found neither");
    write_text(p, "study/arm_a/seed_1/metrics.jsonl", "{\"step\": 1, \"loss\": 3.0}\n{\"step\": 2, \"lo\n");
    EXITS(1, p, report(p, "{}/study"));
    program_expect(p, "arm_a/seed_1/metrics.jsonl line 2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_study_becomes_one_page),
        cmocka_unit_test(test_the_pictures_hold_the_curves),
        cmocka_unit_test(test_the_reference_can_be_named),
        cmocka_unit_test(test_bad_input_is_named),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
