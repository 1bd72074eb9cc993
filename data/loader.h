/* data: from shards to batches. The state of the data is one integer, samples consumed: sample g of the run is a pure
 * function of (seed, epoch, g), where epoch = g / W (docs/file_formats.md). A thread reads ahead; it holds no state
 * that a resume would need. */
#pragma once

#include "core/status.h"
#include "data/sampler.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct loader;

struct loader_config {
    const char *pattern; /* glob of shards; several globs separated by spaces; all matches sorted by name */
    int64_t seq_len;     /* windows of seq_len + 1 tokens at stride seq_len, inside one shard */
    uint32_t vocab;      /* every shard must declare at most this */
    uint64_t seed;
    bool shuffle; /* keyed permutation per epoch; evaluation reads in order */
    int prefetch; /* batches read ahead by a thread; 0 = none */
    bool trusted; /* skips the full read of every shard at open; header and frame table are checked in any case */
};

/* Opens all shards and checks every token of them, unless `trusted`, so that damage shows before the first step. Fails
 * with ERR_DATA / ERR_IO naming file, place, expected, found; no window at all is ERR_DATA with the longest seq_len
 * that would give one. */
MUST_CHECK enum status loader_open(struct loader **loader, const struct loader_config *config);
void loader_close(struct loader *loader);             /* NULL is fine */
uint64_t loader_windows(const struct loader *loader); /* W */
uint64_t loader_tokens(const struct loader *loader);
const char *loader_digest(const struct loader *loader); /* 32 hex digits over the shards' digests, in order */

/* Announces where reading goes on: batches of `samples` consecutive samples from sample `first`, then from
 * first + stride, ... Starts prefetch. */
void loader_seek(struct loader *loader, uint64_t first, uint64_t stride, int64_t samples);

/* The next announced batch. tokens, targets: (samples, seq_len); targets are the tokens one place on. `digest` (may be
 * NULL) receives the XXH3-64 of the batch: samples x (seq_len + 1) tokens as little-endian int32.
 * Fails with ERR_DATA, ERR_IO or ERR_NOMEM. */
MUST_CHECK enum status loader_next(struct loader *loader, int32_t *tokens, int32_t *targets, uint64_t *digest);

/* Sample g without any state, for tests and tools: (seq_len + 1) tokens. */
MUST_CHECK enum status loader_sample(struct loader *loader, uint64_t g, int32_t *tokens);
