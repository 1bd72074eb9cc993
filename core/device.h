/* core: where arrays live and loops run. */
#pragma once

#include "core/status.h"

#include <stdint.h>

enum device_kind { DEVICE_CPU, DEVICE_CUDA };

struct device {
    enum device_kind kind;
    char name[256];       /* as the vendor writes it: CPU model name, GPU name */
    int threads;          /* OpenMP threads of this process */
    int64_t memory_bytes; /* what this process may plan with */
    int ordinal;          /* CUDA: which GPU of the machine */
    int capability;       /* CUDA: 10 * major + minor of its compute capability */
    double peak_flops;    /* dense BF16 FLOP/s by the vendor's datasheet; 0 where none is known (CPUs) */
};

/* `kind` is auto, cpu or cuda; auto takes GPU number `ordinal` of the machine if device_cuda_usable, else the CPU.
 * Fails with ERR_UNSUPPORTED when this build or machine lacks what was asked for. */
MUST_CHECK enum status device_open(struct device *device, const char *kind, int ordinal);

/* GPU number `ordinal`. Only in builds with CUDA (core/cuda.c). Fails with ERR_UNSUPPORTED if there is none, or none
 * that this build has kernels for; ERR_DEVICE if the runtime breaks. */
MUST_CHECK enum status device_cuda_query(struct device *gpu, int ordinal);

/* Is there a GPU of that number that this build has kernels for? Logs nothing. */
bool device_cuda_usable(int ordinal);
