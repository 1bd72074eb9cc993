/* data: a run of numbered shards FOLDER/KIND-00000.tok.zst, ... cut after a fixed number of tokens. */
#pragma once

#include "data/shard.h"

struct shard_set {
    const char *folder, *kind; /* borrows; kind is train or val */
    uint32_t vocab;
    uint64_t shard_tokens;       /* of every shard but the last; at least 1 */
    struct shard_writer *writer; /* owns; of the last shard, NULL between shards */
    uint64_t in_shard;           /* tokens of the last shard */
    int shards;                  /* begun */
    uint64_t tokens;
};

/* Starts shards as they are needed. Fails as shard_writer does. */
MUST_CHECK enum status shard_set_add(struct shard_set *set, const int32_t *tokens, size_t n);

/* Finishes the last shard. A set without tokens has no shard. */
MUST_CHECK enum status shard_set_finish(struct shard_set *set);

/* Removes all shards of the set: after a failure a part of the data would look like the whole. */
void shard_set_remove(struct shard_set *set);

/* Sum of the finished shards' sizes on disk. */
uint64_t shard_set_bytes(const struct shard_set *set);

/* Looks for shards of this kind that `folder` holds before any is written: they would be read together with the new
 * ones. Removes them if `overwrite`, else ERR_USAGE names the first. */
MUST_CHECK enum status shard_set_clear(const struct shard_set *set, bool overwrite);
