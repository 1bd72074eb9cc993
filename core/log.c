/* core: the log. One lock keeps the lines of threads whole, on stderr and in the file alike. */
#include "core/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

static _Atomic int log_level_now = LOG_INFO;
static _Atomic int log_rank;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *log_file; /* guarded by log_lock */

void log_set_level(enum log_level level)
{
    atomic_store(&log_level_now, (int)level);
}

void log_set_rank(int rank, int size)
{
    ASSERT(rank >= 0 && rank < size);
    atomic_store(&log_rank, rank);
}

enum status log_open_file(const char *path)
{
    FILE *file = fopen(path, "ae");
    if (!file) {
        return status_fail_errno(ERR_IO, path, "cannot open the log file");
    }
    log_close_file();
    pthread_mutex_lock(&log_lock);
    log_file = file;
    pthread_mutex_unlock(&log_lock);
    return OK;
}

void log_close_file(void)
{
    pthread_mutex_lock(&log_lock);
    if (log_file) {
        fclose(log_file);
        log_file = NULL;
    }
    pthread_mutex_unlock(&log_lock);
}

/* Lines of a file are read long after the run: they say when, in UTC. */
static void write_time(FILE *out)
{
    struct timespec now;
    struct tm utc;
    char text[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    fprintf(out, "%s.%03ldZ ", text, now.tv_nsec / 1000000);
}

void log_line(enum log_level level, const char *format, ...)
{
    static const char *const prefixes[] = {"debug: ", "", "warning: ", "error: "};
    int rank = atomic_load(&log_rank);
    if ((int)level < atomic_load(&log_level_now) || (rank != 0 && level < LOG_WARN)) {
        return;
    }
    /* Formatted before the lock is taken, and written by one call: other processes share stderr. */
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    char where[32] = "";
    if (rank != 0) {
        snprintf(where, sizeof where, "[rank %d] ", rank);
    }
    pthread_mutex_lock(&log_lock);
    fprintf(stderr, "%s%s%s\n", where, prefixes[level], text);
    if (log_file) {
        write_time(log_file);
        fprintf(log_file, "%s%s%s\n", where, prefixes[level], text);
        fflush(log_file);
    }
    pthread_mutex_unlock(&log_lock);
}
