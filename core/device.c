/* core: devices. */
#include "core/device.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* "model name : ..." of the first processor; ARM kernels have no such line. */
static void cpu_name(char *name, size_t bytes)
{
    snprintf(name, bytes, "unnamed CPU");
    FILE *file = fopen("/proc/cpuinfo", "re");
    if (!file) {
        return;
    }
    char line[256];
    while (fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon && colon[1] == ' ') {
            snprintf(name, bytes, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
            break;
        }
    }
    fclose(file);
}

/* Physical memory, or the limit of the control group (container) where that is less. */
static int64_t cpu_memory_bytes(void)
{
    int64_t bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    FILE *file = fopen("/sys/fs/cgroup/memory.max", "re");
    long long limit; /* the file may also say "max" */
    if (file) {
        if (fscanf(file, "%lld", &limit) == 1 && limit > 0 && limit < bytes) {
            bytes = limit;
        }
        fclose(file);
    }
    return bytes;
}

static void cpu_open(struct device *device)
{
    *device = (struct device){.kind = DEVICE_CPU, .threads = 1, .memory_bytes = cpu_memory_bytes()};
    cpu_name(device->name, sizeof device->name);
#ifdef _OPENMP
    device->threads = omp_get_max_threads();
#endif
}

#if WITH_CUDA
/* Dense BF16 FLOP/s of a GPU by its datasheet, 0 where we have no figure. An H100 on a PCIe card runs slower. */
static double peak_flops(const char *name)
{
    bool slow = strstr(name, "PCIe") != NULL || strstr(name, "NVL") != NULL;
    return !slow && (strstr(name, "H100") != NULL || strstr(name, "H200") != NULL) ? 989.4e12 : 0;
}

static enum status gpu_open(struct device *device, int ordinal)
{
    struct device host, gpu;
    TRY(device_cuda_query(&gpu, ordinal));
    cpu_open(&host); /* whose threads make initial weights */
    gpu.threads = host.threads;
    gpu.peak_flops = peak_flops(gpu.name);
    *device = gpu;
    return OK;
}
#else
bool device_cuda_usable(int ordinal)
{
    (void)ordinal;
    return false;
}

static enum status gpu_open(struct device *device, int ordinal)
{
    (void)device;
    (void)ordinal;
    return status_fail(ERR_UNSUPPORTED, "device cuda: built without CUDA; use device cpu, or build with CUDA=1");
}
#endif

enum status device_open(struct device *device, const char *kind, int ordinal)
{
    if (strcmp(kind, "cuda") == 0) {
        return gpu_open(device, ordinal);
    }
    if (strcmp(kind, "auto") == 0 && device_cuda_usable(ordinal)) {
        return gpu_open(device, ordinal);
    }
    if (strcmp(kind, "cpu") == 0 || strcmp(kind, "auto") == 0) {
        cpu_open(device);
        return OK;
    }
    return status_fail(ERR_CONFIG, "device \"%s\": expected auto, cpu or cuda", kind);
}
