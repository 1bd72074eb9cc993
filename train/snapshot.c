/* train: which tensors and which state a checkpoint holds. */
#include "train/snapshot.h"

#include "checkpoint/checkpoint.h"
#include "core/file.h"
#include "core/log.h"
#include "data/tokenizer.h"
#include "train/hf_config.h"
#include "train/run_folder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = CONFIG_PATH + 64, NAME_BYTES = 96, STATE_VERSION = 1 };

/* The tensors of a trainer, with storage for their names. */
struct tensor_list {
    struct checkpoint_tensor *tensors; /* owns; weights first, then the optimizer's */
    char (*names)[NAME_BYTES];         /* owns */
    int n_model, n_state;
};

/* One optimizer tensor a parameter, of the parameter's shape. */
static void add_state(struct tensor_list *list, struct trainer *t, const char *prefix, enum state_array array,
                      enum dtype dtype)
{
    for (int i = 0; i < t->params.count; i++) {
        struct checkpoint_tensor *tensor = &list->tensors[list->n_model + list->n_state];
        char *name = list->names[list->n_model + list->n_state];
        const struct checkpoint_tensor *weight = &list->tensors[i];
        snprintf(name, NAME_BYTES, "%s%s", prefix, t->params.params[i].name);
        *tensor = *weight;
        tensor->name = name;
        tensor->dtype = dtype;
        t->engine->expose(t, array, i, tensor);
        list->n_state++;
    }
}

static enum status list_tensors(struct tensor_list *list, struct trainer *t)
{
    size_t n = (size_t)t->params.count;
    enum dtype moments = t->config->optim.moments_bf16 ? DTYPE_BF16 : DTYPE_F32;
    *list = (struct tensor_list){.tensors = calloc(4 * n, sizeof *list->tensors), .names = calloc(4 * n, NAME_BYTES)};
    if (list->tensors == NULL || list->names == NULL) {
        return status_fail(ERR_NOMEM, "no memory for a list of %zu tensors", 4 * n);
    }
    for (int i = 0; i < t->params.count; i++) {
        const struct param *p = &t->params.params[i];
        bool vector = p->kind == PARAM_NORM;
        list->tensors[i] = (struct checkpoint_tensor){.name = p->name,
                                                      .dtype = DTYPE_BF16,
                                                      .rank = vector ? 1 : 2,
                                                      .shape = {vector ? p->cols : p->rows, vector ? 0 : p->cols}};
        t->engine->expose(t, STATE_WEIGHTS, i, &list->tensors[i]);
    }
    list->n_model = t->params.count;
    if (t->config->optim.master_fp32) {
        add_state(list, t, "master.", STATE_MASTER, DTYPE_F32);
    }
    add_state(list, t, "exp_avg.", STATE_M, moments);
    add_state(list, t, "exp_avg_sq.", STATE_V, moments);
    return OK;
}

static void tensor_list_close(struct tensor_list *list)
{
    free(list->tensors);
    free(list->names);
}

static enum status group_agree(void *context, enum status mine, enum status *worst)
{
    int64_t value = mine;
    TRY(comm_max_i64(context, &value, 1));
    *worst = (enum status)value;
    return OK;
}

/* Everything that the next update depends on beside tensors. Random numbers are functions of (seed, name, update), so
 * there is no generator to save; the data's whole state is `samples`. */
static json_t *train_state(const struct trainer *t)
{
    char recipe[512];
    attention_recipe_print(&t->config->attention, recipe, sizeof recipe);
    json_t *state = json_object();
    json_object_set_new(state, "version", json_integer(STATE_VERSION));
    json_object_set_new(state, "step", json_integer(t->update));
    json_object_set_new(state, "samples", json_integer(t->samples));
    json_object_set_new(state, "loss", json_finite(t->last_loss));
    json_object_set_new(state, "verdict", json_string(verdict_names[watch_verdict(t->watch)]));
    json_object_set_new(state, "recipe", json_string(recipe));
    json_object_set_new(state, "data_digest", json_string(loader_digest(t->train)));
    json_object_set_new(state, "config", config_to_json(t->config));
    json_object_set_new(state, "watch", watch_save(t->watch));
    return state;
}

/* The tokenizer file of a checkpoint: the configured one, or for the byte vocabulary one written into `out`. */
static enum status find_tokenizer(const struct trainer *t, const char *out, char *path)
{
    path[0] = '\0';
    if (t->config->data.tokenizer[0] != '\0') {
        snprintf(path, PATH_BYTES, "%s", t->config->data.tokenizer);
    } else if (t->config->model.vocab == BYTE_VOCAB) {
        snprintf(path, PATH_BYTES, "%s/tokenizer.json", out);
        if (t->comm->rank == 0) {
            return byte_tokenizer_write_json(path);
        }
    }
    return OK;
}

enum status snapshot_save(struct trainer *t, const char *out)
{
    char folder[PATH_BYTES], tokenizer[PATH_BYTES], choices[PATH_BYTES];
    struct tensor_list list;
    snprintf(folder, sizeof folder, "%s/checkpoints", out);
    snprintf(choices, sizeof choices, "%s/gemm.json", out);
    enum status status = t->comm->rank == 0 ? file_make_folders(folder) : OK;
    if (status == OK) {
        status = find_tokenizer(t, out, tokenizer);
    }
    TRY(ranks_agree(t->comm, status));
    status = list_tensors(&list, t);
    struct checkpoint_group group = {
        .rank = t->comm->rank, .size = t->comm->size, .agree = group_agree, .context = t->comm};
    struct checkpoint_content content = {.model = list.tensors,
                                         .n_model = list.n_model,
                                         .state = list.tensors + list.n_model,
                                         .n_state = list.n_state,
                                         .config = hf_config(&t->config->model),
                                         .train = train_state(t),
                                         .tokenizer_json = tokenizer[0] != '\0' ? tokenizer : NULL,
                                         .gemm_json = access(choices, F_OK) == 0 ? choices : NULL};
    status = ranks_agree(t->comm, status);
    if (status == OK) {
        status = checkpoint_save(folder, t->update, &group, &content);
    }
    json_decref(content.config);
    json_decref(content.train);
    tensor_list_close(&list);
    TRY(status);
    /* A diverged run must not push out what was healthy. */
    struct checkpoint_rotation rotation = {.keep = t->config->checkpoint.keep,
                                           .keep_forever_every = t->config->checkpoint.keep_forever_every,
                                           .window = t->config->watch.window,
                                           .step = t->update};
    bool rotate = t->comm->rank == 0 && watch_verdict(t->watch) != VERDICT_DIVERGED;
    return ranks_agree(t->comm, rotate ? checkpoint_rotate(folder, &rotation, &t->damaged) : OK);
}

/* Before a tensor is touched: does this checkpoint belong to this run? */
static enum status check_state(const struct trainer *t, const json_t *state, const char *path, const char *allowed,
                               int64_t *step, int64_t *samples)
{
    int64_t version;
    const char *digest;
    TRY(json_get_int(state, path, "version", &version));
    if (version != STATE_VERSION) {
        return status_fail(ERR_DATA, "%s: train_state version %lld, this program reads %d", path, (long long)version,
                           STATE_VERSION);
    }
    TRY(json_get_int(state, path, "step", step));
    TRY(json_get_int(state, path, "samples", samples));
    TRY(json_get_string(state, path, "data_digest", &digest));
    TRY(config_compare(t->config, json_object_get(state, "config"), allowed, path));
    if (strcmp(digest, loader_digest(t->train)) != 0) {
        return status_fail(ERR_CONFIG,
                           "resume from %s: checkpoint has training data %s, config has %s (%s): give the shards that "
                           "the run began with, or start in another run.out",
                           path, digest, loader_digest(t->train), t->config->data.train);
    }
    return OK;
}

static enum status load(struct trainer *t, const char *path, const char *allowed, const json_t *state)
{
    struct tensor_list list;
    int64_t step, samples;
    TRY(check_state(t, state, path, allowed, &step, &samples));
    enum status status = list_tensors(&list, t);
    struct checkpoint_content content = {
        .model = list.tensors, .n_model = list.n_model, .state = list.tensors + list.n_model, .n_state = list.n_state};
    if (status == OK) {
        status = checkpoint_load(path, &content);
    }
    tensor_list_close(&list);
    TRY(status);
    char choices[PATH_BYTES];
    snprintf(choices, sizeof choices, "%s/train_state/gemm.json", path);
    if (access(choices, F_OK) == 0) {
        TRY(t->engine->recall(t, choices));
    }
    TRY(watch_restore(t->watch, json_object_get(state, "watch")));
    t->update = step;
    t->samples = samples;
    const json_t *loss = json_object_get(state, "loss");
    t->last_loss = json_is_number(loss) ? json_number_value(loss) : NAN;
    return OK;
}

enum status snapshot_load(struct trainer *t, const char *path, const char *allowed)
{
    json_t *state = NULL;
    enum status status = t->comm->rank == 0 ? checkpoint_verify(path) : OK;
    TRY(ranks_agree(t->comm, status));
    /* Every rank reads all tensors itself: one shared folder, and no rank holds what another lacks. */
    status = checkpoint_read_train(path, &state);
    if (status == OK) {
        status = load(t, path, allowed, state);
    }
    json_decref(state);
    TRY(ranks_agree(t->comm, status));
    trainer_weights_changed(t);
    trainer_seek(t);
    if (t->update >= t->config->schedule.steps) {
        log_info("resume from %s: all %lld updates are made", path, (long long)t->update);
    } else {
        log_info("resume from %s: update %lld of %lld is next", path, (long long)t->update + 1,
                 (long long)t->config->schedule.steps);
    }
    return OK;
}

enum status snapshot_resume(struct trainer *t, const char *out, bool *resumed)
{
    const struct config_checkpoint *config = &t->config->checkpoint;
    char folder[PATH_BYTES], path[PATH_BYTES] = "";
    *resumed = false;
    if (strcmp(config->resume, "auto") != 0 && strcmp(config->resume, "never") != 0) {
        snprintf(path, sizeof path, "%s", config->resume);
    } else {
        snprintf(folder, sizeof folder, "%s/checkpoints", out);
        enum status status = OK;
        if (t->comm->rank == 0 && access(folder, F_OK) == 0) {
            status = checkpoint_find(folder, path, sizeof path);
            if (status == OK && path[0] == '\0') {
                log_warn("%s: no checkpoint there can be resumed from: starting with update 1", folder);
            }
        }
        TRY(ranks_agree(t->comm, status));
        TRY(comm_broadcast(t->comm, path, sizeof path, 0));
    }
    if (path[0] == '\0') {
        return OK;
    }
    if (strcmp(config->resume, "never") == 0) {
        return status_fail(
            ERR_CONFIG, "checkpoint.resume = never, but %s is there: delete it, set another run.out, or resume", path);
    }
    *resumed = true;
    return snapshot_load(t, path, config->may_change);
}

enum status snapshot_last_healthy(const char *out, int64_t onset, char *path, size_t bytes)
{
    char folder[PATH_BYTES];
    snprintf(folder, sizeof folder, "%s/checkpoints", out);
    path[0] = '\0';
    if (access(folder, F_OK) != 0) {
        return OK;
    }
    if (onset > 0) {
        TRY(checkpoint_mark_suspect(folder, onset - 1));
    }
    return checkpoint_find(folder, path, bytes);
}
