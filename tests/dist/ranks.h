/* tests/dist: runs a test program again as several ranks under mpirun. */
#pragma once

#include <stddef.h>

/* Runs this program as `ranks` ranks: mpirun ... PROGRAM `role`. What they print lands in `output`, NUL-terminated.
 * Returns mpirun's exit status, or -1 if it did not end by itself within 60 s. */
int ranks_run(int ranks, const char *role, char *output, size_t bytes);
