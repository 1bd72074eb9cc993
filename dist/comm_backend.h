/* dist: how two ranks exchange bytes. Private to the room: a backend moves messages between pairs, and everything
 * collective is built from pairs in comm.c and grad_tree.c, so that order and waiting are ours. */
#pragma once

#include "dist/comm.h"

struct comm_message {
    const char *call; /* for errors: what the user called */
    void *bytes;
    size_t n;
    int peer;
    double wait_s;
};

struct comm_backend {
    const char *name;
    enum status (*send)(const struct comm *comm, const struct comm_message *message);
    enum status (*recv)(const struct comm *comm, const struct comm_message *message);
    void (*close)(void);
    void (*abort)(int exit_code); /* does not return */
};

/* Joins the ranks: sets rank, size and backend. `launched` is the number of processes that the launcher announced. */
MUST_CHECK enum status comm_mpi_open(struct comm *comm, int *argc, char ***argv, int launched);

/* The public calls of dist/comm.h, made on behalf of `call` by a rank that is `steps` exchanges away from the one that
 * would notice a missing rank first: it waits longer, so that the rank that sees the cause names it. */
MUST_CHECK enum status comm_send_as(struct comm *comm, const char *call, int steps, const void *bytes, size_t n,
                                    int to);
MUST_CHECK enum status comm_recv_as(struct comm *comm, const char *call, int steps, void *bytes, size_t n, int from);
MUST_CHECK enum status comm_broadcast_as(struct comm *comm, const char *call, int steps, void *bytes, size_t n,
                                         int root);
