/* tests: which kernels a program launches. Linked into the GPU tests of a SANITIZE build, where ld gives it the calls
 * by which nvcc's host code registers each kernel at start, instances of templates one by one, and asks for it at its
 * first launch (--wrap; names and arguments: crt/host_runtime.h of CUDA 13). At exit a line for each kernel, for
 * tools/sanitize_gpu.sh: "kernel launched NAME" or "kernel idle NAME", names as the linker has them. */
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { KERNELS_MAX = 1024 };

static struct kernel {
    const void *host;
    const char *name;
    bool launched;
} kernels[KERNELS_MAX];
static int n_kernels;

static void print_kernels(void)
{
    for (int i = 0; i < n_kernels; i++) {
        printf("kernel %s %s\n", kernels[i].launched ? "launched" : "idle", kernels[i].name);
    }
}

static void launched(const void *host)
{
    for (int i = 0; i < n_kernels; i++) {
        kernels[i].launched |= kernels[i].host == host;
    }
}

void __real___cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *thread, void *block, void *block_size, void *grid_size, int *warp_size);
void __wrap___cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *thread, void *block, void *block_size, void *grid_size, int *warp_size);
cudaError_t __real___cudaGetKernel(cudaKernel_t *kernel, const void *host);
cudaError_t __wrap___cudaGetKernel(cudaKernel_t *kernel, const void *host);
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments);

void __wrap___cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *thread, void *block, void *block_size, void *grid_size, int *warp_size)
{
    if (n_kernels == 0) {
        atexit(print_kernels);
    }
    if (n_kernels == KERNELS_MAX) {
        fprintf(stderr, "tests/launches_cuda.c: more than %d kernels: raise KERNELS_MAX\n", KERNELS_MAX);
        abort();
    }
    kernels[n_kernels++] = (struct kernel){host, name, false};
    __real___cudaRegisterFunction(handle, host, device, name, limit, thread, block, block_size, grid_size, warp_size);
}

cudaError_t __wrap___cudaGetKernel(cudaKernel_t *kernel, const void *host)
{
    launched(host);
    return __real___cudaGetKernel(kernel, host);
}

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments)
{
    launched(host);
    return __real_cudaLaunchKernelExC(config, host, arguments);
}
