/* train: sources of configuration and how they compose. inih cuts lines into section, key and value; what it lets
 * pass and TOML does not (or what it would silently cut) is refused in the line reader here. */
#include "train/config.h"

#include <errno.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>

/* inih is built for lines of at most 199 bytes and would cut what is longer. The longest value that a key takes, a list
 * of globs, needs more: see read_line. */
enum { INIH_BYTES_MAX = 199, LINE_BYTES_MAX = CONFIG_GLOBS + 128, FULL_NAME = 300 };

/* One source while it is read: a file, or all overrides of a command line. */
struct source {
    struct config *config;
    struct config_place place;
    FILE *file;
    char *line;             /* owns; the newest line */
    const char *long_value; /* in `line`: the value that was too long for inih; NULL if inih has it */
    bool arm;
    int seen_at[CONFIG_KEYS_MAX];    /* line of each key in this source, 0 = not given */
    int section_at[CONFIG_KEYS_MAX]; /* line where the section of key row i was opened, at the section's first row */
    enum status status;
};

/* First row of a section, -1 if there is none. */
static int section_find(const char *section)
{
    for (int i = 0; i < config_key_count; i++) {
        if (strcmp(config_keys[i].section, section) == 0) {
            return i;
        }
    }
    return -1;
}

int config_find(const char *name)
{
    for (int i = 0; i < config_key_count; i++) {
        size_t n = strlen(config_keys[i].section);
        if (strncmp(name, config_keys[i].section, n) == 0 && name[n] == '.' &&
            strcmp(name + n + 1, config_keys[i].name) == 0) {
            return i;
        }
    }
    return -1;
}

/* The keys that attention.backward is a preset of. */
static bool is_switch(const struct config_key *key)
{
    static const char *const names[] = {"bwd_p", "bwd_v", "bwd_stat", "do_format", "do_scale", "ds_scale", "qk_grad"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(key->section, "attention") == 0 && strcmp(key->name, names[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* Defaults go through the same parser as everything else, so a default that breaks its own range cannot exist. */
void config_init(struct config *config)
{
    static const struct config_place defaults = {.source = "default", .folder = ""};
    memset(config, 0, sizeof *config);
    config->attention = attention_recipe_bf16();
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *key = &config_keys[i];
        bool derived = key->fallback == NULL || (key->type == KEY_ENUM && key->fallback[0] == '\0');
        if (!derived) {
            ASSERT(config_value_set(config, key, key->fallback, &defaults) == OK);
        }
    }
}

/* "section.key" is nowhere in the table: say what the user may have meant. */
static enum status unknown_key(const struct source *source, const char *full)
{
    char at[CONFIG_PATH];
    config_place_print(&source->place, at, sizeof at);
    for (const struct config_absent *a = config_absent_keys; a->name != NULL; a++) {
        if (strcmp(a->name, full) == 0) {
            return status_fail(ERR_UNSUPPORTED, "%s: %s: %s", at, full, a->reason);
        }
    }
    char names[CONFIG_KEYS_MAX][64];
    const char *pointers[CONFIG_KEYS_MAX];
    for (int i = 0; i < config_key_count; i++) {
        snprintf(names[i], sizeof names[i], "%s.%s", config_keys[i].section, config_keys[i].name);
        pointers[i] = names[i];
    }
    return status_fail(ERR_CONFIG, "%s: unknown key %s; the nearest is %s (--keys lists all)", at, full,
                       config_nearest(full, pointers, config_key_count));
}

/* Takes one assignment into the configuration. */
static enum status source_assign(struct source *source, const char *section, const char *name, const char *value)
{
    char full[FULL_NAME], at[CONFIG_PATH];
    snprintf(full, sizeof full, "%s.%s", section, name);
    config_place_print(&source->place, at, sizeof at);
    if (section[0] == '\0') {
        return status_fail(ERR_CONFIG, "%s:%d: key %s stands before any [section]", source->place.source,
                           source->place.line, name);
    }
    int i = config_find(full);
    if (i < 0) {
        return unknown_key(source, full);
    }
    if (source->seen_at[i] != 0) {
        return status_fail(ERR_CONFIG, "%s: key %s is given twice, first in %s %d", at, full,
                           source->place.quoted ? "line" : "override", source->seen_at[i]);
    }
    const struct config_key *key = &config_keys[i];
    if (source->arm && strcmp(section, "attention") != 0 && strcmp(section, "linear") != 0) {
        return status_fail(ERR_CONFIG,
                           "%s:%d: %s: an arm may set [attention] and [linear] only, so that all else is equal over "
                           "the arms; put this key into the study's file",
                           source->place.source, source->place.line, full);
    }
    TRY(config_value_set(source->config, key, value, &source->place));
    source->seen_at[i] = source->place.line;
    char *origin = source->config->origin[i];
    /* Of a long path the end counts: it holds the line. */
    size_t length = strlen(at), longest = CONFIG_ORIGIN - 1;
    snprintf(origin, CONFIG_ORIGIN, "%s", at + (length > longest ? length - longest : 0));
    /* TOML has no order of keys: switches of this same source stay, whether their line comes before or after. */
    if (strcmp(full, "attention.backward") == 0) {
        for (int k = 0; k < config_key_count; k++) {
            if (is_switch(&config_keys[k]) && source->seen_at[k] == 0) {
                source->config->origin[k][0] = '\0';
            }
        }
    }
    return OK;
}

/* inih's callback: 1 = go on. After an error it is called no more, since the reader ends the file. */
static int on_pair(void *user, const char *section, const char *name, const char *value)
{
    struct source *source = user;
    if (source->status == OK) {
        source->status = source_assign(source, section, name, source->long_value != NULL ? source->long_value : value);
    }
    return source->status == OK;
}

/* inih calls back for keys only, so an unknown section without keys, or one opened twice, would pass unseen. */
static enum status check_section_line(struct source *source, const char *line)
{
    char section[LINE_BYTES_MAX + 2];
    size_t n = strlen(line);
    if (line[n - 1] != ']' || n < 3) {
        return status_fail(ERR_CONFIG, "%s:%d: a section line is [name] and nothing else, found: %s",
                           source->place.source, source->place.line, line);
    }
    snprintf(section, sizeof section, "%.*s", (int)n - 2, line + 1);
    int first = section_find(section);
    if (first < 0) {
        const char *sections[CONFIG_KEYS_MAX];
        for (int i = 0; i < config_key_count; i++) {
            sections[i] = config_keys[i].section;
        }
        return status_fail(ERR_CONFIG, "%s:%d: unknown section [%s]; the nearest is [%s]", source->place.source,
                           source->place.line, section, config_nearest(section, sections, config_key_count));
    }
    if (source->section_at[first] != 0) {
        return status_fail(ERR_CONFIG, "%s:%d: section [%s] is opened twice, first in line %d", source->place.source,
                           source->place.line, section, source->section_at[first]);
    }
    source->section_at[first] = source->place.line;
    return OK;
}

/* Lines that inih would read otherwise than a TOML reader: refuse each by name. */
static enum status check_line(struct source *source, const char *line, size_t bytes)
{
    const char *file = source->place.source;
    int at = source->place.line;
    if (bytes > LINE_BYTES_MAX) {
        return status_fail(ERR_CONFIG, "%s:%d: line of %zu bytes, at most %d: shorten it", file, at, bytes,
                           LINE_BYTES_MAX);
    }
    if (strlen(line) != bytes) {
        return status_fail(ERR_CONFIG, "%s:%d: a zero byte: not a text file", file, at);
    }
    if (memchr(line, '\r', bytes) != NULL) {
        return status_fail(ERR_CONFIG, "%s:%d: line ends in CR LF: save the file with Unix line ends", file, at);
    }
    if (line[0] == '\0' || line[0] == '#') {
        return OK;
    }
    if (line[strspn(line, " \t")] == '\0') {
        return OK;
    }
    if (line[0] == ' ' || line[0] == '\t') {
        return status_fail(ERR_CONFIG, "%s:%d: indented line: start keys and sections in the first column", file, at);
    }
    if (line[0] == '[') {
        return check_section_line(source, line);
    }
    size_t key_bytes = strcspn(line, "=");
    if (line[0] == ';' || line[key_bytes] != '=' || memchr(line, ':', key_bytes) != NULL) {
        return status_fail(ERR_CONFIG, "%s:%d: expected key = value, [section] or # comment, found: %s", file, at,
                           line);
    }
    if (strstr(line, " ;") != NULL || strstr(line, "\t;") != NULL) {
        return status_fail(ERR_CONFIG, "%s:%d: \" ;\" would start a comment: remove it", file, at);
    }
    return OK;
}

/* What inih gets of a line that is too long for it: of an assignment `key =`, of a comment nothing. The value stays
 * here, without the blanks around it, as inih would cut it. */
static void shorten_line(struct source *source, size_t bytes, char *buffer, int size)
{
    char *line = source->line;
    size_t key_bytes = strcspn(line, "=");
    buffer[0] = '\0';
    if (line[0] == '#' || line[key_bytes] != '=') {
        return;
    }
    while (line[bytes - 1] == ' ' || line[bytes - 1] == '\t') {
        line[--bytes] = '\0';
    }
    const char *value = line + key_bytes + 1;
    source->long_value = value + strspn(value, " \t");
    snprintf(buffer, (size_t)size, "%.*s", (int)key_bytes + 1, line);
}

/* inih's reader: the next line without its end, NULL at the end or after an error. */
static char *read_line(char *buffer, int size, void *user)
{
    struct source *source = user;
    if (source->status != OK) {
        return NULL;
    }
    size_t capacity = 0;
    free(source->line);
    source->line = NULL;
    source->long_value = NULL;
    ssize_t n = getline(&source->line, &capacity, source->file);
    if (n < 0) {
        return NULL;
    }
    source->place.line++;
    if (n > 0 && source->line[n - 1] == '\n') {
        source->line[--n] = '\0';
    }
    source->status = check_line(source, source->line, (size_t)n);
    if (source->status == OK && n > INIH_BYTES_MAX) {
        shorten_line(source, (size_t)n, buffer, size);
    } else if (source->status == OK) {
        snprintf(buffer, (size_t)size, "%s", source->line);
    }
    return source->status == OK ? buffer : NULL;
}

static enum status add_file(struct config *config, const char *path, bool arm)
{
    char folder[CONFIG_PATH];
    const char *slash = strrchr(path, '/');
    snprintf(folder, sizeof folder, "%.*s", slash == NULL ? 0 : (int)(slash - path + 1), path);
    struct source source = {.config = config, .arm = arm, .file = fopen(path, "r")};
    source.place = (struct config_place){.source = path, .folder = folder, .quoted = true};
    if (source.file == NULL) {
        return status_fail(errno == ENOENT || errno == ENOTDIR ? ERR_CONFIG : ERR_IO, "%s: configuration file: %s",
                           path, strerror(errno));
    }
    int bad_line = ini_parse_stream(read_line, &source, on_pair, &source);
    bool unreadable = ferror(source.file) != 0;
    fclose(source.file);
    free(source.line);
    if (unreadable) {
        return status_fail(ERR_CONFIG, "%s: cannot be read (is it a folder?)", path);
    }
    if (source.status == OK && bad_line != 0) {
        return status_fail(ERR_CONFIG, "%s:%d: not a line of key = value", path, bad_line);
    }
    return source.status;
}

enum status config_add_file(struct config *config, const char *path)
{
    return add_file(config, path, false);
}

enum status config_add_arm(struct config *config, const char *path)
{
    return add_file(config, path, true);
}

/* All overrides are one source: giving a key twice on a command line is a slip as much as in a file. */
enum status config_add_overrides(struct config *config, char *const *assignments, int count)
{
    struct source source = {.config = config, .place = {.source = "command line", .folder = ""}};
    for (int i = 0; i < count; i++) {
        char section[FULL_NAME / 2], name[FULL_NAME / 2];
        const char *text = assignments[i];
        size_t dot = strcspn(text, ".="), equals = strcspn(text, "=");
        if (text[dot] != '.' || text[equals] != '=' || dot >= sizeof section || equals - dot - 1 >= sizeof name) {
            return status_fail(ERR_USAGE, "--%s: expected --section.key=value", text);
        }
        snprintf(section, sizeof section, "%.*s", (int)dot, text);
        snprintf(name, sizeof name, "%.*s", (int)(equals - dot - 1), text + dot + 1);
        source.place.line = i + 1;
        TRY(source_assign(&source, section, name, text + equals + 1));
    }
    return OK;
}

/* The preset fills all switches; those that a source gave alone keep their value. */
static void resolve_backward(struct config *config)
{
    struct attention_recipe given = config->attention;
    bool plain = given.qk == QK_BF16 && given.pv == PV_BF16;
    bool by_route = config->origin[config_find("attention.backward")][0] == '\0';
    attention_recipe_preset(&config->attention, !by_route ? given.backward : plain ? BWD_BF16 : BWD_REPRESENTED);
    for (int i = 0; i < config_key_count; i++) {
        if (is_switch(&config_keys[i]) && config->origin[i][0] != '\0') {
            size_t in_recipe = config_keys[i].offset - offsetof(struct config, attention);
            memcpy((char *)&config->attention + in_recipe, (const char *)&given + in_recipe, config_keys[i].bytes);
        }
    }
}

enum status config_finish(struct config *config)
{
    for (int i = 0; i < config_key_count; i++) {
        if (config_keys[i].fallback == NULL && config->origin[i][0] == '\0') {
            return status_fail(ERR_CONFIG, "%s.%s is not set and has no default: %s", config_keys[i].section,
                               config_keys[i].name, config_keys[i].help);
        }
    }
    if (config->data.train[0] == '\0' && config->run.mode != MODE_STEP_TIME) {
        return status_fail(ERR_CONFIG, "data.train is not set: name the shards to train on (run.mode = step_time alone "
                                       "can do without)");
    }
    if ((config->run.steps > 0) == (config->run.tokens > 0)) {
        return status_fail(ERR_CONFIG, "run.steps = %lld, run.tokens = %lld: give one of the two",
                           (long long)config->run.steps, (long long)config->run.tokens);
    }
    int64_t update_tokens = config->data.batch * config->data.seq_len;
    config->schedule.steps =
        config->run.steps > 0 ? config->run.steps : (config->run.tokens + update_tokens - 1) / update_tokens;
    if (config->model.context == 0) {
        config->model.context = (int)config->data.seq_len;
    }
    if (config->run.out[0] == '\0') {
        snprintf(config->run.out, sizeof config->run.out, "runs/%s", config->run.name);
    }
    config->optim.seed = (uint64_t)config->run.seed;
    resolve_backward(config);
    return OK;
}
