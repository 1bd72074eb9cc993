/* Fuzz target: the configuration. The input is cut at bytes 0xff, which no text holds: a file, a second one that is
 * read as an arm, then overrides as on the command line; one that starts with "{" is the configuration of a checkpoint.
 * What is accepted comes back: each value from its text, the whole from its dump and from its JSON. */
#include "tests/fuzz/fuzz.h"
#include "train/config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PARTS_MAX = 16, VALUE_TEXT = CONFIG_GLOBS + 16 };

struct parts {
    int count;
    char *text[PARTS_MAX]; /* NUL-terminated copies */
    size_t bytes[PARTS_MAX];
};

static struct parts cut(const uint8_t *data, size_t n)
{
    struct parts parts = {0};
    for (size_t start = 0; start <= n && parts.count < PARTS_MAX;) {
        const uint8_t *end = start < n ? memchr(data + start, 0xff, n - start) : NULL;
        size_t bytes = end ? (size_t)(end - data) - start : n - start;
        char *text = calloc(1, bytes + 1);
        if (bytes > 0) {
            memcpy(text, data + start, bytes);
        }
        parts.bytes[parts.count] = bytes;
        parts.text[parts.count++] = text;
        start += bytes + 1;
    }
    return parts;
}

/* A number lies in the range of its row of the table (FP32 rounds the ends). */
static void check_range(const struct config *config, const struct config_key *key)
{
    const void *field = (const char *)config + key->offset;
    double value = key->min;
    if (key->type == KEY_INT) {
        value = key->bytes == 4 ? (double)*(const int32_t *)field : (double)*(const int64_t *)field;
    } else if (key->type == KEY_REAL) {
        value = key->bytes == 4 ? (double)*(const float *)field : *(const double *)field;
    }
    ASSERT(value >= key->min - fabs(key->min) * 1e-7);
    ASSERT((key->type != KEY_INT && key->type != KEY_REAL) || value <= key->max + fabs(key->max) * 1e-7);
}

/* Each value is in its range and what its text says. */
static void check_values(const struct config *config)
{
    static const struct config_place file = {.source = "copy", .folder = "", .line = 1, .quoted = true};
    char text[VALUE_TEXT], again[VALUE_TEXT];
    struct config *copy = malloc(sizeof *copy);
    config_init(copy);
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *key = &config_keys[i];
        check_range(config, key);
        config_value_print(config, key, text, sizeof text);
        ASSERT(config_value_set(copy, key, text, &file) == OK);
        config_value_print(copy, key, again, sizeof again);
        ASSERT(strcmp(text, again) == 0);
    }
    ASSERT(config_diff(config, copy, NULL) == 0);
    free(copy);
}

/* Writes the dump and loads it without its comments, which name other origins. `whole`: no key is left out. */
static char *dump_text(const struct config *config, const char *path, bool *whole)
{
    ASSERT(config_dump(config, path) == OK);
    FILE *in = fopen(path, "r");
    char *text = calloc(1, 1 << 18), *line = NULL;
    size_t used = 0, capacity = 0;
    *whole = true;
    for (ssize_t n; (n = getline(&line, &capacity, in)) >= 0;) {
        *whole = *whole && strstr(line, " is left out: ") == NULL;
        if (line[0] != '#') {
            memcpy(text + used, line, (size_t)n);
            used += (size_t)n;
        }
    }
    free(line);
    fclose(in);
    return text;
}

/* A dump is a configuration file itself. */
static void check_dump(const struct config *config)
{
    bool whole;
    char *first = dump_text(config, "dump.toml", &whole);
    if (whole) {
        struct config *copy = malloc(sizeof *copy);
        config_init(copy);
        ASSERT(config_add_file(copy, "dump.toml") == OK);
        ASSERT(config_finish(copy) == OK);
        char *second = dump_text(copy, "again.toml", &whole);
        ASSERT(whole && strcmp(first, second) == 0);
        free(second);
        free(copy);
    }
    free(first);
}

static void check_json(const struct config *config, const struct parts *parts)
{
    json_t *saved = config_to_json(config), *foreign = NULL;
    ASSERT((int)json_object_size(saved) == config_key_count);
    ASSERT(config_compare(config, saved, "", "checkpoint") == OK);
    json_decref(saved);
    for (int i = 2; i < parts->count; i++) {
        if (parts->text[i][0] == '{' && json_read_text("saved", parts->text[i], parts->bytes[i], &foreign) == OK) {
            enum status status = config_compare(config, foreign, "attention.* run.seed", "checkpoint");
            if (status != OK) {
                fuzz_refused(status, ERR_CONFIG, "resume from checkpoint: ");
            }
            json_decref(foreign);
        }
    }
}

static enum status read_parts(struct config *config, const struct parts *parts)
{
    fuzz_store("input.toml", parts->text[0], parts->bytes[0]);
    TRY(config_add_file(config, "input.toml"));
    if (parts->count > 1) {
        fuzz_store("arm.toml", parts->text[1], parts->bytes[1]);
        TRY(config_add_arm(config, "arm.toml"));
    }
    char *overrides[PARTS_MAX];
    int count = 0;
    for (int i = 2; i < parts->count; i++) {
        if (parts->text[i][0] != '{') {
            overrides[count++] = parts->text[i];
        }
    }
    TRY(config_add_overrides(config, overrides, count));
    return config_finish(config);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct parts parts = cut(data, n);
    struct config *config = malloc(sizeof *config);
    config_init(config);
    enum status status = read_parts(config, &parts);
    if (status == OK) {
        check_values(config);
        check_dump(config);
        check_json(config, &parts);
    } else {
        ASSERT(status == ERR_CONFIG || status == ERR_UNSUPPORTED || status == ERR_USAGE);
        fuzz_refused(status, status, "");
    }
    free(config);
    for (int i = 0; i < parts.count; i++) {
        free(parts.text[i]);
    }
    return 0;
}

static void add_words(const char *folder)
{
    char text[128];
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *key = &config_keys[i];
        if (i == 0 || strcmp(key->section, config_keys[i - 1].section) != 0) {
            snprintf(text, sizeof text, "\\x0a[%s]\\x0a", key->section);
            fuzz_word(folder, text);
        }
        snprintf(text, sizeof text, "\\xff%s.%s=", key->section, key->name);
        fuzz_word(folder, text);
        snprintf(text, sizeof text, "\\x0a%s = ", key->name);
        fuzz_word(folder, text);
        for (const char *const *name = key->names; name != NULL && *name != NULL; name++) {
            snprintf(text, sizeof text, "\\x22%s\\x22\\x0a", *name);
            fuzz_word(folder, text);
        }
    }
}

void fuzz_seeds(const char *folder)
{
    static const char base[] =
        "[run]\nsteps = 10\n\n[model]\nlayers = 2\nwidth = 64\nheads = 2\nkv_heads = 1\nhead_dim = 32\nffn = 128\n"
        "vocab = 320\n\n[optim]\nlr = 1e-3\n\n[data]\ntrain = \"a /b\"\nbatch = 4\nseq_len = 64\n";
    /* | stands for the byte 0xff. */
    static const char arm[] = "|[attention]\nqk = \"nvfp4\"\npv = \"mxfp4\"\nbackward = \"saved_output\"\n";
    static const char *const overrides[] = {
        "",
        "|optim.betas=[0.9, 0.95]|run.name=x",
        "|model.layers=1001",
        "|optim.lr=1e9",
        "|dist.zero=1",
        "|study.seeds=[1,]",
        "|study.seeds=[1, 2, 3]|run.tokens=1_000|run.steps=0",
        "|attention.bwd_p=fp8|model.tied=true|checkpoint.resume=auto",
        "|{\"run.seed\": \"1\", \"model.layers\": \"3\"}",
    };
    char text[2048];
    for (size_t i = 0; i < sizeof overrides / sizeof overrides[0]; i++) {
        char name[] = {'o', (char)('0' + i), '\0'};
        int n = snprintf(text, sizeof text, "%s%s%s", base, arm, overrides[i]);
        for (char *bar = text; (bar = strchr(bar, '|')) != NULL;) {
            *bar = (char)0xff;
        }
        fuzz_seed(folder, name, text, (size_t)n);
    }
    fuzz_seed(folder, "file", base, sizeof base - 1);
    int n = snprintf(text, sizeof text, "%s\xff\xffrun.out=%01100d", base, 0);
    fuzz_seed(folder, "long_path", text, (size_t)n);
    add_words(folder);
    /* All keys at once, as a run writes them. */
    struct config *config = malloc(sizeof *config);
    size_t longest;
    config_init(config);
    fuzz_store("base.toml", base, sizeof base - 1);
    ASSERT(config_add_file(config, "base.toml") == OK && config_finish(config) == OK);
    char *dump = dump_text(config, "dump.toml", &longest);
    fuzz_seed(folder, "dump", dump, strlen(dump));
    free(dump);
    free(config);
}
