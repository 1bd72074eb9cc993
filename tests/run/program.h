/* tests: drives the real program in a folder of its own, and looks at what it leaves. */
#pragma once

#include "tests/test.h"

#include <stdbool.h>
#include <sys/types.h>

enum { PROGRAM_TEXT = 1 << 20 };

struct program {
    char folder[64];           /* temporary; holds base.toml, train.tok.zst, val.tok.zst */
    char output[PROGRAM_TEXT]; /* stdout and stderr of the last call */
};

/* Group fixtures: *state is a struct program. */
int program_setup(void **state);
int program_teardown(void **state);

/* Runs the trainer with base.toml and these arguments (printf style, blanks between; %s of the folder is {}) on `ranks`
 * ranks, and returns its exit status. */
int program_train(struct program *p, int ranks, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* As above without base.toml: the arguments are all there is. */
int program_call(struct program *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Two ranks of base.toml that are given different arguments. */
int program_train_unequal(struct program *p, const char *first, const char *second);

/* A shell command, {} replaced by the folder; returns its exit status. */
int program_shell(struct program *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints the last output, whole: for a test that is about to fail. */
void program_show(const struct program *p);

/* A call and the exit status that it must have; the output is shown if it has another. */
#define EXITS(code, p, call) program_exits(p, call, code, __FILE__, __LINE__)
void program_exits(const struct program *p, int found, int expected, const char *file, int line);

/* Fails the test unless the last output holds `words`. */
void program_expect(const struct program *p, const char *words);

/* Starts the trainer (or mpirun) in the background with base.toml. */
pid_t program_start(const struct program *p, int ranks, const char *arguments);

/* Waits until a run has written `rows` rows of metrics. The limit only bounds a failure. */
void wait_for_rows(const struct program *p, const char *run, int rows);

/* Waits for some rows, sends the run a signal and returns its exit status; -1 if the signal killed it. */
int program_stop(const struct program *p, pid_t pid, const char *run, int number);

/* Files below the folder, byte for byte. */
void assert_same_file(const struct program *p, const char *a, const char *b);

/* metrics.jsonl or layers.jsonl of two runs: equal rows from update `first` on, columns of time and memory aside. */
void assert_same_metrics(const struct program *p, const char *a, const char *b, const char *name, int first);

/* Makes the folder `cut` as if run `whole` had been cut there: its checkpoint of `update`, and so many rows of metrics
 * and layers. */
void cut_run(struct program *p, const char *whole, const char *cut, int update, int rows, int layer_rows);

/* Two runs have the same rows of metrics and layers, and equal weights and moments in the checkpoint after `updates`.
 */
void assert_same_end(const struct program *p, const char *a, const char *b, int updates);

/* Number of rows of a metrics.jsonl, and one column of one update. */
int metrics_rows(const struct program *p, const char *run);
double metrics_value(const struct program *p, const char *run, int step, const char *column);

/* A string or the boolean `true` member of run's verdict.json; fails if it is another. */
void assert_verdict(const struct program *p, const char *run, const char *verdict, bool finished);

bool file_exists(const struct program *p, const char *name);
