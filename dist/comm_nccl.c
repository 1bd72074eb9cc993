/* dist: NCCL. The library is loaded when several ranks meet: a build needs its header only, and one GPU nothing. */
#include "dist/comm_nccl.h"

#include "core/clock.h"
#include "core/library.h"
#include "dist/patience.h"

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

/* What we call of the library, by its own prototypes. */
struct library {
    void *handle;
    const char *(*error_string)(ncclResult_t);
    ncclResult_t (*unique_id)(ncclUniqueId *);
    ncclResult_t (*init_rank)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
    ncclResult_t (*destroy)(ncclComm_t);
    ncclResult_t (*async_error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
};

struct comm_nccl {
    struct library library;
    struct comm *comm;
    const struct cuda *cuda;
    size_t bucket_bytes;
    ncclComm_t ranks;
    ncclResult_t failure; /* the first error of an enqueued sum */
    bool lost;            /* a rank did not answer: nothing may wait for it any more */
};

static enum status library_open(struct library *l)
{
    l->handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (l->handle == NULL) {
        return status_fail(ERR_UNSUPPORTED,
                           "several ranks on GPUs need NCCL: %s; install libnccl2, or put its folder into "
                           "LD_LIBRARY_PATH, or start one rank",
                           dlerror());
    }
    bool all = library_find(l->handle, "ncclGetErrorString", &l->error_string) &&
               library_find(l->handle, "ncclGetUniqueId", &l->unique_id) &&
               library_find(l->handle, "ncclCommInitRankConfig", &l->init_rank) &&
               library_find(l->handle, "ncclCommDestroy", &l->destroy) &&
               library_find(l->handle, "ncclCommGetAsyncError", &l->async_error) &&
               library_find(l->handle, "ncclAllReduce", &l->all_reduce);
    return all ? OK : status_fail(ERR_UNSUPPORTED, "libnccl.so.2 is too old: 2.14 or later is needed");
}

static enum status nccl_failed(struct comm_nccl *n, const char *what, ncclResult_t code)
{
    n->lost = true;
    return status_fail(ERR_COMM, "%s: rank %d: NCCL says: %s", what, n->comm->rank, n->library.error_string(code));
}

static enum status too_late(struct comm_nccl *n, const char *what)
{
    n->lost = true;
    return status_fail(
        ERR_COMM,
        "%s: rank %d waited %g s (dist.timeout_s) for the other ranks: one has died or hangs; its own log "
        "says why",
        what, n->comm->rank, n->comm->timeout_s);
}

/* Calls do not block: NCCL works on, and we look whether it is done, while patience lasts. */
static enum status wait_ready(struct comm_nccl *n, const char *what)
{
    struct patience patience = patience_begin(n->comm->timeout_s, clock_s());
    for (;;) {
        ncclResult_t state = ncclSuccess, code = n->library.async_error(n->ranks, &state);
        if (code != ncclSuccess || (state != ncclSuccess && state != ncclInProgress)) {
            return nccl_failed(n, what, code != ncclSuccess ? code : state);
        }
        if (state == ncclSuccess) {
            return OK;
        }
        if (!patience_lasts(&patience, clock_s())) {
            return too_late(n, what);
        }
        patience_rest(&patience);
    }
}

static enum status join(struct comm_nccl *n)
{
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    memset(&id, 0, sizeof id);
    config.blocking = 0;
    ncclResult_t code = n->comm->rank == 0 ? n->library.unique_id(&id) : ncclSuccess;
    /* An id of zeros tells the others that there is none. */
    TRY(comm_broadcast(n->comm, &id, sizeof id, 0));
    if (code != ncclSuccess) {
        return nccl_failed(n, "ncclGetUniqueId", code);
    }
    static const ncclUniqueId none;
    if (memcmp(&id, &none, sizeof id) == 0) {
        return status_fail(ERR_COMM, "rank %d: rank 0 could not start NCCL", n->comm->rank);
    }
    code = n->library.init_rank(&n->ranks, n->comm->size, id, n->comm->rank, &config);
    if (code != ncclSuccess && code != ncclInProgress) {
        return nccl_failed(n, "ncclCommInitRank", code);
    }
    return wait_ready(n, "ncclCommInitRank");
}

enum status comm_nccl_open(struct comm_nccl **out, struct comm *comm, const struct cuda *cuda, size_t bucket_bytes)
{
    *out = NULL;
    if (comm->size == 1) {
        return OK;
    }
    struct comm_nccl *n = calloc(1, sizeof *n);
    enum status status = n == NULL ? status_fail(ERR_NOMEM, "no memory for NCCL's state") : library_open(&n->library);
    /* All ranks have the library before any waits for the others. */
    int64_t worst = status;
    enum status told = comm_max_i64(comm, &worst, 1);
    if (status == OK) {
        status = told != OK ? told : (enum status)worst;
    }
    if (status == OK) {
        n->comm = comm;
        n->cuda = cuda;
        n->bucket_bytes = bucket_bytes;
        status = join(n);
    }
    if (status != OK) {
        comm_nccl_close(n);
        return status;
    }
    *out = n;
    return OK;
}

/* ncclCommDestroy waits without a limit until the other ranks have closed their connections, which one that is stopped
 * never does, so we make sure first that everybody comes. ncclCommAbort may wait for the same: in 2.28 it does not if
 * all of NCCL's memory is of the cuMem kind, on the host too, else it does (proxy.cc; nccl #863, #1777). So a rank that
 * has lost another leaves NCCL to the end of the process. The library stays loaded: its threads may still be on their
 * way out. */
void comm_nccl_close(struct comm_nccl *n)
{
    if (n == NULL) {
        return;
    }
    if (n->ranks != NULL && !n->lost && comm_barrier(n->comm) == OK) {
        (void)n->library.destroy(n->ranks);
    }
    free(n);
}

void comm_nccl_sum(struct comm_nccl *n, void *data, enum dtype dtype, size_t elements)
{
    ASSERT(dtype == DTYPE_F32 || dtype == DTYPE_BF16);
    if (n == NULL) {
        return;
    }
    size_t bytes = dtype_bytes(dtype), bucket = n->bucket_bytes / bytes;
    for (size_t first = 0; first < elements && n->failure == ncclSuccess; first += bucket) {
        size_t count = elements - first < bucket ? elements - first : bucket;
        char *part = (char *)data + first * bytes;
        ncclResult_t code = n->library.all_reduce(part, part, count, dtype == DTYPE_F32 ? ncclFloat32 : ncclBfloat16,
                                                  ncclSum, n->ranks, (cudaStream_t)n->cuda->stream);
        /* Enqueuing, too, may go on behind our back; the next call must not come before. */
        if (code == ncclInProgress && wait_ready(n, "sum of gradients") != OK) {
            code = ncclSystemError;
        }
        n->failure = code == ncclInProgress ? ncclSuccess : code;
    }
}

enum status comm_nccl_wait(struct comm_nccl *n, const struct cuda *cuda, const char *what)
{
    if (n == NULL) {
        return cuda_sync(cuda, what);
    }
    if (n->lost) {
        return ERR_COMM; /* said already */
    }
    struct patience patience = patience_begin(n->comm->timeout_s, clock_s());
    for (;;) {
        if (n->failure != ncclSuccess) {
            return nccl_failed(n, what, n->failure);
        }
        if (cudaStreamQuery((cudaStream_t)cuda->stream) != cudaErrorNotReady) {
            return cuda_sync(cuda, what); /* done, or failed: it knows the words */
        }
        (void)cudaGetLastError(); /* "not ready" is no failure; kept, the next launch would take it for its own */
        ncclResult_t state = ncclSuccess;
        ncclResult_t code = n->library.async_error(n->ranks, &state);
        if (code != ncclSuccess || (state != ncclSuccess && state != ncclInProgress)) {
            return nccl_failed(n, what, code != ncclSuccess ? code : state);
        }
        if (!patience_lasts(&patience, clock_s())) {
            return too_late(n, what);
        }
        patience_rest(&patience);
    }
}
