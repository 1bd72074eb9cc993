/* safetensors: our header against the format's definition, and headers that lie. */
#include "checkpoint/safetensors.h"
#include "core/json.h"
#include "tests/checkpoint/scratch.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *path;

static int setup(void **state)
{
    (void)state;
    path = scratch_path(scratch_make(), "file.safetensors");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    scratch_remove();
    return 0;
}

/* A file with this header text and `data` zero bytes behind it. */
static void write_file(const char *json, size_t json_bytes, uint64_t announced, size_t data)
{
    size_t n = 8 + json_bytes + data;
    char *bytes = calloc(n + 1, 1);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++) {
        bytes[i] = (char)(announced >> (8 * i) & 0xff);
    }
    memcpy(bytes + 8, json, json_bytes);
    scratch_write(path, bytes, n);
    free(bytes);
}

static void test_the_header_is_what_the_format_says(void **state)
{
    (void)state;
    const struct safetensors_entry entries[] = {
        {.name = "model.embed_tokens.weight", .dtype = DTYPE_BF16, .rank = 2, .shape = {5, 3}},
        {.name = "scalar", .dtype = DTYPE_F32, .rank = 0},
        {.name = "none", .dtype = DTYPE_I32, .rank = 3, .shape = {4, 0, 2}},
        {.name = "bytes \"quoted\" \xc3\xa9", .dtype = DTYPE_U8, .rank = 1, .shape = {7}},
    };
    struct safetensors file;
    assert_int_equal(safetensors_layout(&file, entries, 4), OK);
    assert_int_equal(file.header_bytes % 8, 0);
    assert_int_equal(file.file_bytes, file.header_bytes + 30 + 4 + 0 + 7);
    json_t *root = NULL;
    assert_int_equal(json_read_text("header", file.header + 8, file.header_bytes - 8, &root), OK);
    json_t *expected =
        json_pack("{s:{s:s}, s:{s:s, s:[i,i], s:[i,i]}, s:{s:s, s:[], s:[i,i]}, s:{s:s, s:[i,i,i], "
                  "s:[i,i]}, s:{s:s, s:[i], s:[i,i]}}",
                  "__metadata__", "format", "pt", entries[0].name, "dtype", "BF16", "shape", 5, 3, "data_offsets", 0,
                  30, "scalar", "dtype", "F32", "shape", "data_offsets", 30, 34, "none", "dtype", "I32", "shape", 4, 0,
                  2, "data_offsets", 34, 34, entries[3].name, "dtype", "U8", "shape", 7, "data_offsets", 34, 41);
    assert_non_null(expected);
    assert_true(json_equal(root, expected));
    json_decref(root);
    json_decref(expected);
    /* Written with its data it reads back as it was laid out. */
    char *bytes = calloc(file.file_bytes, 1);
    memcpy(bytes, file.header, file.header_bytes);
    scratch_write(path, bytes, file.file_bytes);
    free(bytes);
    struct safetensors read;
    assert_int_equal(safetensors_read_header(&read, path), OK);
    assert_int_equal(read.count, 4);
    for (int i = 0; i < 4; i++) {
        const struct safetensors_entry *entry = safetensors_find(&read, entries[i].name);
        assert_non_null(entry);
        assert_int_equal(entry->offset, file.entries[i].offset);
        assert_int_equal(entry->bytes, file.entries[i].bytes);
        assert_int_equal(entry->dtype, entries[i].dtype);
        assert_int_equal(entry->rank, entries[i].rank);
        assert_memory_equal(entry->shape, entries[i].shape, sizeof entry->shape);
    }
    assert_null(safetensors_find(&read, "absent"));
    safetensors_close(&read);
    safetensors_close(&file);
}

static void test_names_are_checked_before_writing(void **state)
{
    (void)state;
    struct safetensors_entry entries[2] = {{.name = "a", .rank = 0}, {.name = "a", .rank = 0}};
    struct safetensors file;
    assert_int_equal(safetensors_layout(&file, entries, 2), ERR_DATA);
    entries[1].name[0] = '\0';
    assert_int_equal(safetensors_layout(&file, entries, 2), ERR_DATA);
    entries[1].name[0] = '\xff';
    assert_int_equal(safetensors_layout(&file, entries, 2), ERR_DATA);
}

static void test_entries_in_any_order_come_in_file_order(void **state)
{
    (void)state;
    const char *json = "{\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]},"
                       "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}   ";
    struct safetensors file;
    write_file(json, strlen(json), strlen(json), 12);
    assert_int_equal(safetensors_read_header(&file, path), OK);
    assert_int_equal(file.count, 2);
    assert_string_equal(file.entries[0].name, "a");
    assert_string_equal(file.entries[1].name, "b");
    assert_int_equal(file.entries[1].offset, 8 + strlen(json) + 4);
    safetensors_close(&file);
}

/* Each header is wrong in one way; the message must say which. */
static void test_headers_that_lie_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        size_t data;
        const char *says;
    } lies[] = {
        {"[1, 2]", 0, "expected an object"},
        {"{\"a\":1}", 0, "tensor a: expected an object"},
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "tensor a: dtype F64, expected"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "dtype missing"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "shape: expected a list"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "at most 4 sizes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "shape[0] is no size"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, "shape[0] is no size"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", 0, "2^63"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets: expected"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "data_offsets: expected"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "outside the 4 bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 8, "span 4 bytes, its shape needs 8"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
         6, "tensor b begins at byte"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
         4, "it overlaps"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[6,10]}}",
         10, "there is a hole"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 5, "its tensors end at"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
         8, "duplicate"},
        {"{\"\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "tensor name"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}", 4, "not valid JSON"},
        {"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "not valid JSON"},
        {"{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "not valid JSON"},
    };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        struct safetensors file;
        write_file(lies[i].json, strlen(lies[i].json), strlen(lies[i].json), lies[i].data);
        assert_int_equal(safetensors_read_header(&file, path), ERR_DATA);
        assert_non_null(strstr(status_last_message(), path));
        if (strstr(status_last_message(), lies[i].says) == NULL) {
            fail_msg("\"%s\" lacks \"%s\"", status_last_message(), lies[i].says);
        }
    }
}

static void test_lengths_that_lie_are_refused(void **state)
{
    (void)state;
    const char *json = "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    const uint64_t lengths[] = {0, 1, 1000, 100000001, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    struct safetensors file;
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        write_file(json, strlen(json), lengths[i], 4);
        assert_int_equal(safetensors_read_header(&file, path), ERR_DATA);
        assert_non_null(strstr(status_last_message(), "header length"));
    }
    for (size_t n = 0; n < 10; n++) {
        scratch_write(path, "\2\0\0\0\0\0\0\0{}", n);
        assert_int_equal(safetensors_read_header(&file, path), ERR_DATA);
    }
    scratch_write(path, "\2\0\0\0\0\0\0\0{}", 10);
    assert_int_equal(safetensors_read_header(&file, path), OK);
    assert_int_equal(file.count, 0);
    safetensors_close(&file);
    assert_int_equal(safetensors_read_header(&file, scratch_path(path, "nothing")), ERR_IO);
}

static void test_deep_json_and_long_names_are_refused(void **state)
{
    (void)state;
    enum { DEPTH = 200000 };
    struct safetensors file;
    char *deep = malloc(2 * DEPTH + 8);
    memset(deep, '[', DEPTH);
    memset(deep + DEPTH, ']', DEPTH);
    write_file(deep, 2 * DEPTH, 2 * DEPTH, 0);
    assert_int_equal(safetensors_read_header(&file, path), ERR_DATA);
    int n = snprintf(deep, 2 * DEPTH, "{\"%0*d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 5000, 7);
    write_file(deep, (size_t)n, (uint64_t)n, 0);
    assert_int_equal(safetensors_read_header(&file, path), ERR_DATA);
    assert_non_null(strstr(status_last_message(), "of 5000 bytes"));
    free(deep);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_the_header_is_what_the_format_says, setup, teardown),
        cmocka_unit_test(test_names_are_checked_before_writing),
        cmocka_unit_test_setup_teardown(test_entries_in_any_order_come_in_file_order, setup, teardown),
        cmocka_unit_test_setup_teardown(test_headers_that_lie_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lengths_that_lie_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_deep_json_and_long_names_are_refused, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
