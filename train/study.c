/* train: studies. */
#include "train/study.h"

#include "core/file.h"
#include "core/log.h"
#include "train/plan.h"
#include "train/run_folder.h"

#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ARMS_MAX = 64, NAME_BYTES = 64, PATH_BYTES = CONFIG_PATH + 64, METRICS_BYTES_MAX = 1 << 30 };

struct arm {
    char name[NAME_BYTES];
    struct config config; /* for the seed at hand */
};

struct study {
    const struct config *base;
    struct comm *comm;
    const struct device *device;
    double deadline_s;
    struct arm *arms; /* owns; the reference first */
    int n_arms;
    double *reference_loss;  /* owns; by update, of the seed at hand */
    int64_t reference_count; /* 0: the reference diverged, no partner rule */
};

/* An arm is the study's own configuration with the arm file on top: equal in all else by construction. */
static enum status add_arm(struct study *study, const char *path)
{
    if (study->n_arms == ARMS_MAX) {
        return status_fail(ERR_CONFIG, "study.arms names more than %d arms", ARMS_MAX);
    }
    struct arm *arm = &study->arms[study->n_arms];
    const char *slash = strrchr(path, '/');
    snprintf(arm->name, sizeof arm->name, "%.63s", slash != NULL ? slash + 1 : path);
    size_t n = strlen(arm->name);
    if (n > 5 && strcmp(arm->name + n - 5, ".toml") == 0) {
        arm->name[n - 5] = '\0';
    }
    for (int i = 0; i < study->n_arms; i++) {
        if (strcmp(study->arms[i].name, arm->name) == 0) {
            return status_fail(ERR_CONFIG, "%s: a second arm of the name %s: rename the file", path, arm->name);
        }
    }
    arm->config = *study->base;
    TRY(config_add_arm(&arm->config, path));
    TRY(config_finish(&arm->config));
    study->n_arms++;
    return plan_check(&arm->config, study->comm->size, study->device);
}

/* Moves the reference to the front. */
static enum status place_reference(struct study *study)
{
    const char *names[ARMS_MAX], *wanted = study->base->study.reference;
    for (int i = 0; i < study->n_arms; i++) {
        names[i] = study->arms[i].name;
        if (strcmp(names[i], wanted) == 0) {
            struct arm *moved = malloc(sizeof *moved);
            if (moved == NULL) {
                return status_fail(ERR_NOMEM, "no memory for an arm");
            }
            *moved = study->arms[i];
            memmove(study->arms + 1, study->arms, (size_t)i * sizeof *study->arms);
            study->arms[0] = *moved;
            free(moved);
            return OK;
        }
    }
    return status_fail(ERR_CONFIG, "study.reference = \"%s\" is none of the %d arms; the nearest is %s", wanted,
                       study->n_arms, config_nearest(wanted, names, study->n_arms));
}

/* All arms are read and checked before the first one runs. */
static enum status read_arms(struct study *study)
{
    char copy[CONFIG_GLOBS], *rest = copy;
    if (strcmp(study->base->checkpoint.resume, "auto") != 0) {
        return status_fail(
            ERR_CONFIG,
            "checkpoint.resume = \"%s\": a study resumes each arm from the arm's own folder (auto); a common "
            "start is study.from",
            study->base->checkpoint.resume);
    }
    snprintf(copy, sizeof copy, "%s", study->base->study.arms);
    for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL;) {
        glob_t found;
        if (glob(word, 0, NULL, &found) != 0) {
            return status_fail(ERR_CONFIG, "study.arms: no file matches %s", word);
        }
        enum status status = OK;
        for (size_t i = 0; i < found.gl_pathc && status == OK; i++) {
            status = add_arm(study, found.gl_pathv[i]);
        }
        globfree(&found);
        TRY(status);
    }
    if (study->n_arms < 2) {
        return status_fail(ERR_CONFIG, "study.arms = \"%s\" names %d arms: a study compares at least 2",
                           study->base->study.arms, study->n_arms);
    }
    return place_reference(study);
}

static void print_line(const char *line)
{
    printf("    %s\n", line);
}

/* The whole difference between arms, for the reader to check. */
static void print_differences(const struct study *study)
{
    printf("study %s: %d arms; differences from the reference %s:\n", study->base->run.name, study->n_arms,
           study->arms[0].name);
    for (int i = 1; i < study->n_arms; i++) {
        printf("  %s\n", study->arms[i].name);
        if (config_diff(&study->arms[0].config, &study->arms[i].config, print_line) == 0) {
            printf("    none: this arm repeats the reference\n");
        }
    }
    fflush(stdout);
}

/* The arm's own folder, seed and name. */
static void place_arm(const struct study *study, struct arm *arm, int64_t seed)
{
    struct config *config = &arm->config;
    config->run.mode = MODE_TRAIN;
    config->run.seed = seed;
    config->optim.seed = (uint64_t)seed;   /* config_finish derived it from the study's seed */
    if (config->gemm_choices[0] == '\0') { /* arms differ in their recipes, not in how a product is summed */
        snprintf(config->gemm_choices, sizeof config->gemm_choices, "%.900s/gemm.json", study->base->run.out);
    }
    config->divergence_stop = study->base->study.after_divergence == AFTER_STOP;
    snprintf(config->run.name, sizeof config->run.name, "%.40s/seed_%lld", arm->name, (long long)seed);
    snprintf(config->run.out, sizeof config->run.out, "%.900s/%s/seed_%lld", study->base->run.out, arm->name,
             (long long)seed);
}

/* Every update made, or diverged: nothing is left to do for this arm. */
static bool is_finished(const json_t *verdict, const struct config *config)
{
    const char *word = json_string_value(json_object_get(verdict, "verdict"));
    bool diverged = word != NULL && strcmp(word, verdict_names[VERDICT_DIVERGED]) == 0;
    return json_is_true(json_object_get(verdict, "finished")) &&
           (diverged || json_integer_value(json_object_get(verdict, "step")) >= config->schedule.steps);
}

/* verdict.json of an arm if it finished under this configuration; NULL if there is none yet. Rank 0 only. */
static enum status read_verdict(const struct config *config, json_t **verdict)
{
    char path[PATH_BYTES];
    *verdict = NULL;
    snprintf(path, sizeof path, "%s/verdict.json", config->run.out);
    if (access(path, F_OK) != 0) {
        return OK;
    }
    json_t *found = NULL;
    TRY(json_read_file(path, &found));
    enum status status = config_compare(config, json_object_get(found, "config"), "", path);
    if (status == OK && is_finished(found, config)) {
        *verdict = found;
        return OK;
    }
    json_decref(found);
    return status;
}

/* The reference's losses by update, from its metrics.jsonl. Rank 0 only. */
static enum status read_losses(const struct config *config, double *losses, int64_t count)
{
    char path[PATH_BYTES], *text = NULL, *rest;
    size_t bytes = 0;
    for (int64_t u = 0; u < count; u++) {
        losses[u] = NAN;
    }
    snprintf(path, sizeof path, "%s/metrics.jsonl", config->run.out);
    TRY(file_read_all(path, METRICS_BYTES_MAX, &text, &bytes));
    enum status status = OK;
    rest = text;
    for (char *line; status == OK && (line = strtok_r(rest, "\n", &rest)) != NULL;) {
        json_t *row = NULL;
        status = json_read_text(path, line, strlen(line), &row);
        int64_t step = json_integer_value(json_object_get(row, "step"));
        const json_t *loss = json_object_get(row, "loss");
        if (status == OK && step >= 0 && step < count && json_is_number(loss)) {
            losses[step] = json_number_value(loss);
        }
        json_decref(row);
    }
    free(text);
    return status;
}

/* After the reference of a seed: its losses, in every rank. A diverged reference is no partner. */
static enum status share_reference(struct study *study, const struct config *config)
{
    int64_t count = config->schedule.steps + 1;
    json_t *verdict = NULL;
    enum status status = OK;
    int64_t diverged = 0;
    if (study->comm->rank == 0) {
        status = read_verdict(config, &verdict);
        if (status == OK) {
            const char *word = json_string_value(json_object_get(verdict, "verdict"));
            diverged = word == NULL || strcmp(word, verdict_names[VERDICT_DIVERGED]) == 0;
            status = read_losses(config, study->reference_loss, count);
        }
        json_decref(verdict);
    }
    TRY(ranks_agree(study->comm, status));
    TRY(comm_max_i64(study->comm, &diverged, 1));
    TRY(comm_broadcast(study->comm, study->reference_loss, (size_t)count * sizeof(double), 0));
    study->reference_count = diverged ? 0 : count;
    if (diverged && study->comm->rank == 0) {
        log_warn("the reference %s diverged: other arms are judged without a partner", config->run.name);
    }
    return OK;
}

/* Rank 0 knows what finished before; all ranks follow it. A diverged arm has its verdict and does not end the study. */
static enum status run_arm(struct study *study, struct arm *arm)
{
    const struct config *config = &arm->config;
    bool reference = arm == study->arms;
    json_t *verdict = NULL;
    enum status status = study->comm->rank == 0 ? read_verdict(config, &verdict) : OK;
    int64_t finished = verdict != NULL;
    json_decref(verdict);
    TRY(ranks_agree(study->comm, status));
    TRY(comm_max_i64(study->comm, &finished, 1));
    if (finished) {
        log_info("%s: finished before, skipped", config->run.name);
    } else {
        struct run_options options = {.deadline_s = study->deadline_s,
                                      .partner_loss = study->reference_loss,
                                      .partner_count = reference ? 0 : study->reference_count,
                                      .start_from =
                                          strcmp(study->base->study.from, "init") == 0 ? NULL : study->base->study.from,
                                      .eval_pv_fp8 = true};
        status = run_train(config, study->comm, study->device, &options);
        if (status != OK && status != ERR_DIVERGED) {
            return status;
        }
    }
    return reference ? share_reference(study, config) : OK;
}

static void print_number(const json_t *verdict, const char *key, double minus, const char *format)
{
    const json_t *value = json_object_get(verdict, key);
    if (json_is_number(value) && !isnan(minus)) {
        printf(format, json_number_value(value) - minus);
    } else {
        printf(" %12s", "-");
    }
}

/* One line an arm and seed. Gap: to the reference of the same seed, in evaluation loss. */
static enum status print_summary(struct study *study, const int64_t *seeds, int n_seeds)
{
    printf("\n%-24s %6s %-10s %12s %12s %12s %12s %12s\n", "arm", "seed", "verdict", "updates", "loss", "eval", "gap",
           "eval pv=fp8");
    for (int s = 0; s < n_seeds; s++) {
        double reference = NAN;
        for (int i = 0; i < study->n_arms; i++) {
            json_t *verdict = NULL;
            place_arm(study, &study->arms[i], seeds[s]);
            TRY(read_verdict(&study->arms[i].config, &verdict));
            const char *word = json_string_value(json_object_get(verdict, "verdict"));
            const char *reason = json_string_value(json_object_get(verdict, "reason"));
            const json_t *eval = json_object_get(verdict, "eval_loss");
            if (i == 0 && json_is_number(eval)) {
                reference = json_number_value(eval);
            }
            printf("%-24s %6lld %-10s", study->arms[i].name, (long long)seeds[s], word != NULL ? word : "none");
            print_number(verdict, "step", 0, " %12.0f");
            print_number(verdict, "loss", 0, " %12.4f");
            print_number(verdict, "eval_loss", 0, " %12.4f");
            print_number(verdict, "eval_loss", reference, " %+12.4f");
            print_number(verdict, "eval_loss_pv_fp8", 0, " %12.4f");
            printf("%s%s\n", reason != NULL && reason[0] != '\0' ? "  " : "", reason != NULL ? reason : "");
            json_decref(verdict);
        }
    }
    fflush(stdout);
    return OK;
}

/* Seed by seed, so that arms of one seed are compared as early as possible; the reference first, since its losses judge
 * the others. */
static enum status run_all(struct study *study)
{
    const struct config_seeds *given = &study->base->study.seeds;
    int64_t seeds[CONFIG_SEEDS_MAX] = {study->base->run.seed};
    int n_seeds = given->count > 0 ? given->count : 1;
    memcpy(seeds, given->value, (size_t)given->count * sizeof *seeds);
    TRY(ranks_agree(study->comm, read_arms(study)));
    if (study->comm->rank == 0) {
        print_differences(study);
    }
    for (int s = 0; s < n_seeds; s++) {
        for (int i = 0; i < study->n_arms; i++) {
            place_arm(study, &study->arms[i], seeds[s]);
            TRY(run_arm(study, &study->arms[i]));
        }
    }
    return ranks_agree(study->comm, study->comm->rank == 0 ? print_summary(study, seeds, n_seeds) : OK);
}

enum status study_print(const struct config *config, struct comm *comm, const struct device *device)
{
    struct study study = {.base = config, .comm = comm, .device = device, .arms = calloc(ARMS_MAX, sizeof *study.arms)};
    enum status status = study.arms == NULL ? status_fail(ERR_NOMEM, "no memory for the arms of a study") : OK;
    if (status == OK) {
        status = read_arms(&study);
    }
    if (status == OK && comm->rank == 0) {
        print_differences(&study);
    }
    free(study.arms);
    return status;
}

enum status study_run(const struct config *config, struct comm *comm, const struct device *device, double deadline_s)
{
    struct study study = {.base = config, .comm = comm, .device = device, .deadline_s = deadline_s};
    struct run_folder folder;
    TRY(run_folder_open(&folder, config->run.out, comm));
    study.arms = calloc(ARMS_MAX, sizeof *study.arms);
    study.reference_loss = calloc((size_t)config->schedule.steps + 1, sizeof *study.reference_loss);
    enum status status =
        study.arms == NULL || study.reference_loss == NULL
            ? status_fail(ERR_NOMEM, "no memory for a study of %lld updates", (long long)config->schedule.steps)
            : run_all(&study);
    free(study.arms);
    free(study.reference_loss);
    run_folder_close(&folder);
    return status;
}
