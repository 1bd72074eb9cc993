/* core: status codes and the one way to fail.
 *
 * A function that can fail because of the world (user, files, memory, other ranks, device) returns `enum status`.
 * The first function that knows the cause says it once, with `status_fail`; its callers only pass it on with TRY.
 * Our own mistakes are ASSERTs: they abort. Outputs are set only on success. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum status {
    OK = 0,
    ERR_USAGE,       /* wrong command line                                  exit 1 */
    ERR_CONFIG,      /* wrong or impossible configuration                   exit 1 */
    ERR_DATA,        /* a file holds what it must not                       exit 1 */
    ERR_UNSUPPORTED, /* this build or device lacks what was asked by name   exit 1 */
    ERR_IO,          /* the operating system refused                        exit 2 */
    ERR_NOMEM,       /* memory                                              exit 2 */
    ERR_DEVICE,      /* accelerator                                         exit 2 */
    ERR_COMM,        /* another rank, or the way to it                      exit 2 */
    ERR_DIVERGED,    /* training diverged and was asked to stop             exit 3 */
    ERR_STOPPED,     /* stopped by a signal or a time limit, checkpoint written exit 4 */
};

#define MUST_CHECK __attribute__((warn_unused_result))

/* Logs one line at error level ("what, where, expected, found, what to do") and returns `status`. */
MUST_CHECK enum status status_fail(enum status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* As status_fail, with the text of errno appended. `path` is named first. */
MUST_CHECK enum status status_fail_errno(enum status status, const char *path, const char *what);

const char *status_name(enum status status);

/* The process exit status: 0 done, 1 wrong use or input, 2 machine, 3 diverged, 4 stopped. */
int status_exit_code(enum status status);

/* The text of the last status_fail of this thread, without the log prefix; "" before the first. For tests. */
const char *status_last_message(void);

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        enum status try_status_ = (call);                                                                              \
        if (try_status_ != OK) {                                                                                       \
            return try_status_;                                                                                        \
        }                                                                                                              \
    } while (0)

__attribute__((noreturn)) void assert_failed(const char *expression, const char *file, int line);

#define ASSERT(expression) ((expression) ? (void)0 : assert_failed(#expression, __FILE__, __LINE__))
