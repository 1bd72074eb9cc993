/* docs/faults.md names the test of each line as `room/file: test`: each must be there. */
#include "core/file.h"
#include "tests/test.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool has_test(const char *file, const char *test)
{
    char path[256], line[256], *text = NULL;
    size_t bytes = 0;
    snprintf(path, sizeof path, "tests/%s.c", file);
    snprintf(line, sizeof line, "static void %s(void **state)", test);
    if (file_read_all(path, 1 << 20, &text, &bytes) != OK) {
        return false;
    }
    bool found = strstr(text, line) != NULL;
    free(text);
    return found;
}

static void test_every_test_that_is_named_exists(void **state)
{
    (void)state;
    char *text = NULL, file[128], test[128];
    size_t bytes = 0;
    int named = 0;
    assert_int_equal(file_read_all("docs/faults.md", 1 << 20, &text, &bytes), OK);
    for (const char *at = text; (at = strchr(at, '`')) != NULL; at++) {
        if (sscanf(at, "`%127[a-z_/0-9]: %127[a-z_0-9]`", file, test) == 2 && strstr(file, "/test_") != NULL) {
            named++;
            if (!has_test(file, test)) {
                fail_msg("docs/faults.md names %s: %s, which does not exist", file, test);
            }
        }
    }
    free(text);
    assert_true(named > 80);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_test_that_is_named_exists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
