/* checkpoint: saving. Rank 0 lays the directory out under a temporary name; every rank writes its share of the extents
 * of both tensor files and records their hashes; rank 0 adds the small files and the manifest and renames. Until then
 * nothing that was there is touched. */
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/image.h"
#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COPY_BYTES_MAX = 1 << 28 };
static const char *const tensor_files[2] = {"model.safetensors", "train_state/optimizer.safetensors"};

struct save {
    const char *folder;
    const struct checkpoint_group *group;
    const struct checkpoint_content *content;
    char temporary[PATH_MAX], final[PATH_MAX];
    struct image images[2]; /* in the order of tensor_files */
};

static enum status agree(const struct save *s, enum status mine)
{
    enum status worst = mine;
    if (s->group->size > 1) {
        enum status status = s->group->agree(s->group->context, mine, &worst);
        return status != OK ? status : worst;
    }
    return worst;
}

static enum status inside(char path[PATH_MAX], const struct save *s, const char *name)
{
    return path_inside(path, s->temporary, name);
}

static int64_t extents_of(const struct save *s, int file)
{
    return manifest_extents(s->images[file].layout.file_bytes);
}

static enum status make_temporary(const struct save *s)
{
    char path[PATH_MAX];
    TRY(file_make_folders(s->folder));
    TRY(remove_leftovers(s->folder));
    TRY(inside(path, s, "train_state"));
    TRY(file_make_folders(path));
    for (int f = 0; f < 2; f++) {
        TRY(inside(path, s, tensor_files[f]));
        TRY(image_create(&s->images[f], path));
    }
    TRY(inside(path, s, "hashes"));
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 || close(fd) != 0) {
        return status_fail_errno(ERR_IO, path, "cannot create");
    }
    return OK;
}

static enum status prepare(struct save *s, int64_t step)
{
    TRY(step_path(s->final, s->folder, step));
    TRY(step_path_temporary(s->temporary, s->folder, step));
    TRY(image_open(&s->images[0], s->content->model, s->content->n_model));
    TRY(image_open(&s->images[1], s->content->state, s->content->n_state));
    return s->group->rank == 0 ? make_temporary(s) : OK;
}

/* Ranks tell rank 0 their hashes through a file in which each extent has its place: model first, then optimizer. */
static enum status record_hashes(const struct save *s, int64_t first, const struct digest *digests, int64_t n)
{
    char path[PATH_MAX];
    TRY(inside(path, s, "hashes"));
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return status_fail_errno(ERR_IO, path, "cannot open");
    }
    size_t bytes = (size_t)n * sizeof *digests;
    ssize_t written = pwrite(fd, digests, bytes, (off_t)((size_t)first * sizeof *digests));
    enum status status = OK;
    if (written != (ssize_t)bytes || fsync(fd) != 0) {
        status = status_fail_errno(ERR_IO, path, "cannot write");
    }
    close(fd);
    return status;
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* This rank's contiguous share of all extents. */
static enum status write_share(const struct save *s)
{
    int64_t model = extents_of(s, 0);
    int64_t all = model + extents_of(s, 1);
    int64_t first = all * s->group->rank / s->group->size;
    int64_t last = all * (s->group->rank + 1) / s->group->size;
    if (first == last) {
        return OK;
    }
    struct digest *digests = calloc((size_t)(last - first), sizeof *digests);
    if (digests == NULL) {
        return status_fail(ERR_NOMEM, "%s: no memory for %lld hashes", s->final, (long long)(last - first));
    }
    enum status status = OK;
    for (int f = 0; f < 2 && status == OK; f++) {
        int64_t base = f == 0 ? 0 : model;
        int64_t begin = first > base ? first : base;
        int64_t end = min_i64(last, base + extents_of(s, f));
        char path[PATH_MAX];
        status = inside(path, s, tensor_files[f]);
        if (status == OK && begin < end) {
            status = image_write(&s->images[f], path, begin - base, end - base, digests + (begin - first));
        }
    }
    if (status == OK) {
        status = record_hashes(s, first, digests, last - first);
    }
    free(digests);
    return status;
}

static enum status add_tensor_files(const struct save *s, struct manifest *manifest)
{
    char path[PATH_MAX];
    char *hashes = NULL;
    size_t bytes = 0;
    size_t expected = (size_t)(extents_of(s, 0) + extents_of(s, 1)) * sizeof(struct digest);
    TRY(inside(path, s, "hashes"));
    TRY(file_read_all(path, expected, &hashes, &bytes));
    enum status status = OK;
    if (bytes != expected) {
        status = status_fail(ERR_IO, "%s: expected %zu bytes of hashes, found %zu: the ranks do not see one folder",
                             path, expected, bytes);
    }
    const struct digest *next = (const struct digest *)(const void *)hashes;
    for (int f = 0; f < 2 && status == OK; f++) {
        struct manifest_file *file = NULL;
        status = manifest_add(manifest, tensor_files[f], s->images[f].layout.file_bytes, &file);
        for (int64_t e = 0; status == OK && e < file->extents; e++) {
            file->digests[e] = *next++;
        }
    }
    free(hashes);
    if (status == OK && unlink(path) != 0) {
        status = status_fail_errno(ERR_IO, path, "cannot remove");
    }
    return status;
}

static enum status add_json(const struct save *s, struct manifest *manifest, const char *name, const json_t *root)
{
    char path[PATH_MAX];
    TRY(inside(path, s, name));
    TRY(json_write_file(path, root));
    return manifest_add_written(manifest, s->temporary, name);
}

/* A copy of the file at `from`, if there is one, as `name`. */
static enum status add_copy(const struct save *s, struct manifest *manifest, const char *name, const char *from)
{
    if (from == NULL) {
        return OK;
    }
    char path[PATH_MAX];
    char *text = NULL;
    size_t bytes = 0;
    TRY(inside(path, s, name));
    TRY(file_read_all(from, COPY_BYTES_MAX, &text, &bytes));
    enum status status = file_write_atomic(path, text, bytes);
    free(text);
    TRY(status);
    return manifest_add_written(manifest, s->temporary, name);
}

static enum status complete(const struct save *s, struct manifest *manifest)
{
    char path[PATH_MAX];
    TRY(add_tensor_files(s, manifest));
    TRY(add_json(s, manifest, "config.json", s->content->config));
    TRY(add_json(s, manifest, "train_state/state.json", s->content->train));
    TRY(add_copy(s, manifest, "tokenizer.json", s->content->tokenizer_json));
    TRY(add_copy(s, manifest, "train_state/gemm.json", s->content->gemm_json));
    TRY(inside(path, s, "train_state"));
    TRY(file_sync_folder(path));
    TRY(manifest_write(manifest, s->temporary));
    return file_sync_folder(s->temporary);
}

/* Gives the directory its name. One that is there (a resumed run comes to the same step again) is exchanged in one
 * step, where the file system can. */
static enum status put_in_place(const struct save *s)
{
    if (rename(s->temporary, s->final) == 0) {
        return file_sync_folder(s->folder);
    }
    if (errno != EEXIST && errno != ENOTEMPTY) {
        return status_fail_errno(ERR_IO, s->final, "cannot rename the temporary directory");
    }
    if (renameat2(AT_FDCWD, s->temporary, AT_FDCWD, s->final, RENAME_EXCHANGE) != 0) {
        char aside[PATH_MAX];
        int n = snprintf(aside, sizeof aside, "%s_replaced", s->temporary);
        if (n < 0 || n >= (int)sizeof aside || rename(s->final, aside) != 0 || rename(s->temporary, s->final) != 0) {
            return status_fail_errno(ERR_IO, s->final, "cannot replace the directory");
        }
        TRY(file_sync_folder(s->folder));
        return remove_tree(aside);
    }
    TRY(file_sync_folder(s->folder));
    return remove_tree(s->temporary);
}

static enum status finish(const struct save *s)
{
    if (s->group->rank != 0) {
        return OK;
    }
    struct manifest manifest = {0};
    enum status status = complete(s, &manifest);
    manifest_close(&manifest);
    return status == OK ? put_in_place(s) : status;
}

enum status checkpoint_save(const char *folder, int64_t step, const struct checkpoint_group *group,
                            const struct checkpoint_content *content)
{
    ASSERT(step >= 0 && group->rank >= 0 && group->rank < group->size);
    struct save s = {.folder = folder, .group = group, .content = content};
    enum status status = agree(&s, prepare(&s, step));
    if (status == OK) {
        status = agree(&s, write_share(&s));
    }
    if (status == OK) {
        status = agree(&s, finish(&s));
    }
    if (status != OK && group->rank == 0 && s.temporary[0] != '\0' && remove_tree(s.temporary) != OK) {
        status = ERR_IO; /* said by remove_tree; the next save tries again */
    }
    image_close(&s.images[0]);
    image_close(&s.images[1]);
    return status;
}
