/* tests/data: shards to order, and tools that damage them. */
#include "tests/data/shard_files.h"

#include "data/shard.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

static char folder[] = "/tmp/gpt8b-data-XXXXXX";
static bool have_folder;

const char *scratch_path(const char *name)
{
    static char paths[64][300];
    static int count;
    if (!have_folder) {
        ASSERT(mkdtemp(folder) != NULL);
        have_folder = true;
    }
    char path[300];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (int i = 0; i < count; i++) {
        if (strcmp(paths[i], path) == 0) {
            return paths[i];
        }
    }
    ASSERT(count < 64);
    memcpy(paths[count], path, sizeof path);
    return paths[count++];
}

void scratch_remove(void)
{
    DIR *dir = have_folder ? opendir(folder) : NULL;
    for (struct dirent *entry = dir ? readdir(dir) : NULL; entry; entry = readdir(dir)) {
        unlinkat(dirfd(dir), entry->d_name, 0);
    }
    if (dir) {
        closedir(dir);
        rmdir(folder);
    }
}

int32_t shard_token(uint64_t i, uint32_t vocab)
{
    uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    return (int32_t)((x ^ x >> 29) % vocab);
}

static void make(const char *path, uint32_t vocab, const int32_t *tokens, uint64_t count)
{
    struct shard_writer *writer;
    enum status status = shard_writer_open(&writer, path, vocab);
    ASSERT(status == OK);
    /* In two parts, neither of which is whole frames. */
    uint64_t part = count / 3;
    status = shard_writer_add(writer, tokens, part);
    ASSERT(status == OK);
    status = shard_writer_add(writer, tokens + part, count - part);
    ASSERT(status == OK);
    status = shard_writer_finish(writer);
    ASSERT(status == OK);
}

void shard_make(const char *path, uint32_t vocab, uint64_t count)
{
    int32_t *tokens = malloc(count * sizeof *tokens);
    for (uint64_t i = 0; i < count; i++) {
        tokens[i] = shard_token(i, vocab);
    }
    make(path, vocab, tokens, count);
    free(tokens);
}

void shard_make_counting(const char *path, uint32_t vocab, int32_t first, uint64_t count)
{
    int32_t *tokens = malloc(count * sizeof *tokens);
    for (uint64_t i = 0; i < count; i++) {
        tokens[i] = first + (int32_t)i;
    }
    make(path, vocab, tokens, count);
    free(tokens);
}

struct file_bytes file_load(const char *path)
{
    FILE *in = fopen(path, "rb");
    ASSERT(in != NULL);
    struct file_bytes file = {0};
    fseek(in, 0, SEEK_END);
    file.n = (size_t)ftell(in);
    rewind(in);
    file.data = malloc(file.n + 64); /* room for tests that append */
    ASSERT(fread(file.data, 1, file.n, in) == file.n);
    fclose(in);
    return file;
}

void file_store(const char *path, struct file_bytes file)
{
    FILE *out = fopen(path, "wb");
    ASSERT(out != NULL && fwrite(file.data, 1, file.n, out) == file.n && fclose(out) == 0);
}

void file_free(struct file_bytes *file)
{
    free(file->data);
}

uint64_t bytes_get(const unsigned char *at, int n)
{
    uint64_t value = 0;
    while (n-- > 0) {
        value = value << 8 | at[n];
    }
    return value;
}

void bytes_put(unsigned char *at, int n, uint64_t value)
{
    for (; n > 0; n--, at++, value >>= 8) {
        *at = (unsigned char)(value & 255);
    }
}

void shard_repair(struct file_bytes *file)
{
    uint64_t frames = bytes_get(file->data + 32, 8);
    if (file->n < 64 || frames > (file->n - 64) / 16) {
        return;
    }
    unsigned char *table = file->data + 64;
    for (uint64_t f = 0; f < frames; f++) {
        uint64_t start = bytes_get(table + 16 * f, 8);
        uint64_t end = f + 1 < frames ? bytes_get(table + 16 * (f + 1), 8) : file->n;
        if (start < end && end <= file->n) {
            bytes_put(table + 16 * f + 8, 8, XXH3_64bits(file->data + start, end - start));
        }
    }
    unsigned char *covered = malloc(56 + 16 * frames);
    memcpy(covered, file->data, 56);
    memcpy(covered + 56, table, 16 * frames);
    bytes_put(file->data + 56, 8, XXH3_64bits(covered, 56 + 16 * frames));
    free(covered);
}
