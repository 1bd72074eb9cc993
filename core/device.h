/* core: where arrays live and loops run. Today's builds know the CPU; CUDA adds a kind, not an interface. */
#pragma once

#include "core/status.h"

#include <stdint.h>

enum device_kind { DEVICE_CPU, DEVICE_CUDA };

struct device {
    enum device_kind kind;
    char name[256];       /* as the vendor writes it: CPU model name, GPU name */
    int threads;          /* CPU: OpenMP threads of this process */
    int64_t memory_bytes; /* what this process may plan with */
};

/* `kind` is auto, cpu or cuda. Fails with ERR_UNSUPPORTED when this build or machine lacks what was asked for. */
MUST_CHECK enum status device_open(struct device *device, const char *kind);

/* The first GPU and 10 * major + minor of its compute capability. Only in builds with CUDA (device_cuda.cu).
 * Fails with ERR_UNSUPPORTED if there is none, ERR_DEVICE if the runtime breaks. */
MUST_CHECK enum status device_cuda_query(struct device *gpu, int *capability);
