/* dist: one process as one rank, and the collectives, made of messages between pairs of ranks.
 *
 * Small reductions go through rank 0, which so knows who is missing; bytes are broadcast down a binomial tree. */
#include "dist/comm_backend.h"

#include "core/log.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum status single_exchange(const struct comm *comm, const struct comm_message *message)
{
    (void)comm;
    (void)message;
    ASSERT(!"one rank has no peer");
    return ERR_COMM;
}

static void single_close(void)
{
}

static void single_abort(int exit_code)
{
    exit(exit_code);
}

static const struct comm_backend single_backend = {"one process", single_exchange, single_exchange, single_close,
                                                   single_abort};

bool comm_has_mpi(void)
{
#ifdef WITH_MPI
    return true;
#else
    return false;
#endif
}

static int environment_count(const char *name)
{
    const char *text = getenv(name);
    long count = text != NULL ? strtol(text, NULL, 10) : 0;
    return count > 0 && count < 1 << 24 ? (int)count : 0;
}

/* The processes that a launcher says it started, 0 without a launcher. A Slurm batch script has SLURM_NTASKS too but is
 * no step with tasks: only what srun starts counts. */
static int launched_processes(const char **launcher)
{
    static const struct {
        const char *variable, *launcher, *only_with;
    } known[] = {
        {"OMPI_COMM_WORLD_SIZE", "mpirun", NULL},  {"PMI_SIZE", "mpiexec", NULL},
        {"MPI_LOCALNRANKS", "mpiexec", NULL},      {"SLURM_STEP_NUM_TASKS", "srun", NULL},
        {"SLURM_NTASKS", "srun", "SLURM_STEP_ID"},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        int count = environment_count(known[i].variable);
        if (count > 0 && (known[i].only_with == NULL || getenv(known[i].only_with) != NULL)) {
            *launcher = known[i].launcher;
            return count;
        }
    }
    return 0;
}

enum status comm_open(struct comm *comm, int *argc, char ***argv, double timeout_s)
{
    if (!(timeout_s > 0) || !isfinite(timeout_s)) {
        return status_fail(ERR_CONFIG, "dist.timeout_s: expected a number of seconds above 0, found %g", timeout_s);
    }
    const char *launcher = "";
    int launched = launched_processes(&launcher);
    struct comm opened = {.rank = 0, .size = 1, .timeout_s = timeout_s, .backend = &single_backend};
    if (launched > 1) {
#ifdef WITH_MPI
        TRY(comm_mpi_open(&opened, argc, argv, launched));
#else
        (void)argc;
        (void)argv;
        return status_fail(ERR_COMM,
                           "%s started %d processes, but this build has no MPI, so that each would train alone: start "
                           "one process, or install libopenmpi-dev and build with make MPI=1",
                           launcher, launched);
#endif
    }
    log_set_rank(opened.rank, opened.size);
    *comm = opened;
    return OK;
}

void comm_close(struct comm *comm)
{
    if (comm->backend == NULL) {
        return;
    }
    /* Leaving MPI waits for everybody without a limit, so we make sure first that everybody comes. */
    enum status status = comm_barrier(comm);
    if (status != OK) {
        comm_abort(comm, status_exit_code(status));
    }
    comm->backend->close();
    *comm = (struct comm){0};
}

_Noreturn void comm_abort(struct comm *comm, int exit_code)
{
    fflush(NULL);
    if (comm->backend != NULL) {
        comm->backend->abort(exit_code);
    }
    exit(exit_code);
}

/* A step is never shorter than it takes mpirun to end the others once the first has spoken: it asks, then kills about a
 * second later, or a few on a crowded machine. */
static double wait_s(const struct comm *comm, int steps)
{
    static const double ending_s = 5;
    return comm->timeout_s + steps * fmax(0.1 * comm->timeout_s, ending_s);
}

enum status comm_send_as(struct comm *comm, const char *call, int steps, const void *bytes, size_t n, int to)
{
    struct comm_message message = {call, (void *)(uintptr_t)bytes, n, to, wait_s(comm, steps)};
    return comm->backend->send(comm, &message);
}

enum status comm_recv_as(struct comm *comm, const char *call, int steps, void *bytes, size_t n, int from)
{
    struct comm_message message = {call, bytes, n, from, wait_s(comm, steps)};
    return comm->backend->recv(comm, &message);
}

enum status comm_send(struct comm *comm, const void *bytes, size_t n, int to)
{
    ASSERT(to >= 0 && to < comm->size && to != comm->rank);
    return comm_send_as(comm, "comm_send", 0, bytes, n, to);
}

enum status comm_recv(struct comm *comm, void *bytes, size_t n, int from)
{
    ASSERT(from >= 0 && from < comm->size && from != comm->rank);
    return comm_recv_as(comm, "comm_recv", 0, bytes, n, from);
}

/* Who of those that wait for rank 0 speaks first: 1, 2, 3 for ranks 1, 2, 3, and later ones with more bits. One line is
 * enough. */
static int place_behind_0(int rank)
{
    return rank == 0 ? 0 : __builtin_popcount((unsigned)rank) + 31 - __builtin_clz((unsigned)rank);
}

/* Binomial tree, ranks counted from the root: rank r hears from r without its lowest set bit, then tells r + every
 * smaller power of two. Whoever must tell a rank that does not come sees the cause first. */
enum status comm_broadcast_as(struct comm *comm, const char *call, int steps, void *bytes, size_t n, int root)
{
    int self = (comm->rank - root + comm->size) % comm->size;
    int depth = __builtin_popcount((unsigned)self);
    int mask = 1;
    while (mask < comm->size && (self & mask) == 0) {
        mask <<= 1;
    }
    if (self != 0) {
        TRY(comm_recv_as(comm, call, steps + place_behind_0(self), bytes, n, (self - mask + root) % comm->size));
    }
    for (mask >>= 1; mask > 0; mask >>= 1) {
        if (self + mask < comm->size) {
            TRY(comm_send_as(comm, call, depth, bytes, n, (self + mask + root) % comm->size));
        }
    }
    return OK;
}

enum status comm_broadcast(struct comm *comm, void *bytes, size_t n, int root)
{
    ASSERT(root >= 0 && root < comm->size);
    return comm_broadcast_as(comm, "comm_broadcast", 0, bytes, n, root);
}

/* One 8-byte word of two ranks becomes one. */
typedef void combine_fn(void *into, const void *from);

static void sum_i64(void *into, const void *from)
{
    *(int64_t *)into += *(const int64_t *)from;
}

static void max_i64(void *into, const void *from)
{
    if (*(const int64_t *)from > *(int64_t *)into) {
        *(int64_t *)into = *(const int64_t *)from;
    }
}

static void sum_f64(void *into, const void *from)
{
    *(double *)into += *(const double *)from;
}

static void max_f64(void *into, const void *from)
{
    double x = *(const double *)from;
    if (isnan(x) || x > *(double *)into) {
        *(double *)into = x;
    }
}

/* Rank 0 collects the words of all ranks, combines neighbours, then neighbours of neighbours, and tells the result. */
static enum status collect(struct comm *comm, const char *call, unsigned char *words, size_t n, combine_fn *combine)
{
    size_t bytes = n * sizeof(int64_t);
    if (comm->rank != 0) {
        return comm_send_as(comm, call, place_behind_0(comm->rank), words, bytes, 0);
    }
    unsigned char *all = malloc((size_t)comm->size * bytes + 1);
    if (all == NULL) {
        return status_fail(ERR_NOMEM, "%s: no memory for %zu words of %d ranks", call, n, comm->size);
    }
    memcpy(all, words, bytes);
    enum status status = OK;
    for (int r = 1; r < comm->size && status == OK; r++) {
        status = comm_recv_as(comm, call, 0, all + (size_t)r * bytes, bytes, r);
    }
    for (int stride = 1; stride < comm->size && status == OK; stride *= 2) {
        for (int r = 0; r + stride < comm->size; r += 2 * stride) {
            for (size_t i = 0; i < bytes; i += sizeof(int64_t)) {
                combine(all + (size_t)r * bytes + i, all + (size_t)(r + stride) * bytes + i);
            }
        }
    }
    if (status == OK) {
        memcpy(words, all, bytes);
    }
    free(all);
    return status;
}

static enum status reduce(struct comm *comm, const char *call, void *words, int n, combine_fn *combine)
{
    ASSERT(n >= 0);
    if (comm->size == 1) {
        return OK;
    }
    TRY(collect(comm, call, words, (size_t)n, combine));
    return comm_broadcast_as(comm, call, 1, words, (size_t)n * sizeof(int64_t), 0);
}

enum status comm_barrier(struct comm *comm)
{
    int64_t here = 0;
    return reduce(comm, "comm_barrier", &here, 1, max_i64);
}

enum status comm_sum_i64(struct comm *comm, int64_t *values, int n)
{
    return reduce(comm, "comm_sum_i64", values, n, sum_i64);
}

enum status comm_max_i64(struct comm *comm, int64_t *values, int n)
{
    return reduce(comm, "comm_max_i64", values, n, max_i64);
}

enum status comm_max_f64(struct comm *comm, double *values, int n)
{
    return reduce(comm, "comm_max_f64", values, n, max_f64);
}

enum status comm_sum_f64(struct comm *comm, double *values, int n)
{
    return reduce(comm, "comm_sum_f64", values, n, sum_f64);
}
