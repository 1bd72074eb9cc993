/* replay_verdict: the divergence watch on a recorded series.
 *
 *   ./replay_verdict SERIES.csv [--reference OTHER.csv]
 *
 * A series has the columns update, loss and grad_norm (others are ignored). Prints `verdict: ...` first, then when
 * trouble came and went. Exit status 3 if the run diverged, 1 if a file cannot be read. */
#include "core/file.h"
#include "train/watch.h"

#include <argp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SERIES_BYTES_MAX = 1 << 30 };
enum column { COLUMN_UPDATE, COLUMN_LOSS, COLUMN_NORM, COLUMNS };
static const char *const column_names[COLUMNS] = {"update", "loss", "grad_norm"};

struct series {
    struct watch_row *rows; /* owns */
    size_t n;
};

static char *trim(char *text)
{
    while (*text == ' ' || *text == '\t') {
        text++;
    }
    size_t n = strlen(text);
    while (n > 0 && (text[n - 1] == ' ' || text[n - 1] == '\t' || text[n - 1] == '\r')) {
        text[--n] = '\0';
    }
    return text;
}

/* Finds our columns in the header: place[c] is the index of the field. */
static enum status read_header(const char *path, char *line, int place[COLUMNS])
{
    for (int c = 0; c < COLUMNS; c++) {
        place[c] = -1;
    }
    int index = 0;
    for (char *field = strsep(&line, ","); field != NULL; field = strsep(&line, ","), index++) {
        for (int c = 0; c < COLUMNS; c++) {
            if (strcmp(trim(field), column_names[c]) == 0) {
                if (place[c] >= 0) {
                    return status_fail(ERR_DATA, "%s:1: column %s appears twice", path, column_names[c]);
                }
                place[c] = index;
            }
        }
    }
    for (int c = 0; c < COLUMNS; c++) {
        if (place[c] < 0) {
            return status_fail(ERR_DATA, "%s:1: no column %s; the first line must name update, loss and grad_norm",
                               path, column_names[c]);
        }
    }
    return OK;
}

static enum status read_number(const char *path, size_t line, enum column column, const char *text, double *value)
{
    char *end = NULL;
    *value = strtod(text, &end); /* knows nan and inf */
    if (end == text || *end != '\0') {
        return status_fail(ERR_DATA, "%s:%zu: %s: expected a number, nan or inf, found \"%s\"", path, line,
                           column_names[column], text);
    }
    return OK;
}

static enum status read_row(const char *path, size_t line, char *text, const int place[COLUMNS], struct watch_row *row)
{
    double value[COLUMNS];
    bool seen[COLUMNS] = {false};
    int index = 0;
    for (char *field = strsep(&text, ","); field != NULL; field = strsep(&text, ","), index++) {
        for (int c = 0; c < COLUMNS; c++) {
            if (place[c] == index) {
                TRY(read_number(path, line, (enum column)c, trim(field), &value[c]));
                seen[c] = true;
            }
        }
    }
    for (int c = 0; c < COLUMNS; c++) {
        if (!seen[c]) {
            return status_fail(ERR_DATA, "%s:%zu: no %s: the line has %d fields, the header puts it in field %d", path,
                               line, column_names[c], index, place[c] + 1);
        }
    }
    double update = value[COLUMN_UPDATE];
    if (!(update >= 1 && update <= 1e15) || update != floor(update)) {
        return status_fail(ERR_DATA, "%s:%zu: update: expected a whole number from 1, found %g", path, line, update);
    }
    *row = (struct watch_row){(int64_t)update, value[COLUMN_LOSS], value[COLUMN_NORM], 0, NAN};
    return OK;
}

static enum status parse_series(const char *path, char *text, struct series *series)
{
    int place[COLUMNS];
    size_t line = 0;
    for (char *here = strsep(&text, "\n"); here != NULL; here = strsep(&text, "\n")) {
        line++;
        if (*trim(here) == '\0' && line > 1) {
            continue;
        }
        if (line == 1) {
            TRY(read_header(path, here, place));
            continue;
        }
        struct watch_row *row = &series->rows[series->n];
        TRY(read_row(path, line, here, place, row));
        if (series->n > 0 && row->update <= row[-1].update) {
            return status_fail(ERR_DATA, "%s:%zu: update %lld does not come after %lld: updates must ascend", path,
                               line, (long long)row->update, (long long)row[-1].update);
        }
        series->n++;
    }
    if (series->n == 0) {
        return status_fail(ERR_DATA, "%s:%zu: no rows after the header", path, line);
    }
    return OK;
}

static enum status read_series(const char *path, struct series *series)
{
    if (access(path, R_OK) != 0) {
        return status_fail_errno(ERR_USAGE, path, "cannot read the series");
    }
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        return status_fail(ERR_USAGE, "%s: a folder; expected a CSV file", path);
    }
    char *text = NULL;
    size_t bytes = 0;
    TRY(file_read_all(path, SERIES_BYTES_MAX, &text, &bytes));
    size_t lines = 1;
    for (size_t i = 0; i < bytes; i++) {
        lines += text[i] == '\n';
    }
    enum status status = OK;
    series->rows = calloc(lines, sizeof *series->rows);
    if (series->rows == NULL) {
        status = status_fail(ERR_NOMEM, "%s: no memory for %zu rows", path, lines);
    } else if (strlen(text) != bytes) {
        status = status_fail(ERR_DATA, "%s:1: a zero byte: this is no text file", path);
    } else {
        status = parse_series(path, text, series);
    }
    free(text);
    return status;
}

/* The reference's loss at the same update; updates that it lacks have no partner. */
static void join_reference(struct series *series, const struct series *reference)
{
    size_t r = 0;
    for (size_t i = 0; i < series->n; i++) {
        while (r < reference->n && reference->rows[r].update < series->rows[i].update) {
            r++;
        }
        if (r < reference->n && reference->rows[r].update == series->rows[i].update) {
            series->rows[i].partner_loss = reference->rows[r].loss;
        }
    }
}

/* Feeds the rows in order; what happened goes to `events`. The words of the verdicts appear in the first line of the
 * output alone, so that scripts may search for them. */
static enum verdict replay(struct watch *watch, const struct series *series, FILE *events)
{
    enum verdict before = VERDICT_HEALTHY;
    for (size_t i = 0; i < series->n; i++) {
        long long update = (long long)series->rows[i].update;
        enum verdict now = watch_update(watch, &series->rows[i]);
        if (now == VERDICT_SUSPECT && before == VERDICT_HEALTHY) {
            fprintf(events, "update %lld: trouble: %s\n", update, watch_reason(watch));
        } else if (now == VERDICT_HEALTHY && before == VERDICT_SUSPECT) {
            fprintf(events, "update %lld: calm again\n", update);
        } else if (now == VERDICT_DIVERGED && before != VERDICT_DIVERGED) {
            fprintf(events, "update %lld: final: %s\n", update, watch_reason(watch));
        }
        before = now;
    }
    return before;
}

static enum status print_verdict(const struct series *series, enum verdict *verdict)
{
    struct watch *watch = NULL;
    struct watch_config config = watch_config_default();
    TRY(watch_open(&watch, &config));
    char *events = NULL;
    size_t bytes = 0;
    FILE *memory = open_memstream(&events, &bytes);
    if (memory == NULL) {
        watch_close(watch);
        return status_fail_errno(ERR_NOMEM, "replay_verdict", "open_memstream");
    }
    *verdict = replay(watch, series, memory);
    fclose(memory);
    printf("verdict: %s\n", verdict_names[*verdict]);
    printf("rows: %zu, updates %lld to %lld\n", series->n, (long long)series->rows[0].update,
           (long long)series->rows[series->n - 1].update);
    if (watch_onset(watch) > 0) {
        printf("onset: update %lld\nreason: %s\n", (long long)watch_onset(watch), watch_reason(watch));
    }
    fputs(events, stdout);
    free(events);
    watch_close(watch);
    return OK;
}

struct arguments {
    const char *series, *reference;
};

static error_t parse_option(int key, char *argument, struct argp_state *state)
{
    struct arguments *arguments = state->input;
    switch (key) {
    case 'r':
        arguments->reference = argument;
        return 0;
    case ARGP_KEY_ARG:
        if (arguments->series != NULL) {
            argp_error(state, "one series at a time");
        }
        arguments->series = argument;
        return 0;
    case ARGP_KEY_END:
        if (arguments->series == NULL) {
            argp_error(state, "name the series: a CSV file with the columns update, loss and grad_norm");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int main(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"reference", 'r', "CSV", 0, "the matched run: its loss at the same updates is compared", 0},
        {0},
    };
    static const struct argp argp = {
        options, parse_option, "SERIES.csv", "The divergence verdict of a recorded series (docs/divergence.md).",
        NULL,    NULL,         NULL};
    struct arguments arguments = {0};
    argp_err_exit_status = 1;
    argp_parse(&argp, argc, argv, 0, NULL, &arguments);
    struct series series = {0};
    struct series reference = {0};
    enum verdict verdict = VERDICT_HEALTHY;
    enum status status = read_series(arguments.series, &series);
    if (status == OK && arguments.reference != NULL) {
        status = read_series(arguments.reference, &reference);
    }
    if (status == OK) {
        join_reference(&series, &reference);
        status = print_verdict(&series, &verdict);
    }
    free(series.rows);
    free(reference.rows);
    return status != OK ? status_exit_code(status) : verdict == VERDICT_DIVERGED ? 3 : 0;
}
