/* checkpoint: loading. All names, dtypes and shapes are compared before the first byte is read into place. */
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/manifest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DESCRIPTION_BYTES = 128 };

enum status checkpoint_verify(const char *path)
{
    struct manifest manifest;
    TRY(manifest_read(&manifest, path));
    enum status status = manifest_check(&manifest, path, true);
    manifest_close(&manifest);
    return status;
}

enum status checkpoint_read_train(const char *path, json_t **train)
{
    char file[PATH_MAX];
    TRY(path_inside(file, path, "train_state/state.json"));
    return json_read_file(file, train);
}

static void describe_wanted(const struct checkpoint_tensor *tensor, char text[DESCRIPTION_BYTES])
{
    struct safetensors_entry entry = {.dtype = tensor->dtype, .rank = tensor->rank};
    memcpy(entry.shape, tensor->shape, (size_t)tensor->rank * sizeof entry.shape[0]);
    safetensors_describe(&entry, text, DESCRIPTION_BYTES);
}

static enum status check_tensor(const struct safetensors *file, const char *path,
                                const struct checkpoint_tensor *wanted)
{
    char has[DESCRIPTION_BYTES];
    char wants[DESCRIPTION_BYTES];
    const struct safetensors_entry *entry = safetensors_find(file, wanted->name);
    describe_wanted(wanted, wants);
    if (entry == NULL) {
        return status_fail(ERR_CONFIG, "%s: tensor %s: checkpoint has none, config has %s", path, wanted->name, wants);
    }
    if (entry->dtype != wanted->dtype || entry->rank != wanted->rank ||
        memcmp(entry->shape, wanted->shape, (size_t)entry->rank * sizeof entry->shape[0]) != 0) {
        safetensors_describe(entry, has, sizeof has);
        return status_fail(ERR_CONFIG, "%s: tensor %s: checkpoint has %s, config has %s", path, wanted->name, has,
                           wants);
    }
    return OK;
}

static bool is_wanted(const struct checkpoint_tensor *tensors, int count, const char *name)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(tensors[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static enum status check_tensors(const struct safetensors *file, const char *path,
                                 const struct checkpoint_tensor *tensors, int count)
{
    for (int i = 0; i < count; i++) {
        TRY(check_tensor(file, path, &tensors[i]));
    }
    for (int i = 0; i < file->count; i++) {
        if (!is_wanted(tensors, count, file->entries[i].name)) {
            char has[DESCRIPTION_BYTES];
            safetensors_describe(&file->entries[i], has, sizeof has);
            return status_fail(ERR_CONFIG, "%s: tensor %s: checkpoint has %s, config has none", path,
                               file->entries[i].name, has);
        }
    }
    return OK;
}

/* Bytes [offset, offset + bytes) of a tensor into memory. */
static enum status read_bytes(int fd, const char *path, const struct safetensors_entry *entry, uint64_t offset,
                              uint64_t bytes, char *data)
{
    uint64_t got = 0;
    while (got < bytes) {
        ssize_t n = pread(fd, data + got, bytes - got, (off_t)(entry->offset + offset + got));
        if (n == 0) {
            return status_fail(ERR_DATA, "%s: tensor %s: the file ends %llu bytes early", path, entry->name,
                               (unsigned long long)(entry->bytes - offset - got));
        }
        if (n < 0 && errno != EINTR) {
            return status_fail_errno(ERR_IO, path, "cannot read");
        }
        got += n > 0 ? (uint64_t)n : 0;
    }
    return OK;
}

static enum status read_tensor(int fd, const char *path, const struct safetensors_entry *entry,
                               const struct checkpoint_tensor *tensor)
{
    const struct checkpoint_store *store = tensor->store;
    if (store == NULL) {
        return read_bytes(fd, path, entry, 0, entry->bytes, tensor->data);
    }
    for (uint64_t offset = 0; offset < entry->bytes;) {
        uint64_t n = entry->bytes - offset < store->piece ? entry->bytes - offset : store->piece;
        TRY(read_bytes(fd, path, entry, offset, n, store->buffer));
        TRY(store->put(tensor, offset, n));
        offset += n;
    }
    return OK;
}

static enum status read_tensors(const struct safetensors *file, const char *path,
                                const struct checkpoint_tensor *tensors, int count)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return status_fail_errno(ERR_IO, path, "cannot open");
    }
    enum status status = OK;
    for (int i = 0; i < count && status == OK; i++) {
        status = read_tensor(fd, path, safetensors_find(file, tensors[i].name), &tensors[i]);
    }
    close(fd);
    return status;
}

struct part {
    char path[PATH_MAX];
    struct safetensors file;
    const struct checkpoint_tensor *tensors;
    int count;
};

static enum status open_part(struct part *part, const char *folder, const char *name)
{
    if (part->count == 0) {
        return OK;
    }
    TRY(path_inside(part->path, folder, name));
    TRY(safetensors_read_header(&part->file, part->path));
    return check_tensors(&part->file, part->path, part->tensors, part->count);
}

static enum status read_part(const struct part *part)
{
    return part->count > 0 ? read_tensors(&part->file, part->path, part->tensors, part->count) : OK;
}

enum status checkpoint_load(const char *path, const struct checkpoint_content *content)
{
    struct part model = {.tensors = content->model, .count = content->n_model};
    struct part state = {.tensors = content->state, .count = content->n_state};
    enum status status = open_part(&model, path, "model.safetensors");
    if (status == OK) {
        status = open_part(&state, path, "train_state/optimizer.safetensors");
    }
    if (status == OK) {
        status = read_part(&model);
    }
    if (status == OK) {
        status = read_part(&state);
    }
    safetensors_close(&model.file);
    safetensors_close(&state.file);
    return status;
}
