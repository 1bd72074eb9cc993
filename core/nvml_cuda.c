/* core: NVML. Its header comes with no toolkit that we can rely on, so the few calls are declared here, as NVML's
 * reference manual has them: int results, 0 = success; a device is a pointer. */
#include "core/nvml.h"

#include "core/library.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { NVML_SUCCESS = 0, NVML_CLOCK_SM = 1 };

struct nvml {
    void *device;
    int (*shutdown)(void);
    int (*clock)(void *device, int which, unsigned int *mhz);
    int (*power)(void *device, unsigned int *milliwatts);
};

/* The runtime's numbers follow CUDA_VISIBLE_DEVICES, NVML's do not: the bus address is what both know. */
static bool find_device(struct nvml *nvml, void *library, int ordinal)
{
    int (*init)(void), (*by_bus)(const char *, void **);
    char bus[32];
    bool all = library_find(library, "nvmlInit_v2", &init) && library_find(library, "nvmlShutdown", &nvml->shutdown) &&
               library_find(library, "nvmlDeviceGetHandleByPciBusId_v2", &by_bus) &&
               library_find(library, "nvmlDeviceGetClockInfo", &nvml->clock) &&
               library_find(library, "nvmlDeviceGetPowerUsage", &nvml->power);
    if (!all || init() != NVML_SUCCESS) {
        return false;
    }
    bool found =
        cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal) == cudaSuccess && by_bus(bus, &nvml->device) == NVML_SUCCESS;
    if (!found) {
        (void)cudaGetLastError(); /* nobody's error: the report goes without these numbers */
        nvml->shutdown();
    }
    return found;
}

struct nvml *nvml_open(int ordinal)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    struct nvml *nvml = library != NULL ? calloc(1, sizeof *nvml) : NULL;
    if (nvml != NULL && !find_device(nvml, library, ordinal)) {
        free(nvml);
        nvml = NULL;
    }
    return nvml; /* the library stays loaded for the process */
}

void nvml_close(struct nvml *nvml)
{
    if (nvml != NULL) {
        nvml->shutdown();
        free(nvml);
    }
}

struct nvml_sample nvml_read(const struct nvml *nvml)
{
    struct nvml_sample sample = {NAN, NAN};
    unsigned int value;
    if (nvml == NULL) {
        return sample;
    }
    if (nvml->clock(nvml->device, NVML_CLOCK_SM, &value) == NVML_SUCCESS) {
        sample.sm_mhz = (double)value;
    }
    if (nvml->power(nvml->device, &value) == NVML_SUCCESS) {
        sample.watts = (double)value / 1e3;
    }
    return sample;
}
