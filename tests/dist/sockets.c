#include "tests/dist/sockets.h"

#include "core/device.h"
#include "dist/comm_backend.h"
#include "tests/test.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int peer_socket;

static enum status socket_send(const struct comm *comm, const struct comm_message *m)
{
    (void)comm;
    for (size_t done = 0; done < m->n;) {
        ssize_t n = write(peer_socket, (const char *)m->bytes + done, m->n - done);
        if (n <= 0) {
            return status_fail_errno(ERR_COMM, m->call, "the other process is gone");
        }
        done += (size_t)n;
    }
    return OK;
}

static enum status socket_recv(const struct comm *comm, const struct comm_message *m)
{
    (void)comm;
    for (size_t done = 0; done < m->n;) {
        ssize_t n = read(peer_socket, (char *)m->bytes + done, m->n - done);
        if (n <= 0) {
            return status_fail_errno(ERR_COMM, m->call, "the other process is gone");
        }
        done += (size_t)n;
    }
    return OK;
}

static void socket_close(void)
{
    close(peer_socket);
}

static const struct comm_backend socket_backend = {"socket", socket_send, socket_recv, socket_close, _exit};

int sockets_run(int (*role)(struct comm *comm))
{
    int pair[2], worst = 0;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    for (int rank = 0; rank < 2; rank++) {
        if (fork() == 0) {
            struct comm comm = {
                .rank = rank, .size = 2, .local_rank = rank, .timeout_s = 60, .backend = &socket_backend};
            peer_socket = pair[rank];
            close(pair[!rank]);
            _exit(role(&comm));
        }
    }
    close(pair[0]);
    close(pair[1]);
    for (int rank = 0; rank < 2; rank++) {
        int status;
        assert_true(wait(&status) > 0);
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 100;
        worst = code > worst ? code : worst;
    }
    return worst;
}

bool sockets_two_gpus(void)
{
    int status;
    if (fork() == 0) {
        _exit(device_cuda_usable(1) ? 0 : 1);
    }
    assert_true(wait(&status) > 0);
    bool two = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!two) {
        print_message("one GPU: the test of two ranks is skipped\n");
    }
    return two;
}
