/* data: reading token shards.
 *
 * Nothing in the file is believed before it is checked: sizes first against the size that the operating system reports
 * (in 64 bits, so that no count can wrap or make us allocate more than the file is long), then header and table by
 * their checksum, each frame by its own, and every token against the vocabulary. */
#include "data/shard_format.h"

#include <ctype.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>

/* Tokens, compressed bytes and decompressed bytes of one frame. */
struct frame_buffers {
    ZSTD_DCtx *zstd;
    unsigned char *packed, *raw;
    int32_t *tokens;
    uint64_t frame; /* whose tokens these are; NO_FRAME */
};

#define NO_FRAME UINT64_MAX

struct shard {
    char *path;
    int fd; /* -1 at rest */
    uint32_t vocab, token_bytes;
    uint64_t tokens, frames, file_bytes;
    unsigned char header[SHARD_HEADER_BYTES];
    unsigned char *table; /* as in the file */
    char digest[33];
    struct frame_buffers buffers; /* zeros at rest */
};

uint64_t shard_tokens(const struct shard *shard)
{
    return shard->tokens;
}

uint32_t shard_vocab(const struct shard *shard)
{
    return shard->vocab;
}

const char *shard_path(const struct shard *shard)
{
    return shard->path;
}

const char *shard_digest(const struct shard *shard)
{
    return shard->digest;
}

static uint64_t frame_offset(const struct shard *shard, uint64_t frame)
{
    return frame == shard->frames ? shard->file_bytes : shard_get(shard->table + frame * SHARD_ENTRY_BYTES, 8);
}

static uint64_t frame_tokens(const struct shard *shard, uint64_t frame)
{
    uint64_t left = shard->tokens - frame * SHARD_FRAME_TOKENS;
    return left < SHARD_FRAME_TOKENS ? left : SHARD_FRAME_TOKENS;
}

static size_t packed_bound(const struct shard *shard)
{
    return ZSTD_compressBound((size_t)SHARD_FRAME_TOKENS * shard->token_bytes);
}

static enum status open_file(struct shard *shard)
{
    if (shard->fd < 0) {
        shard->fd = open(shard->path, O_RDONLY | O_CLOEXEC);
    }
    return shard->fd >= 0 ? OK : status_fail_errno(ERR_IO, shard->path, "cannot open the shard");
}

static enum status read_bytes(struct shard *shard, uint64_t offset, void *bytes, size_t n)
{
    size_t done = 0;
    while (done < n) {
        ssize_t got = pread(shard->fd, (char *)bytes + done, n - done, (off_t)(offset + done));
        if (got < 0) {
            return status_fail_errno(ERR_IO, shard->path, "cannot read the shard");
        }
        if (got == 0) {
            return status_fail(ERR_DATA, "%s: ends at byte %" PRIu64 ", expected %zu bytes at %" PRIu64 ": cut",
                               shard->path, offset + done, n, offset);
        }
        done += (size_t)got;
    }
    return OK;
}

static enum status check_magic(const struct shard *shard, size_t have)
{
    if (have >= 8 && memcmp(shard->header, SHARD_MAGIC, 8) == 0) {
        return OK;
    }
    char found[9] = "";
    for (size_t i = 0; i < 8 && i < have; i++) {
        found[i] = (char)(isprint(shard->header[i]) ? shard->header[i] : '.');
    }
    return status_fail(ERR_DATA, "%s: magic at byte 0: expected '%s', found '%s' (0x%016" PRIx64 "): not a token shard",
                       shard->path, SHARD_MAGIC, found, shard_get(shard->header, 8));
}

/* The header as far as the size of the file allows it to be read, and that the size is right. */
static enum status read_header(struct shard *shard)
{
    struct stat info;
    if (fstat(shard->fd, &info) != 0) {
        return status_fail_errno(ERR_IO, shard->path, "cannot stat the shard");
    }
    if (!S_ISREG(info.st_mode)) {
        return status_fail(ERR_DATA, "%s: expected a file, found a folder or device", shard->path);
    }
    uint64_t size = (uint64_t)info.st_size;
    if (size == 0) {
        return status_fail(ERR_DATA, "%s: expected a token shard, found an empty file", shard->path);
    }
    size_t have = size < SHARD_HEADER_BYTES ? (size_t)size : SHARD_HEADER_BYTES;
    TRY(read_bytes(shard, 0, shard->header, have));
    TRY(check_magic(shard, have));
    if (have < SHARD_HEADER_BYTES) {
        return status_fail(ERR_DATA, "%s: expected a header of %d bytes, found %zu: cut", shard->path,
                           SHARD_HEADER_BYTES, have);
    }
    uint64_t version = shard_get(shard->header + SHARD_AT_VERSION, 4);
    if (version != SHARD_VERSION) {
        return status_fail(ERR_DATA, "%s: version at byte %d: expected %d, found %" PRIu64, shard->path,
                           SHARD_AT_VERSION, SHARD_VERSION, version);
    }
    shard->file_bytes = shard_get(shard->header + SHARD_AT_FILE_BYTES, 8);
    if (shard->file_bytes != size) {
        return status_fail(ERR_DATA, "%s: expected %" PRIu64 " bytes (byte %d), found a file of %" PRIu64 ": %s",
                           shard->path, shard->file_bytes, SHARD_AT_FILE_BYTES, size,
                           size < shard->file_bytes ? "cut" : "something was appended");
    }
    return OK;
}

static enum status check_width(struct shard *shard)
{
    shard->token_bytes = (uint32_t)shard_get(shard->header + SHARD_AT_TOKEN_BYTES, 4);
    shard->vocab = (uint32_t)shard_get(shard->header + SHARD_AT_VOCAB, 4);
    if (shard->vocab < 1 || shard->vocab > INT32_MAX) {
        return status_fail(ERR_DATA, "%s: vocabulary at byte %d: expected 1 to %d, found %" PRIu32, shard->path,
                           SHARD_AT_VOCAB, INT32_MAX, shard->vocab);
    }
    if (shard->token_bytes != shard_token_bytes(shard->vocab)) {
        return status_fail(ERR_DATA,
                           "%s: token width at byte %d: expected %" PRIu32 " bytes for a vocabulary of %" PRIu32
                           ", found %" PRIu32 ": ids would wrap",
                           shard->path, SHARD_AT_TOKEN_BYTES, shard_token_bytes(shard->vocab), shard->vocab,
                           shard->token_bytes);
    }
    uint64_t frame = shard_get(shard->header + SHARD_AT_FRAME_TOKENS, 4);
    if (frame != SHARD_FRAME_TOKENS) {
        return status_fail(ERR_DATA, "%s: tokens a frame at byte %d: expected %d, found %" PRIu64, shard->path,
                           SHARD_AT_FRAME_TOKENS, SHARD_FRAME_TOKENS, frame);
    }
    return OK;
}

static enum status check_counts(struct shard *shard)
{
    shard->tokens = shard_get(shard->header + SHARD_AT_TOKENS, 8);
    shard->frames = shard_get(shard->header + SHARD_AT_FRAMES, 8);
    if (shard->tokens == 0) {
        return status_fail(ERR_DATA, "%s: token count at byte %d: expected at least 1, found 0", shard->path,
                           SHARD_AT_TOKENS);
    }
    if (shard->frames != shard_frame_count(shard->tokens)) {
        return status_fail(
            ERR_DATA, "%s: frame count at byte %d: expected %" PRIu64 " for %" PRIu64 " tokens, found %" PRIu64,
            shard->path, SHARD_AT_FRAMES, shard_frame_count(shard->tokens), shard->tokens, shard->frames);
    }
    uint64_t room = (shard->file_bytes - SHARD_HEADER_BYTES) / SHARD_ENTRY_BYTES;
    if (shard->frames > room) {
        return status_fail(ERR_DATA,
                           "%s: frame count at byte %d: found %" PRIu64 " frames (%" PRIu64
                           " tokens), expected at most %" PRIu64 " in a file of %" PRIu64 " bytes",
                           shard->path, SHARD_AT_FRAMES, shard->frames, shard->tokens, room, shard->file_bytes);
    }
    return OK;
}

static enum status read_table(struct shard *shard)
{
    size_t bytes = (size_t)shard->frames * SHARD_ENTRY_BYTES;
    shard->table = malloc(bytes);
    XXH3_state_t *hash = XXH3_createState();
    if (!shard->table || !hash) {
        XXH3_freeState(hash);
        return status_fail(ERR_NOMEM, "%s: no memory for a frame table of %zu bytes", shard->path, bytes);
    }
    enum status status = read_bytes(shard, SHARD_HEADER_BYTES, shard->table, bytes);
    if (status == OK) {
        XXH3_64bits_reset(hash);
        XXH3_64bits_update(hash, shard->header, SHARD_AT_CHECKSUM);
        XXH3_64bits_update(hash, shard->table, bytes);
        uint64_t expected = shard_get(shard->header + SHARD_AT_CHECKSUM, 8), found = XXH3_64bits_digest(hash);
        if (expected != found) {
            status = status_fail(ERR_DATA,
                                 "%s: checksum of header and frame table at byte %d: expected %016" PRIx64
                                 ", found %016" PRIx64 ": damaged",
                                 shard->path, SHARD_AT_CHECKSUM, expected, found);
        }
        XXH3_128bits_reset(hash);
        XXH3_128bits_update(hash, shard->header, SHARD_HEADER_BYTES);
        XXH3_128bits_update(hash, shard->table, bytes);
        XXH128_hash_t digest = XXH3_128bits_digest(hash);
        snprintf(shard->digest, sizeof shard->digest, "%016" PRIx64 "%016" PRIx64, (uint64_t)digest.high64,
                 (uint64_t)digest.low64);
    }
    XXH3_freeState(hash);
    return status;
}

static enum status check_table(const struct shard *shard)
{
    uint64_t expected = SHARD_HEADER_BYTES + shard->frames * SHARD_ENTRY_BYTES;
    for (uint64_t f = 0; f < shard->frames; f++) {
        uint64_t offset = frame_offset(shard, f), next = frame_offset(shard, f + 1);
        if ((f == 0 && offset != expected) || next <= offset || next > shard->file_bytes ||
            next - offset > packed_bound(shard)) {
            return status_fail(ERR_DATA,
                               "%s: frame %" PRIu64 " at byte %" PRIu64 ": table says bytes %" PRIu64 " to %" PRIu64
                               ", expected 1 to %zu bytes inside %" PRIu64 " to %" PRIu64,
                               shard->path, f, SHARD_HEADER_BYTES + f * SHARD_ENTRY_BYTES, offset, next,
                               packed_bound(shard), expected, shard->file_bytes);
        }
    }
    return OK;
}

/* How many tokens a frame holds by its own zstd header. */
static enum status check_content_size(const struct shard *shard, uint64_t frame, const void *packed, size_t bytes)
{
    unsigned long long content = ZSTD_getFrameContentSize(packed, bytes);
    uint64_t expected = frame_tokens(shard, frame);
    if (content == ZSTD_CONTENTSIZE_ERROR || content == ZSTD_CONTENTSIZE_UNKNOWN) {
        return status_fail(ERR_DATA,
                           "%s: frame %" PRIu64 " at byte %" PRIu64 ": expected a zstd frame that states its size, "
                           "found other bytes: damaged",
                           shard->path, frame, frame_offset(shard, frame));
    }
    if (content != expected * shard->token_bytes) {
        return status_fail(ERR_DATA,
                           "%s: frame %" PRIu64 " at byte %" PRIu64 ": expected %" PRIu64 " tokens (the header counts "
                           "%" PRIu64 " in all), found %llu bytes = %llu tokens",
                           shard->path, frame, frame_offset(shard, frame), expected, shard->tokens, content,
                           content / shard->token_bytes);
    }
    return OK;
}

/* The one frame whose length depends on the token count: a wrong count shows before anything is decompressed. */
static enum status check_last_frame(struct shard *shard)
{
    unsigned char start[18]; /* the longest zstd frame header */
    uint64_t offset = frame_offset(shard, shard->frames - 1), left = shard->file_bytes - offset;
    size_t n = left < sizeof start ? (size_t)left : sizeof start;
    TRY(read_bytes(shard, offset, start, n));
    return check_content_size(shard, shard->frames - 1, start, n);
}

static enum status open_and_check(struct shard *shard)
{
    TRY(open_file(shard));
    TRY(read_header(shard));
    TRY(check_width(shard));
    TRY(check_counts(shard));
    TRY(read_table(shard));
    TRY(check_table(shard));
    return check_last_frame(shard);
}

enum status shard_open(struct shard **shard, const char *path)
{
    struct shard *opened = calloc(1, sizeof *opened);
    char *copy = strdup(path);
    if (!opened || !copy) {
        free(opened);
        free(copy);
        return status_fail(ERR_NOMEM, "%s: no memory to open it", path);
    }
    opened->path = copy;
    opened->fd = -1;
    enum status status = open_and_check(opened);
    shard_rest(opened);
    if (status != OK) {
        shard_close(opened);
        return status;
    }
    *shard = opened;
    return OK;
}

void shard_rest(struct shard *shard)
{
    ZSTD_freeDCtx(shard->buffers.zstd);
    free(shard->buffers.packed);
    free(shard->buffers.raw);
    free(shard->buffers.tokens);
    shard->buffers = (struct frame_buffers){0};
    if (shard->fd >= 0) {
        close(shard->fd);
        shard->fd = -1;
    }
}

void shard_close(struct shard *shard)
{
    if (!shard) {
        return;
    }
    shard_rest(shard);
    free(shard->table);
    free(shard->path);
    free(shard);
}

static enum status wake(struct shard *shard)
{
    struct frame_buffers *b = &shard->buffers;
    if (b->tokens) {
        return OK;
    }
    TRY(open_file(shard));
    *b = (struct frame_buffers){.zstd = ZSTD_createDCtx(),
                                .packed = malloc(packed_bound(shard)),
                                .raw = malloc((size_t)SHARD_FRAME_TOKENS * shard->token_bytes),
                                .tokens = malloc(SHARD_FRAME_TOKENS * sizeof(int32_t)),
                                .frame = NO_FRAME};
    if (!b->zstd || !b->packed || !b->raw || !b->tokens) {
        shard_rest(shard);
        return status_fail(ERR_NOMEM, "%s: no memory for the buffers of a frame", shard->path);
    }
    return OK;
}

static enum status decode_tokens(const struct shard *shard, uint64_t frame)
{
    const struct frame_buffers *b = &shard->buffers;
    uint64_t n = frame_tokens(shard, frame);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t token = shard->token_bytes == 2 ? shard_get(b->raw + 2 * i, 2) : shard_get(b->raw + 4 * i, 4);
        if (token >= shard->vocab) {
            return status_fail(ERR_DATA,
                               "%s: token at position %" PRIu64 " (frame %" PRIu64 "): expected an id below the "
                               "vocabulary of %" PRIu32 ", found %" PRIu64,
                               shard->path, frame * SHARD_FRAME_TOKENS + i, frame, shard->vocab, token);
        }
        b->tokens[i] = (int32_t)token;
    }
    return OK;
}

static enum status load_frame(struct shard *shard, uint64_t frame)
{
    TRY(wake(shard));
    struct frame_buffers *b = &shard->buffers;
    if (b->frame == frame) {
        return OK;
    }
    b->frame = NO_FRAME;
    uint64_t offset = frame_offset(shard, frame);
    size_t packed = (size_t)(frame_offset(shard, frame + 1) - offset);
    size_t bytes = (size_t)frame_tokens(shard, frame) * shard->token_bytes;
    TRY(read_bytes(shard, offset, b->packed, packed));
    uint64_t expected = shard_get(shard->table + frame * SHARD_ENTRY_BYTES + 8, 8);
    uint64_t found = XXH3_64bits(b->packed, packed);
    if (expected != found) {
        return status_fail(ERR_DATA,
                           "%s: frame %" PRIu64 " at byte %" PRIu64 ": checksum expected %016" PRIx64
                           ", found %016" PRIx64 ": damaged",
                           shard->path, frame, offset, expected, found);
    }
    TRY(check_content_size(shard, frame, b->packed, packed));
    size_t got = ZSTD_decompressDCtx(b->zstd, b->raw, bytes, b->packed, packed);
    if (ZSTD_isError(got)) {
        return status_fail(ERR_DATA, "%s: frame %" PRIu64 " at byte %" PRIu64 ": zstd: %s: damaged", shard->path, frame,
                           offset, ZSTD_getErrorName(got));
    }
    if (got != bytes) {
        return status_fail(ERR_DATA, "%s: frame %" PRIu64 " at byte %" PRIu64 ": expected %zu bytes, found %zu",
                           shard->path, frame, offset, bytes, got);
    }
    TRY(decode_tokens(shard, frame));
    b->frame = frame;
    return OK;
}

enum status shard_read(struct shard *shard, uint64_t first, uint64_t count, int32_t *tokens)
{
    ASSERT(first <= shard->tokens && count <= shard->tokens - first);
    while (count > 0) {
        uint64_t frame = first / SHARD_FRAME_TOKENS, at = first % SHARD_FRAME_TOKENS;
        uint64_t left = frame_tokens(shard, frame) - at, n = count < left ? count : left;
        TRY(load_frame(shard, frame));
        memcpy(tokens, shard->buffers.tokens + at, (size_t)n * sizeof *tokens);
        tokens += n;
        first += n;
        count -= n;
    }
    return OK;
}

enum status shard_verify(struct shard *shard)
{
    for (uint64_t f = 0; f < shard->frames; f++) {
        TRY(load_frame(shard, f));
    }
    return OK;
}
