/* train: the run folder. One folder that all ranks see, used by one run at a time. */
#pragma once

#include "dist/comm.h"

struct run_folder {
    int lock; /* file descriptor that holds the lock on rank 0, else -1 */
};

/* Creates `path`, locks it against a second run (ERR_CONFIG names who holds it), and checks that every rank sees the
 * same folder: rank 0 writes a random word that all must read (ERR_CONFIG). All ranks call it. */
MUST_CHECK enum status run_folder_open(struct run_folder *folder, const char *path, struct comm *comm);
void run_folder_close(struct run_folder *folder);

/* Makes all ranks fail if one did, so that none waits for one that gave up. While ranks are quiet (below), the lowest
 * rank that failed says why; so the cause is printed once, also where all ranks met it. */
MUST_CHECK enum status ranks_agree(struct comm *comm, enum status mine);

/* Called with how a run or measurement ended, before anything of it is closed. An error that may be this rank's alone
 * ends all ranks here, if there are others, with the error's exit status: to close first could wait for ever. NCCL ends
 * only when all ranks end it, device memory is freed only after the sums before it, and the others may be lost, or wait
 * for this rank elsewhere. Returns if all ranks have this status, or there is one. */
void ranks_leave(struct comm *comm, enum status ended);

/* Before the first step ranks above 0 are quiet: they would repeat what rank 0 says. */
void ranks_quiet(const struct comm *comm, bool quiet);
