/* train: metrics rows and the console. */
#include "train/metrics.h"

#include "core/clock.h"
#include "core/file.h"
#include "core/log.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const double flushed_max = 0.5;

enum { PATH_BYTES = CONFIG_PATH + 64 };

/* Does a line hold a whole row of an update up to `update`? */
static bool is_kept(const char *line, size_t bytes, int64_t update)
{
    long long step = 0;
    return line[bytes - 1] == '\n' && sscanf(line, "{\"step\": %lld", &step) == 1 && step <= update;
}

/* Reads all rows and copies those that stay to `out`, NULL: nowhere. `cuts`: some do not stay. Line by line, since a
 * long run has more rows than memory should hold. `path` is for messages. */
static enum status copy_rows(FILE *in, FILE *out, const char *path, int64_t update, bool *cuts)
{
    char *line = NULL;
    size_t capacity = 0;
    enum status status = OK;
    *cuts = false;
    rewind(in);
    for (ssize_t n; status == OK && (n = getline(&line, &capacity, in)) > 0;) {
        if (!is_kept(line, (size_t)n, update)) {
            *cuts = true;
        } else if (out != NULL && fwrite(line, 1, (size_t)n, out) != (size_t)n) {
            status = status_fail_errno(ERR_IO, path, "cannot write the rows that stay");
        }
    }
    /* The end of the rows is the end of the file: anything else would cut what was not read. */
    if (status == OK && !feof(in)) {
        status = status_fail_errno(ERR_IO, path, "cannot read");
    }
    free(line);
    return status;
}

/* The rows that stay become a new file, which takes the name only when it is whole on the disk. */
static enum status replace_rows(FILE *in, const char *path, int64_t update)
{
    char temporary[PATH_BYTES + 8];
    bool cuts;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    FILE *out = fopen(temporary, "we");
    if (out == NULL) {
        return status_fail_errno(ERR_IO, temporary, "cannot create");
    }
    enum status status = copy_rows(in, out, path, update, &cuts);
    if (status == OK && (fflush(out) != 0 || fsync(fileno(out)) != 0)) {
        status = status_fail_errno(ERR_IO, temporary, "cannot write the rows that stay");
    }
    if (fclose(out) != 0 && status == OK) {
        status = status_fail_errno(ERR_IO, temporary, "cannot close");
    }
    if (status != OK) {
        unlink(temporary);
        return status;
    }
    return file_replace(temporary, path);
}

/* Keeps the rows of updates up to `update`; most often all stay, and nothing is written. */
static enum status keep_rows(const char *path, int64_t update)
{
    bool cuts;
    FILE *in = fopen(path, "re");
    if (in == NULL) {
        return errno == ENOENT ? OK : status_fail_errno(ERR_IO, path, "cannot open");
    }
    enum status status = copy_rows(in, NULL, path, update, &cuts);
    if (status == OK && cuts) {
        status = replace_rows(in, path, update);
    }
    fclose(in);
    return status;
}

/* Appending after the cut: a crash can tear at most the last line. */
static enum status open_rows(FILE **file, const char *out, const char *name, int64_t update)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", out, name);
    TRY(keep_rows(path, update));
    *file = fopen(path, "ae");
    return *file != NULL ? OK : status_fail_errno(ERR_IO, path, "cannot open for writing");
}

enum status metrics_open(struct metrics *metrics, const char *out, int64_t update, int rank)
{
    *metrics = (struct metrics){.first_update = update, .started_s = clock_s()};
    if (rank != 0) {
        return OK;
    }
    TRY(open_rows(&metrics->rows, out, "metrics.jsonl", update));
    return open_rows(&metrics->layers, out, "layers.jsonl", update);
}

void metrics_close(struct metrics *metrics)
{
    if (metrics->rows != NULL) {
        fclose(metrics->rows);
    }
    if (metrics->layers != NULL) {
        fclose(metrics->layers);
    }
    metrics->rows = metrics->layers = NULL;
}

/* NaN, hence null, where nothing was counted: 0 would say that nothing was lost. */
static double ratio(double part, double whole)
{
    return whole != 0 ? part / whole : NAN;
}

/* FP8 gradients die quietly (a dO without a scale once lost 97 % of its values while the loss went on moving), so one
 * line says when most of them are zero. */
static void warn_flushed(struct metrics *metrics, const struct trainer *t, const struct attention_stats *s,
                         int64_t step)
{
    double share = ratio(s->do_flushed, s->do_count);
    if (share > flushed_max && !metrics->warned) {
        metrics->warned = true;
        log_warn("%s, update %lld: %.1f %% of dO became zero in its format (do_flushed in metrics.jsonl; said once)",
                 t->config->run.name, (long long)step, 100 * share);
    }
}

static void put(json_t *row, const char *key, double value)
{
    json_object_set_new(row, key, json_finite(value));
}

/* Sums over calls become the shares and slopes of a row (docs/file_formats.md, Run folder). */
static void put_attention(json_t *row, const struct attention_stats *s)
{
    put(row, "logit_max", s->p_rows > 0 ? s->logit_max : NAN);
    put(row, "row_leak", ratio(s->leak_abs, s->ds_abs));
    put(row, "row_leak_stored", ratio(s->leak_stored_abs, s->ds_stored_abs));
    put(row, "row_leak_slope", ratio(s->leak_r, s->r_r));
    put(row, "do_flushed", ratio(s->do_flushed, s->do_count));
    put(row, "ds_flushed", ratio(s->ds_flushed, s->ds_count));
    put(row, "ds_saturated", ratio(s->ds_saturated, s->ds_count));
    put(row, "p_lost_mass", ratio(s->p_lost_mass, s->p_rows));
}

static enum status write_row(FILE *file, json_t *row)
{
    /* A space after the colon is part of the form that is_kept reads. */
    int failed = json_dumpf(row, file, 0) != 0 || fputc('\n', file) == EOF || fflush(file) != 0;
    json_decref(row);
    return failed ? status_fail_errno(ERR_IO, "metrics", "cannot write a row") : OK;
}

static void print_duration(double seconds, char *text, size_t bytes)
{
    long long s = (long long)(seconds + 0.5);
    snprintf(text, bytes, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
}

/* Time left comes from all updates of this process, evaluations and checkpoints included: that is what one waits for.
 */
static void print_console(const struct metrics *metrics, const struct trainer *t, const struct step_result *r,
                          double val_loss, double tokens_per_s)
{
    char left[32], val[32] = "";
    double done = (double)(r->update - metrics->first_update);
    double each = (clock_s() - metrics->started_s) / (done > 0 ? done : 1);
    print_duration(each * (double)(t->config->schedule.steps - r->update), left, sizeof left);
    if (!isnan(val_loss)) {
        snprintf(val, sizeof val, "  val %.4f", val_loss);
    }
    printf("%s  step %lld/%lld  loss %.4f%s  norm %.3g  lr %.2e  %.0f tok/s  %s  left %s\n", t->config->run.name,
           (long long)r->update, (long long)t->config->schedule.steps, r->loss, val, r->grad_norm, r->lr, tokens_per_s,
           verdict_names[r->verdict], left);
    fflush(stdout);
}

enum status metrics_write(struct metrics *metrics, const struct trainer *t, const struct step_result *r,
                          double val_loss, bool last)
{
    if (metrics->rows == NULL || (r->update % t->config->log_every != 0 && !last && isnan(val_loss))) {
        return OK;
    }
    double tokens = (double)(t->config->data.batch * t->config->data.seq_len), seconds = r->step_ms / 1e3;
    double flops = model_flops_per_token(&t->config->model, &t->params, t->config->data.seq_len);
    struct attention_stats all = {0};
    char hash[32];
    for (int l = 0; r->counted && l < t->config->model.layers; l++) {
        json_t *row = json_object();
        json_object_set_new(row, "step", json_integer(r->update));
        json_object_set_new(row, "layer", json_integer(l));
        put_attention(row, &r->layer_stats[l]);
        json_object_set_new(row, "non_finite", json_integer((json_int_t)r->layer_stats[l].non_finite));
        TRY(write_row(metrics->layers, row));
        attention_stats_add(&all, &r->layer_stats[l]);
    }
    warn_flushed(metrics, t, &all, r->update);
    json_t *row = json_object();
    json_object_set_new(row, "step", json_integer(r->update));
    json_object_set_new(row, "tokens", json_integer((json_int_t)((double)r->update * tokens)));
    put(row, "loss", r->loss);
    put(row, "val_loss", val_loss);
    put(row, "grad_norm", r->grad_norm);
    put(row, "lr", r->lr);
    put(row, "step_ms", r->step_ms);
    put(row, "data_ms", r->data_ms);
    put(row, "forward_ms", r->forward_ms);
    put(row, "backward_ms", r->backward_ms);
    put(row, "comm_ms", r->comm_ms);
    put(row, "optim_ms", r->optim_ms);
    put(row, "tokens_per_s", tokens / seconds);
    put(row, "tflops", tokens * flops / seconds / 1e12);
    /* No CPU states a peak that would mean anything here. */
    double peak = t->device->peak_flops * t->comm->size;
    put(row, "mfu", peak > 0 ? tokens * flops / seconds / peak : NAN);
    put(row, "mem_gib", t->engine->memory_gib(t));
    put_attention(row, &all);
    json_object_set_new(row, "non_finite", json_integer(r->non_finite));
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)r->batch_hash);
    json_object_set_new(row, "batch_hash", json_string(hash));
    json_object_set_new(row, "verdict", json_string(verdict_names[r->verdict]));
    TRY(write_row(metrics->rows, row));
    if (t->config->log_stdout) {
        print_console(metrics, t, r, val_loss, tokens / seconds);
    }
    return OK;
}

enum status metrics_write_verdict(const char *out, const struct trainer *t, const struct metrics_end *end)
{
    char path[PATH_BYTES];
    if (t->comm->rank != 0) {
        return OK;
    }
    json_t *root = json_object();
    json_object_set_new(root, "verdict", json_string(end->verdict));
    json_object_set_new(root, "finished", json_boolean(end->finished));
    json_object_set_new(root, "step", json_integer(end->step));
    json_object_set_new(root, "onset", end->onset > 0 ? json_integer(end->onset) : json_null());
    json_object_set_new(root, "reason", json_string(end->reason));
    put(root, "loss", end->loss);
    put(root, "eval_loss", end->eval_loss);
    put(root, "eval_loss_pv_fp8", end->eval_loss_pv_fp8);
    json_object_set_new(root, "last_healthy_checkpoint",
                        end->last_healthy_checkpoint[0] != '\0' ? json_string(end->last_healthy_checkpoint)
                                                                : json_null());
    json_object_set_new(root, "config", config_to_json(t->config));
    snprintf(path, sizeof path, "%s/verdict.json", out);
    enum status status = json_write_file(path, root);
    json_decref(root);
    return status;
}
