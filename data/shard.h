/* data: token shards `*.tok.zst`: header, frame table, independent zstd frames of 2^16 tokens (docs/file_formats.md).
 */
#pragma once

#include "core/status.h"

#include <stddef.h>
#include <stdint.h>

enum { SHARD_FRAME_TOKENS = 1 << 16 };

struct shard; /* an open shard for reading; one thread at a time */

/* Checks header, frame table, sizes. Every fault is ERR_DATA with file, place, expected, found; ERR_IO if unreadable.
 */
MUST_CHECK enum status shard_open(struct shard **shard, const char *path);
void shard_close(struct shard *shard); /* NULL is fine */
uint64_t shard_tokens(const struct shard *shard);
uint32_t shard_vocab(const struct shard *shard);
const char *shard_path(const struct shard *shard);
/* XXH3-128 of header and frame table, as 32 hex digits: names the content, since the table holds every frame's hash. */
const char *shard_digest(const struct shard *shard);

/* Tokens first .. first + count - 1 as int32; the range must lie in the shard. Damage and tokens >= vocabulary fail
 * with ERR_DATA naming the place. Keeps the file and the last frame for the next call. */
MUST_CHECK enum status shard_read(struct shard *shard, uint64_t first, uint64_t count, int32_t *tokens);

/* Closes the file and frees the buffers until the next read: a run may have more shards than files may be open. */
void shard_rest(struct shard *shard);

/* Decompresses and checks every frame. */
MUST_CHECK enum status shard_verify(struct shard *shard);

struct shard_writer;
/* Token width is 2 bytes if vocab <= 65536, else 4. A shard grows in memory, compressed; finish writes path.tmp, fsyncs
 * and renames. Tokens outside [0, vocab) and an empty shard are ERR_DATA. */
MUST_CHECK enum status shard_writer_open(struct shard_writer **writer, const char *path, uint32_t vocab);
MUST_CHECK enum status shard_writer_add(struct shard_writer *writer, const int32_t *tokens, size_t count);
MUST_CHECK enum status shard_writer_finish(struct shard_writer *writer); /* closes in every case */
void shard_writer_abandon(struct shard_writer *writer);                  /* NULL is fine */
