/* Statuses, their messages and exit codes. */
#include "core/status.h"

#include "tests/test.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

static void test_exit_codes_follow_the_design(void **state)
{
    (void)state;
    static const int expected[] = {0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4};
    for (int status = OK; status <= ERR_STOPPED; status++) {
        assert_int_equal(status_exit_code((enum status)status), expected[status]);
        const char *name = status_name((enum status)status);
        assert_true(strcmp(name, "OK") == 0 || strncmp(name, "ERR_", 4) == 0);
    }
    assert_string_equal(status_name(ERR_STOPPED), "ERR_STOPPED");
    assert_int_equal(status_exit_code((enum status)99), 2);
}

static enum status pass_on(int *steps)
{
    TRY(OK);
    ++*steps;
    TRY(status_fail(ERR_DATA, "%s: token %d, vocabulary %d", "data.bin", 300, 256));
    ++*steps;
    return OK;
}

static void test_try_passes_on_the_first_failure_and_keeps_its_words(void **state)
{
    (void)state;
    int steps = 0;
    assert_int_equal(pass_on(&steps), ERR_DATA);
    assert_int_equal(steps, 1);
    assert_string_equal(status_last_message(), "data.bin: token 300, vocabulary 256");
}

static void test_errno_is_put_into_words(void **state)
{
    (void)state;
    errno = ENOSPC;
    assert_int_equal(status_fail_errno(ERR_IO, "run/log", "cannot write"), ERR_IO);
    assert_string_equal(status_last_message(), "run/log: cannot write: No space left on device");
}

static void *message_of_a_new_thread(void *unused)
{
    (void)unused;
    return strcmp(status_last_message(), "") == 0 ? NULL : "not empty";
}

static void test_messages_belong_to_their_thread(void **state)
{
    (void)state;
    assert_int_equal(status_fail(ERR_USAGE, "of the main thread"), ERR_USAGE);
    pthread_t thread;
    void *result = NULL;
    assert_int_equal(pthread_create(&thread, NULL, message_of_a_new_thread, NULL), 0);
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_null(result);
}

static void test_a_failure_is_one_line_whatever_it_quotes(void **state)
{
    (void)state;
    assert_int_equal(status_fail(ERR_DATA, "%s: bad", "a\nb\r\x1b[2Jc\xc3\xa9"), ERR_DATA);
    assert_string_equal(status_last_message(), "a.b..[2Jc\xc3\xa9: bad");
}

static void test_long_messages_are_cut(void **state)
{
    (void)state;
    static char text[5000];
    memset(text, 'x', sizeof text - 1);
    assert_int_equal(status_fail(ERR_IO, "%s", text), ERR_IO);
    assert_in_range(strlen(status_last_message()), 500, 2000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exit_codes_follow_the_design),
        cmocka_unit_test(test_try_passes_on_the_first_failure_and_keeps_its_words),
        cmocka_unit_test(test_errno_is_put_into_words),
        cmocka_unit_test(test_messages_belong_to_their_thread),
        cmocka_unit_test(test_a_failure_is_one_line_whatever_it_quotes),
        cmocka_unit_test(test_long_messages_are_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
