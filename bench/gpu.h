/* bench: what the benchmarks of the GPU share. */
#pragma once

#include "core/cuda.h"

#include <stdlib.h>

/* A failure has said so in the log. */
static inline void must(enum status status)
{
    if (status != OK) {
        exit(status_exit_code(status));
    }
}

static inline void *device_memory(size_t bytes)
{
    void *memory;
    must(cuda_alloc(&memory, bytes > 0 ? bytes : 16, "a benchmark"));
    return memory;
}

/* n values of about a normal distribution times scale, in BF16: the sum of four uniform ones. */
static inline bf16 *device_normal(const struct cuda *cuda, int64_t n, uint64_t seed, float scale)
{
    bf16 *host = malloc((size_t)n * sizeof *host), *device = device_memory((size_t)n * sizeof *device);
    ASSERT(host);
    for (int64_t i = 0; i < n; i++) {
        uint64_t x = (seed + (uint64_t)i) * 0x9E3779B97F4A7C15u;
        x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
        x ^= x >> 32;
        float sum = 0;
        for (int k = 0; k < 4; k++) {
            sum += (float)(x >> (16 * k) & 0xffff) * 0x1p-16f - 0.5f;
        }
        host[i] = bf16_from_float(sum * 1.7320508f * scale);
    }
    cuda_upload(cuda, device, host, (size_t)n * sizeof *host);
    must(cuda_sync(cuda, "upload"));
    free(host);
    return device;
}

static inline int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts. */
static inline double median(double *ms, int n)
{
    qsort(ms, (size_t)n, sizeof *ms, ascending);
    return ms[n / 2];
}
