/* core: the log. One line a call, to stderr and, once opened, to a file of the run.
 * Rank 0 speaks; other ranks are silent below LOG_WARN, and every line of theirs names the rank. */
#pragma once

#include "core/status.h"

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

/* The level is the only global state of the program, with the rank and the log file. */
void log_set_level(enum log_level level);
void log_set_rank(int rank, int size);

/* Copies every later line to `path` (appended). Fails with ERR_IO. */
MUST_CHECK enum status log_open_file(const char *path);
void log_close_file(void);

void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)
#define log_info(...) log_line(LOG_INFO, __VA_ARGS__)
#define log_warn(...) log_line(LOG_WARN, __VA_ARGS__)
