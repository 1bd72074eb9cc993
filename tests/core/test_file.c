/* Whole files: the old bytes or the new ones, never a mixture, and errors that name the path. */
#include "core/file.h"

#include "tests/core/scratch_folder.h"
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void test_write_then_read(void **state)
{
    char path[SCRATCH_PATH_MAX];
    scratch_path(state, "bytes", path);
    enum { COUNT = 200000 }; /* several growths of the reader's buffer */
    static char bytes[COUNT];
    for (int i = 0; i < COUNT; i++) {
        bytes[i] = (char)(i * 31 % 251);
    }
    char *read = NULL;
    size_t n = 0;
    assert_int_equal(file_write_atomic(path, bytes, COUNT), OK);
    assert_int_equal(file_read_all(path, COUNT, &read, &n), OK);
    assert_int_equal(n, COUNT);
    assert_memory_equal(read, bytes, COUNT);
    assert_int_equal(read[COUNT], 0);
    free(read);
    assert_int_equal(file_write_atomic(path, "new", 3), OK);
    assert_int_equal(file_read_all(path, COUNT, &read, &n), OK);
    assert_string_equal(read, "new");
    free(read);
    char temporary[SCRATCH_PATH_MAX];
    assert_int_equal(access(scratch_path(state, "bytes.tmp", temporary), F_OK), -1);
    assert_int_equal(file_write_atomic(path, "", 0), OK);
    assert_int_equal(file_read_all(path, 0, &read, &n), OK);
    assert_int_equal(n, 0);
    free(read);
}

static void test_a_failed_write_leaves_the_old_file(void **state)
{
    char path[SCRATCH_PATH_MAX];
    char temporary[SCRATCH_PATH_MAX];
    scratch_path(state, "kept", path);
    assert_int_equal(file_write_atomic(path, "old", 3), OK);
    /* A folder in the place of the temporary file: it cannot be created. */
    assert_int_equal(mkdir(scratch_path(state, "kept.tmp", temporary), 0777), 0);
    assert_int_equal(file_write_atomic(path, "new", 3), ERR_IO);
    assert_non_null(strstr(status_last_message(), "kept.tmp"));
    char *read = NULL;
    size_t n = 0;
    assert_int_equal(file_read_all(path, 10, &read, &n), OK);
    assert_string_equal(read, "old");
    free(read);
    /* A folder in the place of the file: renaming fails, and the temporary file goes. */
    assert_int_equal(file_write_atomic(temporary, "new", 3), ERR_IO);
    assert_int_equal(access(scratch_path(state, "kept.tmp.tmp", path), F_OK), -1);
}

static void test_reading_what_is_not_there_or_too_large(void **state)
{
    char path[SCRATCH_PATH_MAX];
    char *read = NULL;
    size_t n = 0;
    assert_int_equal(file_read_all(scratch_path(state, "none", path), 10, &read, &n), ERR_IO);
    assert_non_null(strstr(status_last_message(), "none: cannot open: No such file"));
    assert_int_equal(file_write_atomic(scratch_path(state, "large", path), "12345678901", 11), OK);
    assert_int_equal(file_read_all(path, 10, &read, &n), ERR_DATA);
    assert_int_equal(file_read_all(*state, 10, &read, &n), ERR_IO); /* a folder */
    assert_null(read);
}

static void test_folders_with_their_parents(void **state)
{
    char path[SCRATCH_PATH_MAX];
    struct stat info;
    scratch_path(state, "a/b//c/", path);
    assert_int_equal(file_make_folders(path), OK);
    assert_int_equal(file_make_folders(path), OK);
    assert_true(stat(path, &info) == 0 && S_ISDIR(info.st_mode));
    assert_int_equal(file_sync_folder(path), OK);
    assert_int_equal(file_write_atomic(scratch_path(state, "a/file", path), "x", 1), OK);
    assert_int_equal(file_make_folders(scratch_path(state, "a/file/d", path)), ERR_IO);
    assert_int_equal(file_make_folders(scratch_path(state, "a/file", path)), ERR_IO);
    assert_int_equal(file_sync_folder(scratch_path(state, "none", path)), ERR_IO);
    assert_int_equal(file_make_folders(""), ERR_IO);
}

static void test_paths_that_are_too_long(void **state)
{
    (void)state;
    static char path[6000];
    memset(path, 'x', sizeof path - 1);
    assert_int_equal(file_write_atomic(path, "x", 1), ERR_IO);
    assert_int_equal(file_make_folders(path), ERR_IO);
}

#define IN_SCRATCH(test) cmocka_unit_test_setup_teardown(test, scratch_folder_open, scratch_folder_close)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_SCRATCH(test_write_then_read),
        IN_SCRATCH(test_a_failed_write_leaves_the_old_file),
        IN_SCRATCH(test_reading_what_is_not_there_or_too_large),
        IN_SCRATCH(test_folders_with_their_parents),
        cmocka_unit_test(test_paths_that_are_too_long),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
