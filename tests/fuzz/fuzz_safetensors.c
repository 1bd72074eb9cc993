/* Fuzz target: headers of safetensors files. The first byte chooses what the rest is:
 *   a file as it is; bytes of data (2) and the JSON of a header whose length is made right; or a recipe of tensors,
 * from which a file is made that must be accepted. What is accepted covers the data without holes and survives being
 * laid out and read again. */
#include "checkpoint/safetensors.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS_MAX = 12 };

static bool is_same(const struct safetensors_entry *a, const struct safetensors_entry *b)
{
    return b != NULL && strcmp(a->name, b->name) == 0 && a->dtype == b->dtype && a->rank == b->rank &&
           memcmp(a->shape, b->shape, sizeof a->shape) == 0 && a->bytes == b->bytes;
}

/* Every byte behind the header belongs to one tensor, whose shape needs that many. */
static void check_cover(const struct safetensors *file, uint64_t file_bytes)
{
    uint64_t at = file->header_bytes;
    for (int i = 0; i < file->count; i++) {
        const struct safetensors_entry *entry = &file->entries[i];
        const uint64_t element[] = {[DTYPE_F32] = 4, [DTYPE_BF16] = 2, [DTYPE_I32] = 4, [DTYPE_U8] = 1};
        uint64_t bytes = element[entry->dtype];
        for (int d = 0; d < entry->rank; d++) {
            bytes *= (uint64_t)entry->shape[d];
        }
        ASSERT(entry->offset == at && entry->bytes == bytes);
        ASSERT(entry->name[0] != '\0' && safetensors_find(file, entry->name) == entry);
        char text[64];
        safetensors_describe(entry, text, sizeof text);
        at += bytes;
    }
    ASSERT(at == file_bytes && file->file_bytes == file_bytes);
}

/* Header and zeros of data. */
static void store(const char *path, const struct safetensors *file)
{
    char *bytes = calloc(1, file->file_bytes + 1);
    memcpy(bytes, file->header, file->header_bytes);
    fuzz_store(path, bytes, file->file_bytes);
    free(bytes);
}

/* Lays out the entries of a file that was read, and reads them back. */
static void check_round_trip(const struct safetensors *file)
{
    struct safetensors made, read;
    ASSERT(safetensors_layout(&made, file->entries, file->count) == OK);
    store("again", &made);
    ASSERT(safetensors_read_header(&read, "again") == OK);
    ASSERT(read.count == file->count);
    check_cover(&read, made.file_bytes);
    for (int i = 0; i < file->count; i++) {
        ASSERT(is_same(&file->entries[i], safetensors_find(&made, file->entries[i].name)));
        ASSERT(is_same(&file->entries[i], safetensors_find(&read, file->entries[i].name)));
    }
    safetensors_close(&made);
    safetensors_close(&read);
}

static enum status read_file(const char *path, uint64_t file_bytes)
{
    struct safetensors file = {.count = -1};
    enum status status = safetensors_read_header(&file, path);
    if (status != OK) {
        ASSERT(file.count == -1 && file.entries == NULL);
        fuzz_refused(status, ERR_DATA, path);
        return status;
    }
    check_cover(&file, file_bytes);
    check_round_trip(&file);
    safetensors_close(&file);
    return OK;
}

static void try_recipe(struct fuzz_bytes *bytes)
{
    struct safetensors_entry entries[TENSORS_MAX] = {0};
    struct safetensors file;
    int count = (int)(fuzz_take(bytes, 1) % (TENSORS_MAX + 1));
    for (int i = 0; i < count; i++) {
        struct safetensors_entry *entry = &entries[i];
        uint64_t shape = fuzz_take(bytes, 1);
        entry->dtype = (enum dtype)(shape & 3);
        entry->rank = (int)(shape >> 2) % (SAFETENSORS_RANK_MAX + 1);
        for (int d = 0; d < entry->rank; d++) {
            entry->shape[d] = (int64_t)(fuzz_take(bytes, 1) % 6);
        }
        snprintf(entry->name, sizeof entry->name, "%0*d.weight", 1 + (int)(shape % 80), i);
    }
    ASSERT(safetensors_layout(&file, entries, count) == OK);
    store("input", &file);
    ASSERT(read_file("input", file.file_bytes) == OK);
    safetensors_close(&file);
}

/* The length of `n` bytes of JSON, the JSON, zeros of data. */
static uint64_t store_json(const char *path, const uint8_t *json, size_t n, size_t data_bytes)
{
    unsigned char *file = calloc(1, 8 + n + data_bytes);
    for (int i = 0; i < 8; i++) {
        file[i] = (unsigned char)((uint64_t)n >> (8 * i));
    }
    if (n > 0) {
        memcpy(file + 8, json, n);
    }
    fuzz_store(path, file, 8 + n + data_bytes);
    free(file);
    return 8 + n + data_bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct fuzz_bytes bytes = {data, n};
    uint64_t way = fuzz_take(&bytes, 1) % 3;
    if (way == 2) {
        try_recipe(&bytes);
        return 0;
    }
    uint64_t file_bytes = bytes.left;
    if (way == 1) {
        size_t data_bytes = (size_t)fuzz_take(&bytes, 2);
        file_bytes = store_json("input", bytes.at, bytes.left, data_bytes);
    } else {
        fuzz_store("input", bytes.at, bytes.left);
    }
    (void)!read_file("input", file_bytes);
    return 0;
}

/* A seed of each way from the same header. */
static void seed_file(const char *folder, const char *name, const struct safetensors_entry *entries, int count)
{
    struct safetensors file;
    char path[64];
    ASSERT(safetensors_layout(&file, entries, count) == OK);
    unsigned char *seed = calloc(1, file.file_bytes + 3);
    memcpy(seed + 1, file.header, file.header_bytes);
    snprintf(path, sizeof path, "%s_file", name);
    fuzz_seed(folder, path, seed, file.file_bytes + 1);
    uint64_t data_bytes = file.file_bytes - file.header_bytes;
    seed[0] = 1;
    seed[1] = (unsigned char)data_bytes;
    seed[2] = (unsigned char)(data_bytes >> 8);
    memcpy(seed + 3, file.header + 8, file.header_bytes - 8);
    snprintf(path, sizeof path, "%s_json", name);
    fuzz_seed(folder, path, seed, file.header_bytes - 8 + 3);
    free(seed);
    safetensors_close(&file);
}

void fuzz_seeds(const char *folder)
{
    static const struct safetensors_entry entries[] = {
        {.name = "model.embed_tokens.weight", .dtype = DTYPE_BF16, .rank = 2, .shape = {3, 4}},
        {.name = "step", .dtype = DTYPE_I32},
        {.name = "none", .dtype = DTYPE_U8, .rank = 1, .shape = {0}},
        {.name = "exp_avg", .dtype = DTYPE_F32, .rank = 4, .shape = {1, 2, 1, 5}},
    };
    seed_file(folder, "none", entries, 0);
    seed_file(folder, "one", entries, 1);
    seed_file(folder, "four", entries, 4);
    /* Refused ones, close to limits that mutations seldom reach. */
    static const char *const refused[] = {
        "\1\0\0[]",
        "\1\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}",
        "\1\4\0{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387905],\"data_offsets\":[0,4]}}",
        "\1\4\0{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[9223372036854775804,9223372036854775807]}}",
        "\1\4\0{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,4],\"data_offsets\":[0,4]}}",
        "\1\4\0{\"a\":{\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[4,0]}}",
    };
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        char name[] = {'r', (char)('0' + i), '\0'};
        fuzz_seed(folder, name, refused[i], 3 + strlen(refused[i] + 3));
    }
    static const unsigned char recipe[] = {2, 3, 9, 2, 3, 1, 4, 0, 18, 1, 2, 3, 4};
    fuzz_seed(folder, "recipe", recipe, sizeof recipe);
    static const char *const words[] = {"\\x22dtype\\x22:",
                                        "\\x22shape\\x22:[",
                                        "\\x22data_offsets\\x22:[",
                                        "\\x22__metadata__\\x22:{",
                                        "\\x22F32\\x22",
                                        "\\x22BF16\\x22",
                                        "\\x22I32\\x22",
                                        "\\x22U8\\x22",
                                        "9223372036854775807",
                                        "4294967296",
                                        "-9223372036854775808",
                                        "},\\x22a\\x22:{"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        fuzz_word(folder, words[i]);
    }
}
