/* Rows of metrics.jsonl at a resume: those of updates that are made again go, the others keep their bytes. */
#include "core/file.h"
#include "core/log.h"
#include "tests/test.h"
#include "tests/train/scratch.h"
#include "train/metrics.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static enum status cut(int64_t update)
{
    struct metrics metrics;
    enum status status = metrics_open(&metrics, scratch_folder(), update, 0);
    metrics_close(&metrics);
    return status;
}

static void test_rows_after_the_update_and_torn_ones_go(void **state)
{
    (void)state;
    static const struct {
        const char *before, *after;
        int64_t update;
    } cases[] = {
        {"", "", 5},
        {"{\"step\": 1}\n{\"step\": 5}\n", "{\"step\": 1}\n{\"step\": 5}\n", 5},
        {"{\"step\": 1}\n{\"step\": 5}\n{\"step\": 6}\n", "{\"step\": 1}\n{\"step\": 5}\n", 5},
        {"{\"step\": 1}\n{\"step\": 2", "{\"step\": 1}\n", 5},
        {"{\"step\": 1}\n\nno row\n{\"step\": 2}\n", "{\"step\": 1}\n{\"step\": 2}\n", 5},
        {"{\"step\": 1}\n", "", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *text = NULL;
        size_t bytes = 0;
        assert_int_equal(file_write_atomic(scratch_path("metrics.jsonl"), cases[i].before, strlen(cases[i].before)),
                         OK);
        assert_int_equal(cut(cases[i].update), OK);
        assert_int_equal(file_read_all(scratch_path("metrics.jsonl"), 1 << 20, &text, &bytes), OK);
        assert_string_equal(text, cases[i].after);
        assert_int_not_equal(access(scratch_path("metrics.jsonl.tmp"), F_OK), 0);
        free(text);
    }
}

static ino_t inode(void)
{
    struct stat info;
    assert_int_equal(stat(scratch_path("metrics.jsonl"), &info), 0);
    return info.st_ino;
}

/* A file that stays as it is needs no room for a copy. */
static void test_nothing_is_written_if_all_rows_stay(void **state)
{
    (void)state;
    static const char rows[] = "{\"step\": 1}\n{\"step\": 2}\n";
    assert_int_equal(file_write_atomic(scratch_path("metrics.jsonl"), rows, strlen(rows)), OK);
    ino_t before = inode();
    assert_int_equal(cut(2), OK);
    assert_true(inode() == before);
    assert_int_equal(cut(1), OK);
    assert_true(inode() != before);
}

/* A copy that cannot be made leaves the rows as they were. */
static void test_a_failed_cut_harms_nothing(void **state)
{
    (void)state;
    static const char rows[] = "{\"step\": 1}\n{\"step\": 2}\n";
    char *text = NULL;
    size_t bytes = 0;
    assert_int_equal(file_write_atomic(scratch_path("metrics.jsonl"), rows, strlen(rows)), OK);
    assert_int_equal(mkdir(scratch_path("metrics.jsonl.tmp"), 0777), 0);
    assert_int_equal(cut(1), ERR_IO);
    assert_non_null(strstr(status_last_message(), "metrics.jsonl.tmp: cannot create"));
    assert_int_equal(rmdir(scratch_path("metrics.jsonl.tmp")), 0);
    assert_int_equal(file_read_all(scratch_path("metrics.jsonl"), 1 << 20, &text, &bytes), OK);
    assert_string_equal(text, rows);
    free(text);
}

/* More than 1 GiB: rows of 32 MiB, mostly holes, so that the file needs no room; all but two go. */
static void test_a_file_of_more_than_a_gibibyte(void **state)
{
    (void)state;
    enum { ROWS = 36 };
    const long row_bytes = 32L << 20;
    struct stat info;
    FILE *file = fopen(scratch_path("metrics.jsonl"), "w");
    assert_non_null(file);
    for (int i = 0; i < ROWS; i++) {
        assert_int_equal(fseek(file, i * row_bytes, SEEK_SET), 0);
        assert_true(fprintf(file, "{\"step\": %d}", i + 1) > 0);
        assert_int_equal(fseek(file, (i + 1) * row_bytes - 1, SEEK_SET), 0);
        assert_int_equal(fputc('\n', file), '\n');
    }
    assert_int_equal(fclose(file), 0);
    assert_int_equal(cut(ROWS), OK);
    assert_int_equal(stat(scratch_path("metrics.jsonl"), &info), 0);
    assert_int_equal(info.st_size, ROWS * row_bytes);
    assert_int_equal(cut(2), OK);
    assert_int_equal(stat(scratch_path("metrics.jsonl"), &info), 0);
    assert_int_equal(info.st_size, 2 * row_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_after_the_update_and_torn_ones_go),
        cmocka_unit_test(test_nothing_is_written_if_all_rows_stay),
        cmocka_unit_test(test_a_failed_cut_harms_nothing),
        cmocka_unit_test(test_a_file_of_more_than_a_gibibyte),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
