#include "tests/dist/ranks.h"

#include "dist/comm.h"
#include "tests/test.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void exec_mpirun(int ranks, const char *role, int out)
{
    char self[4096] = "";
    char count[16];
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) {
        _exit(125);
    }
    snprintf(count, sizeof count, "%d", ranks);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    /* Open MPI keeps memory until exit; that is its own affair. */
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    execlp("mpirun", "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", count, self, role, (char *)NULL);
    _exit(126);
}

char ranks_output[65536];

static int run(int ranks, const char *role)
{
    FILE *out = tmpfile();
    if (out == NULL) {
        return -1;
    }
    pid_t child = fork();
    if (child == 0) {
        exec_mpirun(ranks, role, fileno(out));
    }
    int status = 0;
    pid_t ended = 0;
    for (int tenths = 0; tenths < 3000 && ended == 0; tenths++) { /* bounds a failure only */
        ended = waitpid(child, &status, WNOHANG);
        if (ended == 0) {
            usleep(100000);
        }
    }
    if (ended == 0) {
        kill(child, SIGTERM);
        waitpid(child, &status, 0);
        status = -1;
    }
    rewind(out);
    ranks_output[fread(ranks_output, 1, sizeof ranks_output - 1, out)] = '\0';
    fclose(out);
    return ended == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int ranks_run(int ranks, const char *role)
{
    if (!comm_has_mpi()) {
        skip();
    }
    int code = run(ranks, role);
    print_message("%d ranks, %s: exit %d\n%s", ranks, role, code, ranks_output);
    print_message("\n"); /* cmocka cuts long messages, and "OK" must begin a line */
    return code;
}
