/* checkpoint: manifest.json. */
#include "checkpoint/manifest.h"

#include "checkpoint/checkpoint_folder.h"
#include "core/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { MANIFEST_VERSION = 1, READ_BYTES = 1 << 20, HEX_BYTES = 33 };

int64_t manifest_extents(uint64_t bytes)
{
    return (int64_t)((bytes + manifest_extent_bytes - 1) / manifest_extent_bytes);
}

void manifest_close(struct manifest *manifest)
{
    for (int i = 0; i < manifest->count; i++) {
        free(manifest->files[i].digests);
    }
    *manifest = (struct manifest){0};
}

enum status manifest_add(struct manifest *manifest, const char *path, uint64_t bytes, struct manifest_file **file)
{
    ASSERT(manifest->count < MANIFEST_FILES_MAX && strlen(path) < MANIFEST_PATH_BYTES);
    struct manifest_file *added = &manifest->files[manifest->count];
    int64_t extents = manifest_extents(bytes);
    struct digest *digests = calloc((size_t)extents + 1, sizeof *digests);
    if (digests == NULL) {
        return status_fail(ERR_NOMEM, "%s: no memory for the hashes of %lld extents", path, (long long)extents);
    }
    *added = (struct manifest_file){.bytes = bytes, .extents = extents, .digests = digests};
    snprintf(added->path, sizeof added->path, "%s", path);
    manifest->count++;
    *file = added;
    return OK;
}

static void digest_hex(const struct digest *digest, char hex[HEX_BYTES])
{
    for (size_t i = 0; i < sizeof digest->bytes; i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest->bytes[i]);
    }
}

/* Hashes `n` bytes of the file from `offset`. */
static enum status hash_range(int fd, const char *path, uint64_t offset, uint64_t n, struct digest *digest)
{
    unsigned char *buffer = malloc(READ_BYTES);
    XXH3_state_t *state = XXH3_createState();
    enum status status = OK;
    if (buffer == NULL || state == NULL) {
        status = status_fail(ERR_NOMEM, "%s: no memory to hash it", path);
    } else {
        XXH3_128bits_reset(state);
    }
    while (status == OK && n > 0) {
        ssize_t got = pread(fd, buffer, n < READ_BYTES ? n : READ_BYTES, (off_t)offset);
        if (got > 0) {
            XXH3_128bits_update(state, buffer, (size_t)got);
            offset += (uint64_t)got;
            n -= (uint64_t)got;
        } else if (got == 0) {
            status = status_fail(ERR_DATA, "%s: ends at byte %llu while it is read", path, (unsigned long long)offset);
        } else if (errno != EINTR) {
            status = status_fail_errno(ERR_IO, path, "cannot read");
        }
    }
    if (status == OK) {
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
        memcpy(digest->bytes, canonical.digest, sizeof digest->bytes);
    }
    XXH3_freeState(state);
    free(buffer);
    return status;
}

static enum status hash_extent(int fd, const char *path, uint64_t file_bytes, int64_t extent, struct digest *digest)
{
    uint64_t begin = (uint64_t)extent * manifest_extent_bytes;
    uint64_t n = file_bytes - begin < manifest_extent_bytes ? file_bytes - begin : manifest_extent_bytes;
    return hash_range(fd, path, begin, n, digest);
}

static enum status open_file(const char *path, int *fd, uint64_t *bytes)
{
    struct stat info;
    int opened = open(path, O_RDONLY | O_CLOEXEC);
    if (opened < 0) {
        return errno == ENOENT || errno == ENOTDIR ? status_fail(ERR_DATA, "%s: missing", path)
                                                   : status_fail_errno(ERR_IO, path, "cannot open");
    }
    if (fstat(opened, &info) != 0) {
        close(opened);
        return status_fail_errno(ERR_IO, path, "cannot stat");
    }
    if (!S_ISREG(info.st_mode)) {
        close(opened);
        return status_fail(ERR_DATA, "%s: expected a file, found a folder or device", path);
    }
    *fd = opened;
    *bytes = (uint64_t)info.st_size;
    return OK;
}

enum status manifest_add_written(struct manifest *manifest, const char *folder, const char *name)
{
    char path[PATH_MAX];
    int fd = -1;
    uint64_t bytes = 0;
    struct manifest_file *file = NULL;
    TRY(path_inside(path, folder, name));
    TRY(open_file(path, &fd, &bytes));
    enum status status = manifest_add(manifest, name, bytes, &file);
    for (int64_t e = 0; status == OK && e < file->extents; e++) {
        status = hash_extent(fd, path, bytes, e, &file->digests[e]);
    }
    close(fd);
    return status;
}

enum status manifest_write(const struct manifest *manifest, const char *folder)
{
    char path[PATH_MAX];
    TRY(path_inside(path, folder, "manifest.json"));
    json_t *files = json_array();
    for (int i = 0; i < manifest->count; i++) {
        const struct manifest_file *file = &manifest->files[i];
        json_t *hashes = json_array();
        for (int64_t e = 0; e < file->extents; e++) {
            char hex[HEX_BYTES];
            digest_hex(&file->digests[e], hex);
            json_array_append_new(hashes, json_string(hex));
        }
        json_array_append_new(files, json_pack("{s:s, s:I, s:o}", "path", file->path, "bytes", (json_int_t)file->bytes,
                                               "xxh3_128", hashes));
    }
    json_t *root = json_pack("{s:i, s:I, s:o}", "version", MANIFEST_VERSION, "extent_bytes",
                             (json_int_t)manifest_extent_bytes, "files", files);
    enum status status =
        root != NULL ? json_write_file(path, root) : status_fail(ERR_NOMEM, "%s: no memory to write it", path);
    json_decref(root);
    return status;
}

static bool digest_from_hex(const char *hex, struct digest *digest)
{
    if (hex == NULL || strlen(hex) != 2 * sizeof digest->bytes || strspn(hex, "0123456789abcdef") != strlen(hex)) {
        return false;
    }
    for (size_t i = 0; i < sizeof digest->bytes; i++) {
        const char pair[3] = {hex[2 * i], hex[2 * i + 1], '\0'};
        digest->bytes[i] = (unsigned char)strtoul(pair, NULL, 16);
    }
    return true;
}

static enum status read_file_entry(struct manifest *manifest, const char *path, const json_t *entry)
{
    const char *name = NULL;
    int64_t bytes = 0;
    struct manifest_file *file = NULL;
    TRY(json_get_string(entry, path, "path", &name));
    TRY(json_get_int(entry, path, "bytes", &bytes));
    const json_t *hashes = json_object_get(entry, "xxh3_128");
    if (name[0] == '\0' || name[0] == '/' || strstr(name, "..") != NULL || strlen(name) >= MANIFEST_PATH_BYTES) {
        return status_fail(ERR_DATA, "%s: path \"%.80s\": expected a file inside the checkpoint", path, name);
    }
    if (bytes < 0 || manifest_extents((uint64_t)bytes) != (int64_t)json_array_size(hashes)) {
        return status_fail(ERR_DATA, "%s: %s: %zu hashes for %lld bytes, expected %lld", path, name,
                           json_array_size(hashes), (long long)bytes,
                           (long long)(bytes < 0 ? 0 : manifest_extents((uint64_t)bytes)));
    }
    if (manifest->count == MANIFEST_FILES_MAX) {
        return status_fail(ERR_DATA, "%s: more than %d files", path, MANIFEST_FILES_MAX);
    }
    TRY(manifest_add(manifest, name, (uint64_t)bytes, &file));
    for (int64_t e = 0; e < file->extents; e++) {
        if (!digest_from_hex(json_string_value(json_array_get(hashes, (size_t)e)), &file->digests[e])) {
            return status_fail(ERR_DATA, "%s: %s: hash %lld is not 32 hex digits", path, name, (long long)e);
        }
    }
    return OK;
}

static enum status read_root(struct manifest *manifest, const char *path, const json_t *root)
{
    int64_t version = 0;
    int64_t extent_bytes = 0;
    TRY(json_get_int(root, path, "version", &version));
    TRY(json_get_int(root, path, "extent_bytes", &extent_bytes));
    if (version != MANIFEST_VERSION || extent_bytes != (int64_t)manifest_extent_bytes) {
        return status_fail(ERR_DATA, "%s: version %lld with extents of %lld bytes, this program reads %d with %lld",
                           path, (long long)version, (long long)extent_bytes, MANIFEST_VERSION,
                           (long long)manifest_extent_bytes);
    }
    const json_t *files = json_object_get(root, "files");
    if (json_array_size(files) == 0) {
        return status_fail(ERR_DATA, "%s: it lists no files", path);
    }
    for (size_t i = 0; i < json_array_size(files); i++) {
        TRY(read_file_entry(manifest, path, json_array_get(files, i)));
    }
    return OK;
}

enum status manifest_read(struct manifest *manifest, const char *folder)
{
    char path[PATH_MAX];
    json_t *root = NULL;
    TRY(path_inside(path, folder, "manifest.json"));
    if (access(path, F_OK) != 0 && errno == ENOENT) {
        return status_fail(ERR_DATA, "%s: missing: this checkpoint is not complete", path);
    }
    TRY(json_read_file(path, &root));
    *manifest = (struct manifest){0};
    enum status status = read_root(manifest, path, root);
    json_decref(root);
    if (status != OK) {
        manifest_close(manifest);
    }
    return status;
}

static enum status check_hashes(const struct manifest_file *file, int fd, const char *path)
{
    for (int64_t e = 0; e < file->extents; e++) {
        struct digest found;
        TRY(hash_extent(fd, path, file->bytes, e, &found));
        if (memcmp(&found, &file->digests[e], sizeof found) != 0) {
            char expected_hex[HEX_BYTES];
            char found_hex[HEX_BYTES];
            digest_hex(&file->digests[e], expected_hex);
            digest_hex(&found, found_hex);
            return status_fail(ERR_DATA,
                               "%s: damaged in extent %lld (64 MiB from byte %llu): expected hash %s, found %s", path,
                               (long long)e, (unsigned long long)e * manifest_extent_bytes, expected_hex, found_hex);
        }
    }
    return OK;
}

/* An unlisted file would go unchecked: these are in every checkpoint, and a resume reads them. */
static enum status check_listed(const struct manifest *manifest, const char *folder)
{
    static const char *const required[] = {"config.json", "model.safetensors", "train_state/optimizer.safetensors",
                                           "train_state/state.json"};
    for (size_t r = 0; r < sizeof required / sizeof required[0]; r++) {
        int i = 0;
        while (i < manifest->count && strcmp(manifest->files[i].path, required[r]) != 0) {
            i++;
        }
        if (i == manifest->count) {
            return status_fail(ERR_DATA,
                               "%s/manifest.json: does not list %s, so that nothing can tell whether that file is "
                               "whole: resume from another checkpoint, or put the manifest of this save back",
                               folder, required[r]);
        }
    }
    return OK;
}

enum status manifest_check(const struct manifest *manifest, const char *folder, bool hashes)
{
    TRY(check_listed(manifest, folder));
    for (int i = 0; i < manifest->count; i++) {
        const struct manifest_file *file = &manifest->files[i];
        char path[PATH_MAX];
        int fd = -1;
        uint64_t bytes = 0;
        TRY(path_inside(path, folder, file->path));
        TRY(open_file(path, &fd, &bytes));
        enum status status = OK;
        if (bytes != file->bytes) {
            status = status_fail(ERR_DATA, "%s: expected %llu bytes, found %llu", path, (unsigned long long)file->bytes,
                                 (unsigned long long)bytes);
        } else if (hashes) {
            status = check_hashes(file, fd, path);
        }
        close(fd);
        TRY(status);
    }
    return OK;
}
