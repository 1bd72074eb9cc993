/* tests: runs in the background that something happens to; the long tests of `make soak`. */
#pragma once

#include "tests/run/program.h"

/* `make soak` sets SOAK: more points, and tests that are too long for every day. */
bool is_soak(void);
void soak_only(void);

/* Skips the test unless several ranks can be started. */
void needs_mpi(void);

/* The process of one rank below a launcher of program_start. */
pid_t rank_process(struct program *p, pid_t launcher, int rank);

/* Waits for the end of a program_start, at most `limit_s`; p->output becomes what it said. Returns its exit status, or
 * 128 + the signal that ended it. No trainer of this run may be left. */
int wait_for_end(struct program *p, pid_t launcher, const char *run, double limit_s);

/* Fails unless the last output holds exactly `count` times `words`. */
void expect_times(const struct program *p, const char *words, int count);

/* Fails unless the errors of the last output, one at least, all name `rank` as the one that is lost. */
void expect_blamed(const struct program *p, int rank);

/* A run of 100000 updates that ended early must go on exactly: resumes it for one update, then makes a run of as many
 * updates in one go, of which the last row must be the same. `options` are those of the run without run.steps, and must
 * not depend on it: a constant learning rate, no evaluation. */
void goes_on_exactly(struct program *p, const char *run, const char *options);
