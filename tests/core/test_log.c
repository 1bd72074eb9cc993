/* The log, as its file shows it: levels, ranks, one line a call. */
#include "core/log.h"

#include "core/file.h"

#include "tests/core/scratch_folder.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The lines of the log file, without their times, joined. */
static void read_lines(const char *path, char *out, size_t bytes)
{
    char *text = NULL;
    size_t n = 0;
    assert_int_equal(file_read_all(path, 100000, &text, &n), OK);
    out[0] = '\0';
    char *rest = text;
    for (char *line; (line = strtok_r(rest, "\n", &rest));) {
        char *space = strchr(line, ' ');
        assert_non_null(space);
        assert_int_equal(space[-1], 'Z');
        size_t used = strlen(out);
        snprintf(out + used, bytes - used, "%s\n", space + 1);
    }
    free(text);
}

static void test_levels_and_ranks(void **state)
{
    char path[SCRATCH_PATH_MAX];
    char lines[1000];
    scratch_path(state, "log.txt", path);
    assert_int_equal(log_open_file(path), OK);
    log_debug("hidden");
    log_info("step %d", 1);
    log_warn("slow");
    log_set_level(LOG_DEBUG);
    log_debug("shown");
    log_set_level(LOG_INFO);
    log_set_rank(3, 4);
    log_info("other ranks are silent");
    log_warn("late");
    assert_int_equal(status_fail(ERR_COMM, "lost"), ERR_COMM);
    log_set_rank(0, 1);
    log_close_file();
    log_info("after closing, only on stderr");
    read_lines(path, lines, sizeof lines);
    assert_string_equal(lines, "step 1\nwarning: slow\ndebug: shown\n[rank 3] warning: late\n[rank 3] error: lost\n");
    /* Opening again appends: a resumed run keeps its history. */
    assert_int_equal(log_open_file(path), OK);
    log_info("resumed");
    log_close_file();
    read_lines(path, lines, sizeof lines);
    assert_non_null(strstr(lines, "error: lost\nresumed\n"));
    assert_int_equal(log_open_file(*state), ERR_IO); /* a folder */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_levels_and_ranks, scratch_folder_open, scratch_folder_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
