/* dist: the ranks and what they exchange. Only this room names MPI (and, on devices, NCCL). Knows bytes and numbers, no
 * model. One process is one rank; without MPI there is one rank and every call is a copy. */
#pragma once

#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct comm_backend;

struct comm {
    int rank, size;
    int local_rank; /* among the ranks of this machine: which of its GPUs is this rank's */
    double timeout_s;
    const struct comm_backend *backend; /* one process, or MPI: dist/comm_backend.h */
};

/* True if this build can join several ranks. */
bool comm_has_mpi(void);

/* Joins the ranks that mpirun or srun started, or makes one rank, and tells the log which rank speaks. Fails with
 * ERR_COMM if a launcher started several processes and this build, or this launcher, cannot join them, with the remedy;
 * ERR_CONFIG if timeout_s is not positive. argc, argv go to MPI_Init and may be NULL. */
MUST_CHECK enum status comm_open(struct comm *comm, int *argc, char ***argv, double timeout_s);

/* Orderly end: all ranks call it. A rank that does not come in time ends all others. After an error use comm_abort. */
void comm_close(struct comm *comm);

/* Ends all ranks now with `exit_code`; called by whoever fails, never returns. */
_Noreturn void comm_abort(struct comm *comm, int exit_code);

/* Collectives on host memory: all ranks call the same one with the same sizes. A rank that waits longer than timeout_s
 * (a tenth and at least 5 s more for each step that it is further from the rank waited for, so that whoever sees the
 * cause speaks first; time in which the waiting process itself was stopped does not count) fails with ERR_COMM naming
 * the call and the rank that is missing; what is left to do then is comm_abort. */
MUST_CHECK enum status comm_barrier(struct comm *comm);
MUST_CHECK enum status comm_broadcast(struct comm *comm, void *bytes, size_t n, int root);
MUST_CHECK enum status comm_sum_i64(struct comm *comm, int64_t *values, int n);
MUST_CHECK enum status comm_max_i64(struct comm *comm, int64_t *values, int n);
/* A NaN on any rank gives NaN. */
MUST_CHECK enum status comm_max_f64(struct comm *comm, double *values, int n);
/* Adds in a binary tree over ranks in rank order: equal bits from run to run, but not over numbers of ranks. For
 * statistics; gradients go through dist/grad_tree. */
MUST_CHECK enum status comm_sum_f64(struct comm *comm, double *values, int n);

/* Point to point, blocking; the receiver names the size that it expects. Any size: large messages travel in pieces, and
 * timeout_s is for each piece. */
MUST_CHECK enum status comm_send(struct comm *comm, const void *bytes, size_t n, int to);
MUST_CHECK enum status comm_recv(struct comm *comm, void *bytes, size_t n, int from);
