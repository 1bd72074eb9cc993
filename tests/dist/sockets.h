/* tests/dist: two ranks without MPI: processes of this test, joined by a socket. For GPUs: CUDA must start after the
 * fork, so that the calling process must not have touched it. */
#pragma once

#include "dist/comm.h"

#include <stdbool.h>

/* Runs `role` as rank 0 and rank 1, each in a process of its own, and returns the worse exit status (100: a signal). */
int sockets_run(int (*role)(struct comm *comm));

/* Are there two GPUs? Asks in another process; prints a line if not. */
bool sockets_two_gpus(void);
