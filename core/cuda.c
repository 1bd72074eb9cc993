/* core: the GPU of this process, over the CUDA runtime's C interface. */
#include "core/cuda.h"

#include "core/gemm_cuda.h"
#include "core/log.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The first error of an enqueued call; operators cannot return one. */
struct cuda_failure {
    int code;
    char what[96];
};

struct cuda_event {
    cudaEvent_t event;
};

struct cuda_graph {
    cudaGraphExec_t executable;
};

/* "what: the runtime's words (their name)" as ERR_DEVICE. */
static enum status device_fail(const char *what, cudaError_t error)
{
    return status_fail(ERR_DEVICE, "GPU: %s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

static enum status check(const char *what, cudaError_t error)
{
    return error == cudaSuccess ? OK : device_fail(what, error);
}

/* ---- devices ---- */

static enum status count_devices(int *count)
{
    cudaError_t error = cudaGetDeviceCount(count);
    /* A missing or too old driver counts as a machine without a usable GPU: the runtime's words say which. */
    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver || (error == cudaSuccess && *count == 0)) {
        return status_fail(ERR_UNSUPPORTED, "device cuda: no CUDA device (%s); use device cpu",
                           cudaGetErrorString(error));
    }
    return check("counting devices", error);
}

/* Machine code in this build (GPU= of the Makefile); there is no PTX that a driver could translate for other GPUs. */
static bool has_kernels(int capability)
{
    bool hopper = false, blackwell = false;
#ifdef KERNELS_90a
    hopper = true;
#endif
#ifdef KERNELS_100a
    blackwell = true;
#endif
    return (capability == 90 && hopper) || (capability == 100 && blackwell);
}

bool device_cuda_usable(int ordinal)
{
    struct cudaDeviceProp properties;
    int count = 0;
    bool found = cudaGetDeviceCount(&count) == cudaSuccess && ordinal < count &&
                 cudaGetDeviceProperties(&properties, ordinal) == cudaSuccess;
    (void)cudaGetLastError(); /* a machine without a GPU is no error here */
    return found && has_kernels(10 * properties.major + properties.minor);
}

enum status device_cuda_query(struct device *gpu, int ordinal)
{
    struct cudaDeviceProp properties;
    int count = 0;
    TRY(count_devices(&count));
    if (ordinal >= count) {
        return status_fail(ERR_UNSUPPORTED,
                           "device cuda: GPU %d wanted by this rank, but the machine shows %d: start at most %d ranks "
                           "a machine, or look at CUDA_VISIBLE_DEVICES",
                           ordinal, count, count);
    }
    TRY(check("querying properties", cudaGetDeviceProperties(&properties, ordinal)));
    int capability = 10 * properties.major + properties.minor;
    if (!has_kernels(capability)) {
        return status_fail(ERR_UNSUPPORTED,
                           "device cuda: %s has compute capability %d.%d; this build has kernels for%s%s; use device "
                           "cpu, or build with GPU=\"90a 100a\"",
                           properties.name, properties.major, properties.minor,
                           has_kernels(90) ? " 9.0 (H100, H200)" : "", has_kernels(100) ? " 10.0 (B200)" : "");
    }
    *gpu = (struct device){.kind = DEVICE_CUDA,
                           .threads = 1,
                           .memory_bytes = (int64_t)properties.totalGlobalMem,
                           .ordinal = ordinal,
                           .capability = capability};
    snprintf(gpu->name, sizeof gpu->name, "%s", properties.name);
    return OK;
}

static enum status open_parts(struct cuda *cuda, int ordinal)
{
    struct device gpu;
    struct cudaDeviceProp properties;
    TRY(device_cuda_query(&gpu, ordinal));
    if (gpu.capability >= 100) {
        log_warn("%s: the kernels for compute capability 10.0 compile, but were never run on hardware", gpu.name);
    }
    TRY(check("choosing the device", cudaSetDevice(ordinal)));
    TRY(check("querying properties", cudaGetDeviceProperties(&properties, ordinal)));
    cuda->ordinal = ordinal;
    cuda->capability = gpu.capability;
    cuda->multiprocessors = properties.multiProcessorCount;
    cuda->l2_bytes = properties.l2CacheSize;
    cuda->failure = calloc(1, sizeof *cuda->failure);
    if (cuda->failure == NULL) {
        return status_fail(ERR_NOMEM, "GPU: no host memory for its state");
    }
    TRY(check("making a stream", cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking)));
    TRY(cuda_alloc((void **)&cuda->step, sizeof *cuda->step, "the step's numbers"));
    return gemm_cuda_open(cuda);
}

enum status cuda_open(struct cuda **out, int ordinal)
{
    struct cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        return status_fail(ERR_NOMEM, "GPU: no host memory for its state");
    }
    enum status status = open_parts(cuda, ordinal);
    if (status == OK) {
        struct cuda_step first = {.loss_scale = 1.0F};
        cuda_set_step(cuda, &first);
        status = cuda_sync(cuda, "first copy");
    }
    if (status != OK) {
        cuda_close(cuda);
        return status;
    }
    *out = cuda;
    return OK;
}

void cuda_close(struct cuda *cuda)
{
    if (cuda == NULL) {
        return;
    }
    if (cuda->gemm != NULL) {
        gemm_cuda_close(cuda);
    }
    cuda_free(cuda->step);
    if (cuda->stream != NULL) {
        cudaStreamDestroy(cuda->stream);
    }
    free(cuda->failure);
    free(cuda);
}

/* ---- memory ---- */

enum status cuda_alloc(void **memory, size_t bytes, const char *what)
{
    *memory = NULL;
    cudaError_t error = cudaMalloc(memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        size_t left = 0, whole = 0;
        (void)cudaGetLastError(); /* it was told; it must not be reported again */
        (void)cudaMemGetInfo(&left, &whole);
        return status_fail(ERR_NOMEM, "GPU memory for %s: %.2f GiB wanted, %.2f of %.2f GiB free", what,
                           (double)bytes / 0x1p30, (double)left / 0x1p30, (double)whole / 0x1p30);
    }
    return check(what, error);
}

void cuda_free(void *memory)
{
    if (memory != NULL) {
        cudaFree(memory);
    }
}

enum status cuda_memory_free(int64_t *bytes)
{
    size_t left = 0, whole = 0;
    TRY(check("asking for free memory", cudaMemGetInfo(&left, &whole)));
    *bytes = (int64_t)left;
    return OK;
}

enum status cuda_host_alloc(void **memory, size_t bytes, const char *what)
{
    *memory = NULL;
    cudaError_t error = cudaMallocHost(memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* it was told; it must not be reported again */
        return status_fail(ERR_NOMEM, "page-locked host memory for %s: %.2f GiB refused", what, (double)bytes / 0x1p30);
    }
    return check(what, error);
}

void cuda_host_free(void *memory)
{
    if (memory != NULL) {
        cudaFreeHost(memory);
    }
}

void cuda_note(const struct cuda *cuda, const char *what, int code)
{
    if (code != 0 && cuda->failure->code == 0) {
        cuda->failure->code = code;
        snprintf(cuda->failure->what, sizeof cuda->failure->what, "%s", what);
    }
}

void cuda_upload(const struct cuda *cuda, void *device, const void *host, size_t bytes)
{
    cuda_note(cuda, "upload", (int)cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, cuda->stream));
}

void cuda_download(const struct cuda *cuda, void *host, const void *device, size_t bytes)
{
    cuda_note(cuda, "download", (int)cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda->stream));
}

void cuda_copy(const struct cuda *cuda, void *to, const void *from, size_t bytes)
{
    cuda_note(cuda, "copy", (int)cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda->stream));
}

void cuda_zero(const struct cuda *cuda, void *device, size_t bytes)
{
    cuda_note(cuda, "fill with zeros", (int)cudaMemsetAsync(device, 0, bytes, cuda->stream));
}

void cuda_set_step(const struct cuda *cuda, const struct cuda_step *step)
{
    cuda_upload(cuda, cuda->step, step, sizeof *step);
}

/* A fault of enqueued work (an address that is not there, say) makes every later call fail in words of its own: the
 * fault is the cause; the first call that met it tells where the host was. */
static enum status first_failure(const struct cuda *cuda, const char *what, cudaError_t fault)
{
    const struct cuda_failure *first = cuda->failure;
    if (fault != cudaSuccess) {
        return status_fail(ERR_DEVICE, "GPU: %s (%s), noticed after %s; the first call that it broke: %s",
                           cudaGetErrorString(fault), cudaGetErrorName(fault), what, first->what);
    }
    return status_fail(ERR_DEVICE, "GPU: %s, noticed after %s: %s", first->what, what,
                       cudaGetErrorString((cudaError_t)first->code));
}

enum status cuda_sync(const struct cuda *cuda, const char *what)
{
    cudaError_t fault = cudaStreamSynchronize(cuda->stream);
    return cuda->failure->code != 0 ? first_failure(cuda, what, fault) : check(what, fault);
}

/* ---- time ---- */

enum status cuda_event_open(struct cuda_event **out)
{
    struct cuda_event *event = calloc(1, sizeof *event);
    if (event == NULL) {
        return status_fail(ERR_NOMEM, "GPU: no host memory for an event");
    }
    enum status status = check("making an event", cudaEventCreate(&event->event));
    if (status != OK) {
        free(event);
        return status;
    }
    *out = event;
    return OK;
}

void cuda_event_close(struct cuda_event *event)
{
    if (event != NULL) {
        cudaEventDestroy(event->event);
        free(event);
    }
}

void cuda_event_record(const struct cuda *cuda, struct cuda_event *event)
{
    cuda_note(cuda, "recording an event", (int)cudaEventRecord(event->event, cuda->stream));
}

double cuda_event_ms(const struct cuda_event *from, const struct cuda_event *to)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, from->event, to->event) != cudaSuccess) {
        (void)cudaGetLastError(); /* what broke the work between them is told by the next sync */
        return NAN;
    }
    return (double)ms;
}

/* ---- graphs ---- */

enum status cuda_graph_begin(const struct cuda *cuda)
{
    return check("starting a capture", cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal));
}

enum status cuda_graph_end(const struct cuda *cuda, struct cuda_graph **out)
{
    cudaGraph_t captured = NULL;
    cudaError_t ended = cudaStreamEndCapture(cuda->stream, &captured);
    if (ended != cudaSuccess && cuda->failure->code != 0) { /* the call that broke it says more */
        return first_failure(cuda, "capturing a graph", cudaStreamSynchronize(cuda->stream));
    }
    TRY(check("ending a capture", ended));
    struct cuda_graph *graph = calloc(1, sizeof *graph);
    enum status status = graph == NULL
                             ? status_fail(ERR_NOMEM, "GPU: no host memory for a graph")
                             : check("preparing a graph", cudaGraphInstantiate(&graph->executable, captured, 0));
    cudaGraphDestroy(captured);
    if (status != OK) {
        free(graph);
        return status;
    }
    *out = graph;
    return OK;
}

void cuda_graph_launch(const struct cuda *cuda, const struct cuda_graph *graph)
{
    cuda_note(cuda, "launching a graph", (int)cudaGraphLaunch(graph->executable, cuda->stream));
}

void cuda_graph_close(struct cuda_graph *graph)
{
    if (graph != NULL) {
        cudaGraphExecDestroy(graph->executable);
        free(graph);
    }
}
