/* core: JSON by jansson, with our errors. */
#include "core/json.h"

#include "core/file.h"

#include <math.h>
#include <stdlib.h>

/* Tokenisers of 128k tokens take 17 MB; more than this is not a JSON file of ours. */
enum { JSON_BYTES_MAX = 1 << 28 };

enum status json_read_text(const char *name, const char *text, size_t bytes, json_t **root)
{
    json_error_t error;
    json_t *read = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!read) {
        return status_fail(ERR_DATA, "%s:%d:%d: not valid JSON: %s", name, error.line, error.column, error.text);
    }
    *root = read;
    return OK;
}

enum status json_read_file(const char *path, json_t **root)
{
    char *text = NULL;
    size_t bytes = 0;
    TRY(file_read_all(path, JSON_BYTES_MAX, &text, &bytes));
    enum status status = json_read_text(path, text, bytes, root);
    free(text);
    return status;
}

enum status json_write_file(const char *path, const json_t *root)
{
    /* JSON_ENCODE_ANY: whether a lone number is a document is for the caller to say. */
    const size_t flags = JSON_INDENT(2) | JSON_ENCODE_ANY;
    size_t bytes = json_dumpb(root, NULL, 0, flags);
    if (bytes == 0) {
        return status_fail(ERR_IO, "%s: this JSON cannot be written as text", path);
    }
    char *text = malloc(bytes + 1);
    if (!text) {
        return status_fail(ERR_NOMEM, "%s: no memory for %zu bytes of JSON", path, bytes);
    }
    size_t written = json_dumpb(root, text, bytes, flags);
    ASSERT(written == bytes);
    text[bytes] = '\n';
    enum status status = file_write_atomic(path, text, bytes + 1);
    free(text);
    return status;
}

json_t *json_finite(double x)
{
    json_t *number = isfinite(x) ? json_real(x) : json_null();
    ASSERT(number);
    return number;
}

/* The member under `key`, of whatever type; `type` is for the message. */
static enum status find(const json_t *object, const char *name, const char *key, const char *type, json_t **member)
{
    if (!json_is_object(object)) {
        return status_fail(ERR_DATA, "%s: expected an object that holds %s", name, key);
    }
    *member = json_object_get(object, key);
    if (!*member) {
        return status_fail(ERR_DATA, "%s: %s is missing, expected %s", name, key, type);
    }
    return OK;
}

static enum status wrong_type(const char *name, const char *key, const char *type)
{
    return status_fail(ERR_DATA, "%s: %s is not %s", name, key, type);
}

enum status json_get_int(const json_t *object, const char *name, const char *key, int64_t *value)
{
    json_t *member;
    TRY(find(object, name, key, "an integer", &member));
    if (!json_is_integer(member)) {
        return wrong_type(name, key, "an integer");
    }
    *value = json_integer_value(member);
    return OK;
}

enum status json_get_double(const json_t *object, const char *name, const char *key, double *value)
{
    json_t *member;
    TRY(find(object, name, key, "a number", &member));
    if (!json_is_number(member)) {
        return wrong_type(name, key, "a number");
    }
    *value = json_number_value(member);
    return OK;
}

enum status json_get_string(const json_t *object, const char *name, const char *key, const char **value)
{
    json_t *member;
    TRY(find(object, name, key, "a string", &member));
    if (!json_is_string(member)) {
        return wrong_type(name, key, "a string");
    }
    *value = json_string_value(member);
    return OK;
}
