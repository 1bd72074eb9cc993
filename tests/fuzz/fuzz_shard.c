/* Fuzz target: the reader of token shards. The first byte chooses what the rest is:
 *   a file as it is; a file whose checksums are made right first, so that faults behind them are met; or a recipe of a
 *   file (struct recipe), whose frames are compressed here, so that any ids and lengths come behind valid zstd frames.
 * Reads in parts agree with a read of the whole; a recipe's tokens are also known without the reader. */
#include "data/shard.h"
#include "tests/data/shard_files.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>
#include <zstd.h>

enum { FRAME = 65536, READ_MAX = 2 * FRAME };

/* Reads windows of an open shard at places that the input chooses. */
static void check_windows(struct shard *shard, const int32_t *all, struct fuzz_bytes places)
{
    uint64_t tokens = shard_tokens(shard);
    int32_t *window = malloc(tokens * sizeof *window);
    for (int i = 0; i < 3; i++) {
        uint64_t first = fuzz_take(&places, 3) % tokens, count = fuzz_take(&places, 3) % (tokens - first + 1);
        enum status status = shard_read(shard, first, count, window);
        ASSERT(status == OK && memcmp(window, all + first, count * sizeof *window) == 0);
        if (i == 1) {
            shard_rest(shard);
        }
    }
    free(window);
}

/* Opens and reads everything. `expected`: the tokens if they are known and right, else NULL. */
static enum status read_all(const char *path, struct fuzz_bytes places, const int32_t *expected)
{
    struct shard *shard = NULL;
    enum status status = shard_open(&shard, path);
    if (status != OK) {
        ASSERT(shard == NULL);
        return status;
    }
    uint64_t tokens = shard_tokens(shard);
    ASSERT(tokens > 0 && shard_vocab(shard) > 0 && strlen(shard_digest(shard)) == 32);
    status = shard_verify(shard);
    if (tokens <= READ_MAX) {
        int32_t *all = malloc(tokens * sizeof *all);
        ASSERT(shard_read(shard, 0, tokens, all) == status);
        for (uint64_t i = 0; status == OK && i < tokens; i++) {
            ASSERT(all[i] >= 0 && (uint32_t)all[i] < shard_vocab(shard));
        }
        ASSERT(status != OK || expected == NULL || memcmp(all, expected, tokens * sizeof *all) == 0);
        if (status == OK) {
            check_windows(shard, all, places);
        }
        free(all);
    }
    shard_close(shard);
    return status;
}

/* A shard to be made. Frames hold `rest` of the input over and over. */
struct recipe {
    uint32_t vocab, tokens, width;
    bool content_size, checksum;
    int length_change; /* of the last frame, in bytes */
    uint32_t damage_at, damage;
    uint64_t claim;  /* of tokens in the header, with the frames that go with them; 0: as many as there are */
    size_t stuffing; /* zeros behind the last frame's bytes, within its place in the table */
    struct fuzz_bytes rest;
};

static struct recipe recipe_take(struct fuzz_bytes *bytes)
{
    struct recipe r = {0};
    uint64_t flags = fuzz_take(bytes, 1);
    r.content_size = (flags & 1) == 0;
    r.checksum = (flags & 2) != 0;
    r.length_change = flags & 4 ? (int)(fuzz_take(bytes, 1) % 17) - 8 : 0;
    r.vocab = (uint32_t)fuzz_take(bytes, flags & 8 ? 4 : 2);
    r.vocab = r.vocab == 0 || r.vocab > INT32_MAX ? 320 : r.vocab;
    r.width = r.vocab <= 65536 ? 2 : 4;
    r.tokens =
        1 + (uint32_t)fuzz_take(bytes, 1) + ((flags & 0x90) == 0x90 ? FRAME - 128 : 0); /* rarely two frames: slow */
    if (flags & 32) {
        r.damage_at = (uint32_t)fuzz_take(bytes, 2);
        r.damage = (uint32_t)fuzz_take(bytes, 1);
    }
    r.stuffing = flags & 64 ? (size_t)fuzz_take(bytes, 2) * 8 : 0;
    r.claim = (flags & 0x90) == 0x10 ? fuzz_take(bytes, 8) : 0;
    r.rest = *bytes;
    return r;
}

/* Compresses one frame's bytes to the end of the file. */
static void add_frame(struct file_bytes *file, const struct recipe *r, const unsigned char *raw, size_t n)
{
    static ZSTD_CCtx *zstd; /* kept: making one takes longer than the rest of an input */
    if (zstd == NULL) {
        zstd = ZSTD_createCCtx();
    }
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_compressionLevel, 1);
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_contentSizeFlag, r->content_size);
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_checksumFlag, r->checksum);
    size_t packed = ZSTD_compress2(zstd, file->data + file->n, ZSTD_compressBound(n), raw, n);
    ASSERT(!ZSTD_isError(packed));
    file->n += packed;
}

/* The tokens in `raw`; NULL if one is outside the vocabulary. */
static int32_t *recipe_tokens(const struct recipe *r, const unsigned char *raw)
{
    int32_t *tokens = malloc(r->tokens * sizeof *tokens);
    for (uint32_t i = 0; i < r->tokens; i++) {
        uint64_t id = bytes_get(raw + (size_t)i * r->width, (int)r->width);
        if (id >= r->vocab) {
            free(tokens);
            return NULL;
        }
        tokens[i] = (int32_t)id;
    }
    return tokens;
}

/* Makes the file; returns its tokens if a reader must accept it, else NULL. */
static int32_t *recipe_make(const struct recipe *r, struct file_bytes *file)
{
    uint32_t frames = (r->tokens + FRAME - 1) / FRAME;
    size_t most = (size_t)r->tokens * r->width + 64;
    unsigned char *raw = calloc(1, most);
    file->data = calloc(1, 1024 + ZSTD_compressBound(most) + r->stuffing);
    for (size_t i = 0; r->rest.left > 0 && i < most; i += r->rest.left) {
        memcpy(raw + i, r->rest.at, r->rest.left < most - i ? r->rest.left : most - i);
    }
    memcpy(file->data, "gpt8btok", 8);
    const uint64_t fields[][3] = {{8, 4, 1},      {12, 4, r->width},  {16, 4, r->vocab},
                                  {20, 4, FRAME}, {24, 8, r->tokens}, {32, 8, frames}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        bytes_put(file->data + fields[i][0], (int)fields[i][1], fields[i][2]);
    }
    file->n = 64 + 16 * frames;
    bool right = r->content_size && r->length_change == 0 && r->damage == 0 && r->stuffing == 0 && r->claim == 0;
    for (uint32_t f = 0; f < frames; f++) {
        uint32_t left = r->tokens - f * FRAME;
        long n = (long)(left < FRAME ? left : FRAME) * r->width + (f + 1 == frames ? r->length_change : 0);
        bytes_put(file->data + 64 + 16 * f, 8, file->n);
        add_frame(file, r, raw + (size_t)f * FRAME * r->width, n < 0 ? 0 : (size_t)n);
    }
    size_t frame_bytes = file->n - 64 - 16 * frames;
    file->n += r->stuffing;
    bytes_put(file->data + 40, 8, file->n);
    if (r->claim != 0) {
        bytes_put(file->data + 24, 8, r->claim);
        bytes_put(file->data + 32, 8, r->claim / FRAME + (r->claim % FRAME != 0));
    }
    file->data[64 + 16 * frames + r->damage_at % frame_bytes] ^= (unsigned char)r->damage;
    shard_repair(file);
    int32_t *tokens = right ? recipe_tokens(r, raw) : NULL;
    free(raw);
    return tokens;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct fuzz_bytes bytes = {data, n};
    uint64_t way = fuzz_take(&bytes, 1) % 3;
    struct file_bytes file = {.n = bytes.left};
    int32_t *expected = NULL;
    if (way == 2) {
        struct recipe recipe = recipe_take(&bytes);
        expected = recipe_make(&recipe, &file);
    } else {
        file.data = calloc(1, bytes.left + 64); /* shard_repair looks at a whole header */
        memcpy(file.data, bytes.at, bytes.left);
        if (way == 1) {
            shard_repair(&file);
        }
    }
    fuzz_store("input", file.data, file.n);
    enum status status = read_all("input", bytes, expected);
    if (status != OK) {
        fuzz_refused(status, ERR_DATA, "input: ");
    }
    ASSERT(status == OK || expected == NULL);
    free(expected);
    file_free(&file);
    return 0;
}

/* A valid shard, once as it is and once to be repaired after mutation. */
static void seed_shard(const char *folder, char letter, uint32_t vocab, uint64_t count)
{
    shard_make(scratch_path("seed"), vocab, count);
    struct file_bytes file = file_load(scratch_path("seed"));
    unsigned char *seed = malloc(file.n + 1);
    memcpy(seed + 1, file.data, file.n);
    for (unsigned char way = 0; way < 2; way++) {
        char name[] = {letter, (char)('0' + way), '\0'};
        seed[0] = way;
        fuzz_seed(folder, name, seed, file.n + 1);
    }
    free(seed);
    file_free(&file);
}

void fuzz_seeds(const char *folder)
{
    seed_shard(folder, 'a', 320, 1);
    seed_shard(folder, 'b', 320, 300);
    seed_shard(folder, 'c', 65537, 100);
    seed_shard(folder, 'd', 1, 65800); /* two frames of zeros: a small file */
    static const struct {
        const char *name;
        unsigned char bytes[16];
    } recipes[] = {
        {"small", {2, 0, 0x40, 1, 5, 7, 0, 9, 0}},
        {"two_frames", {2, 0x90, 0x40, 1, 200, 7, 0, 9, 0}},
        {"wide", {2, 0x98, 0, 0, 2, 0, 200, 7, 0, 1, 0}},
        {"long_last", {2, 4, 10, 0x40, 1, 5, 7, 0}},
        {"no_content_size", {2, 1, 0x40, 1, 5, 7, 0}},
        {"stuffed", {2, 64, 0x40, 1, 5, 0xff, 0x7f, 7, 0}},
        {"claims_much", {2, 16, 0x40, 1, 5, 0, 0, 0, 0, 0, 0, 0, 0x80, 7, 0}},
        {"damaged_block", {2, 32, 0x40, 1, 200, 9, 0, 255, 7, 0, 5, 0, 3}},
        {"damaged_checksum", {2, 32 + 2, 0x40, 1, 200, 12, 0, 255, 7, 0}},
    };
    for (size_t i = 0; i < sizeof recipes / sizeof recipes[0]; i++) {
        fuzz_seed(folder, recipes[i].name, recipes[i].bytes, sizeof recipes[i].bytes);
    }
    scratch_remove();
}
