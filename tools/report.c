/* report: the metrics of one or more runs as one self-contained HTML page.
 *
 *   ./report [--out FILE] [--reference NAME] DIR...
 *
 * A DIR is a run (it holds metrics.jsonl) or a study (its ARM/seed_N folders do). gnuplot draws; the pictures are
 * embedded, so the page can be mailed. Knows the files, not the trainer. */
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"

#include <argp.h>
#include <errno.h>
#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RUNS_MAX = 64, PATH_BYTES = 4096, METRICS_BYTES_MAX = 1 << 30 };

/* What is drawn: a column of metrics.jsonl, or `gap`, which is loss minus the reference's loss at the same step. */
enum column { COL_LOSS, COL_NORM, COL_LEAK, COL_SLOPE, COL_LOGIT, COL_RATE, COLUMNS };
static const char *const column_keys[COLUMNS] = {"loss",           "grad_norm", "row_leak",
                                                 "row_leak_slope", "logit_max", "tokens_per_s"};

struct row {
    double step;
    double value[COLUMNS]; /* NaN: null or missing */
};

struct run {
    char name[256];
    char folder[PATH_BYTES];
    struct row *rows; /* owns */
    size_t n_rows;
    char verdict[32];
    char reason[512];
    int64_t onset;
    double eval_loss, eval_fp8_loss; /* NaN: none */
};

struct report {
    const char *out;
    const char *reference;
    const char *folders[RUNS_MAX];
    int n_folders;
    struct run runs[RUNS_MAX];
    int n_runs;
    int reference_run;
};

static double number_or_nan(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static enum status read_metrics(struct run *run)
{
    char path[PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/metrics.jsonl", run->folder);
    char *text = NULL;
    size_t bytes = 0;
    TRY(file_read_all(path, METRICS_BYTES_MAX, &text, &bytes));
    size_t lines = 0;
    for (size_t i = 0; i < bytes; i++) {
        lines += text[i] == '\n';
    }
    run->rows = calloc(lines + 1, sizeof *run->rows);
    if (run->rows == NULL) {
        free(text);
        return status_fail(ERR_NOMEM, "%s: no memory for %zu rows", path, lines);
    }
    enum status status = OK;
    char *cursor = text;
    for (size_t line = 1; status == OK && cursor < text + bytes; line++) {
        char *end = strchr(cursor, '\n');
        size_t length = end != NULL ? (size_t)(end - cursor) : strlen(cursor);
        char where[PATH_BYTES + 64];
        snprintf(where, sizeof where, "%s line %zu", path, line);
        json_t *object = NULL;
        if (length > 0) {
            status = json_read_text(where, cursor, length, &object);
        }
        if (object != NULL) {
            struct row *row = &run->rows[run->n_rows++];
            row->step = number_or_nan(object, "step");
            for (int c = 0; c < COLUMNS; c++) {
                row->value[c] = number_or_nan(object, column_keys[c]);
            }
            json_decref(object);
        }
        cursor += length + 1;
    }
    free(text);
    return status;
}

/* verdict.json is written when a run ends: a run that goes on has none. */
static enum status read_verdict(struct run *run)
{
    char path[PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/verdict.json", run->folder);
    snprintf(run->verdict, sizeof run->verdict, "unfinished");
    run->eval_loss = run->eval_fp8_loss = NAN;
    if (access(path, R_OK) != 0) {
        return OK;
    }
    json_t *object = NULL;
    TRY(json_read_file(path, &object));
    const char *verdict = json_string_value(json_object_get(object, "verdict"));
    const char *reason = json_string_value(json_object_get(object, "reason"));
    snprintf(run->verdict, sizeof run->verdict, "%s", verdict != NULL ? verdict : "unknown");
    snprintf(run->reason, sizeof run->reason, "%s", reason != NULL ? reason : "");
    run->onset = json_integer_value(json_object_get(object, "onset"));
    run->eval_loss = number_or_nan(object, "eval_loss");
    run->eval_fp8_loss = number_or_nan(object, "eval_loss_pv_fp8");
    json_decref(object);
    return OK;
}

static enum status add_run(struct report *report, const char *folder, const char *name)
{
    if (report->n_runs == RUNS_MAX) {
        return status_fail(ERR_USAGE, "report: more than %d runs; name fewer folders", RUNS_MAX);
    }
    struct run *run = &report->runs[report->n_runs++];
    snprintf(run->folder, sizeof run->folder, "%s", folder);
    snprintf(run->name, sizeof run->name, "%s", name);
    TRY(read_metrics(run));
    return read_verdict(run);
}

/* The name of a run: the last two folders for ARM/seed_N, else the last one. */
static const char *short_name(const char *folder)
{
    const char *last = strrchr(folder, '/');
    if (last == NULL) {
        return folder;
    }
    if (strncmp(last + 1, "seed_", 5) != 0) {
        return last + 1;
    }
    while (last > folder && last[-1] != '/') {
        last--;
    }
    return last;
}

static enum status find_runs(struct report *report, const char *argument)
{
    char folder[PATH_BYTES];
    char pattern[PATH_BYTES + 32];
    snprintf(folder, sizeof folder, "%s", argument);
    for (size_t n = strlen(folder); n > 1 && folder[n - 1] == '/'; n--) {
        folder[n - 1] = '\0';
    }
    snprintf(pattern, sizeof pattern, "%s/metrics.jsonl", folder);
    if (access(pattern, R_OK) == 0) {
        return add_run(report, folder, short_name(folder));
    }
    snprintf(pattern, sizeof pattern, "%s/*/seed_*/metrics.jsonl", folder);
    glob_t found;
    if (glob(pattern, 0, NULL, &found) != 0) {
        return status_fail(ERR_USAGE, "%s: expected metrics.jsonl or ARM/seed_N/metrics.jsonl inside, found neither",
                           folder);
    }
    enum status status = OK;
    for (size_t i = 0; i < found.gl_pathc && status == OK; i++) {
        *strrchr(found.gl_pathv[i], '/') = '\0';
        status = add_run(report, found.gl_pathv[i], short_name(found.gl_pathv[i]));
    }
    globfree(&found);
    return status;
}

/* The reference: the run whose name starts with --reference, else one named bf16..., else the first. */
static enum status choose_reference(struct report *report)
{
    const char *wanted = report->reference != NULL ? report->reference : "bf16";
    for (int i = 0; i < report->n_runs; i++) {
        if (strncmp(report->runs[i].name, wanted, strlen(wanted)) == 0) {
            report->reference_run = i;
            return OK;
        }
    }
    if (report->reference != NULL) {
        return status_fail(ERR_USAGE, "report: --reference %s names none of the %d runs; the first is called %s",
                           report->reference, report->n_runs, report->runs[0].name);
    }
    return OK;
}

static double loss_at(const struct run *run, double step)
{
    for (size_t i = 0; i < run->n_rows; i++) {
        if (run->rows[i].step == step) {
            return run->rows[i].value[COL_LOSS];
        }
    }
    return NAN;
}

struct plot {
    const char *title, *unit;
    enum column column;
    bool gap, log_scale;
};

static const struct plot plots[] = {
    {"Training loss", "nats a token", COL_LOSS, false, false},
    {"Gap to the reference", "nats a token", COL_LOSS, true, false},
    {"Gradient norm before clipping", "", COL_NORM, false, true},
    {"Row leak of dS before it is stored", "sum |row sums| / sum |dS|", COL_LEAK, false, true},
    {"Signed row leak (slope on r)", "", COL_SLOPE, false, false},
    {"Largest logit", "natural units", COL_LOGIT, false, false},
};
enum { PLOTS = sizeof plots / sizeof plots[0] };

static double plotted(const struct report *report, const struct plot *plot, int run, size_t i)
{
    const struct row *row = &report->runs[run].rows[i];
    if (plot->gap) {
        return row->value[COL_LOSS] - loss_at(&report->runs[report->reference_run], row->step);
    }
    return row->value[plot->column];
}

static bool has_points(const struct report *report, const struct plot *plot)
{
    for (int r = 0; r < report->n_runs; r++) {
        for (size_t i = 0; i < report->runs[r].n_rows; i++) {
            double y = plotted(report, plot, r, i);
            if (isfinite(y) && (!plot->log_scale || y > 0)) {
                return true;
            }
        }
    }
    return false;
}

/* Draws into `svg` (a temporary file). gnuplot reads data inline: a run is one data block. */
static enum status draw(const struct report *report, const struct plot *plot, const char *svg)
{
    FILE *pipe = popen("gnuplot", "w");
    if (pipe == NULL) {
        return status_fail(ERR_IO, "report: cannot start gnuplot: %s; install gnuplot-nox", strerror(errno));
    }
    fprintf(pipe,
            "set terminal svg size 960,400 noenhanced font 'sans-serif,12' background '#ffffff'\nset output '%s'\n",
            svg);
    fprintf(pipe, "set title '%s'\nset xlabel 'update'\nset ylabel '%s'\nset grid lc rgb '#dddddd'\n", plot->title,
            plot->unit);
    fprintf(pipe, "set key below\nset border 3\nset tics nomirror\n%s",
            plot->log_scale ? "set logscale y\nset format y '%.0e'\n" : "");
    fprintf(pipe, "plot ");
    for (int r = 0; r < report->n_runs; r++) {
        fprintf(pipe, "%s'-' with lines lw 1.5 title '%s'", r > 0 ? ", " : "", report->runs[r].name);
    }
    fprintf(pipe, "\n");
    for (int r = 0; r < report->n_runs; r++) {
        for (size_t i = 0; i < report->runs[r].n_rows; i++) {
            double y = plotted(report, plot, r, i);
            if (isfinite(y) && (!plot->log_scale || y > 0)) {
                fprintf(pipe, "%.0f %.9g\n", report->runs[r].rows[i].step, y);
            } else {
                fprintf(pipe, "\n"); /* a break in the line, not a bridge over the missing point */
            }
        }
        fprintf(pipe, "e\n");
    }
    int status = pclose(pipe);
    if (status != 0) {
        return status_fail(ERR_IO, "report: gnuplot ended with status %d; install gnuplot-nox", status);
    }
    return OK;
}

static void write_base64(FILE *page, const unsigned char *bytes, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        size_t left = n - i;
        unsigned word = (unsigned)bytes[i] << 16 | (left > 1 ? (unsigned)bytes[i + 1] << 8 : 0) |
                        (left > 2 ? (unsigned)bytes[i + 2] : 0);
        fputc(digits[word >> 18], page);
        fputc(digits[word >> 12 & 63], page);
        fputc(left > 1 ? digits[word >> 6 & 63] : '=', page);
        fputc(left > 2 ? digits[word & 63] : '=', page);
    }
}

static void write_escaped(FILE *page, const char *text)
{
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '<':
            fputs("&lt;", page);
            break;
        case '>':
            fputs("&gt;", page);
            break;
        case '&':
            fputs("&amp;", page);
            break;
        case '"':
            fputs("&quot;", page);
            break;
        default:
            fputc(*text, page);
        }
    }
}

static void write_cell(FILE *page, double value, const char *format)
{
    fputs("<td>", page);
    if (isfinite(value)) {
        fprintf(page, format, value);
    } else {
        fputs("&ndash;", page);
    }
    fputs("</td>", page);
}

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of the finite values of a column; NaN if there are none. */
static double column_median(const struct run *run, enum column column)
{
    double *values = malloc((run->n_rows + 1) * sizeof *values);
    size_t n = 0;
    for (size_t i = 0; values != NULL && i < run->n_rows; i++) {
        if (isfinite(run->rows[i].value[column])) {
            values[n++] = run->rows[i].value[column];
        }
    }
    double median = NAN;
    if (n > 0) {
        qsort(values, n, sizeof *values, compare_double);
        median = values[n / 2];
    }
    free(values);
    return median;
}

static void write_table(FILE *page, const struct report *report)
{
    fputs("<table><tr><th>run</th><th>verdict</th><th>onset</th><th>updates</th><th>last loss</th><th>gap</th>"
          "<th>evaluation</th><th>with pv = fp8</th><th>median row leak</th><th>median slope</th>"
          "<th>largest logit</th><th>tokens/s</th></tr>\n",
          page);
    const struct run *reference = &report->runs[report->reference_run];
    for (int r = 0; r < report->n_runs; r++) {
        const struct run *run = &report->runs[r];
        const struct row *last = run->n_rows > 0 ? &run->rows[run->n_rows - 1] : NULL;
        double loss = last != NULL ? last->value[COL_LOSS] : NAN;
        fputs("<tr><td class=name>", page);
        write_escaped(page, run->name);
        fputs(run == reference ? " (reference)</td><td class=\"" : "</td><td class=\"", page);
        write_escaped(page, run->verdict);
        fputs("\">", page);
        write_escaped(page, run->verdict);
        fputs("</td>", page);
        write_cell(page, run->onset > 0 ? (double)run->onset : NAN, "%.0f");
        write_cell(page, last != NULL ? last->step : NAN, "%.0f");
        write_cell(page, loss, "%.4f");
        write_cell(page, last != NULL ? loss - loss_at(reference, last->step) : NAN, "%+.4f");
        write_cell(page, run->eval_loss, "%.4f");
        write_cell(page, run->eval_fp8_loss, "%.4f");
        write_cell(page, column_median(run, COL_LEAK), "%.2e");
        write_cell(page, column_median(run, COL_SLOPE), "%+.2e");
        write_cell(page, last != NULL ? last->value[COL_LOGIT] : NAN, "%.2f");
        write_cell(page, column_median(run, COL_RATE), "%.0f");
        fputs("</tr>\n", page);
    }
    fputs("</table>\n", page);
    for (int r = 0; r < report->n_runs; r++) {
        if (report->runs[r].reason[0] != '\0') {
            fputs("<p><b>", page);
            write_escaped(page, report->runs[r].name);
            fputs("</b>: ", page);
            write_escaped(page, report->runs[r].reason);
            fputs("</p>\n", page);
        }
    }
}

static enum status write_plot(FILE *page, const struct report *report, const struct plot *plot, const char *svg)
{
    if (!has_points(report, plot)) {
        fprintf(page, "<p>%s: no run has this number.</p>\n", plot->title);
        return OK;
    }
    TRY(draw(report, plot, svg));
    char *bytes = NULL;
    size_t n = 0;
    TRY(file_read_all(svg, METRICS_BYTES_MAX, &bytes, &n));
    fprintf(page, "<p><img alt=\"%s\" src=\"data:image/svg+xml;base64,", plot->title);
    write_base64(page, (const unsigned char *)bytes, n);
    fputs("\"></p>\n", page);
    free(bytes);
    return OK;
}

static enum status write_page(FILE *page, const struct report *report, const char *svg)
{
    fputs("<!doctype html><html lang=en><meta charset=utf-8><title>gpt8b report</title>\n<style>"
          "body{font:15px sans-serif;margin:2em auto;max-width:72em;color:#222}"
          "table{border-collapse:collapse;font-size:13px}th,td{padding:.3em .6em;border-bottom:1px solid #ddd;"
          "text-align:right}th{background:#f4f4f4}td.name{text-align:left}img{max-width:100%}"
          ".diverged{color:#b00020;font-weight:bold}.suspect{color:#b36b00}.healthy{color:#1b7a2f}"
          "</style>\n<h1>gpt8b report</h1>\n",
          page);
    write_table(page, report);
    for (int i = 0; i < PLOTS; i++) {
        TRY(write_plot(page, report, &plots[i], svg));
    }
    fputs("</html>\n", page);
    return OK;
}

static enum status report_run(struct report *report)
{
    for (int i = 0; i < report->n_folders; i++) {
        TRY(find_runs(report, report->folders[i]));
    }
    TRY(choose_reference(report));
    char *text = NULL;
    size_t bytes = 0;
    FILE *page = open_memstream(&text, &bytes);
    if (page == NULL) {
        return status_fail_errno(ERR_NOMEM, "report", "open_memstream");
    }
    char svg[] = "/tmp/gpt8b_report_XXXXXX";
    int fd = mkstemp(svg);
    enum status status = fd < 0 ? status_fail_errno(ERR_IO, svg, "mkstemp") : write_page(page, report, svg);
    if (fd >= 0) {
        close(fd);
        unlink(svg);
    }
    fclose(page);
    char path[PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/report.html", report->folders[0]);
    if (status == OK) {
        const char *out = report->out != NULL ? report->out : path;
        status = file_write_atomic(out, text, bytes);
        if (status == OK) {
            printf("wrote %s: %d runs\n", out, report->n_runs);
        }
    }
    free(text);
    return status;
}

static error_t parse_option(int key, char *argument, struct argp_state *state)
{
    struct report *report = state->input;
    switch (key) {
    case 'o':
        report->out = argument;
        return 0;
    case 'r':
        report->reference = argument;
        return 0;
    case ARGP_KEY_ARG:
        if (report->n_folders == RUNS_MAX) {
            argp_error(state, "more than %d folders", RUNS_MAX);
        }
        report->folders[report->n_folders++] = argument;
        return 0;
    case ARGP_KEY_END:
        if (report->n_folders == 0) {
            argp_error(state, "name at least one run or study folder");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int main(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"out", 'o', "FILE", 0, "the page to write (default: report.html in the first DIR)", 0},
        {"reference", 'r', "NAME", 0, "run that gaps are measured from (default: the one named bf16, else the first)",
         0},
        {0},
    };
    static const struct argp argp = {
        options, parse_option, "DIR...", "Metrics of runs and studies as one self-contained HTML page.",
        NULL,    NULL,         NULL};
    static struct report report; /* large; zeroed */
    argp_err_exit_status = 1;
    argp_parse(&argp, argc, argv, 0, NULL, &report);
    enum status status = report_run(&report);
    for (int i = 0; i < report.n_runs; i++) {
        free(report.runs[i].rows);
    }
    return status_exit_code(status);
}
