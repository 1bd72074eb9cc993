/* dist: ranks over MPI, on host memory. The only file that names MPI.
 *
 * MPI's blocking calls wait for ever for a dead rank. Here every call is started without blocking and polled until a
 * deadline, so that a lost rank becomes an error with a name. */
#include "core/clock.h"
#include "dist/comm_backend.h"
#include "dist/patience.h"

#include <mpi.h>
#include <stdlib.h>

/* Pieces keep MPI's int counts far from 2^31, and make the timeout one of progress rather than of size. */
static const size_t piece_bytes = (size_t)64 << 20;

static enum status mpi_failed(const struct comm *comm, const char *call, int peer, int code)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return status_fail(ERR_COMM, "%s: rank %d lost rank %d: MPI says: %s", call, comm->rank, peer, text);
}

static enum status wait_for(const struct comm *comm, const struct comm_message *m, MPI_Request *request,
                            MPI_Status *result)
{
    struct patience patience = patience_begin(m->wait_s, clock_s());
    for (;;) {
        int done = 0;
        int code = MPI_Test(request, &done, result);
        if (code != MPI_SUCCESS) {
            return mpi_failed(comm, m->call, m->peer, code);
        }
        if (done) {
            return OK;
        }
        if (!patience_lasts(&patience, clock_s())) {
            return status_fail(ERR_COMM,
                               "%s: rank %d heard nothing from rank %d for %.1f s (dist.timeout_s %g): that rank has "
                               "died or hangs; its own log says why",
                               m->call, comm->rank, m->peer, m->wait_s, comm->timeout_s);
        }
        patience_rest(&patience);
    }
}

static enum status mpi_send(const struct comm *comm, const struct comm_message *m)
{
    const unsigned char *bytes = m->bytes;
    size_t sent = 0;
    do {
        size_t n = m->n - sent < piece_bytes ? m->n - sent : piece_bytes;
        MPI_Request request;
        MPI_Status result;
        int code = MPI_Isend(n > 0 ? bytes + sent : NULL, (int)n, MPI_BYTE, m->peer, 0, MPI_COMM_WORLD, &request);
        if (code != MPI_SUCCESS) {
            return mpi_failed(comm, m->call, m->peer, code);
        }
        TRY(wait_for(comm, m, &request, &result));
        sent += n;
    } while (sent < m->n);
    return OK;
}

static enum status mpi_recv(const struct comm *comm, const struct comm_message *m)
{
    unsigned char *bytes = m->bytes;
    size_t received = 0;
    do {
        size_t n = m->n - received < piece_bytes ? m->n - received : piece_bytes;
        MPI_Request request;
        MPI_Status result;
        int code = MPI_Irecv(n > 0 ? bytes + received : NULL, (int)n, MPI_BYTE, m->peer, 0, MPI_COMM_WORLD, &request);
        if (code != MPI_SUCCESS) {
            return mpi_failed(comm, m->call, m->peer, code);
        }
        TRY(wait_for(comm, m, &request, &result));
        int found = 0;
        MPI_Get_count(&result, MPI_BYTE, &found);
        if ((size_t)found != n) {
            return status_fail(ERR_COMM, "%s: rank %d expected %zu bytes from rank %d, found %d: the ranks disagree",
                               m->call, comm->rank, n, m->peer, found);
        }
        received += n;
    } while (received < m->n);
    return OK;
}

static void mpi_close(void)
{
    MPI_Finalize();
}

static void mpi_abort(int exit_code)
{
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    abort();
}

static const struct comm_backend mpi_backend = {"MPI", mpi_send, mpi_recv, mpi_close, mpi_abort};

/* Place among the ranks that share this machine's memory, in rank order. */
static enum status find_local_rank(struct comm *comm)
{
    MPI_Comm machine;
    int code = MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, comm->rank, MPI_INFO_NULL, &machine);
    if (code != MPI_SUCCESS) {
        return mpi_failed(comm, "MPI_Comm_split_type", comm->rank, code);
    }
    MPI_Comm_rank(machine, &comm->local_rank);
    MPI_Comm_free(&machine);
    return OK;
}

enum status comm_mpi_open(struct comm *comm, int *argc, char ***argv, int launched)
{
    int provided = 0;
    int code =
        MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided); /* the loader has threads, but no messages */
    if (code != MPI_SUCCESS || provided < MPI_THREAD_FUNNELED) {
        return status_fail(ERR_COMM,
                           "MPI_Init_thread: code %d, thread level %d, needed %d: build Open MPI with threads", code,
                           provided, MPI_THREAD_FUNNELED);
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &comm->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &comm->size);
    if (comm->size == 1) {
        return status_fail(
            ERR_COMM,
            "the launcher started %d processes, but MPI sees 1, so that each would train alone: use this "
            "MPI's own mpirun, or srun --mpi=pmix",
            launched);
    }
    comm->backend = &mpi_backend;
    return find_local_rank(comm);
}
