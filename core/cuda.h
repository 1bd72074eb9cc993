/* core: the GPU of this process, for host code. Builds with CUDA only (core/cuda.c, over the runtime's C interface).
 *
 * Work is enqueued on one stream and runs in order; a call returns at once. An operator cannot fail by itself: a launch
 * error, or a product that cuBLASLt refuses, is kept (first one wins) and reported by the next cuda_sync. Headers of
 * operators name this struct only, so that they are plain C. */
#pragma once

#include "core/device.h"
#include "core/tensor.h"

#include <stddef.h>

struct CUstream_st;
typedef struct CUstream_st *cuda_stream; /* cudaStream_t */
struct gemm_cuda_state;

/* What changes from call to call, in device memory: a captured graph is replayed with new values. */
struct cuda_step {
    uint64_t sample; /* index of the first sample in the run: with update, keys random numbers */
    uint32_t update;
    float loss_scale; /* 1 / valid targets of the whole update */
};

struct cuda {
    int ordinal, capability, multiprocessors; /* capability: 10 * major + minor */
    int64_t l2_bytes;
    cuda_stream stream;
    struct cuda_step *step;       /* device memory */
    struct gemm_cuda_state *gemm; /* owned by core/gemm_cuda.c */
    struct cuda_failure *failure; /* the first error that a call met, for cuda_sync */
};

/* The GPU number `ordinal` of this process. Fails with ERR_UNSUPPORTED (no GPU, or not of a kind this build has kernels
 * for) or ERR_DEVICE. */
MUST_CHECK enum status cuda_open(struct cuda **cuda, int ordinal);
void cuda_close(struct cuda *cuda);

/* Plain device memory, and page-locked host memory. ERR_NOMEM names `what`, bytes wanted and bytes free. */
MUST_CHECK enum status cuda_alloc(void **memory, size_t bytes, const char *what);
void cuda_free(void *memory);
MUST_CHECK enum status cuda_memory_free(int64_t *bytes); /* of this GPU, now */
MUST_CHECK enum status cuda_host_alloc(void **memory, size_t bytes, const char *what);
void cuda_host_free(void *memory);

/* Enqueued copies. Page-locked host memory must stay as it is until the next sync; other memory is copied before the
 * call returns (download: complete after cuda_sync in both cases). */
void cuda_upload(const struct cuda *cuda, void *device, const void *host, size_t bytes);
void cuda_download(const struct cuda *cuda, void *host, const void *device, size_t bytes);
void cuda_copy(const struct cuda *cuda, void *to, const void *from, size_t bytes); /* device to device */
void cuda_zero(const struct cuda *cuda, void *device, size_t bytes);

/* New values for later kernels (one small copy). */
void cuda_set_step(const struct cuda *cuda, const struct cuda_step *step);

/* Waits for everything enqueued. Fails with ERR_DEVICE, naming a fault of the work itself as the runtime reports it,
 * together with the first kept error, which the fault caused; without a fault, the kept error alone. */
MUST_CHECK enum status cuda_sync(const struct cuda *cuda, const char *what);

/* Keeps an error for cuda_sync; `code` is a cudaError_t, 0 means none. For .cu files: cuda_launched() in core/cuda.cuh.
 */
void cuda_note(const struct cuda *cuda, const char *what, int code);

/* Points in time on the stream. cuda_event_ms: milliseconds between two of them, after a sync; NaN if that failed. */
struct cuda_event;
MUST_CHECK enum status cuda_event_open(struct cuda_event **event);
void cuda_event_close(struct cuda_event *event);
void cuda_event_record(const struct cuda *cuda, struct cuda_event *event);
double cuda_event_ms(const struct cuda_event *from, const struct cuda_event *to);

/* Everything enqueued between begin and end becomes a graph instead of running; launch enqueues it as a whole. */
struct cuda_graph;
MUST_CHECK enum status cuda_graph_begin(const struct cuda *cuda);
MUST_CHECK enum status cuda_graph_end(const struct cuda *cuda, struct cuda_graph **graph);
void cuda_graph_launch(const struct cuda *cuda, const struct cuda_graph *graph);
void cuda_graph_close(struct cuda_graph *graph);
