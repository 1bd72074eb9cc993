/* checkpoint: save, load, list and rotate `step_XXXXXXXX/` directories (docs/file_formats.md). Knows named tensors and
 * two JSON texts; neither model, optimizer nor ranks: the caller hands it rank, size and a
 * way to agree.
 *
 * A directory is a Hugging Face model directory (config.json, model.safetensors, tokenizer.json) with train_state/
 * (optimizer tensors, state.json) and manifest.json, which holds sizes and an XXH3-128 per 64 MiB extent of every file.
 * It is written under a temporary name, every rank its byte ranges, all fsynced; rank 0 then writes the manifest and
 * renames. A directory without the right manifest does not exist for load. */
#pragma once

#include "checkpoint/safetensors.h"
#include "core/json.h"

#include <stdbool.h>

struct checkpoint_group {
    int rank, size;
    /* Waits for all ranks and tells each the worst status of any; not called if size is 1. */
    enum status (*agree)(void *context, enum status mine, enum status *worst);
    void *context;
};

struct checkpoint_tensor;

/* Tensors that lie elsewhere than in this process's memory, on a device: their bytes pass through a buffer, at most
 * `piece` at a time, always whole elements. */
struct checkpoint_store {
    size_t piece;
    void *buffer; /* get fills it, put empties it */
    enum status (*get)(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n);
    enum status (*put)(const struct checkpoint_tensor *tensor, uint64_t offset, size_t n);
};

struct checkpoint_tensor {
    const char *name;
    enum dtype dtype;
    int rank;
    int64_t shape[4];
    void *data; /* full tensor, in every rank (data parallel without sharding); with a store: the key of its calls */
    const struct checkpoint_store *store; /* NULL: data is memory */
};

struct checkpoint_content {
    const struct checkpoint_tensor *model; /* -> model.safetensors */
    int n_model;
    const struct checkpoint_tensor *state; /* -> train_state/optimizer.safetensors */
    int n_state;
    json_t *config; /* -> config.json (Hugging Face) */
    json_t *train;  /* -> train_state/state.json: step, samples, versions, recipe, digests, watch, config dump */
    const char *tokenizer_json; /* path to copy, or NULL */
    const char *gemm_json;      /* path to copy as train_state/gemm.json, or NULL: choices of a device's products */
};

/* Saves as folder/step_XXXXXXXX, in place of one of that name. All ranks call it. Removes what a killed save left.
 * Fails with ERR_IO (errno text) on all ranks, leaving what was there. */
MUST_CHECK enum status checkpoint_save(const char *folder, int64_t step, const struct checkpoint_group *group,
                                       const struct checkpoint_content *content);

/* The newest complete, undamaged and healthy one; logs why newer ones were skipped. Healthy: "verdict" in state.json is
 * "healthy", and nobody marked it suspect; without a verdict nothing is known, and it is skipped. `path` is "" if there
 * is none. */
MUST_CHECK enum status checkpoint_find(const char *folder, char *path, size_t bytes);

/* Checks sizes and hashes against the manifest. ERR_DATA names file, extent, expected, found, or a file that a resume
 * reads and the manifest does not list. */
MUST_CHECK enum status checkpoint_verify(const char *path);

/* Reads train_state/state.json alone; the caller decides whether it fits before reading tensors. */
MUST_CHECK enum status checkpoint_read_train(const char *path, json_t **train);

/* Reads the tensors into their data; config, train and tokenizer_json are ignored, and a file without tensors is not
 * opened. Names, dtypes and shapes must agree before anything is read: else ERR_CONFIG, "checkpoint has X, config has
 * Y". checkpoint_verify checks the hashes. */
MUST_CHECK enum status checkpoint_load(const char *path, const struct checkpoint_content *content);

/* Marks checkpoints after `after_step` suspect, so that checkpoint_find skips them: a file `suspect` beside the
 * manifest; what was saved stays as it is. */
MUST_CHECK enum status checkpoint_mark_suspect(const char *folder, int64_t after_step);

/* Deletes old ones. Kept are the newest `keep` complete ones and whatever is newer than the oldest of these; every one
 * whose step is a multiple of keep_forever_every (0: none); the newest healthy one at least `window` updates before
 * `step`, and the oldest healthy one within the window, which will take its place. */
struct checkpoint_rotation {
    int keep;
    int64_t keep_forever_every, window, step;
};

/* Damaged ones that rotation has reported. A run keeps this from one rotation to the next, zero at first, so that each
 * is reported once. They are not examined again, except that of `step`, which has just been saved. Those that do not
 * fit are reported each time. */
struct checkpoint_damaged {
    int count;
    int64_t steps[16];
};
MUST_CHECK enum status checkpoint_rotate(const char *folder, const struct checkpoint_rotation *rotation,
                                         struct checkpoint_damaged *damaged);
