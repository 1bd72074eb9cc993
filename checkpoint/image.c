/* checkpoint: writing a safetensors file by extents. */
#include "checkpoint/image.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum status image_open(struct image *image, const struct checkpoint_tensor *tensors, int count)
{
    struct safetensors_entry *entries = calloc((size_t)count + 1, sizeof *entries);
    if (entries == NULL) {
        return status_fail(ERR_NOMEM, "checkpoint: no memory for %d tensors", count);
    }
    enum status status = OK;
    for (int i = 0; i < count && status == OK; i++) {
        const struct checkpoint_tensor *t = &tensors[i];
        ASSERT(t->rank >= 0 && t->rank <= SAFETENSORS_RANK_MAX);
        if (strlen(t->name) >= sizeof entries[i].name) {
            status = status_fail(ERR_DATA, "tensor %s: a name of %zu bytes, at most %zu", t->name, strlen(t->name),
                                 sizeof entries[i].name - 1);
        }
        snprintf(entries[i].name, sizeof entries[i].name, "%s", t->name);
        entries[i].dtype = t->dtype;
        entries[i].rank = t->rank;
        memcpy(entries[i].shape, t->shape, (size_t)t->rank * sizeof t->shape[0]);
    }
    if (status == OK) {
        status = safetensors_layout(&image->layout, entries, count);
        image->tensors = tensors;
    }
    free(entries);
    return status;
}

void image_close(struct image *image)
{
    safetensors_close(&image->layout);
    image->tensors = NULL;
}

enum status image_create(const struct image *image, const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        return status_fail_errno(ERR_IO, path, "cannot create");
    }
    off_t bytes = (off_t)image->layout.file_bytes;
    enum status status = OK;
    /* A full disk shows here, before minutes of writing; file systems that cannot reserve say so in other words. */
    if (fallocate(fd, 0, 0, bytes) != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
        char what[64];
        snprintf(what, sizeof what, "cannot reserve %lld bytes", (long long)bytes);
        status = status_fail_errno(ERR_IO, path, what);
    } else if (ftruncate(fd, bytes) != 0) {
        status = status_fail_errno(ERR_IO, path, "cannot set the size");
    }
    if (close(fd) != 0 && status == OK) {
        status = status_fail_errno(ERR_IO, path, "cannot close");
    }
    return status;
}

/* The longest run of bytes from `offset`, at most *n, that lies in one piece of memory. */
static enum status piece_at(const struct image *image, uint64_t offset, uint64_t *n, const char **bytes)
{
    const struct safetensors *layout = &image->layout;
    if (offset < layout->header_bytes) {
        *n = *n < layout->header_bytes - offset ? *n : layout->header_bytes - offset;
        *bytes = layout->header + offset;
        return OK;
    }
    int i = 0;
    while (offset >= layout->entries[i].offset + layout->entries[i].bytes) {
        i++;
        ASSERT(i < layout->count);
    }
    const struct checkpoint_tensor *tensor = &image->tensors[i];
    uint64_t within = offset - layout->entries[i].offset, left = layout->entries[i].bytes - within;
    *n = *n < left ? *n : left;
    if (tensor->store == NULL) {
        *bytes = (const char *)tensor->data + within;
        return OK;
    }
    *n = *n < tensor->store->piece ? *n : tensor->store->piece;
    *bytes = tensor->store->buffer;
    return tensor->store->get(tensor, within, *n);
}

static enum status write_all(int fd, const char *path, const char *bytes, uint64_t n, uint64_t offset)
{
    for (uint64_t done = 0; done < n;) {
        ssize_t written = pwrite(fd, bytes + done, n - done, (off_t)(offset + done));
        if (written < 0 && errno != EINTR) {
            return status_fail_errno(ERR_IO, path, "cannot write");
        }
        done += written > 0 ? (uint64_t)written : 0;
    }
    return OK;
}

static enum status write_range(const struct image *image, int fd, const char *path, uint64_t begin, uint64_t end,
                               XXH3_state_t *hash)
{
    while (begin < end) {
        uint64_t n = end - begin;
        const char *bytes;
        TRY(piece_at(image, begin, &n, &bytes));
        TRY(write_all(fd, path, bytes, n, begin));
        XXH3_128bits_update(hash, bytes, n);
        begin += n;
    }
    return OK;
}

static enum status write_extents(const struct image *image, int fd, const char *path, int64_t first, int64_t last,
                                 struct digest *digests)
{
    XXH3_state_t *hash = XXH3_createState();
    if (hash == NULL) {
        return status_fail(ERR_NOMEM, "%s: no memory to hash it", path);
    }
    enum status status = OK;
    for (int64_t e = first; e < last && status == OK; e++) {
        uint64_t begin = (uint64_t)e * manifest_extent_bytes;
        uint64_t left = image->layout.file_bytes - begin;
        XXH3_128bits_reset(hash);
        status = write_range(image, fd, path, begin,
                             begin + (left < manifest_extent_bytes ? left : manifest_extent_bytes), hash);
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(hash));
        memcpy(digests[e - first].bytes, canonical.digest, sizeof digests->bytes);
    }
    XXH3_freeState(hash);
    return status;
}

enum status image_write(const struct image *image, const char *path, int64_t first, int64_t last,
                        struct digest *digests)
{
    if (first == last) {
        return OK;
    }
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return status_fail_errno(ERR_IO, path, "cannot open");
    }
    enum status status = write_extents(image, fd, path, first, last, digests);
    if (status == OK && fsync(fd) != 0) {
        status = status_fail_errno(ERR_IO, path, "cannot fsync");
    }
    if (close(fd) != 0 && status == OK) {
        status = status_fail_errno(ERR_IO, path, "cannot close");
    }
    return status;
}
