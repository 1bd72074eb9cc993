/* tests/dist: runs a test program again as several ranks under mpirun. */
#pragma once

/* Runs this program as `ranks` ranks: mpirun ... PROGRAM `role`. Returns mpirun's exit status, or -1 if it did not end
 * by itself within 60 s. Prints what happened; skips the test in a build without MPI. */
int ranks_run(int ranks, const char *role);

/* What the ranks of the last call printed, NUL-terminated. */
extern char ranks_output[65536];
