/* tests: processes in the background. */
#include "tests/faults/background.h"

#include "dist/comm.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LOOKS_A_SECOND = 100 };

bool is_soak(void)
{
    return getenv("SOAK") != NULL;
}

void soak_only(void)
{
    if (!is_soak()) {
        skip();
    }
}

void needs_mpi(void)
{
    if (!comm_has_mpi()) {
        skip();
    }
}

pid_t rank_process(struct program *p, pid_t launcher, int rank)
{
    EXITS(0, p,
          program_shell(p,
                        "for c in $(cat /proc/%ld/task/*/children); do "
                        "tr '\\0' '\\n' < /proc/$c/environ | grep -qx OMPI_COMM_WORLD_RANK=%d && echo $c; done; true",
                        (long)launcher, rank));
    long pid = strtol(p->output, NULL, 10);
    assert_true(pid > 1);
    return (pid_t)pid;
}

int wait_for_end(struct program *p, pid_t launcher, const char *run, double limit_s)
{
    int status = 0;
    pid_t ended = 0;
    for (int i = 0; i < limit_s * LOOKS_A_SECOND && ended == 0; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000000 / LOOKS_A_SECOND}, NULL);
        ended = waitpid(launcher, &status, WNOHANG);
    }
    if (ended != launcher) {
        kill(launcher, SIGKILL);
        waitpid(launcher, &status, 0);
        program_shell(p, "cat {}/background.txt");
        program_show(p);
        fail_msg("%s: still there after %g s", run, limit_s);
    }
    program_shell(p,
                  "for c in $(pgrep -x train_gpt8b); do tr '\\0' '\\n' < /proc/$c/cmdline; done 2>/dev/null | "
                  "grep -Fx -e --run.out={}/%s",
                  run);
    assert_string_equal(p->output, "");
    EXITS(0, p, program_shell(p, "cat {}/background.txt"));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int times(const struct program *p, const char *words)
{
    int found = 0;
    for (const char *at = p->output; (at = strstr(at, words)) != NULL; at += strlen(words)) {
        found++;
    }
    return found;
}

void expect_times(const struct program *p, const char *words, int count)
{
    int found = times(p, words);
    if (found != count) {
        program_show(p);
        fail_msg("\"%s\": %d times in the output, expected %d", words, found, count);
    }
}

void expect_blamed(const struct program *p, int rank)
{
    char words[64];
    snprintf(words, sizeof words, "heard nothing from rank %d for", rank);
    program_expect(p, words);
    expect_times(p, "error: ", times(p, words));
}

void goes_on_exactly(struct program *p, const char *run, const char *options)
{
    EXITS(4, p, program_train(p, 1, "--run.out={}/%s %s --run.steps=100000 --run.max_minutes=0.00001", run, options));
    program_expect(p, "is next");
    int rows = metrics_rows(p, run);
    EXITS(0, p, program_train(p, 1, "--run.out={}/%s_whole %s --run.steps=%d", run, options, rows));
    char whole[64];
    snprintf(whole, sizeof whole, "%s_whole", run);
    assert_int_equal(metrics_rows(p, whole), rows);
    static const char *const columns[] = {"step", "loss", "grad_norm", "tokens"};
    for (size_t i = 0; i < sizeof columns / sizeof columns[0]; i++) {
        assert_true(metrics_value(p, run, rows, columns[i]) == metrics_value(p, whole, rows, columns[i]));
    }
}
