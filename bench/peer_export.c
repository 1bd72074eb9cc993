/* bench: the initial weights and the first batches of a configuration, for a trainer written elsewhere
 * (bench/peer/torch_llama.py): both then see the same numbers.
 *
 *   build/release/bench/peer_export CONFIG OUT_DIR STEPS
 *
 * Writes OUT_DIR/init.safetensors (FP32, Hugging Face names), tokens.i32 and targets.i32 (STEPS, batch, seq_len), and
 * peer.json with the shape and the optimizer's numbers. */
#include "checkpoint/safetensors.h"
#include "core/file.h"
#include "core/json.h"
#include "data/loader.h"
#include "model/params.h"
#include "train/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum status write_weights(const struct param_list *list, const float *values, const char *path)
{
    struct safetensors_entry *entries = calloc((size_t)list->count, sizeof *entries);
    struct safetensors file = {0};
    if (entries == NULL) {
        return status_fail(ERR_NOMEM, "peer_export: %d tensor names", list->count);
    }
    for (int i = 0; i < list->count; i++) {
        const struct param *p = &list->params[i];
        bool vector = p->kind == PARAM_NORM;
        snprintf(entries[i].name, sizeof entries[i].name, "%s", p->name);
        entries[i].dtype = DTYPE_F32;
        entries[i].rank = vector ? 1 : 2;
        entries[i].shape[0] = vector ? p->cols : p->rows;
        entries[i].shape[1] = p->cols;
    }
    enum status status = safetensors_layout(&file, entries, list->count);
    free(entries);
    char *bytes = status == OK ? calloc(1, file.file_bytes) : NULL;
    if (bytes != NULL) {
        memcpy(bytes, file.header, file.header_bytes);
        for (int i = 0; i < list->count; i++) {
            memcpy(bytes + file.entries[i].offset, values + list->params[i].offset, file.entries[i].bytes);
        }
        status = file_write_atomic(path, bytes, file.file_bytes);
    }
    free(bytes);
    safetensors_close(&file);
    return status;
}

static enum status write_batches(const struct config *c, const char *folder, int64_t steps)
{
    struct loader *loader = NULL;
    struct loader_config lc = {.pattern = c->data.train,
                               .seq_len = c->data.seq_len,
                               .vocab = (uint32_t)c->model.vocab,
                               .seed = (uint64_t)c->run.seed,
                               .shuffle = true};
    TRY(loader_open(&loader, &lc));
    size_t rows = (size_t)(steps * c->data.batch), length = (size_t)c->data.seq_len;
    int32_t *window = malloc((length + 1) * sizeof *window);
    int32_t *tokens = malloc(rows * length * sizeof *tokens);
    int32_t *targets = malloc(rows * length * sizeof *targets);
    enum status status = window && tokens && targets ? OK : status_fail(ERR_NOMEM, "peer_export: %zu samples", rows);
    for (size_t g = 0; g < rows && status == OK; g++) {
        status = loader_sample(loader, g, window);
        memcpy(tokens + g * length, window, length * sizeof *tokens);
        memcpy(targets + g * length, window + 1, length * sizeof *targets);
    }
    char path[CONFIG_PATH + 32];
    snprintf(path, sizeof path, "%s/tokens.i32", folder);
    status = status == OK ? file_write_atomic(path, tokens, rows * length * sizeof *tokens) : status;
    snprintf(path, sizeof path, "%s/targets.i32", folder);
    status = status == OK ? file_write_atomic(path, targets, rows * length * sizeof *targets) : status;
    free(window);
    free(tokens);
    free(targets);
    loader_close(loader);
    return status;
}

static enum status write_numbers(const struct config *c, const char *folder, int64_t steps)
{
    json_t *lr = json_array();
    for (int64_t u = 1; u <= steps; u++) {
        json_array_append_new(lr, json_real((double)c->optim.lr_peak * schedule_factor(&c->schedule, u)));
    }
    const struct model_config *m = &c->model;
    json_t *root = json_pack(
        "{s:i s:i s:i s:i s:i s:i s:i s:f s:f s:b s:b s:f s:f s:f s:i s:I s:I s:I s:f s:f s:f s:f s:f s:o}", "layers",
        m->layers, "width", m->width, "heads", m->heads, "kv_heads", m->kv_heads, "head_dim", m->head_dim, "ffn",
        m->ffn, "vocab", m->vocab, "norm_eps", (double)m->norm_eps, "rope_theta", (double)m->rope.theta, "rope_llama3",
        m->rope.scaling == ROPE_LLAMA3, "tied", m->tied, "factor", (double)m->rope.factor, "low_freq_factor",
        (double)m->rope.low_freq_factor, "high_freq_factor", (double)m->rope.high_freq_factor, "original_context",
        m->rope.original_context, "steps", (json_int_t)steps, "batch", (json_int_t)c->data.batch, "seq_len",
        (json_int_t)c->data.seq_len, "beta1", (double)c->optim.beta1, "beta2", (double)c->optim.beta2, "eps",
        (double)c->optim.eps, "weight_decay", (double)c->optim.weight_decay, "clip", (double)c->optim.clip, "lr", lr);
    ASSERT(root != NULL);
    char path[CONFIG_PATH + 32];
    snprintf(path, sizeof path, "%s/peer.json", folder);
    enum status status = json_write_file(path, root);
    json_decref(root);
    return status;
}

static enum status export_all(const char *config_path, const char *folder, int64_t steps)
{
    static struct config config; /* large */
    config_init(&config);
    TRY(config_add_file(&config, config_path));
    TRY(config_finish(&config));
    if (steps < 1 || steps > config.run.steps) {
        return status_fail(ERR_USAGE, "peer_export: STEPS %lld, expected 1 .. %lld (run.steps)", (long long)steps,
                           (long long)config.run.steps);
    }
    TRY(file_make_folders(folder));
    struct param_list list = {0};
    TRY(param_list_open(&list, &config.model));
    float *values = calloc(list.elements, sizeof *values);
    enum status status = values ? OK : status_fail(ERR_NOMEM, "peer_export: %zu weights", list.elements);
    if (status == OK) {
        param_list_init(&list, &config.model, (uint64_t)config.run.seed, values);
        char path[CONFIG_PATH + 32];
        snprintf(path, sizeof path, "%s/init.safetensors", folder);
        status = write_weights(&list, values, path);
    }
    free(values);
    param_list_close(&list);
    TRY(status);
    TRY(write_batches(&config, folder, steps));
    return write_numbers(&config, folder, steps);
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        return status_exit_code(status_fail(ERR_USAGE, "usage: peer_export CONFIG OUT_DIR STEPS"));
    }
    return status_exit_code(export_all(argv[1], argv[2], strtoll(argv[3], NULL, 10)));
}
