/* data: windows of shards, in the sampler's order, as batches.
 *
 * The prefetch thread and loader_sample share the open shards under one lock. Only a few shards are awake (file and
 * buffers open) at a time; the frame tables of all stay in memory. */
#include "data/loader.h"

#include "core/log.h"
#include "data/prefetch.h"
#include "data/shard.h"

#include <glob.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "batch digests are over little-endian int32");

enum { LOADER_AWAKE = 8 };

struct batch {
    int32_t *tokens; /* samples x (seq_len + 1) */
    uint64_t digest;
};

struct loader {
    struct loader_config config; /* pattern: owned copy */
    struct shard **shards;
    size_t n_shards;
    uint64_t *first_window; /* n_shards + 1: windows in the shards before; the last one is W */
    uint64_t tokens;
    char digest[33];

    pthread_mutex_t reading;    /* guards awake and the shards' buffers */
    size_t awake[LOADER_AWAKE]; /* ring of shards, oldest at next_awake */
    size_t n_awake, next_awake;

    /* What loader_seek announced; the thread reads it and is at rest when it changes. */
    uint64_t first, stride;
    int64_t samples;
    bool no_memory;      /* for the batches: reported by loader_next */
    struct batch *slots; /* prefetch of them, at least one */
    int n_slots;
    int64_t slot_samples;
    struct prefetch *prefetch; /* NULL without a thread */
    uint64_t next_batch;       /* without a thread */
};

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* All files that the globs match, sorted by bytes whatever the locale says. */
static enum status find_shards(const char *pattern, glob_t *found)
{
    char *copy = strdup(pattern), *rest = NULL;
    int flags = GLOB_NOSORT;
    for (char *one = copy ? strtok_r(copy, " ", &rest) : NULL; one; one = strtok_r(NULL, " ", &rest)) {
        int result = glob(one, flags, NULL, found);
        if (result != 0) {
            enum status status =
                result == GLOB_NOMATCH
                    ? status_fail(ERR_DATA, "no token shard matches '%s': prepare_data makes them", one)
                    : status_fail_errno(ERR_IO, one, "cannot search for shards");
            free(copy);
            return status;
        }
        flags |= GLOB_APPEND;
    }
    free(copy);
    if (found->gl_pathc == 0) {
        return status_fail(ERR_DATA, "no token shards: the pattern '%s' is empty", pattern);
    }
    qsort(found->gl_pathv, found->gl_pathc, sizeof *found->gl_pathv, compare_names);
    for (size_t i = 1; i < found->gl_pathc; i++) {
        if (strcmp(found->gl_pathv[i - 1], found->gl_pathv[i]) == 0) {
            return status_fail(ERR_DATA, "%s: matched by two globs of '%s': its text would count twice",
                               found->gl_pathv[i], pattern);
        }
    }
    return OK;
}

static enum status open_shard(struct loader *loader, const char *path)
{
    struct shard **shard = &loader->shards[loader->n_shards];
    TRY(shard_open(shard, path));
    size_t s = loader->n_shards++;
    if (shard_vocab(*shard) > loader->config.vocab) {
        return status_fail(ERR_DATA,
                           "%s: made for a vocabulary of %" PRIu32 ", expected at most the model's %" PRIu32
                           ": prepare it with the model's tokenizer or set model.vocab",
                           path, shard_vocab(*shard), loader->config.vocab);
    }
    if (!loader->config.trusted) {
        enum status status = shard_verify(*shard);
        shard_rest(*shard);
        TRY(status);
    }
    uint64_t tokens = shard_tokens(*shard), windows = (tokens - 1) / (uint64_t)loader->config.seq_len;
    if (windows == 0) {
        log_warn("%s: %" PRIu64 " tokens are no window of %" PRId64 " + 1: not used", path, tokens,
                 loader->config.seq_len);
    }
    loader->tokens += tokens;
    loader->first_window[s + 1] = loader->first_window[s] + windows;
    return OK;
}

static enum status open_shards(struct loader *loader, const glob_t *found)
{
    loader->shards = calloc(found->gl_pathc, sizeof(struct shard *));
    loader->first_window = calloc(found->gl_pathc + 1, sizeof *loader->first_window);
    if (!loader->shards || !loader->first_window) {
        return status_fail(ERR_NOMEM, "no memory for a list of %zu shards", found->gl_pathc);
    }
    uint64_t longest = 0;
    for (size_t i = 0; i < found->gl_pathc; i++) {
        TRY(open_shard(loader, found->gl_pathv[i]));
        uint64_t tokens = shard_tokens(loader->shards[i]);
        longest = tokens > longest ? tokens : longest;
    }
    if (loader_windows(loader) == 0) {
        return status_fail(ERR_DATA,
                           "%s: the longest of %zu shards has %" PRIu64 " tokens, a window takes seq_len + 1 = %" PRId64
                           ": set data.seq_len to at most %" PRIu64 " or prepare more text",
                           loader->config.pattern, loader->n_shards, longest, loader->config.seq_len + 1, longest - 1);
    }
    return OK;
}

static enum status find_digest(struct loader *loader)
{
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) {
        return status_fail(ERR_NOMEM, "no memory for a hash");
    }
    XXH3_128bits_reset(hash);
    for (size_t i = 0; i < loader->n_shards; i++) {
        XXH3_128bits_update(hash, shard_digest(loader->shards[i]), 32);
    }
    XXH128_hash_t digest = XXH3_128bits_digest(hash);
    XXH3_freeState(hash);
    snprintf(loader->digest, sizeof loader->digest, "%016" PRIx64 "%016" PRIx64, (uint64_t)digest.high64,
             (uint64_t)digest.low64);
    return OK;
}

static enum status produce_batch(void *context, int slot, uint64_t k);

static enum status fill_loader(struct loader *loader, const struct loader_config *config)
{
    loader->config = *config;
    loader->config.pattern = strdup(config->pattern);
    loader->n_slots = config->prefetch > 0 ? config->prefetch : 1;
    loader->slots = calloc((size_t)loader->n_slots, sizeof *loader->slots);
    if (!loader->config.pattern || !loader->slots) {
        return status_fail(ERR_NOMEM, "no memory for a loader of %s", config->pattern);
    }
    glob_t found = {0};
    enum status status = find_shards(config->pattern, &found);
    status = status == OK ? open_shards(loader, &found) : status;
    globfree(&found);
    TRY(status);
    TRY(find_digest(loader));
    return config->prefetch > 0 ? prefetch_open(&loader->prefetch, config->prefetch, produce_batch, loader) : OK;
}

enum status loader_open(struct loader **loader, const struct loader_config *config)
{
    ASSERT(config->pattern != NULL && config->seq_len >= 1 && config->vocab >= 1 && config->prefetch >= 0);
    struct loader *opened = calloc(1, sizeof *opened);
    if (!opened) {
        return status_fail(ERR_NOMEM, "no memory for a loader of %s", config->pattern);
    }
    pthread_mutex_init(&opened->reading, NULL);
    enum status status = fill_loader(opened, config);
    if (status != OK) {
        loader_close(opened);
        return status;
    }
    *loader = opened;
    return OK;
}

void loader_close(struct loader *loader)
{
    if (!loader) {
        return;
    }
    prefetch_close(loader->prefetch);
    for (int i = 0; loader->slots && i < loader->n_slots; i++) {
        free(loader->slots[i].tokens);
    }
    for (size_t i = 0; i < loader->n_shards; i++) {
        shard_close(loader->shards[i]);
    }
    pthread_mutex_destroy(&loader->reading);
    free(loader->slots);
    free(loader->shards);
    free(loader->first_window);
    free((char *)loader->config.pattern);
    free(loader);
}

uint64_t loader_windows(const struct loader *loader)
{
    return loader->first_window[loader->n_shards];
}

uint64_t loader_tokens(const struct loader *loader)
{
    return loader->tokens;
}

const char *loader_digest(const struct loader *loader)
{
    return loader->digest;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

/* The shard of a window: the last one that begins at or before it. */
static size_t shard_of_window(const struct loader *loader, uint64_t window)
{
    size_t low = 0, high = loader->n_shards;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (loader->first_window[middle] <= window) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static void wake_shard(struct loader *loader, size_t s)
{
    for (size_t i = 0; i < loader->n_awake; i++) {
        if (loader->awake[i] == s) {
            return;
        }
    }
    if (loader->n_awake == LOADER_AWAKE) {
        shard_rest(loader->shards[loader->awake[loader->next_awake]]);
    } else {
        loader->n_awake++;
    }
    loader->awake[loader->next_awake] = s;
    loader->next_awake = (loader->next_awake + 1) % LOADER_AWAKE;
}

enum status loader_sample(struct loader *loader, uint64_t g, int32_t *tokens)
{
    uint64_t windows = loader_windows(loader), epoch = g / windows, window = g % windows;
    if (loader->config.shuffle) {
        window = sampler_permute(loader->config.seed, epoch, windows, window);
    }
    size_t s = shard_of_window(loader, window);
    uint64_t seq_len = (uint64_t)loader->config.seq_len, first = (window - loader->first_window[s]) * seq_len;
    pthread_mutex_lock(&loader->reading);
    wake_shard(loader, s);
    enum status status = shard_read(loader->shards[s], first, seq_len + 1, tokens);
    pthread_mutex_unlock(&loader->reading);
    return status;
}

static enum status produce_batch(void *context, int slot, uint64_t k)
{
    struct loader *loader = context;
    struct batch *batch = &loader->slots[slot];
    size_t length = (size_t)loader->config.seq_len + 1;
    for (int64_t i = 0; i < loader->samples; i++) {
        uint64_t g = loader->first + k * loader->stride + (uint64_t)i;
        TRY(loader_sample(loader, g, batch->tokens + (size_t)i * length));
    }
    batch->digest = XXH3_64bits(batch->tokens, (size_t)loader->samples * length * sizeof(int32_t));
    return OK;
}

/* Batches of another size need other slots; the usual seek keeps them. */
static bool resize_slots(struct loader *loader, int64_t samples)
{
    if (loader->slot_samples == samples) {
        return true;
    }
    loader->slot_samples = 0;
    for (int i = 0; i < loader->n_slots; i++) {
        free(loader->slots[i].tokens);
        loader->slots[i].tokens = calloc((size_t)samples, ((size_t)loader->config.seq_len + 1) * sizeof(int32_t));
        if (!loader->slots[i].tokens) {
            return false;
        }
    }
    loader->slot_samples = samples;
    return true;
}

void loader_seek(struct loader *loader, uint64_t first, uint64_t stride, int64_t samples)
{
    ASSERT(samples >= 1);
    if (loader->prefetch) {
        prefetch_pause(loader->prefetch);
    }
    loader->first = first;
    loader->stride = stride;
    loader->samples = samples;
    loader->next_batch = 0;
    loader->no_memory = !resize_slots(loader, samples);
    if (loader->prefetch && !loader->no_memory) {
        prefetch_start(loader->prefetch);
    }
}

static void copy_batch(const struct loader *loader, const struct batch *batch, int32_t *tokens, int32_t *targets)
{
    size_t seq_len = (size_t)loader->config.seq_len;
    for (size_t i = 0; i < (size_t)loader->samples; i++) {
        memcpy(tokens + i * seq_len, batch->tokens + i * (seq_len + 1), seq_len * sizeof *tokens);
        memcpy(targets + i * seq_len, batch->tokens + i * (seq_len + 1) + 1, seq_len * sizeof *targets);
    }
}

enum status loader_next(struct loader *loader, int32_t *tokens, int32_t *targets, uint64_t *digest)
{
    ASSERT(loader->samples >= 1); /* loader_seek first */
    if (loader->no_memory) {
        return status_fail(ERR_NOMEM, "no memory for %d batches of %" PRId64 " x %" PRId64 " tokens", loader->n_slots,
                           loader->samples, loader->config.seq_len + 1);
    }
    int slot = 0;
    if (loader->prefetch) {
        TRY(prefetch_take(loader->prefetch, &slot));
    } else {
        TRY(produce_batch(loader, slot, loader->next_batch));
        loader->next_batch++;
    }
    copy_batch(loader, &loader->slots[slot], tokens, targets);
    if (digest) {
        *digest = loader->slots[slot].digest;
    }
    if (loader->prefetch) {
        prefetch_release(loader->prefetch);
    }
    return OK;
}
