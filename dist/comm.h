/* dist: the ranks and what they exchange. Only this room names MPI (and, on devices, NCCL). Knows bytes and numbers, no
 * model. One process is one rank; without MPI there is one rank and every call is a copy. */
#pragma once

#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct comm {
    int rank, size;
    double timeout_s;
    struct comm_backend *backend; /* owns */
};

/* Joins the ranks that mpirun or srun started, or makes one rank. Fails with ERR_COMM if a launcher started several
 * processes and this build has no MPI, with the remedy. argc, argv go to MPI_Init. */
MUST_CHECK enum status comm_open(struct comm *comm, int *argc, char ***argv, double timeout_s);

/* Orderly end: all ranks call it. */
void comm_close(struct comm *comm);

/* Ends all ranks now with `exit_code`; called by whoever fails, never returns. */
_Noreturn void comm_abort(struct comm *comm, int exit_code);

/* Collectives on host memory. A rank that waits longer than timeout_s fails with ERR_COMM naming the call. */
MUST_CHECK enum status comm_barrier(struct comm *comm);
MUST_CHECK enum status comm_broadcast(struct comm *comm, void *bytes, size_t n, int root);
MUST_CHECK enum status comm_sum_i64(struct comm *comm, int64_t *values, int n);
MUST_CHECK enum status comm_max_i64(struct comm *comm, int64_t *values, int n);
MUST_CHECK enum status comm_max_f64(struct comm *comm, double *values, int n);
/* Sums in rank order by the same binary tree as comm_tree_sum: equal bits for every power-of-two size is NOT promised
 * here; use it for statistics. */
MUST_CHECK enum status comm_sum_f64(struct comm *comm, double *values, int n);

/* Point to point, blocking. */
MUST_CHECK enum status comm_send(struct comm *comm, const void *bytes, size_t n, int to);
MUST_CHECK enum status comm_recv(struct comm *comm, void *bytes, size_t n, int from);
