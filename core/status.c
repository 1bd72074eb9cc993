/* core: status codes, the last message of a thread, and the end of a program that caught itself in a mistake. */
#include "core/status.h"

#include "core/log.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Long enough for a path and a sentence; what is longer ends early. */
static _Thread_local char last_message[1024];

enum status status_fail(enum status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_message, sizeof last_message, format, args);
    va_end(args);
    /* Messages quote files and command lines: whatever bytes those hold, a failure is one line. */
    for (char *c = last_message; *c != '\0'; c++) {
        *c = (char)(iscntrl((unsigned char)*c) ? '.' : *c);
    }
    log_line(LOG_ERROR, "%s", last_message);
    return status;
}

enum status status_fail_errno(enum status status, const char *path, const char *what)
{
    int cause = errno;
    char text[128];
    /* The GNU strerror_r: returns the text, which need not be in `text`. */
    return status_fail(status, "%s: %s: %s", path, what, strerror_r(cause, text, sizeof text));
}

const char *status_name(enum status status)
{
    switch (status) {
    case OK:
        return "OK";
    case ERR_USAGE:
        return "ERR_USAGE";
    case ERR_CONFIG:
        return "ERR_CONFIG";
    case ERR_DATA:
        return "ERR_DATA";
    case ERR_UNSUPPORTED:
        return "ERR_UNSUPPORTED";
    case ERR_IO:
        return "ERR_IO";
    case ERR_NOMEM:
        return "ERR_NOMEM";
    case ERR_DEVICE:
        return "ERR_DEVICE";
    case ERR_COMM:
        return "ERR_COMM";
    case ERR_DIVERGED:
        return "ERR_DIVERGED";
    case ERR_STOPPED:
        return "ERR_STOPPED";
    }
    return "unknown status";
}

int status_exit_code(enum status status)
{
    switch (status) {
    case OK:
        return 0;
    case ERR_USAGE:
    case ERR_CONFIG:
    case ERR_DATA:
    case ERR_UNSUPPORTED:
        return 1;
    case ERR_IO:
    case ERR_NOMEM:
    case ERR_DEVICE:
    case ERR_COMM:
        return 2;
    case ERR_DIVERGED:
        return 3;
    case ERR_STOPPED:
        return 4;
    }
    /* No such status: a broken program counts as a broken machine, not as the user's fault. */
    return 2;
}

const char *status_last_message(void)
{
    return last_message;
}

void assert_failed(const char *expression, const char *file, int line)
{
    log_line(LOG_ERROR, "%s:%d: a mistake of this program: %s does not hold", file, line, expression);
    abort();
}
