/* dist: sums of gradients between GPUs, by NCCL (loaded at run time). One rank, one GPU. Builds with CUDA only.
 *
 * The order of a sum is NCCL's: fixed for one number of ranks, machine and version, so that runs repeat. All ranks get
 * equal bits. A rank that is lost would block the others for ever: they wait here with the time-out of dist/comm.h, in
 * which time when the waiting process itself was stopped does not count either. */
#pragma once

#include "core/cuda.h"
#include "dist/comm.h"

struct comm_nccl;

/* Joins the GPUs of all ranks; rank 0's id travels by comm_broadcast. All ranks call it. *nccl is NULL, which every
 * call takes, for a single rank: then NCCL is not even loaded. `bucket_bytes`: most bytes of one sum. Fails with
 * ERR_UNSUPPORTED (no library, with what was looked for), ERR_COMM. */
MUST_CHECK enum status comm_nccl_open(struct comm_nccl **nccl, struct comm *comm, const struct cuda *cuda,
                                      size_t bucket_bytes);

/* Orderly end: all ranks call it, with nothing enqueued. After an error of open or wait it only forgets: NCCL, and a
 * sum that waits on the GPU, end with the process. */
void comm_nccl_close(struct comm_nccl *nccl);

/* Enqueues: data (n elements, FP32 or BF16, device memory) becomes its sum over the ranks. BF16 sums are rounded as
 * NCCL adds them. An error is reported by the next wait. */
void comm_nccl_sum(struct comm_nccl *nccl, void *data, enum dtype dtype, size_t n);

/* Waits for everything enqueued on the stream, as cuda_sync. ERR_COMM if it takes longer than comm->timeout_s or NCCL
 * reports an error: a rank has died or hangs. What is left to do then is comm_abort. */
MUST_CHECK enum status comm_nccl_wait(struct comm_nccl *nccl, const struct cuda *cuda, const char *what);
