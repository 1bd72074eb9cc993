/* Fuzz target: core/json. The input is a JSON file. What is accepted survives being written and read again; typed reads
 * agree with the types that jansson reports. */
#include "core/json.h"
#include "tests/fuzz/fuzz.h"

#include <math.h>
#include <string.h>

static void check_member(const json_t *object, const char *key)
{
    const json_t *member = json_object_get(object, key);
    int64_t i;
    double x;
    const char *text = NULL;
    bool is_int = member && json_is_integer(member), is_number = member && json_is_number(member);
    ASSERT(json_get_int(object, "input", key, &i) == (is_int ? OK : ERR_DATA));
    ASSERT(json_get_double(object, "input", key, &x) == (is_number ? OK : ERR_DATA));
    ASSERT(!is_number || isfinite(x));
    bool is_string = member && json_is_string(member);
    ASSERT(json_get_string(object, "input", key, &text) == (is_string ? OK : ERR_DATA));
    ASSERT(!is_string || strlen(text) == json_string_length(member));
}

static void check_round_trip(const json_t *root)
{
    json_t *again = NULL;
    ASSERT(json_write_file("copy", root) == OK);
    ASSERT(json_read_file("copy", &again) == OK);
    ASSERT(json_equal(root, again));
    json_decref(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    json_t *from_text = NULL, *from_file = NULL;
    enum status status = json_read_text("input", (const char *)data, n, &from_text);
    fuzz_store("input", data, n);
    ASSERT(json_read_file("input", &from_file) == status);
    if (status != OK) {
        fuzz_refused(status, ERR_DATA, "input:");
        ASSERT(from_text == NULL && from_file == NULL);
        return 0;
    }
    ASSERT(json_equal(from_text, from_file));
    const char *key;
    json_t *value;
    json_object_foreach(from_text, key, value)
    {
        check_member(from_text, key);
        check_member(value, key);
    }
    check_member(from_text, "step");
    check_round_trip(from_text);
    json_decref(from_text);
    json_decref(from_file);
    return 0;
}

void fuzz_seeds(const char *folder)
{
    static const char *const texts[] = {
        "{}",
        "[]",
        "[1, -2, 0.5, 1e-7, 1E+300, -0.0, null, true, false, \"\"]",
        "{\"step\": 12, \"tokens\": 9007199254740993, \"loss\": 3.25, \"name\": \"a\\u00e9\\n\\\"b\", \"x\": null}",
        "{\"a\": {\"b\": {\"c\": [[[{}]]]}}, \"step\": \"\xc3\xa9\\ud83d\\ude00\"}",
        "{\"version\": 1, \"files\": [{\"path\": \"config.json\", \"bytes\": 10, \"xxh3\": [\"00ff\"]}]}",
        "{\"a\": 1, \"a\": 2}",
        "[-9223372036854775808, 9223372036854775807]",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        char name[] = {'j', (char)('0' + i), '\0'};
        fuzz_seed(folder, name, texts[i], strlen(texts[i]));
    }
    static const char *const words[] = {"null",
                                        "true",
                                        "false",
                                        "\\x5cu0000",
                                        "\\x5cud83d\\x5cude00",
                                        "\\x22:",
                                        "\\xc3\\xa9",
                                        "\\xed\\xa0\\x80",
                                        "\\xf4\\x90\\x80\\x80",
                                        "-0",
                                        "e308",
                                        "1e-400",
                                        "9223372036854775808",
                                        "[[[[[[[[[[[[[[[[",
                                        "{\\x22a\\x22:"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        fuzz_word(folder, words[i]);
    }
    /* What the program itself writes. */
    json_t *root =
        json_pack("{s:o, s:[i,i], s:s, s:b}", "tenth", json_finite(0.1), "list", 1, 2, "name", "run", "on", 1);
    ASSERT(root != NULL);
    char *text = json_dumps(root, JSON_INDENT(2));
    fuzz_seed(folder, "written", text, strlen(text));
    free(text);
    json_decref(root);
}
