/* Fuzz target: a checkpoint whose manifest.json, and behind a byte 0xff train_state/state.json, are the input. What
 * verifies is as the manifest says, read here without the room's code; looking for a checkpoint never fails. */
#include "checkpoint/checkpoint.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

static const char step[] = "./step_00000007", manifest_path[] = "./step_00000007/manifest.json",
                  state_path[] = "./step_00000007/train_state/state.json";
static char *state; /* as saved; once there is a checkpoint */
static size_t state_bytes;

static char *load(const char *path, size_t *n)
{
    FILE *in = fopen(path, "rb");
    ASSERT(in != NULL);
    char *bytes = calloc(1, 1 << 16);
    *n = fread(bytes, 1, (1 << 16) - 1, in);
    fclose(in);
    return bytes;
}

/* A valid checkpoint of two small tensors in the current folder. */
static void save(void)
{
    static const struct checkpoint_group alone = {.rank = 0, .size = 1};
    float norm[3] = {1, 2, 3}, moment[3] = {0};
    const struct checkpoint_tensor tensors[] = {
        {.name = "model.norm.weight", .dtype = DTYPE_F32, .rank = 1, .shape = {3}, .data = norm},
        {.name = "exp_avg", .dtype = DTYPE_F32, .rank = 1, .shape = {3}, .data = moment},
    };
    struct checkpoint_content content = {.model = tensors, .n_model = 1, .state = tensors + 1, .n_state = 1};
    content.config = json_pack("{s:s}", "model_type", "llama");
    content.train = json_pack("{s:i, s:s}", "step", 7, "verdict", "healthy");
    ASSERT(checkpoint_save(".", 7, &alone, &content) == OK);
    json_decref(content.config);
    json_decref(content.train);
    state = load(state_path, &state_bytes);
}

/* One file of an accepted manifest: inside the folder, of that size (below one extent) and hash. */
static void check_listed(const json_t *entry)
{
    char path[256], hex[33];
    const char *name = json_string_value(json_object_get(entry, "path"));
    const json_t *hashes = json_object_get(entry, "xxh3_128");
    struct stat info;
    size_t n;
    ASSERT(name != NULL && name[0] != '/' && strncmp(name, "../", 3) != 0 && strstr(name, "/../") == NULL);
    snprintf(path, sizeof path, "%s/%s", step, name);
    ASSERT(stat(path, &info) == 0 && S_ISREG(info.st_mode));
    ASSERT(json_integer_value(json_object_get(entry, "bytes")) == info.st_size);
    ASSERT(json_array_size(hashes) == (info.st_size > 0));
    if (info.st_size > 0) {
        char *bytes = load(path, &n);
        XXH128_hash_t hash = XXH3_128bits(bytes, n);
        snprintf(hex, sizeof hex, "%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
        ASSERT(strcmp(hex, json_string_value(json_array_get(hashes, 0))) == 0);
        free(bytes);
    }
}

static void check_accepted(const char *text, size_t n)
{
    json_t *root = json_loadb(text, n, 0, NULL);
    const json_t *files = json_object_get(root, "files");
    ASSERT(json_array_size(files) > 0);
    for (size_t i = 0; i < json_array_size(files); i++) {
        check_listed(json_array_get(files, i));
    }
    json_decref(root);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char found[64];
    if (state == NULL) {
        save();
    }
    const uint8_t *cut = n > 0 ? memchr(data, 0xff, n) : NULL;
    size_t manifest_bytes = cut ? (size_t)(cut - data) : n;
    fuzz_store(manifest_path, data, manifest_bytes);
    if (cut) {
        fuzz_store(state_path, cut + 1, n - manifest_bytes - 1);
    }
    enum status status = checkpoint_verify(step);
    if (status == OK) {
        check_accepted((const char *)data, manifest_bytes);
    } else {
        fuzz_refused(status, ERR_DATA, step);
    }
    json_t *train = NULL;
    enum status readable = checkpoint_read_train(step, &train);
    if (readable != OK) {
        fuzz_refused(readable, ERR_DATA, state_path);
    }
    ASSERT(checkpoint_find(".", found, sizeof found) == OK);
    ASSERT(found[0] == '\0' || (strcmp(found, step) == 0 && status == OK && readable == OK));
    json_decref(train);
    if (cut) {
        fuzz_store(state_path, state, state_bytes);
    }
    return 0;
}

/* The manifest with another path and size of its first file: to be refused. */
static void seed_changed(const char *folder, const char *manifest, const char *name, const char *path, json_int_t bytes)
{
    json_t *root = json_loads(manifest, 0, NULL);
    json_t *file = json_array_get(json_object_get(root, "files"), 0);
    json_object_set_new(file, "path", json_string(path));
    json_object_set_new(file, "bytes", json_integer(bytes));
    char *text = json_dumps(root, JSON_INDENT(2));
    fuzz_seed(folder, name, text, strlen(text));
    free(text);
    json_decref(root);
}

/* Names that leave the checkpoint and come back, or are no files. */
static void seed_refused(const char *folder, const char *manifest)
{
    struct stat info;
    char inside[128], outside[128];
    json_t *root = json_loads(manifest, 0, NULL);
    const json_t *file = json_array_get(json_object_get(root, "files"), 0);
    const char *name = json_string_value(json_object_get(file, "path"));
    json_int_t bytes = json_integer_value(json_object_get(file, "bytes"));
    snprintf(outside, sizeof outside, "../%s/%s", strrchr(step, '/') + 1, name);
    seed_changed(folder, manifest, "outside", outside, bytes);
    snprintf(inside, sizeof inside, "%s/x", name);
    seed_changed(folder, manifest, "below_file", inside, bytes);
    ASSERT(stat(step, &info) == 0);
    seed_changed(folder, manifest, "folder", ".", info.st_size);
    json_decref(root);
}

void fuzz_seeds(const char *folder)
{
    size_t n;
    save();
    char *manifest = load(manifest_path, &n);
    fuzz_seed(folder, "manifest", manifest, n);
    seed_refused(folder, manifest);
    manifest[n] = (char)0xff;
    memcpy(manifest + n + 1, state, state_bytes);
    fuzz_seed(folder, "with_state", manifest, n + 1 + state_bytes);
    free(manifest);
    static const char *const words[] = {"\\x22path\\x22: \\x22",
                                        "\\x22bytes\\x22: ",
                                        "\\x22xxh3_128\\x22: [",
                                        "train_state",
                                        "../",
                                        "config.json",
                                        "[]",
                                        "9223372036854775807",
                                        "67108865",
                                        "\\x22verdict\\x22: "};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        fuzz_word(folder, words[i]);
    }
}
