/* JSON: exact integers, refused files with their place, and documents that survive a round trip. */
#include "core/json.h"

#include "core/file.h"

#include "tests/core/scratch_folder.h"
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static json_t *read_text(const char *text)
{
    json_t *root = NULL;
    assert_int_equal(json_read_text("text", text, strlen(text), &root), OK);
    return root;
}

static void test_integers_beyond_double_precision_stay_exact(void **state)
{
    (void)state;
    json_t *root = read_text("{\"n\": 9007199254740993, \"m\": -9223372036854775808}");
    int64_t value = 0;
    assert_int_equal(json_get_int(root, "text", "n", &value), OK);
    assert_true(value == INT64_C(9007199254740993));
    assert_int_equal(json_get_int(root, "text", "m", &value), OK);
    assert_true(value == INT64_MIN);
    json_decref(root);
}

static void test_broken_text_is_refused_with_its_place(void **state)
{
    (void)state;
    static const char *const broken[] = {
        "{\"a\": 1, \"a\": 2}",         "{\"a\": NaN}",   "{\"a\": 1", "{} {}", "",
        "{\"a\": 9223372036854775808}", "{\"a\": 1e999}",
    };
    json_t *root = NULL;
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        assert_int_equal(json_read_text("some.json", broken[i], strlen(broken[i]), &root), ERR_DATA);
        assert_null(root);
    }
    assert_int_equal(json_read_text("some.json", "{\n\"a\": 1,\n\"a\": 2}", 18, &root), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "some.json:3:3: "));
    assert_non_null(strstr(status_last_message(), "duplicate"));
}

static void test_typed_reads_name_what_is_wrong(void **state)
{
    (void)state;
    json_t *root = read_text("{\"i\": 3, \"x\": 0.5, \"s\": \"word\"}");
    int64_t i = 0;
    double x = 0;
    const char *s = NULL;
    assert_int_equal(json_get_int(root, "f", "i", &i), OK);
    assert_int_equal(json_get_double(root, "f", "x", &x), OK);
    assert_int_equal(json_get_string(root, "f", "s", &s), OK);
    assert_true(i == 3 && x == 0.5 && strcmp(s, "word") == 0);
    assert_int_equal(json_get_double(root, "f", "i", &x), OK);
    assert_true(x == 3);
    assert_int_equal(json_get_int(root, "model/config.json", "x", &i), ERR_DATA);
    assert_string_equal(status_last_message(), "model/config.json: x is not an integer");
    assert_int_equal(json_get_double(root, "f", "s", &x), ERR_DATA);
    assert_int_equal(json_get_string(root, "f", "i", &s), ERR_DATA);
    assert_int_equal(json_get_int(root, "f", "none", &i), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "none is missing"));
    json_t *list = read_text("[1]");
    assert_int_equal(json_get_int(list, "f", "i", &i), ERR_DATA);
    assert_true(i == 3 && x == 3);
    json_decref(list);
    json_decref(root);
}

static void test_files_survive_a_round_trip(void **state)
{
    char path[SCRATCH_PATH_MAX];
    scratch_path(state, "out.json", path);
    json_t *root = json_pack("{s:o, s:o, s:I}", "tenth", json_finite(0.1), "nan", json_finite(NAN), "n",
                             (json_int_t)9007199254740993);
    assert_non_null(root);
    json_t *again = NULL;
    assert_int_equal(json_write_file(path, root), OK);
    assert_int_equal(json_read_file(path, &again), OK);
    assert_true(json_equal(root, again));
    assert_true(json_is_null(json_object_get(again, "nan")));
    char *text = NULL;
    size_t bytes = 0;
    assert_int_equal(file_read_all(path, 1000, &text, &bytes), OK);
    assert_int_equal(text[bytes - 1], '\n');
    free(text);
    json_decref(again);
    json_decref(root);
    assert_int_equal(json_read_file(scratch_path(state, "none.json", path), &again), ERR_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_integers_beyond_double_precision_stay_exact),
        cmocka_unit_test(test_broken_text_is_refused_with_its_place),
        cmocka_unit_test(test_typed_reads_name_what_is_wrong),
        cmocka_unit_test_setup_teardown(test_files_survive_a_round_trip, scratch_folder_open, scratch_folder_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
