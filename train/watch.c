/* train: the divergence rule of docs/divergence.md.
 *
 * Every row is compared with baselines made of earlier rows that were in order. Rows in trouble do not enter the
 * baselines, so that a slow disaster cannot become its own measure. */
#include "train/watch.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A median of fewer rows says little: sparse series look back over this many rows even if that is more than a window.
 */
enum { ROWS_MIN = 6 };
/* Batch noise (standard deviation of the loss, nats) that the thresholds are made for. Noisier series get wider ones in
 * proportion, up to a limit, since a curved start looks like noise. */
static const double noise_unit = 0.1;
static const double noise_widening_max = 3;

const char *const verdict_names[] = {"healthy", "suspect", "diverged", NULL};

struct sample {
    int64_t update;
    double loss, norm;
};

struct watch {
    struct watch_config config;
    enum verdict verdict;
    char reason[256];
    int64_t last_update;
    double last_norm;
    double best;           /* lowest level of the loss so far; INFINITY before ROWS_MIN rows */
    int64_t trouble_since; /* first and last row of the present episode of trouble; 0 = none */
    int64_t trouble_last;
    int64_t rise_since; /* loss rise that has not come back; 0 = none */
    double rise_peak;   /* its highest point above the baseline */
    int64_t burst_since, burst_last;
    int64_t partner_since;
    int n_samples, capacity;
    struct sample samples[]; /* rows in order, ascending */
};

struct baseline {
    bool known;
    double loss, norm, widening;
};

struct watch_config watch_config_default(void)
{
    return (struct watch_config){.window = 100,
                                 .loss_rise_suspect = 0.5,
                                 .loss_rise_diverged = 0.75,
                                 .norm_factor = 8,
                                 .confirm = 25,
                                 .partner_gap = 0.75};
}

static enum status check_config(const struct watch_config *c)
{
    if (c->window < 1 || c->window > WATCH_WINDOW_MAX) {
        return status_fail(ERR_CONFIG, "divergence.window: expected 1 to %d updates, found %lld", WATCH_WINDOW_MAX,
                           (long long)c->window);
    }
    if (c->confirm < 1) {
        return status_fail(ERR_CONFIG, "divergence.confirm: expected at least 1 update, found %lld",
                           (long long)c->confirm);
    }
    if (!(c->loss_rise_suspect > 0) || !(c->loss_rise_diverged >= c->loss_rise_suspect) ||
        !isfinite(c->loss_rise_diverged)) {
        return status_fail(ERR_CONFIG,
                           "divergence.loss_rise_suspect, loss_rise_diverged: expected 0 < suspect <= diverged nats, "
                           "found %g and %g",
                           c->loss_rise_suspect, c->loss_rise_diverged);
    }
    if (!(c->norm_factor > 1) || !isfinite(c->norm_factor)) {
        return status_fail(ERR_CONFIG, "divergence.norm_factor: expected a factor above 1, found %g", c->norm_factor);
    }
    if (!(c->partner_gap > 0) || !isfinite(c->partner_gap)) {
        return status_fail(ERR_CONFIG, "divergence.partner_gap: expected nats above 0, found %g", c->partner_gap);
    }
    return OK;
}

enum status watch_open(struct watch **watch, const struct watch_config *config)
{
    TRY(check_config(config));
    int capacity = (int)(config->window > ROWS_MIN ? config->window : ROWS_MIN) + 1;
    struct watch *w = calloc(1, sizeof *w + (size_t)capacity * sizeof w->samples[0]);
    if (w == NULL) {
        return status_fail(ERR_NOMEM, "divergence watch: no memory for %d rows", capacity);
    }
    w->config = *config;
    w->capacity = capacity;
    w->best = INFINITY;
    *watch = w;
    return OK;
}

void watch_close(struct watch *watch)
{
    free(watch);
}

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Lower median; sorts x. */
static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, compare_double);
    return x[(n - 1) / 2];
}

/* Standard deviation of the batch noise, from the spread of the steps between rows: a steady descent moves all steps
 * alike and so does not count. */
static double noise_of(const struct sample *s, int n)
{
    double step[WATCH_WINDOW_MAX + ROWS_MIN];
    int steps = n - 1;
    for (int i = 0; i < steps; i++) {
        step[i] = s[i + 1].loss - s[i].loss;
    }
    double middle = median(step, steps);
    for (int i = 0; i < steps; i++) {
        step[i] = fabs(step[i] - middle);
    }
    /* A step holds the noise of two rows; the median deviation of a normal is 0.6745 of its standard deviation. */
    return median(step, steps) / (0.6745 * sqrt(2.0));
}

/* What the rows in order say. The first few rows are too few for a median: their highest value stands in. */
static struct baseline baseline_of(struct watch *w)
{
    struct baseline b = {.widening = 1};
    int n = w->n_samples;
    if (n == 0) {
        return b;
    }
    double loss[WATCH_WINDOW_MAX + ROWS_MIN];
    double norm[WATCH_WINDOW_MAX + ROWS_MIN];
    for (int i = 0; i < n; i++) {
        loss[i] = w->samples[i].loss;
        norm[i] = w->samples[i].norm;
    }
    b.known = true;
    double level = median(loss, n);
    b.norm = median(norm, n);
    if (n < ROWS_MIN) {
        b.loss = loss[n - 1];
        b.norm = norm[n - 1];
        return b;
    }
    w->best = fmin(w->best, level);
    b.loss = w->best;
    b.widening = fmin(fmax(noise_of(w->samples, n) / noise_unit, 1), noise_widening_max);
    return b;
}

/* Forgets rows before the window, but never the last ROWS_MIN. */
static void forget(struct watch *w, int64_t update)
{
    int old = 0;
    while (w->n_samples - old > ROWS_MIN && w->samples[old].update < update - w->config.window) {
        old++;
    }
    w->n_samples -= old;
    memmove(w->samples, w->samples + old, (size_t)w->n_samples * sizeof w->samples[0]);
}

static void keep(struct watch *w, const struct watch_row *row)
{
    ASSERT(w->n_samples < w->capacity);
    w->samples[w->n_samples++] = (struct sample){row->update, row->loss, row->grad_norm};
}

static void set_verdict(struct watch *w, enum verdict verdict)
{
    w->verdict = verdict;
    w->reason[0] = '\0';
}

/* Appends to the reason, which set_verdict has emptied. */
static __attribute__((format(printf, 2, 3))) void say(struct watch *w, const char *format, ...)
{
    size_t used = strlen(w->reason);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(w->reason + used, sizeof w->reason - used, format, arguments);
    va_end(arguments);
}

static bool not_finite(struct watch *w, const struct watch_row *row)
{
    if (isfinite(row->loss) && isfinite(row->grad_norm) && row->non_finite == 0) {
        return false;
    }
    set_verdict(w, VERDICT_DIVERGED);
    say(w, "loss %g, gradient norm %g, %lld gradients not finite at update %lld", row->loss, row->grad_norm,
        (long long)row->non_finite, (long long)row->update);
    return true;
}

/* Follows the loss rise: it begins above the higher threshold and ends below the lower one, so that noise around one
 * threshold does not cut it. Returns true if the loss of this row is out of order. */
static bool follow_rise(struct watch *w, const struct watch_row *row, const struct baseline *b)
{
    double rise = row->loss - b->loss;
    bool high = b->known && rise > w->config.loss_rise_suspect * b->widening;
    if (!high) {
        w->rise_since = 0;
        w->rise_peak = 0;
        return false;
    }
    if (w->rise_since == 0 && rise > w->config.loss_rise_diverged * b->widening) {
        w->rise_since = row->update;
    }
    if (w->rise_since > 0) {
        w->rise_peak = fmax(w->rise_peak, rise);
    }
    return true;
}

static bool follow_burst(struct watch *w, const struct watch_row *row, const struct baseline *b)
{
    bool burst = b->known && b->norm > 0 && row->grad_norm > w->config.norm_factor * b->norm;
    if (!burst) {
        w->burst_since = 0;
        return false;
    }
    if (w->burst_since == 0) {
        w->burst_since = row->update;
    }
    w->burst_last = row->update;
    return true;
}

static bool follow_partner(struct watch *w, const struct watch_row *row)
{
    bool behind = row->loss - row->partner_loss > w->config.partner_gap; /* false for NaN */
    if (!behind) {
        w->partner_since = 0;
    } else if (w->partner_since == 0) {
        w->partner_since = row->update;
    }
    return behind;
}

/* A rise that lasts. With a norm burst beside it `confirm` updates are enough, unless the loss is already on its way
 * back (below half of its peak): a spike that recovers is no divergence. */
static bool rise_confirmed(const struct watch *w, const struct watch_row *row, const struct baseline *b)
{
    double rise = row->loss - b->loss;
    if (w->rise_since == 0 || rise <= w->config.loss_rise_diverged * b->widening) {
        return false;
    }
    int64_t lasted = row->update - w->rise_since;
    bool burst = w->burst_last > 0 && w->burst_last >= w->rise_since - w->config.confirm;
    return lasted >= w->config.window || (burst && lasted >= w->config.confirm && rise >= 0.5 * w->rise_peak);
}

/* Growth by the square of the burst factor twice running, from one row to the next: no batch does that. */
static bool runs_away(const struct watch *w, const struct watch_row *row, const struct baseline *b)
{
    double leap = w->config.norm_factor * w->config.norm_factor;
    return b->known && b->norm > 0 && w->last_norm > leap * b->norm && row->grad_norm > leap * w->last_norm;
}

static void say_numbers(struct watch *w, const struct watch_row *row, const struct baseline *b)
{
    say(w, "at update %lld loss %.4g", (long long)row->update, row->loss);
    if (b->known) {
        say(w, " (%+.2f nats from its best level %.4g)", row->loss - b->loss, b->loss);
    }
    say(w, ", norm %.3g", row->grad_norm);
    if (b->known && b->norm > 0) {
        say(w, " (%.3g times its median)", row->grad_norm / b->norm);
    }
    if (w->partner_since > 0) {
        say(w, ", %+.2f nats from the reference, so since update %lld", row->loss - row->partner_loss,
            (long long)w->partner_since);
    }
}

static void judge(struct watch *w, const struct watch_row *row, const struct baseline *b, bool trouble)
{
    bool left_behind = w->partner_since > 0 && row->update - w->partner_since >= w->config.confirm;
    if (left_behind || rise_confirmed(w, row, b) || runs_away(w, row, b)) {
        set_verdict(w, VERDICT_DIVERGED);
        say_numbers(w, row, b);
    } else if (trouble) {
        set_verdict(w, VERDICT_SUSPECT);
        say_numbers(w, row, b);
    } else if (w->verdict == VERDICT_SUSPECT && row->update - w->trouble_last >= w->config.confirm) {
        set_verdict(w, VERDICT_HEALTHY);
        w->trouble_since = 0;
    }
}

enum verdict watch_update(struct watch *w, const struct watch_row *row)
{
    ASSERT(row->update > w->last_update);
    w->last_update = row->update;
    if (w->verdict == VERDICT_DIVERGED) {
        return w->verdict;
    }
    if (not_finite(w, row)) {
        w->trouble_since = w->trouble_since > 0 ? w->trouble_since : row->update;
        return w->verdict;
    }
    forget(w, row->update);
    struct baseline b = baseline_of(w);
    bool high = follow_rise(w, row, &b);
    bool burst = follow_burst(w, row, &b);
    bool behind = follow_partner(w, row);
    bool trouble = high || burst || behind;
    if (trouble) {
        w->trouble_since = w->trouble_since > 0 ? w->trouble_since : row->update;
        w->trouble_last = row->update;
    }
    judge(w, row, &b, trouble);
    w->last_norm = row->grad_norm;
    /* A norm that stays high for a whole window while the loss is in order is the new normal. */
    if (!high && (!burst || row->update - w->burst_since > w->config.window)) {
        keep(w, row);
    }
    return w->verdict;
}

enum verdict watch_verdict(const struct watch *watch)
{
    return watch->verdict;
}

int64_t watch_onset(const struct watch *watch)
{
    return watch->trouble_since;
}

const char *watch_reason(const struct watch *watch)
{
    return watch->reason;
}

static json_t *sample_json(const struct sample *s)
{
    return json_pack("[I, f, f]", (json_int_t)s->update, s->loss, s->norm);
}

json_t *watch_save(const struct watch *w)
{
    json_t *rows = json_array();
    for (int i = 0; rows != NULL && i < w->n_samples; i++) {
        if (json_array_append_new(rows, sample_json(&w->samples[i])) != 0) {
            json_decref(rows);
            return NULL;
        }
    }
    json_t *state = json_pack("{s:s, s:s, s:I, s:f, s:I, s:I, s:I, s:f, s:I, s:I, s:I, s:o}", "verdict",
                              verdict_names[w->verdict], "reason", w->reason, "last_update", (json_int_t)w->last_update,
                              "last_norm", w->last_norm, "trouble_since", (json_int_t)w->trouble_since, "trouble_last",
                              (json_int_t)w->trouble_last, "rise_since", (json_int_t)w->rise_since, "rise_peak",
                              w->rise_peak, "burst_since", (json_int_t)w->burst_since, "burst_last",
                              (json_int_t)w->burst_last, "partner_since", (json_int_t)w->partner_since, "rows", rows);
    if (state != NULL && isfinite(w->best) && json_object_set_new(state, "best", json_real(w->best)) != 0) {
        json_decref(state);
        return NULL;
    }
    return state;
}

static const char state_name[] = "divergence watch state";

/* Far above any loss and norm, far below where their differences and products overflow. */
static const double number_max = 1e100;
static const int64_t updates_max = 1000000000000000; /* that a configuration can ask for */

static enum status read_update(const json_t *state, const char *key, int64_t last, int64_t *value)
{
    TRY(json_get_int(state, state_name, key, value));
    if (*value < 0 || *value > last) {
        return status_fail(ERR_DATA, "%s: %s: expected an update in 0 .. %lld, found %lld", state_name, key,
                           (long long)last, (long long)*value);
    }
    return OK;
}

static enum status read_number(const json_t *state, const char *key, double min, double *value)
{
    TRY(json_get_double(state, state_name, key, value));
    if (!(*value >= min && *value <= number_max)) {
        return status_fail(ERR_DATA, "%s: %s: expected a number in %g .. %g, found %g", state_name, key, min,
                           number_max, *value);
    }
    return OK;
}

static enum status read_rows(struct watch *w, const json_t *rows)
{
    size_t n = json_array_size(rows);
    /* A shorter window than the one that saved it needs the latest rows only. */
    size_t first = n > (size_t)w->capacity ? n - (size_t)w->capacity : 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *row = json_array_get(rows, i);
        const json_t *update = json_array_get(row, 0);
        const json_t *loss = json_array_get(row, 1);
        const json_t *norm = json_array_get(row, 2);
        bool ascends =
            i == 0 || json_integer_value(update) > json_integer_value(json_array_get(json_array_get(rows, i - 1), 0));
        if (json_array_size(row) != 3 || !json_is_integer(update) || !json_is_number(loss) || !json_is_number(norm) ||
            !ascends || json_integer_value(update) < 0 || json_integer_value(update) > w->last_update ||
            fabs(json_number_value(loss)) > number_max || !(json_number_value(norm) >= 0) ||
            json_number_value(norm) > number_max) {
            return status_fail(ERR_DATA, "%s: rows[%zu]: expected [update, loss, norm], updates ascending to %lld",
                               state_name, i, (long long)w->last_update);
        }
        if (i >= first) {
            w->samples[w->n_samples++] =
                (struct sample){json_integer_value(update), json_number_value(loss), json_number_value(norm)};
        }
    }
    return OK;
}

static enum status read_verdict(struct watch *w, const json_t *state)
{
    const char *name = NULL;
    const char *reason = NULL;
    TRY(json_get_string(state, state_name, "verdict", &name));
    TRY(json_get_string(state, state_name, "reason", &reason));
    if (strlen(reason) >= sizeof w->reason) { /* a cut could fall inside a letter, and JSON takes whole ones only */
        return status_fail(ERR_DATA, "%s: reason of %zu bytes, expected at most %zu", state_name, strlen(reason),
                           sizeof w->reason - 1);
    }
    for (int v = 0; verdict_names[v] != NULL; v++) {
        if (strcmp(name, verdict_names[v]) == 0) {
            set_verdict(w, (enum verdict)v);
            say(w, "%s", reason);
            return OK;
        }
    }
    return status_fail(ERR_DATA, "%s: verdict: expected healthy, suspect or diverged, found \"%s\"", state_name, name);
}

enum status watch_restore(struct watch *watch, const json_t *state)
{
    struct watch *w = NULL;
    TRY(watch_open(&w, &watch->config));
    const struct {
        const char *key;
        int64_t *value;
    } updates[] = {{"trouble_since", &w->trouble_since}, {"trouble_last", &w->trouble_last},
                   {"rise_since", &w->rise_since},       {"burst_since", &w->burst_since},
                   {"burst_last", &w->burst_last},       {"partner_since", &w->partner_since}};
    enum status status = read_verdict(w, state);
    if (status == OK) {
        status = read_update(state, "last_update", updates_max, &w->last_update);
    }
    for (size_t i = 0; status == OK && i < sizeof updates / sizeof updates[0]; i++) {
        status = read_update(state, updates[i].key, w->last_update, updates[i].value);
    }
    if (status == OK) {
        status = read_number(state, "last_norm", 0, &w->last_norm);
    }
    if (status == OK) {
        status = read_number(state, "rise_peak", -number_max, &w->rise_peak);
    }
    if (status == OK && json_object_get(state, "best") != NULL) {
        status = read_number(state, "best", -number_max, &w->best);
    }
    if (status == OK) {
        status = read_rows(w, json_object_get(state, "rows"));
    }
    if (status == OK) {
        memcpy(watch, w, sizeof *w + (size_t)w->capacity * sizeof w->samples[0]);
    }
    watch_close(w);
    return status;
}
