/* The program replay_verdict: its first line, its exit status, and what it refuses. */
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char file[] = "/tmp/gpt8b_series_XXXXXX";
static char output[1 << 16]; /* of the last run, both streams */

static int run(const char *arguments)
{
    char line[2048];
    const char *build = getenv("BUILD_DIR");
    snprintf(line, sizeof line, "exec 2>&1; %s/replay_verdict %s", build != NULL ? build : "build/release", arguments);
    FILE *pipe = popen(line, "r");
    assert_non_null(pipe);
    output[fread(output, 1, sizeof output - 1, pipe)] = '\0';
    int status = pclose(pipe);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int run_text(const char *text)
{
    FILE *out = fopen(file, "wb");
    assert_non_null(out);
    fputs(text, out);
    fclose(out);
    return run(file);
}

/* The first line, and no name of a verdict behind it. */
static void expect_verdict(const char *verdict)
{
    char first[64];
    snprintf(first, sizeof first, "verdict: %s\n", verdict);
    assert_int_equal(strncmp(output, first, strlen(first)), 0);
    const char *rest = output + strlen(first);
    assert_null(strstr(rest, "healthy"));
    assert_null(strstr(rest, "suspect"));
    assert_null(strstr(rest, "diverged"));
}

static void test_the_paper_s_series(void **state)
{
    (void)state;
    assert_int_equal(run("tests/series/paper_8b_mxfp4_pv.csv"), 3);
    expect_verdict("diverged");
    assert_non_null(strstr(output, "onset: update 325\nreason: at update 350 loss 7.221"));
    assert_int_equal(run("tests/series/paper_8b_fp8_pv.csv --reference tests/series/paper_8b_bf16.csv"), 0);
    expect_verdict("healthy");
    assert_int_equal(run("tests/series/paper_8b_bf16.csv"), 0);
    expect_verdict("healthy");
}

static void test_a_series_that_ends_in_a_spike_is_suspect(void **state)
{
    (void)state;
    char text[4096] = "update,loss,grad_norm\n";
    for (int u = 1; u <= 50; u++) {
        snprintf(text + strlen(text), sizeof text - strlen(text), "%d,%g,0.5\n", u, u < 50 ? 3.0 : 4.5);
    }
    assert_int_equal(run_text(text), 0);
    expect_verdict("suspect");
}

static void test_nan_and_inf_are_read_and_other_columns_ignored(void **state)
{
    (void)state;
    static const char *const numbers[] = {"nan", "NaN", "inf", "-inf", "Infinity"};
    for (int i = 0; i < 5; i++) {
        char text[256];
        snprintf(text, sizeof text, "lr,loss,grad_norm,update\r\nx,3.5,1,1\r\nx,%s,1,2\r\n\r\n", numbers[i]);
        assert_int_equal(run_text(text), 3);
        expect_verdict("diverged");
        snprintf(text, sizeof text, "update,loss,grad_norm\n1,3.5,1\n2,3.5,%s\n3,3.5,1", numbers[i]);
        assert_int_equal(run_text(text), 3);
        assert_non_null(strstr(output, "onset: update 2\n"));
    }
}

static void test_the_reference_decides_at_equal_updates(void **state)
{
    (void)state;
    char command[128];
    char reference[] = "/tmp/gpt8b_reference_XXXXXX";
    close(mkstemp(reference));
    FILE *a = fopen(file, "wb");
    FILE *b = fopen(reference, "wb");
    assert_true(a != NULL && b != NULL);
    fputs("update,loss,grad_norm\n", a);
    fputs("update,loss,grad_norm\n", b);
    for (int u = 1; u <= 100; u++) {
        fprintf(a, "%d,%g,0.5\n", 2 * u, 3.0);
        fprintf(b, "%d,%g,0.5\n", u, u < 50 ? 2.9 : 1.5);
    }
    fclose(a);
    fclose(b);
    assert_int_equal(run(file), 0);
    snprintf(command, sizeof command, "%s --reference=%s", file, reference);
    assert_int_equal(run(command), 3);
    assert_non_null(strstr(output, "onset: update 50\n"));
    unlink(reference);
}

static void test_bad_files_exit_1_and_name_the_line(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"", ":1: no column update"},
        {"update,loss,grad_norm\n", ":2: no rows"},
        {"update,loss\n1,2\n", ":1: no column grad_norm"},
        {"update,loss,loss,grad_norm\n1,2,2,2\n", ":1: column loss appears twice"},
        {"update,loss,grad_norm\n1,2,3\n2,x,3\n", ":3: loss: expected a number, nan or inf, found \"x\""},
        {"update,loss,grad_norm\n1,,3\n", ":2: loss: expected a number"},
        {"update,loss,grad_norm\n1,2\n", ":2: no grad_norm"},
        {"update,loss,grad_norm\n1.5,2,3\n", ":2: update: expected a whole number"},
        {"update,loss,grad_norm\n0,2,3\n", ":2: update: expected a whole number from 1"},
        {"update,loss,grad_norm\n5,2,3\n\n4,2,3\n", ":4: update 4 does not come after 5"},
        {"update,loss,grad_norm\n5,2,3\n5,2,3\n", ":3: update 5 does not come after 5"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char says[256];
        assert_int_equal(run_text(bad[i].text), 1);
        snprintf(says, sizeof says, "%s%s", file, bad[i].says);
        assert_non_null(strstr(output, says));
        assert_null(strstr(output, "verdict"));
    }
    assert_int_equal(run("/nowhere/series.csv"), 1);
    assert_int_equal(run("/tmp"), 1);
    assert_int_equal(run(""), 1);
    assert_int_equal(run("a b"), 1);
    assert_int_equal(run("--help"), 0);
}

static int setup(void **state)
{
    (void)state;
    return close(mkstemp(file));
}

static int teardown(void **state)
{
    (void)state;
    return unlink(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_paper_s_series),
        cmocka_unit_test(test_a_series_that_ends_in_a_spike_is_suspect),
        cmocka_unit_test(test_nan_and_inf_are_read_and_other_columns_ignored),
        cmocka_unit_test(test_the_reference_decides_at_equal_updates),
        cmocka_unit_test(test_bad_files_exit_1_and_name_the_line),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
