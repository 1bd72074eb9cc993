/* train: one value of the configuration, to and from text, checked against its row of the table. */
#include "train/config.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_MAX = CONFIG_GLOBS + 16, WORD_MAX = 64 }; /* the longest text, quoted */

/* Levenshtein distance, words cut at WORD_MAX letters: names are short. */
static int edit_distance(const char *a, const char *b)
{
    int row[WORD_MAX + 1], na = (int)strnlen(a, WORD_MAX), nb = (int)strnlen(b, WORD_MAX);
    for (int j = 0; j <= nb; j++) {
        row[j] = j;
    }
    for (int i = 1; i <= na; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            int replace = diagonal + (a[i - 1] != b[j - 1]);
            int insert_or_delete = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replace < insert_or_delete ? replace : insert_or_delete;
        }
    }
    return row[nb];
}

const char *config_nearest(const char *word, const char *const *names, int count)
{
    const char *best = count > 0 ? names[0] : "";
    for (int i = 1; i < count; i++) {
        if (edit_distance(word, names[i]) < edit_distance(word, best)) {
            best = names[i];
        }
    }
    return best;
}

void config_place_print(const struct config_place *place, char *text, size_t bytes)
{
    if (place->quoted) {
        snprintf(text, bytes, "%s:%d", place->source, place->line);
    } else {
        snprintf(text, bytes, "%s", place->source);
    }
}

/* The one sentence of a bad value: place, key, value (a long one cut: the sentence goes on), what would do. */
static enum status wrong(const struct config_key *key, const char *text, const struct config_place *place,
                         const char *expected)
{
    char at[CONFIG_PATH + 16];
    config_place_print(place, at, sizeof at);
    return status_fail(ERR_CONFIG, "%s: %s.%s = %.300s: expected %s", at, key->section, key->name,
                       text[0] == '\0' ? "(nothing)" : text, expected);
}

/* Copies a number without TOML's underscores between digits; false if it has another form than
 * sign, digits[, . digits][, e sign digits]. Neither hex nor inf nor nan: no key means them. */
static bool number_text(const char *text, bool real, char *out, size_t bytes)
{
    size_t n = 0;
    const char *p = text;
    bool digits = false, point = !real, exponent = !real;
    for (; *p != '\0' && n + 1 < bytes; p++) {
        bool start = p == text || ((p[-1] == 'e' || p[-1] == 'E') && exponent && real);
        if (isdigit((unsigned char)*p)) {
            digits = true;
        } else if (*p == '_' && digits && isdigit((unsigned char)p[1])) {
            continue;
        } else if ((*p == '.') && !point && digits && isdigit((unsigned char)p[1])) {
            point = true;
        } else if ((*p == 'e' || *p == 'E') && !exponent && digits && p[1] != '\0') {
            exponent = point = true;
        } else if (!((*p == '-' || *p == '+') && start && isdigit((unsigned char)p[1]))) {
            return false;
        }
        out[n++] = *p;
    }
    out[n] = '\0';
    return digits && *p == '\0';
}

static enum status set_int(void *field, const struct config_key *key, const char *text,
                           const struct config_place *place)
{
    char clean[WORD_MAX], expected[128];
    snprintf(expected, sizeof expected, "a whole number in %.0f .. %.0f", key->min, key->max);
    errno = 0;
    if (!number_text(text, false, clean, sizeof clean)) {
        return wrong(key, text, place, expected);
    }
    long long value = strtoll(clean, NULL, 10);
    if (errno != 0 || (double)value < key->min || (double)value > key->max) {
        return wrong(key, text, place, expected);
    }
    if (key->bytes == 4) {
        *(int32_t *)field = (int32_t)value;
    } else {
        *(int64_t *)field = value;
    }
    return OK;
}

static enum status set_real(void *field, const struct config_key *key, const char *text,
                            const struct config_place *place)
{
    char clean[WORD_MAX], expected[128];
    snprintf(expected, sizeof expected, "a number in %g .. %g", key->min, key->max);
    if (!number_text(text, true, clean, sizeof clean)) {
        return wrong(key, text, place, expected);
    }
    double value = strtod(clean, NULL);
    if (!(value >= key->min && value <= key->max)) {
        return wrong(key, text, place, expected);
    }
    if (key->bytes == 4) {
        *(float *)field = (float)value;
    } else {
        *(double *)field = value;
    }
    return OK;
}

/* All names are listed: there are few, and the reader has the choice before the eyes. */
static enum status set_enum(void *field, const struct config_key *key, const char *text,
                            const struct config_place *place)
{
    char expected[512] = "one of";
    int count = 0;
    for (; key->names[count] != NULL; count++) {
        if (strcmp(text, key->names[count]) == 0) {
            if (key->bytes == 1) {
                *(bool *)field = count != 0;
            } else {
                *(int32_t *)field = count;
            }
            return OK;
        }
        size_t n = strlen(expected);
        snprintf(expected + n, sizeof expected - n, "%s %s", count > 0 ? "," : "", key->names[count]);
    }
    size_t n = strlen(expected);
    snprintf(expected + n, sizeof expected - n, "; the nearest is %s", config_nearest(text, key->names, count));
    return wrong(key, text, place, expected);
}

/* Words of a path value become relative to the folder of the file that names them. auto, never and init are words of
 * checkpoint.resume and study.from, not paths. */
static enum status set_paths(char *field, const struct config_key *key, const char *text,
                             const struct config_place *place)
{
    size_t used = 0;
    char copy[TEXT_MAX];
    snprintf(copy, sizeof copy, "%s", text);
    field[0] = '\0';
    char *rest = copy;
    for (char *word = copy; word != NULL && *word != '\0';) {
        if (key->type == KEY_GLOBS) {
            word = strtok_r(rest, " ", &rest);
            if (word == NULL) {
                break;
            }
        }
        bool keyword = key->type == KEY_PATH &&
                       (strcmp(word, "auto") == 0 || strcmp(word, "never") == 0 || strcmp(word, "init") == 0);
        int n = snprintf(field + used, key->bytes - used, "%s%s%s", used > 0 ? " " : "",
                         word[0] == '/' || keyword ? "" : place->folder, word);
        if (n < 0 || (size_t)n >= key->bytes - used) {
            return wrong(key, text, place, "a shorter path");
        }
        used += (size_t)n;
        word = key->type == KEY_GLOBS ? rest : NULL;
    }
    return OK;
}

/* "[1, 2, 3]" into seeds, or "[a, b]" into a pair of floats. */
static enum status set_list(void *field, const struct config_key *key, const char *text,
                            const struct config_place *place)
{
    bool pair = key->type == KEY_PAIR;
    const char *expected = pair ? "[first, second], two numbers from 0 to below 1"
                                : "[n, n, ...], at most 16 different whole numbers from 0 up";
    size_t length = strlen(text);
    struct config_seeds seeds = {0};
    float values[2] = {0};
    char copy[TEXT_MAX], clean[WORD_MAX];
    if (length < 2 || text[0] != '[' || text[length - 1] != ']') {
        return wrong(key, text, place, expected);
    }
    snprintf(copy, sizeof copy, "%.*s", (int)length - 2, text + 1);
    bool ends_in_comma = length > 2 && text[length - 2] == ',';
    int count = 0;
    char *rest = copy;
    for (char *word; (word = strtok_r(rest, ", ", &rest)) != NULL; count++) {
        if (count >= (pair ? 2 : CONFIG_SEEDS_MAX) || !number_text(word, pair, clean, sizeof clean)) {
            return wrong(key, text, place, expected);
        }
        double value = strtod(clean, NULL);
        if (!(value >= key->min && (!pair || value <= key->max) && value < 1e15)) {
            return wrong(key, text, place, expected);
        }
        if (pair) {
            values[count] = (float)value;
        }
        for (int i = 0; !pair && i < count; i++) {
            if (seeds.value[i] == (int64_t)value) {
                return wrong(key, text, place, expected);
            }
        }
        seeds.value[count] = (int64_t)value;
    }
    if (ends_in_comma || (pair && count != 2)) {
        return wrong(key, text, place, expected);
    }
    seeds.count = count;
    if (pair) {
        memcpy(field, values, sizeof values);
    } else {
        memcpy(field, &seeds, sizeof seeds);
    }
    return OK;
}

/* Text that survives the dump (a file of lines, where " ;" starts a comment) and JSON (UTF-8). */
static bool is_storable(const char *text)
{
    for (const char *c = text; *c != '\0'; c++) {
        if (iscntrl((unsigned char)*c) || strchr("\"\\", *c) != NULL || (c[0] == ' ' && c[1] == ';')) {
            return false;
        }
    }
    json_t *string = json_string(text); /* NULL if not UTF-8 */
    json_decref(string);
    return string != NULL;
}

/* Strips the quotes that files must and command lines may have. */
static enum status unquote(const struct config_key *key, const char *text, const struct config_place *place, char *out)
{
    size_t n = strlen(text);
    bool quotes = n >= 2 && text[0] == '"' && text[n - 1] == '"';
    if ((place->quoted && !quotes) || n >= TEXT_MAX) {
        return wrong(key, text, place, "a text in double quotes, with nothing after it");
    }
    snprintf(out, TEXT_MAX, "%.*s", quotes ? (int)n - 2 : (int)n, quotes ? text + 1 : text);
    if (!is_storable(out)) {
        return wrong(key, text, place,
                     "a text in UTF-8 without quotes, backslashes, control characters or \" ;\" inside, and nothing "
                     "after it");
    }
    return OK;
}

enum status config_value_set(struct config *config, const struct config_key *key, const char *text,
                             const struct config_place *place)
{
    void *field = (char *)config + key->offset;
    char plain[TEXT_MAX];
    if (key->type == KEY_INT) {
        return set_int(field, key, text, place);
    }
    if (key->type == KEY_REAL) {
        return set_real(field, key, text, place);
    }
    if (key->type == KEY_SEEDS || key->type == KEY_PAIR) {
        return set_list(field, key, text, place);
    }
    if (key->type == KEY_BOOL) {
        bool yes = strcmp(text, "true") == 0 || strcmp(text, "1") == 0;
        if (!yes && strcmp(text, "false") != 0 && strcmp(text, "0") != 0) {
            return wrong(key, text, place, "true or false");
        }
        *(bool *)field = yes;
        return OK;
    }
    TRY(unquote(key, text, place, plain));
    if (key->type == KEY_ENUM) {
        return set_enum(field, key, plain, place);
    }
    if (key->type == KEY_PATH || key->type == KEY_GLOBS) {
        return set_paths(field, key, plain, place);
    }
    if (strlen(plain) >= key->bytes) {
        return wrong(key, text, place, "a shorter text");
    }
    snprintf(field, key->bytes, "%s", plain);
    return OK;
}

/* The shortest decimal that reads back as the same number, always recognisable as a real number. */
static void print_real(double value, bool narrow, char *text, size_t bytes)
{
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, bytes, "%.*g", digits, value);
        double back = strtod(text, NULL);
        if (narrow ? (float)back == (float)value : back == value) {
            break;
        }
    }
    if (strpbrk(text, ".e") == NULL) {
        size_t n = strlen(text);
        snprintf(text + n, bytes - n, ".0");
    }
}

void config_value_print(const struct config *config, const struct config_key *key, char *text, size_t bytes)
{
    const void *field = (const char *)config + key->offset;
    char first[32], second[32];
    size_t n;
    switch (key->type) {
    case KEY_INT:
        snprintf(text, bytes, "%lld",
                 key->bytes == 4 ? (long long)*(const int32_t *)field : (long long)*(const int64_t *)field);
        break;
    case KEY_REAL:
        print_real(key->bytes == 4 ? (double)*(const float *)field : *(const double *)field, key->bytes == 4, text,
                   bytes);
        break;
    case KEY_BOOL:
        snprintf(text, bytes, "%s", *(const bool *)field ? "true" : "false");
        break;
    case KEY_ENUM:
        snprintf(text, bytes, "\"%s\"",
                 key->names[key->bytes == 1 ? (int)*(const bool *)field : *(const int32_t *)field]);
        break;
    case KEY_PAIR:
        print_real((double)((const float *)field)[0], true, first, sizeof first);
        print_real((double)((const float *)field)[1], true, second, sizeof second);
        snprintf(text, bytes, "[%s, %s]", first, second);
        break;
    case KEY_SEEDS:
        snprintf(text, bytes, "[");
        for (int i = 0; i < ((const struct config_seeds *)field)->count; i++) {
            n = strlen(text);
            snprintf(text + n, bytes - n, "%s%lld", i > 0 ? ", " : "",
                     (long long)((const struct config_seeds *)field)->value[i]);
        }
        n = strlen(text);
        snprintf(text + n, bytes - n, "]");
        break;
    default:
        snprintf(text, bytes, "\"%s\"", (const char *)field);
    }
}
