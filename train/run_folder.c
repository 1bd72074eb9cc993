/* train: run folder: lock and nonce. */
#include "train/run_folder.h"

#include "core/file.h"
#include "core/log.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

enum { PATH_BYTES = 1100, NONCE_BYTES = 33 };

enum { LOG_NOTHING = LOG_ERROR + 1 };

void ranks_quiet(const struct comm *comm, bool quiet)
{
    if (comm->rank != 0) {
        log_set_level(quiet ? (enum log_level)LOG_NOTHING : LOG_INFO);
    }
}

enum status ranks_agree(struct comm *comm, enum status mine)
{
    /* Largest status, and the lowest rank that failed. */
    int64_t values[2] = {mine, mine != OK ? -comm->rank : INT64_MIN};
    TRY(comm_max_i64(comm, values, 2));
    if (values[0] == OK) {
        return OK;
    }
    if (comm->rank != 0 && values[1] == -comm->rank) {
        ranks_quiet(comm, false);
        log_line(LOG_ERROR, "%s", status_last_message());
    }
    /* Nobody leaves, which would end all, before the cause is printed. */
    TRY(comm_barrier(comm));
    return mine != OK ? mine : (enum status)values[0];
}

void ranks_leave(struct comm *comm, enum status ended)
{
    /* All ranks agree on these. */
    bool together = ended == OK || ended == ERR_DIVERGED || ended == ERR_STOPPED;
    if (!together && comm->size > 1) {
        comm_abort(comm, status_exit_code(ended));
    }
}

/* The lock file stays behind: what counts is the kernel's lock on it, which ends with the process, also by kill -9. */
static enum status take_lock(struct run_folder *folder, const char *path)
{
    char name[PATH_BYTES], holder[128] = "";
    TRY(file_make_folders(path));
    snprintf(name, sizeof name, "%s/lock", path);
    int lock = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock < 0) {
        return status_fail_errno(ERR_IO, name, "cannot open the lock file");
    }
    if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
        ssize_t n = read(lock, holder, sizeof holder - 1);
        holder[n > 0 ? n : 0] = '\0';
        holder[strcspn(holder, "\n")] = '\0';
        close(lock);
        return status_fail(ERR_CONFIG, "%s: in use by another run (%s): stop it, or set another run.out", path, holder);
    }
    char host[64] = "";
    (void)gethostname(host, sizeof host - 1);
    int n = snprintf(holder, sizeof holder, "process %ld on %s\n", (long)getpid(), host);
    if (ftruncate(lock, 0) != 0 || pwrite(lock, holder, (size_t)n, 0) != n) {
        close(lock);
        return status_fail_errno(ERR_IO, name, "cannot write the lock file");
    }
    folder->lock = lock;
    return OK;
}

/* Random, so that a file left by another run, or by the same job on another disk, cannot pass for ours. */
static enum status write_nonce(const char *name, char *nonce)
{
    uint64_t words[2];
    if (getrandom(words, sizeof words, 0) != (ssize_t)sizeof words) {
        return status_fail_errno(ERR_IO, name, "no random numbers from the system");
    }
    snprintf(nonce, NONCE_BYTES, "%016llx%016llx", (unsigned long long)words[0], (unsigned long long)words[1]);
    return file_write_atomic(name, nonce, NONCE_BYTES - 1);
}

static enum status read_nonce(const char *name, const char *nonce, int rank)
{
    char *found = NULL;
    size_t n = 0;
    enum status status = file_read_all(name, 64, &found, &n);
    if (status == OK && strcmp(found, nonce) != 0) {
        status = ERR_IO;
    }
    free(found);
    if (status != OK) {
        return status_fail(
            ERR_CONFIG,
            "%s: rank %d does not see what rank 0 wrote there: run.out must be one folder that all ranks "
            "share",
            name, rank);
    }
    return OK;
}

/* Ranks that write into different folders of one name would each hold a part of a checkpoint, found out at resume. */
enum status run_folder_open(struct run_folder *folder, const char *path, struct comm *comm)
{
    char name[PATH_BYTES], nonce[NONCE_BYTES] = "";
    folder->lock = -1;
    snprintf(name, sizeof name, "%s/nonce", path);
    enum status status = OK;
    if (comm->rank == 0) {
        status = take_lock(folder, path);
        if (status == OK) {
            status = write_nonce(name, nonce);
        }
    }
    TRY(ranks_agree(comm, status));
    TRY(comm_broadcast(comm, nonce, sizeof nonce, 0));
    TRY(ranks_agree(comm, read_nonce(name, nonce, comm->rank)));
    if (comm->rank == 0) {
        unlink(name);
    }
    return OK;
}

void run_folder_close(struct run_folder *folder)
{
    if (folder->lock >= 0) {
        close(folder->lock);
        folder->lock = -1;
    }
}
