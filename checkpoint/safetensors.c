/* checkpoint: the header of a safetensors file: 8 bytes of length, a JSON object of tensors, padding; then the data of
 * all tensors without holes. Files may come from anywhere, so nothing in a header is believed before it is checked. */
#include "checkpoint/safetensors.h"

#include "core/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The format's own limit on a header. */
static const uint64_t header_bytes_max = 100000000;
enum { LENGTH_BYTES = 8, ALIGNMENT = 8 };

static const char *const dtype_codes[] = {
    [DTYPE_F32] = "F32", [DTYPE_BF16] = "BF16", [DTYPE_I32] = "I32", [DTYPE_U8] = "U8"};
enum { DTYPES = sizeof dtype_codes / sizeof dtype_codes[0] };

void safetensors_close(struct safetensors *file)
{
    free(file->entries);
    free(file->header);
    *file = (struct safetensors){0};
}

const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name)
{
    for (int i = 0; i < file->count; i++) {
        if (strcmp(file->entries[i].name, name) == 0) {
            return &file->entries[i];
        }
    }
    return NULL;
}

void safetensors_describe(const struct safetensors_entry *entry, char *text, size_t bytes)
{
    int used = snprintf(text, bytes, "%s (", dtype_codes[entry->dtype]);
    for (int i = 0; i < entry->rank && used > 0 && (size_t)used < bytes; i++) {
        used += snprintf(text + used, bytes - (size_t)used, "%s%lld", i > 0 ? ", " : "", (long long)entry->shape[i]);
    }
    if (used > 0 && (size_t)used < bytes) {
        snprintf(text + used, bytes - (size_t)used, ")");
    }
}

/* Bytes of a tensor; false if they do not fit 63 bits. */
static bool tensor_bytes(const struct safetensors_entry *entry, uint64_t *bytes)
{
    int64_t n = (int64_t)dtype_bytes(entry->dtype);
    for (int i = 0; i < entry->rank; i++) {
        if (entry->shape[i] < 0 || __builtin_mul_overflow(n, entry->shape[i], &n)) {
            return false;
        }
    }
    *bytes = (uint64_t)n;
    return true;
}

/* ------------------------------------------------------------------------------------------------------- writing ---
 */

static json_t *describe_entry(const struct safetensors_entry *entry, uint64_t begin)
{
    json_t *shape = json_array();
    for (int i = 0; i < entry->rank; i++) {
        json_array_append_new(shape, json_integer(entry->shape[i]));
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_codes[entry->dtype], "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)(begin + entry->bytes));
}

static enum status describe_all(struct safetensors *file, json_t *root, uint64_t *data_bytes)
{
    json_object_set_new(root, "__metadata__", json_pack("{s:s}", "format", "pt"));
    uint64_t begin = 0;
    for (int i = 0; i < file->count; i++) {
        struct safetensors_entry *entry = &file->entries[i];
        bool fits = entry->rank >= 0 && entry->rank <= SAFETENSORS_RANK_MAX && tensor_bytes(entry, &entry->bytes);
        ASSERT(fits);
        if (entry->name[0] == '\0' || json_object_get(root, entry->name) != NULL) {
            return status_fail(ERR_DATA, "tensor %d of %d: name \"%s\" is empty or taken", i, file->count, entry->name);
        }
        if (json_object_set_new(root, entry->name, describe_entry(entry, begin)) != 0) {
            return status_fail(ERR_DATA, "tensor %d of %d: its name is not UTF-8 text", i, file->count);
        }
        entry->offset = begin;
        begin += entry->bytes;
    }
    *data_bytes = begin;
    return OK;
}

static enum status build_header(struct safetensors *file, const char *json)
{
    size_t json_bytes = strlen(json);
    size_t padded = (LENGTH_BYTES + json_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    file->header = malloc(padded);
    if (file->header == NULL) {
        return status_fail(ERR_NOMEM, "no memory for a safetensors header of %zu bytes", padded);
    }
    memset(file->header, ' ', padded);
    for (int i = 0; i < LENGTH_BYTES; i++) {
        file->header[i] = (char)((padded - LENGTH_BYTES) >> (8 * i) & 0xff);
    }
    memcpy(file->header + LENGTH_BYTES, json, json_bytes);
    file->header_bytes = padded;
    return OK;
}

static enum status lay_out(struct safetensors *file, json_t *root)
{
    uint64_t data_bytes = 0;
    TRY(describe_all(file, root, &data_bytes));
    char *json = json_dumps(root, JSON_COMPACT);
    if (json == NULL) {
        return status_fail(ERR_NOMEM, "no memory for the safetensors header of %d tensors", file->count);
    }
    enum status status = build_header(file, json);
    free(json);
    TRY(status);
    for (int i = 0; i < file->count; i++) {
        file->entries[i].offset += file->header_bytes;
    }
    file->file_bytes = file->header_bytes + data_bytes;
    return OK;
}

enum status safetensors_layout(struct safetensors *file, const struct safetensors_entry *entries, int count)
{
    struct safetensors made = {.count = count, .entries = calloc((size_t)count + 1, sizeof *entries)};
    json_t *root = json_object();
    if (made.entries == NULL || root == NULL) {
        free(made.entries);
        json_decref(root);
        return status_fail(ERR_NOMEM, "no memory for a safetensors header of %d tensors", count);
    }
    if (count > 0) {
        memcpy(made.entries, entries, (size_t)count * sizeof *entries);
    }
    enum status status = lay_out(&made, root);
    json_decref(root);
    if (status != OK) {
        safetensors_close(&made);
        return status;
    }
    *file = made;
    return OK;
}

/* ------------------------------------------------------------------------------------------------------- reading ---
 */

static enum status read_exactly(int fd, const char *path, void *bytes, size_t n, off_t offset)
{
    size_t got = 0;
    while (got < n) {
        ssize_t r = pread(fd, (char *)bytes + got, n - got, offset + (off_t)got);
        if (r < 0 && errno == EINTR) {
            continue;
        }
        if (r < 0) {
            return status_fail_errno(ERR_IO, path, "cannot read");
        }
        if (r == 0) {
            return status_fail(ERR_DATA, "%s: ends at byte %lld, expected %zu bytes more", path,
                               (long long)offset + (long long)got, n - got);
        }
        got += (size_t)r;
    }
    return OK;
}

/* The JSON part of the header as malloc'ed text. */
static enum status read_json_bytes(int fd, const char *path, struct safetensors *file, char **json, size_t *json_bytes)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return status_fail_errno(ERR_IO, path, "cannot stat");
    }
    uint64_t size = (uint64_t)info.st_size;
    unsigned char length[LENGTH_BYTES];
    if (!S_ISREG(info.st_mode) || size < LENGTH_BYTES + 2) {
        return status_fail(ERR_DATA, "%s: no safetensors file: %llu bytes", path, (unsigned long long)size);
    }
    TRY(read_exactly(fd, path, length, sizeof length, 0));
    uint64_t n = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) {
        n = n << 8 | length[i];
    }
    if (n < 2 || n > header_bytes_max || n > size - LENGTH_BYTES) {
        return status_fail(ERR_DATA,
                           "%s: header length %llu, expected 2 to %llu (file of %llu bytes): cut short, or no "
                           "safetensors file",
                           path, (unsigned long long)n, (unsigned long long)header_bytes_max, (unsigned long long)size);
    }
    char *text = malloc(n);
    if (text == NULL) {
        return status_fail(ERR_NOMEM, "%s: no memory for a header of %llu bytes", path, (unsigned long long)n);
    }
    enum status status = read_exactly(fd, path, text, n, LENGTH_BYTES);
    if (status != OK) {
        free(text);
        return status;
    }
    file->header_bytes = LENGTH_BYTES + n;
    file->file_bytes = size;
    *json = text;
    *json_bytes = n;
    return OK;
}

static enum status read_shape(const char *path, const json_t *shape, struct safetensors_entry *entry)
{
    size_t rank = json_array_size(shape);
    if (!json_is_array(shape) || rank > SAFETENSORS_RANK_MAX) {
        return status_fail(ERR_DATA, "%s: tensor %s: shape: expected a list of at most %d sizes", path, entry->name,
                           SAFETENSORS_RANK_MAX);
    }
    entry->rank = (int)rank;
    for (size_t i = 0; i < rank; i++) {
        const json_t *size = json_array_get(shape, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0) {
            return status_fail(ERR_DATA, "%s: tensor %s: shape[%zu] is no size", path, entry->name, i);
        }
        entry->shape[i] = json_integer_value(size);
    }
    if (!tensor_bytes(entry, &entry->bytes)) {
        return status_fail(ERR_DATA, "%s: tensor %s: a shape of more than 2^63 bytes", path, entry->name);
    }
    return OK;
}

static enum status read_dtype(const char *path, const json_t *code, struct safetensors_entry *entry)
{
    for (int d = 0; json_is_string(code) && d < DTYPES; d++) {
        if (strcmp(json_string_value(code), dtype_codes[d]) == 0) {
            entry->dtype = (enum dtype)d;
            return OK;
        }
    }
    return status_fail(ERR_DATA, "%s: tensor %s: dtype %s, expected F32, BF16, I32 or U8", path, entry->name,
                       json_is_string(code) ? json_string_value(code) : "missing");
}

static enum status read_offsets(const char *path, const struct safetensors *file, const json_t *offsets,
                                struct safetensors_entry *entry)
{
    const json_t *begin = json_array_get(offsets, 0);
    const json_t *end = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end)) {
        return status_fail(ERR_DATA, "%s: tensor %s: data_offsets: expected [begin, end]", path, entry->name);
    }
    long long b = json_integer_value(begin);
    long long e = json_integer_value(end);
    uint64_t data_bytes = file->file_bytes - file->header_bytes;
    if (b < 0 || e < b || (uint64_t)e > data_bytes) {
        return status_fail(ERR_DATA, "%s: tensor %s: data_offsets [%lld, %lld] outside the %llu bytes of data", path,
                           entry->name, b, e, (unsigned long long)data_bytes);
    }
    if ((uint64_t)(e - b) != entry->bytes) {
        return status_fail(ERR_DATA, "%s: tensor %s: data_offsets span %lld bytes, its shape needs %llu", path,
                           entry->name, e - b, (unsigned long long)entry->bytes);
    }
    entry->offset = file->header_bytes + (uint64_t)b;
    return OK;
}

static enum status read_entry(const char *path, const struct safetensors *file, const char *name, const json_t *value,
                              struct safetensors_entry *entry)
{
    if (name[0] == '\0' || strlen(name) >= sizeof entry->name) {
        return status_fail(ERR_DATA, "%s: tensor name \"%.40s...\" of %zu bytes, expected 1 to %zu", path, name,
                           strlen(name), sizeof entry->name - 1);
    }
    snprintf(entry->name, sizeof entry->name, "%s", name);
    if (!json_is_object(value)) {
        return status_fail(ERR_DATA, "%s: tensor %s: expected an object with dtype, shape and data_offsets", path,
                           name);
    }
    TRY(read_dtype(path, json_object_get(value, "dtype"), entry));
    TRY(read_shape(path, json_object_get(value, "shape"), entry));
    return read_offsets(path, file, json_object_get(value, "data_offsets"), entry);
}

static int compare_place(const void *a, const void *b)
{
    const struct safetensors_entry *x = a;
    const struct safetensors_entry *y = b;
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty tensors first */
}

/* Every byte of the data belongs to exactly one tensor. */
static enum status check_cover(const char *path, const struct safetensors *file)
{
    uint64_t at = file->header_bytes;
    for (int i = 0; i < file->count; i++) {
        const struct safetensors_entry *entry = &file->entries[i];
        if (entry->offset != at) {
            return status_fail(ERR_DATA, "%s: tensor %s begins at byte %llu, expected %llu: %s", path, entry->name,
                               (unsigned long long)entry->offset, (unsigned long long)at,
                               entry->offset < at ? "it overlaps the one before" : "there is a hole before it");
        }
        at += entry->bytes;
    }
    if (at != file->file_bytes) {
        return status_fail(ERR_DATA, "%s: %llu bytes, its tensors end at %llu", path,
                           (unsigned long long)file->file_bytes, (unsigned long long)at);
    }
    return OK;
}

static enum status read_entries(const char *path, struct safetensors *file, json_t *root)
{
    if (!json_is_object(root)) {
        return status_fail(ERR_DATA, "%s: header: expected an object of tensors", path);
    }
    file->entries = calloc(json_object_size(root) + 1, sizeof *file->entries);
    if (file->entries == NULL) {
        return status_fail(ERR_NOMEM, "%s: no memory for %zu tensors", path, json_object_size(root));
    }
    const char *name;
    json_t *value;
    json_object_foreach(root, name, value)
    {
        if (strcmp(name, "__metadata__") != 0) {
            TRY(read_entry(path, file, name, value, &file->entries[file->count]));
            file->count++;
        }
    }
    qsort(file->entries, (size_t)file->count, sizeof *file->entries, compare_place);
    return check_cover(path, file);
}

static enum status read_open_header(int fd, const char *path, struct safetensors *file)
{
    char *json = NULL;
    size_t bytes = 0;
    json_t *root = NULL;
    TRY(read_json_bytes(fd, path, file, &json, &bytes));
    enum status status = json_read_text(path, json, bytes, &root);
    free(json);
    if (status == OK) {
        status = read_entries(path, file, root);
    }
    json_decref(root);
    return status;
}

enum status safetensors_read_header(struct safetensors *file, const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return status_fail_errno(ERR_IO, path, "cannot open");
    }
    struct safetensors read = {0};
    enum status status = read_open_header(fd, path, &read);
    close(fd);
    if (status != OK) {
        safetensors_close(&read);
        return status;
    }
    *file = read;
    return OK;
}
