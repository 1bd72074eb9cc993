/* data: numbered shards. */
#include "data/shard_set.h"

#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/* `number` is "00012", or "*" for a glob of all. */
static enum status shard_name(char path[PATH_MAX], const struct shard_set *set, const char *number)
{
    int n = snprintf(path, PATH_MAX, "%s/%s-%s.tok.zst", set->folder, set->kind, number);
    if (n < 0 || n >= PATH_MAX) {
        return status_fail(ERR_USAGE, "%.80s...: a path of more than %d bytes", set->folder, PATH_MAX - 1);
    }
    return OK;
}

static enum status numbered_name(char path[PATH_MAX], const struct shard_set *set, int shard)
{
    char number[16];
    snprintf(number, sizeof number, "%05d", shard);
    return shard_name(path, set, number);
}

enum status shard_set_finish(struct shard_set *set)
{
    struct shard_writer *writer = set->writer;
    set->writer = NULL;
    set->in_shard = 0;
    return writer ? shard_writer_finish(writer) : OK;
}

enum status shard_set_add(struct shard_set *set, const int32_t *tokens, size_t n)
{
    ASSERT(set->shard_tokens >= 1);
    while (n > 0) {
        if (!set->writer) {
            char path[PATH_MAX];
            TRY(numbered_name(path, set, set->shards));
            TRY(shard_writer_open(&set->writer, path, set->vocab));
            set->shards++;
        }
        uint64_t room = set->shard_tokens - set->in_shard;
        size_t part = n < room ? n : (size_t)room;
        TRY(shard_writer_add(set->writer, tokens, part));
        tokens += part;
        n -= part;
        set->in_shard += part;
        set->tokens += part;
        if (set->in_shard == set->shard_tokens) {
            TRY(shard_set_finish(set));
        }
    }
    return OK;
}

void shard_set_remove(struct shard_set *set)
{
    shard_writer_abandon(set->writer);
    set->writer = NULL;
    for (int i = 0; i < set->shards; i++) {
        char path[PATH_MAX];
        if (numbered_name(path, set, i) == OK) {
            unlink(path);
        }
    }
    set->shards = 0;
}

uint64_t shard_set_bytes(const struct shard_set *set)
{
    uint64_t bytes = 0;
    for (int i = 0; i < set->shards; i++) {
        char path[PATH_MAX];
        struct stat info;
        if (numbered_name(path, set, i) == OK && stat(path, &info) == 0) {
            bytes += (uint64_t)info.st_size;
        }
    }
    return bytes;
}

enum status shard_set_clear(const struct shard_set *set, bool overwrite)
{
    char pattern[PATH_MAX];
    TRY(shard_name(pattern, set, "*"));
    glob_t found = {0};
    enum status status = OK;
    if (glob(pattern, 0, NULL, &found) == 0 && !overwrite) {
        status =
            status_fail(ERR_USAGE, "%s: is already there: choose another --out or add --overwrite", found.gl_pathv[0]);
    }
    for (size_t i = 0; status == OK && i < found.gl_pathc; i++) {
        if (unlink(found.gl_pathv[i]) != 0) {
            status = status_fail_errno(ERR_IO, found.gl_pathv[i], "cannot remove");
        }
    }
    globfree(&found);
    return status;
}
