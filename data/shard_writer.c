/* data: writing token shards. Header and table are known only when the last frame is, and stand first in the file, so
 * the compressed frames wait in memory; whoever writes shards bounds their length. */
#include "core/file.h"
#include "data/shard_format.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include <zstd.h>

enum { SHARD_ZSTD_LEVEL = 9 }; /* written once, read every epoch */

/* A growing array. */
struct bytes {
    unsigned char *data;
    size_t used, capacity;
};

struct shard_writer {
    char *path;
    uint32_t vocab, token_bytes;
    uint64_t tokens;
    ZSTD_CCtx *zstd;
    unsigned char *raw;
    size_t raw_tokens;   /* of the frame that is being filled */
    struct bytes frames; /* compressed, one after the other */
    struct bytes table;  /* entries; offsets count from the first frame until finish */
};

static enum status reserve(struct shard_writer *writer, struct bytes *bytes, size_t more)
{
    if (bytes->capacity - bytes->used >= more) {
        return OK;
    }
    size_t capacity = 2 * bytes->capacity + more;
    unsigned char *data = realloc(bytes->data, capacity);
    if (!data) {
        return status_fail(ERR_NOMEM, "%s: no memory for a shard of %zu bytes; write shorter shards", writer->path,
                           capacity);
    }
    bytes->data = data;
    bytes->capacity = capacity;
    return OK;
}

enum status shard_writer_open(struct shard_writer **writer, const char *path, uint32_t vocab)
{
    ASSERT(vocab >= 1 && vocab <= INT32_MAX);
    struct shard_writer *opened = calloc(1, sizeof *opened);
    if (opened) {
        opened->path = strdup(path);
        opened->vocab = vocab;
        opened->token_bytes = shard_token_bytes(vocab);
        opened->zstd = ZSTD_createCCtx();
        opened->raw = malloc((size_t)SHARD_FRAME_TOKENS * opened->token_bytes);
    }
    if (!opened || !opened->path || !opened->zstd || !opened->raw) {
        shard_writer_abandon(opened);
        return status_fail(ERR_NOMEM, "%s: no memory to write it", path);
    }
    ZSTD_CCtx_setParameter(opened->zstd, ZSTD_c_compressionLevel, SHARD_ZSTD_LEVEL);
    ZSTD_CCtx_setParameter(opened->zstd, ZSTD_c_checksumFlag, 1);
    *writer = opened;
    return OK;
}

void shard_writer_abandon(struct shard_writer *writer)
{
    if (!writer) {
        return;
    }
    ZSTD_freeCCtx(writer->zstd);
    free(writer->raw);
    free(writer->frames.data);
    free(writer->table.data);
    free(writer->path);
    free(writer);
}

static enum status end_frame(struct shard_writer *writer)
{
    size_t raw = writer->raw_tokens * writer->token_bytes, bound = ZSTD_compressBound(raw);
    TRY(reserve(writer, &writer->frames, bound));
    TRY(reserve(writer, &writer->table, SHARD_ENTRY_BYTES));
    unsigned char *frame = writer->frames.data + writer->frames.used;
    size_t packed = ZSTD_compress2(writer->zstd, frame, bound, writer->raw, raw);
    if (ZSTD_isError(packed)) {
        return status_fail(ERR_NOMEM, "%s: zstd cannot compress a frame: %s", writer->path, ZSTD_getErrorName(packed));
    }
    unsigned char *entry = writer->table.data + writer->table.used;
    shard_put(entry, 8, writer->frames.used);
    shard_put(entry + 8, 8, XXH3_64bits(frame, packed));
    writer->table.used += SHARD_ENTRY_BYTES;
    writer->frames.used += packed;
    writer->raw_tokens = 0;
    return OK;
}

enum status shard_writer_add(struct shard_writer *writer, const int32_t *tokens, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= writer->vocab) {
            return status_fail(ERR_DATA,
                               "%s: token %" PRIu64 " to write: expected an id in 0 to %" PRIu32 ", found %" PRId32,
                               writer->path, writer->tokens, writer->vocab - 1, tokens[i]);
        }
        shard_put(writer->raw + writer->raw_tokens * writer->token_bytes, (int)writer->token_bytes,
                  (uint64_t)tokens[i]);
        writer->raw_tokens++;
        writer->tokens++;
        if (writer->raw_tokens == SHARD_FRAME_TOKENS) {
            TRY(end_frame(writer));
        }
    }
    return OK;
}

static enum status write_file(struct shard_writer *writer)
{
    if (writer->tokens == 0) {
        return status_fail(ERR_DATA, "%s: expected at least 1 token to write, found none", writer->path);
    }
    if (writer->raw_tokens > 0) {
        TRY(end_frame(writer));
    }
    size_t start = SHARD_HEADER_BYTES + writer->table.used, size = start + writer->frames.used;
    TRY(reserve(writer, &writer->frames, start));
    unsigned char *file = writer->frames.data;
    memmove(file + start, file, writer->frames.used);
    for (size_t at = 0; at < writer->table.used; at += SHARD_ENTRY_BYTES) {
        unsigned char *entry = writer->table.data + at;
        shard_put(entry, 8, shard_get(entry, 8) + start);
    }
    memset(file, 0, SHARD_HEADER_BYTES);
    memcpy(file, SHARD_MAGIC, 8);
    shard_put(file + SHARD_AT_VERSION, 4, SHARD_VERSION);
    shard_put(file + SHARD_AT_TOKEN_BYTES, 4, writer->token_bytes);
    shard_put(file + SHARD_AT_VOCAB, 4, writer->vocab);
    shard_put(file + SHARD_AT_FRAME_TOKENS, 4, SHARD_FRAME_TOKENS);
    shard_put(file + SHARD_AT_TOKENS, 8, writer->tokens);
    shard_put(file + SHARD_AT_FRAMES, 8, shard_frame_count(writer->tokens));
    shard_put(file + SHARD_AT_FILE_BYTES, 8, size);
    /* The checksum leaves itself out: bytes 0..55 directly before the table, then the table is moved up. */
    memcpy(file + SHARD_AT_CHECKSUM, writer->table.data, writer->table.used);
    uint64_t checksum = XXH3_64bits(file, SHARD_AT_CHECKSUM + writer->table.used);
    memcpy(file + SHARD_HEADER_BYTES, writer->table.data, writer->table.used);
    shard_put(file + SHARD_AT_CHECKSUM, 8, checksum);
    return file_write_atomic(writer->path, file, size);
}

enum status shard_writer_finish(struct shard_writer *writer)
{
    enum status status = write_file(writer);
    shard_writer_abandon(writer);
    return status;
}
