/* core: what there is to know about the first GPU. Host code only; nothing runs on the GPU yet. */
extern "C" {
#include "core/device.h"
}

#include <cuda_runtime_api.h>
#include <stdio.h>

enum status device_cuda_query(struct device *gpu, int *capability)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    /* A missing or too old driver is, for who asks, a machine without a usable GPU: the runtime's words say which. */
    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver || (error == cudaSuccess && count == 0)) {
        return status_fail(ERR_UNSUPPORTED, "device cuda: no CUDA device (%s); use device cpu",
                           cudaGetErrorString(error));
    }
    if (error != cudaSuccess) {
        return status_fail(ERR_DEVICE, "device cuda: cannot count the GPUs: %s", cudaGetErrorString(error));
    }
    cudaDeviceProp properties;
    error = cudaGetDeviceProperties(&properties, 0);
    if (error != cudaSuccess) {
        return status_fail(ERR_DEVICE, "device cuda: cannot query GPU 0: %s", cudaGetErrorString(error));
    }
    struct device found = {};
    found.kind = DEVICE_CUDA;
    found.threads = 1;
    found.memory_bytes = (int64_t)properties.totalGlobalMem;
    snprintf(found.name, sizeof found.name, "%s", properties.name);
    *gpu = found;
    *capability = 10 * properties.major + properties.minor;
    return OK;
}
