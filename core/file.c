/* core: whole files. A name either holds the old bytes or all the new ones, also after a crash or a power cut. */
#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* write() may take less than it is given; the data is safe only after fsync. */
static enum status write_all(int fd, const char *path, const char *bytes, size_t n)
{
    while (n > 0) {
        ssize_t written = write(fd, bytes, n);
        if (written < 0 && errno != EINTR) {
            return status_fail_errno(ERR_IO, path, "cannot write");
        }
        if (written > 0) {
            bytes += written;
            n -= (size_t)written;
        }
    }
    return fsync(fd) == 0 ? OK : status_fail_errno(ERR_IO, path, "cannot fsync");
}

/* The folder of a path, "." when it names none. */
static void folder_of(const char *path, char folder[PATH_MAX])
{
    const char *slash = strrchr(path, '/');
    if (!slash) {
        snprintf(folder, PATH_MAX, ".");
    } else {
        snprintf(folder, PATH_MAX, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    }
}

/* Room for the path and its temporary neighbour in buffers of PATH_MAX. */
static enum status check_path(const char *path)
{
    if (strlen(path) + sizeof ".tmp" > PATH_MAX) {
        return status_fail(ERR_IO, "%.80s...: path of %zu bytes, at most %d", path, strlen(path), PATH_MAX - 5);
    }
    return OK;
}

enum status file_replace(const char *temporary, const char *path)
{
    if (rename(temporary, path) != 0) {
        enum status status = status_fail_errno(ERR_IO, path, "cannot rename the temporary file");
        unlink(temporary);
        return status;
    }
    char folder[PATH_MAX];
    folder_of(path, folder);
    return file_sync_folder(folder);
}

enum status file_write_atomic(const char *path, const void *bytes, size_t n)
{
    TRY(check_path(path));
    char temporary[PATH_MAX + sizeof ".tmp"];
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        return status_fail_errno(ERR_IO, temporary, "cannot create");
    }
    enum status status = write_all(fd, temporary, bytes, n);
    if (close(fd) != 0 && status == OK) {
        status = status_fail_errno(ERR_IO, temporary, "cannot close");
    }
    if (status != OK) {
        unlink(temporary);
        return status;
    }
    return file_replace(temporary, path);
}

static enum status read_open_file(FILE *file, const char *path, size_t limit, char **bytes, size_t *n)
{
    size_t capacity = 1 << 16;
    size_t used = 0;
    char *buffer = malloc(capacity);
    /* Grows as it reads: sizes of pipes and of files in /proc are not known beforehand. */
    while (buffer) {
        size_t got = fread(buffer + used, 1, capacity - used - 1, file);
        used += got;
        if (used > limit) {
            free(buffer);
            return status_fail(ERR_DATA, "%s: larger than the %zu bytes expected at most", path, limit);
        }
        if (got == 0 && ferror(file)) {
            enum status status = status_fail_errno(ERR_IO, path, "cannot read");
            free(buffer);
            return status;
        }
        if (got == 0) {
            buffer[used] = '\0';
            *bytes = buffer;
            *n = used;
            return OK;
        }
        if (used == capacity - 1) {
            char *larger = realloc(buffer, 2 * capacity);
            if (!larger) {
                free(buffer);
            }
            buffer = larger;
            capacity *= 2;
        }
    }
    return status_fail(ERR_NOMEM, "%s: no memory to read it (%zu bytes)", path, capacity);
}

enum status file_read_all(const char *path, size_t limit, char **bytes, size_t *n)
{
    FILE *file = fopen(path, "rbe");
    if (!file) {
        return status_fail_errno(ERR_IO, path, "cannot open");
    }
    enum status status = read_open_file(file, path, limit, bytes, n);
    fclose(file);
    return status;
}

/* A folder that another process makes at the same moment is as good as ours. */
static enum status make_folder(const char *path)
{
    struct stat info;
    if (mkdir(path, 0777) == 0 || (errno == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode))) {
        return OK;
    }
    return status_fail_errno(ERR_IO, path, "cannot make the folder");
}

enum status file_make_folders(const char *path)
{
    TRY(check_path(path));
    char prefix[PATH_MAX];
    snprintf(prefix, sizeof prefix, "%s", path);
    for (char *at = prefix + 1; prefix[0] != '\0' && *at != '\0'; at++) {
        if (*at == '/') {
            *at = '\0';
            TRY(make_folder(prefix));
            *at = '/';
        }
    }
    return make_folder(prefix);
}

enum status file_sync_folder(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return status_fail_errno(ERR_IO, path, "cannot open the folder");
    }
    /* EINVAL: file systems that cannot sync a folder keep its names safe by themselves or not at all. */
    enum status status = fsync(fd) == 0 || errno == EINVAL ? OK : status_fail_errno(ERR_IO, path, "cannot fsync");
    close(fd);
    return status;
}
