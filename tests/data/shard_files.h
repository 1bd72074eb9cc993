/* tests/data: shards to order, and tools that damage them. The layout is restated here from docs/file_formats.md, so
 * that reader and writer cannot agree on a mistake unseen. */
#pragma once

#include "core/status.h"

#include <stddef.h>
#include <stdint.h>

/* A path in a folder of this process under /tmp, made at the first call; scratch_remove deletes it and its files. The
 * text stays valid. */
const char *scratch_path(const char *name);
void scratch_remove(void);

/* Token i of every test shard: below vocab, looks random, depends on i only. */
int32_t shard_token(uint64_t i, uint32_t vocab);

/* Writes a shard of `count` such tokens. */
void shard_make(const char *path, uint32_t vocab, uint64_t count);

/* Writes a shard whose tokens count up: first, first + 1, ... */
void shard_make_counting(const char *path, uint32_t vocab, int32_t first, uint64_t count);

/* A whole file in memory. */
struct file_bytes {
    unsigned char *data;
    size_t n;
};
struct file_bytes file_load(const char *path);
void file_store(const char *path, struct file_bytes file);
void file_free(struct file_bytes *file);

uint64_t bytes_get(const unsigned char *at, int n);
void bytes_put(unsigned char *at, int n, uint64_t value);

/* Makes all checksums right for what the file says: of frames whose table entries lie in the file, of the header. */
void shard_repair(struct file_bytes *file);
