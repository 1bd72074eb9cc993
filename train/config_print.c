/* train: what a configuration looks like from outside: the list of keys, the dump of a run, differences. */
#include "core/file.h"
#include "core/log.h"
#include "train/config.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VALUE_TEXT = CONFIG_GLOBS + 16 };

/* "whole number 1 .. 1000", "one of a | b" */
static void print_type(const struct config_key *key, char *text, size_t bytes)
{
    static const char *const names[] = {
        [KEY_BOOL] = "true | false", [KEY_TEXT] = "text",         [KEY_PATH] = "path",
        [KEY_GLOBS] = "globs",       [KEY_SEEDS] = "[n, n, ...]", [KEY_PAIR] = "[number, number]",
    };
    if (key->type == KEY_INT || key->type == KEY_REAL) {
        const char *word = key->type == KEY_INT ? "whole number" : "number";
        if (key->max >= 1e15) {
            snprintf(text, bytes, "%s from %g", word, key->min);
        } else {
            snprintf(text, bytes, "%s %g .. %g", word, key->min, key->max);
        }
    } else if (key->type == KEY_ENUM) {
        text[0] = '\0';
        for (int i = 0; key->names[i] != NULL; i++) {
            size_t n = strlen(text);
            snprintf(text + n, bytes - n, "%s%s", i > 0 ? " | " : "", key->names[i]);
        }
    } else {
        snprintf(text, bytes, "%s", names[key->type]);
    }
}

/* A | inside a table cell of markdown needs a backslash. */
static void print_cell(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        fprintf(out, *text == '|' ? "\\%c" : "%c", *text);
    }
}

void config_print_keys(FILE *out, bool markdown)
{
    static const char *const on_resume[] = {"free", "notice", "fixed"};
    if (markdown) {
        fprintf(out,
                "# Configuration keys\n\n"
                "Generated from the key table in the source: `train_gpt8b --keys=markdown > docs/config.md`.\n"
                "Files are a TOML subset (sections, `key = value`, whole-line comments); any key can be given on the "
                "command line as `--section.key=value`.\nResume says what happens when a checkpoint was made with "
                "another value: free (nothing), notice (applied, and said), fixed (refused, unless "
                "`checkpoint.may_change` names the key).\n");
    }
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *key = &config_keys[i];
        char type[512];
        const char *fallback = key->fallback == NULL ? "required" : key->fallback[0] == '\0' ? "\"\"" : key->fallback;
        print_type(key, type, sizeof type);
        bool opens = i == 0 || strcmp(key->section, config_keys[i - 1].section) != 0;
        if (!markdown) {
            fprintf(out, "%s%s.%s  (%s; %s)\n    %s\n", opens && i > 0 ? "\n" : "", key->section, key->name, type,
                    key->fallback == NULL      ? fallback
                    : key->fallback[0] == '\0' ? "default empty"
                                               : fallback,
                    key->help);
            continue;
        }
        if (opens) {
            fprintf(out, "\n## [%s]\n\n| key | values | default | resume | meaning |\n|---|---|---|---|---|\n",
                    key->section);
        }
        fprintf(out, "| %s | ", key->name);
        print_cell(out, type);
        fprintf(out, " | %s | %s | ", fallback, on_resume[key->on_resume]);
        print_cell(out, key->help);
        fprintf(out, " |\n");
    }
}

/* Paths of a dump are absolute, since it lies in another folder than the files that named them. */
static void print_absolute(const struct config *config, const struct config_key *key, char *text, size_t bytes)
{
    char cwd[CONFIG_PATH];
    const char *value = (const char *)config + key->offset;
    bool word = key->type == KEY_PATH && (strcmp(value, "auto") == 0 || strcmp(value, "never") == 0 ||
                                          strcmp(value, "init") == 0 || value[0] == '\0');
    if ((key->type != KEY_PATH && key->type != KEY_GLOBS) || word || getcwd(cwd, sizeof cwd) == NULL) {
        config_value_print(config, key, text, bytes);
        return;
    }
    snprintf(text, bytes, "\"");
    char copy[CONFIG_GLOBS];
    snprintf(copy, sizeof copy, "%s", value);
    char *rest = copy;
    const char *separators = key->type == KEY_GLOBS ? " " : "";
    for (char *part; (part = strtok_r(rest, separators, &rest)) != NULL;) {
        size_t n = strlen(text);
        snprintf(text + n, bytes - n, "%s%s%s%s", n > 1 ? " " : "", part[0] == '/' ? "" : cwd,
                 part[0] == '/' ? "" : "/", part);
    }
    size_t n = strlen(text);
    snprintf(text + n, bytes - n, "\"");
}

enum status config_dump(const struct config *config, const char *path)
{
    char *bytes = NULL, value[VALUE_TEXT];
    size_t size = 0;
    FILE *out = open_memstream(&bytes, &size);
    if (out == NULL) {
        return status_fail_errno(ERR_NOMEM, path, "memory for the configuration");
    }
    fprintf(out, "# The configuration as used. Above each key: where its value comes from.\n");
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *key = &config_keys[i];
        if (i == 0 || strcmp(key->section, config_keys[i - 1].section) != 0) {
            fprintf(out, "\n[%s]\n", key->section);
        }
        print_absolute(config, key, value, sizeof value);
        fprintf(out, "# %s\n", config->origin[i][0] == '\0' ? "default" : config->origin[i]);
        bool paths = key->type == KEY_PATH || key->type == KEY_GLOBS;
        if (paths && strlen(value) >= key->bytes + strlen("\"\"")) {
            fprintf(out, "# %s is left out: with absolute paths it has more than %zu bytes: give it again\n", key->name,
                    key->bytes - 1);
            log_warn("%s: %s.%s is left out: with absolute paths it has more than %zu bytes: who starts from this "
                     "file must give it again",
                     path, key->section, key->name, key->bytes - 1);
            continue;
        }
        fprintf(out, "%s = %s\n", key->name, value);
    }
    fclose(out);
    enum status status = file_write_atomic(path, bytes, size);
    free(bytes);
    return status;
}

json_t *config_to_json(const struct config *config)
{
    json_t *object = json_object();
    char value[VALUE_TEXT], name[128];
    for (int i = 0; i < config_key_count; i++) {
        snprintf(name, sizeof name, "%s.%s", config_keys[i].section, config_keys[i].name);
        config_value_print(config, &config_keys[i], value, sizeof value);
        json_object_set_new(object, name, json_string(value));
    }
    return object;
}

int config_diff(const struct config *a, const struct config *b, void (*print)(const char *line))
{
    int count = 0;
    char left[VALUE_TEXT], right[VALUE_TEXT], line[2 * VALUE_TEXT + 128];
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *key = &config_keys[i];
        config_value_print(a, key, left, sizeof left);
        config_value_print(b, key, right, sizeof right);
        if (strcmp(left, right) != 0) {
            count++;
            if (print != NULL) {
                snprintf(line, sizeof line, "%s.%s: %s -> %s", key->section, key->name, left, right);
                print(line);
            }
        }
    }
    return count;
}

/* Is section.name among the words of `allowed`? */
static bool is_allowed(const char *allowed, const struct config_key *key)
{
    char copy[CONFIG_PATH], name[128], section[128];
    snprintf(copy, sizeof copy, "%s", allowed);
    snprintf(name, sizeof name, "%s.%s", key->section, key->name);
    snprintf(section, sizeof section, "%s.*", key->section);
    char *rest = copy;
    for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL;) {
        if (strcmp(word, name) == 0 || strcmp(word, section) == 0) {
            return true;
        }
    }
    return false;
}

enum status config_compare(const struct config *config, const json_t *saved, const char *allowed, const char *path)
{
    char value[VALUE_TEXT], name[128];
    int refused = 0;
    char first[512] = "";
    for (int i = 0; i < config_key_count; i++) {
        const struct config_key *key = &config_keys[i];
        snprintf(name, sizeof name, "%s.%s", key->section, key->name);
        config_value_print(config, key, value, sizeof value);
        const char *old = json_string_value(json_object_get(saved, name));
        if (key->on_resume == RESUME_FREE || (old != NULL && strcmp(old, value) == 0)) {
            continue;
        }
        /* A key that the saving program did not know, left at its default: that means what that program did. */
        if (old == NULL && config->origin[i][0] == '\0') {
            continue;
        }
        if (key->on_resume == RESUME_NOTICE || is_allowed(allowed, key)) {
            log_info("resume: %s: checkpoint has %s, config has %s: applied", name, old == NULL ? "none" : old, value);
            continue;
        }
        if (refused++ == 0) {
            snprintf(first, sizeof first, "%s: checkpoint has %.160s, config has %.160s", name,
                     old == NULL ? "none" : old, value);
        }
    }
    if (refused > 0) {
        return status_fail(ERR_CONFIG,
                           "resume from %s: %s (%d such keys in all); set checkpoint.may_change to the keys that are "
                           "meant to differ, or start in another run.out",
                           path, first, refused);
    }
    return OK;
}
